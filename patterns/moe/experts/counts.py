"""Group ends [E] of rows sorted by expert, the inclusive prefix sum of the number of rows of each expert.

Rows per expert are counted from the list of experts, one entry for each row, by

bincount, histc, scatter_add of ones     of the list
a sum over all rows                      of list == expert, or of a one-hot encoding of the list

searchsorted in the sorted list gives the ends without counts.
"""

from __future__ import annotations

from math import prod

import torch

from fusion.analysis.intervals import bounds, is_exact, uncast
from fusion.analysis.rounding import unscaled
from fusion.graph import Dim, Value

_EXACT = {torch.float32, torch.float64, torch.int32, torch.int64}
"""Dtypes that represent the number of rows exactly."""


def are_indices(experts: Value, count: Dim) -> bool:
    """Return True if all elements of `experts` are proven to be in 0 … `count` - 1."""
    low, high = bounds(experts)
    return isinstance(count, int) and 0 <= low <= high < count


def counted(ends: Value, count: Dim) -> Value | None:
    """Return the list of experts from whose counts `ends` [E] are the inclusive prefix sums, for E = `count` experts.

    None if `ends` are computed in another way, or if an entry of the list may be outside of 0 … `count` - 1.
    """
    ends = _uncast(ends)
    if ends.op == "searchsorted":
        return _searched(ends, count)
    if ends.op != "cumsum" or ends.attrs != (0,):
        return None
    counts = _uncast(ends.arg)
    if not {ends.dtype, counts.dtype} <= _EXACT:
        return None
    if counts.op == "bincount":
        listed = _unsorted(counts.arg)
        return listed if counts.attrs == (count,) and are_indices(listed, count) else None
    if ends.shape != (count,):
        return None
    if counts.op == "histogram":
        return _unsorted(_uncast(counts.arg))
    if counts.op == "add_rows" and counts.arg.op == counts.args[1].below("expand").op == "full":
        numbers = (counts.arg.attrs[0], counts.args[1].below("expand").attrs[0])
        return _unsorted(counts.args[2]) if numbers == (0, 1) else None
    return _summed(counts)


def counted_outside(ends: Value) -> bool:
    """Return True if `ends` are an input of the graph, or the prefix sum of one."""
    ends = _uncast(ends)
    return (_uncast(ends.arg) if ends.op == "cumsum" else ends).op == "input"


def _uncast(x: Value) -> Value:
    """Strip from `x` reshapes, casts that are proven exact, and casts to dtypes that represent each possible number of
    rows.
    """
    while x.op == "reshape" or (x.op == "cast" and (x.dtype in _EXACT or is_exact(x))):
        x = x.arg
    return x


def _unsorted(x: Value) -> Value:
    """Return the operand of a sort in ascending order, `x` itself if it is none; reshapes on both are stripped."""
    x = uncast(x, "reshape")
    return uncast(x.arg, "reshape") if x.op == "ascending" else x


def _searched(ends: Value, count: Dim) -> Value | None:
    """Return the sorted list [R] in which `ends` are found by searchsorted; None if they are computed in another way.

    The boundaries are 0 … `count` - 1 from the right (numbers ≤ e), or 1 … `count` from the left (numbers < e + 1).
    """
    listed, numbers = (uncast(each, "reshape") for each in ends.args)
    first = 0 if ends.attrs == (True,) else 1
    counts = (numbers.op, numbers.attrs, numbers.shape) == ("arange", (first, 1), (count,))
    return uncast(listed.arg, "reshape") if counts and listed.op == "ascending" and listed.rank == 1 else None


def _summed(counts: Value) -> Value | None:
    """Return the list that `counts` [E] counts: counts[e] = Σ (list == e), or the sum of its one-hot encoding.

    None if `counts` are computed in another way.
    """
    below, factor = unscaled(counts)
    below = below.below("reshape")
    if below.op not in ("mean", "total") or below.dtype not in _EXACT:
        return None
    flags = below.arg
    if factor != (1 if below.op == "total" else prod(flags.shape[axis] for axis in below.attrs)):
        return None
    flags, axes = _boolean(flags, below.attrs)
    return _compared(flags, axes) or _one_hot(flags, axes)


def _boolean(x: Value, axes: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """Strip from `x` conversions of booleans to 0 and 1, and permutes.

    Returns what is below, and the dims of that which `axes` of `x` are.
    """
    while x.op in ("cast", "permute") or _is_indicator(x):
        if x.op == "permute":
            axes = tuple(sorted(x.attrs[axis % x.rank] - x.rank for axis in axes))
        x = x.arg
    return x, axes


def _is_indicator(x: Value) -> bool:
    """Return True if `x` is where(condition, 1, 0)."""
    return x.op == "where" and [(each.op, each.attrs) for each in x.args[1:]] == [("full", (1,)), ("full", (0,))]


def _compared(flags: Value, axes: tuple[int, ...]) -> Value | None:
    """Return the list that `flags` compares by == with 0, 1, … along the one dim that is not among `axes`.

    None if `flags` are no such comparison.
    """
    left = [axis for axis in range(-flags.rank, 0) if axis not in axes]
    if (flags.op, flags.attrs) != ("compare", ("eq",)) or len(left) != 1:
        return None
    for listed, numbers in (flags.args, flags.args[::-1]):
        line = uncast(numbers, "reshape")
        along = [place - numbers.rank for place, size in enumerate(numbers.shape) if size != 1]
        is_outer = prod(listed.shape) * line.shape[0] == prod(flags.shape) if line.rank else False
        if (line.op, line.attrs) == ("arange", (0, 1)) and along == left and is_outer:
            return uncast(_unsorted(listed), "reshape")
    return None


def _one_hot(flags: Value, axes: tuple[int, ...]) -> Value | None:
    """Return the top-k indices [.., K] if `flags` [.., E] are True at these alone, and `axes` are all dims but the
    last.

    None if not.
    """
    distinct = flags.op == "chosen" and flags.arg.op == "largest_index"  # an index that repeats would count once
    return flags.arg if distinct and tuple(axes) == tuple(range(-flags.rank, -1)) else None
