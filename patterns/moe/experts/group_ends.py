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
from fusion.graph import Algebra, Dim, Value
from patterns.moe.experts.expert_lists import unsorted

_EXACT = {torch.float32, torch.float64, torch.int32, torch.int64}
"""Dtypes that represent the number of rows exactly."""


def are_indices(experts: Value, count: Dim) -> bool:
    """Return True if all elements of `experts` are proven to be in 0 … `count` - 1."""
    low, high = bounds(experts)
    return isinstance(count, int) and 0 <= low <= high < count


def counted(a: Algebra, ends: Value, count: Dim) -> Value | None:
    """Return the list of experts from whose counts `ends` [E] are the inclusive prefix sums, for E = `count` experts.

    Entries of the list from E on are not counted. None if `ends` are computed in another way, or if entries below 0 or
    from E on might be counted.
    """
    ends = _first_entries(_uncast(ends), count)
    if ends.op == "searchsorted":
        return _searched(ends, count)
    if ends.op != "cumsum" or ends.attrs != (0,):
        return None
    counts = _uncast(ends.arg)
    if not {ends.dtype, counts.dtype} <= _EXACT:
        return None
    counts = _first_entries(counts, count)
    size = counts.attrs[0] if counts.op == "bincount" else prod(counts.shape)
    if not isinstance(count, int) or not isinstance(size, int) or size < count:
        return None
    if counts.op == "bincount":
        listed = _unsorted(counts.arg)
        return listed if are_indices(listed, size) else None
    if counts.op == "histogram":
        listed = _unsorted(_uncast(counts.arg))
        return listed if counts.attrs[0] < size or are_indices(listed, size) else None
    if counts.op == "add_rows" and counts.arg.op == counts.args[1].below("expand").op == "full":
        numbers = (counts.arg.attrs[0], counts.args[1].below("expand").attrs[0])
        return _unsorted(counts.args[2]) if numbers == (0, 1) else None
    if counts.op == "cat":
        return _joined(a, counts)
    return _summed(counts)


def _first_entries(x: Value, count: Dim) -> Value:
    """Return the vector of which `x` has the first `count` entries; `x` itself if it is no such slice."""
    return _uncast(x.arg) if (x.op, x.attrs) == ("slice", (0, 0, count, 1)) and x.rank == 1 else x


def _joined(a: Algebra, counts: Value) -> Value | None:
    """Return the list whose entries 0, 1, … the parts of `counts`, a concatenation of sums over list == e, count."""
    lists: set[Value] = set()
    for e, part in enumerate(counts.args):
        below, factor = unscaled(_uncast(part))
        flags = below.below("reshape").arg.below("cast") if below.below("reshape").op in ("mean", "total") else below
        one = _uncast(below)
        is_sum = (one.op == "total" and factor == 1) or (one.op == "mean" and factor == prod(flags.shape))
        if (flags.op, flags.attrs) != ("compare", ("eq",)) or not is_sum or prod(one.shape) != 1:
            return None
        numbers = [each for each in flags.args if (each.op, each.attrs) == ("full", (e,))]
        lists |= {uncast(_unsorted(each), "reshape") for each in flags.args if each not in numbers}
    return lists.pop() if len(lists) == 1 else None


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
    """Return the list of which `x` has the entries in ascending order, `x` itself if it has no such order; reshapes on
    both are stripped.
    """
    x = uncast(x, "reshape")
    source = unsorted(x)
    return x if source is None else uncast(source, "reshape")


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
    """Strip conversions of booleans to 0 and 1, and permutes, from `x`.

    Returns:
        The tensor below them, and its dims that correspond to the dims `axes` of `x`, counted from the end.
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
    for listed, numbers in flags.operands():
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
