"""Runs: positions that count by one, from wherever they start."""

from __future__ import annotations

import math
from typing import NamedTuple

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Dim, Value, but_ones


class Run(NamedTuple):
    """Positions start + offset, start + offset + 1, …; start None stands for 0."""

    start: Value | None
    offset: int


def iota(x: Value) -> int | None:
    """The first of consecutive integers that `x` [n] counts, None where it does not count by one."""
    if x.op == "arange":
        return int(x.attrs[0]) if x.attrs[1] == 1 else None
    if x.op == "constant":
        numbers = x.attrs[0]
        return numbers[0] if x.rank and list(numbers) == list(range(numbers[0], numbers[0] + len(numbers))) else None
    return None


def run(a: Algebra, x: Value) -> Run | None:
    """The run that `x` [.., S] is along its last dim; its start has the dims before, without those of size 1.

    Sums may wrap round in int32: what they give then lies before every tensor, which is an error as well.
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
    """`counted` + `start`, of which only `counted` varies along the last dim."""
    below = run(a, counted)
    if below is None or below.start is not None or start.shape[-1:] not in ((), (1,)):
        return None
    return Run(a.reshape(start, but_ones(start.shape)), below.offset)


def wrapped(a: Algebra, x: Value, size: Dim) -> Value:
    """Positions of which negative ones count from the end."""
    return x if bounds(x)[0] >= 0 else a.make("wrap", (x,), (size,), x.shape, x.dtype)
