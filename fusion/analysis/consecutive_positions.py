"""Runs: consecutive positions start, start + 1, …, of a start that may be computed."""

from __future__ import annotations

import math
from typing import NamedTuple

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Dim, Value, but_ones


class Run(NamedTuple):
    """The positions start + offset, start + offset + 1, …; None for a start of 0."""

    start: Value | None
    offset: int


def iota(x: Value) -> int | None:
    """Return the first element of the constant `x` [n], if it consists of consecutive integers; else None."""
    if x.op == "arange":
        return int(x.attrs[0]) if x.attrs[1] == 1 else None
    if x.op == "constant":
        numbers = x.attrs[0]
        return numbers[0] if x.rank and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) else None
    return None


def run(a: Algebra, x: Value) -> Run | None:
    """Recognise `x` [.., S] as start, start + 1, … along its last dim; start has the other dims, but for those of size
    1.

    None for any other `x`. A sum may overflow int32: it is negative then, and no valid position in either reading.
    """
    if x.op in ("reshape", "expand") and x.arg.shape[-1:] == x.shape[-1:] and math.prod(x.shape[:-1]) == 1:
        return run(a, x.arg)
    below = uncast(x)
    if below is not x:
        return run(a, below)
    if x.op == "shift":
        below = run(a, x.arg)
        return Run(below.start, below.offset + int(x.attrs[0])) if below else None
    if x.op == "add":
        return _from(a, *x.args) or _from(a, *x.args[::-1])
    first = iota(x) if x.rank == 1 else None
    return None if first is None else Run(None, first)


def _from(a: Algebra, counted: Value, start: Value) -> Run | None:
    """Recognise `counted` + `start` as a run, if `counted` is 0, 1, … plus a constant, and `start` is [.., 1]; else
    None.
    """
    below = run(a, counted)
    if below is None or below.start is not None or start.shape[-1:] not in ((), (1,)):
        return None
    return Run(a.reshape(start, but_ones(start.shape)), below.offset)


def wrapped(a: Algebra, x: Value, size: Dim) -> Value:
    """Return positions `x` along a dim of `size`, of which negative ones count from the end, as nonnegative
    positions.
    """
    return x if bounds(x)[0] >= 0 else a.make("wrap", (x,), (size,), x.shape, x.dtype)
