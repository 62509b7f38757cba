"""Python's stack, of which a frame may be the first of a new chunk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_ROOM = 1 << 15  # words; what is mapped has as much again for the frames above


def _called(function: Callable[[], _T]) -> _T:
    return function()


_called.__code__ = _called.__code__.replace(co_stacksize=_ROOM)


def roomy(function: Callable[[], _T]) -> _T:
    """Call what calls many others, with room for the frames of all of them.

    From CPython 3.11 on frames lie in chunks of 16 KiB. One that does not fit is the first of another, which is mapped
    for it and unmapped when it returns: where that frame is in a loop, every turn pays for it, and the same work takes
    half as long again from one depth of the caller as from another. Behind a frame that is as large as this one, all
    others have one chunk.
    """
    return _called(function)
