"""All cases by their number, which is what the processes that record them are sent."""

from __future__ import annotations

from functools import cache

from .cases import Case, every
from .outcome import text


@cache
def numbered() -> tuple[Case, ...]:
    """Every case, in the order of its number."""
    return tuple(every())


def recorded(number: int) -> str:
    """The text of one case."""
    return text(numbered()[number])
