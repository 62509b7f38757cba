"""A call with enough room on CPython's frame stack, so that no frame below it starts a new chunk in a loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_T = TypeVar("_T")
_ROOM = 1 << 15  # words; the chunk that CPython maps for it has as much again for the frames above


def _called(function: Callable[[], _T]) -> _T:
    return function()


_called.__code__ = _called.__code__.replace(co_stacksize=_ROOM)


def roomy(function: Callable[[], _T]) -> _T:
    """Call `function` behind a frame so large that CPython maps one chunk for all frames above it.

    From CPython 3.11 on, frames are in chunks of 16 KiB. A frame that does not fit is the first of a new chunk, mapped
    for it and unmapped when it returns: in a loop every turn pays for that, and the same work takes half as long again
    from one depth of the caller as from another.
    """
    return _called(function)
