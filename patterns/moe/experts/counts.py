"""Where the rows of each expert end once they are sorted: the sums of how many each has, in all ways to count them.

bincount, histc, ones that are added to zeros    of the list
sums of list == expert, or of what it chooses    over all pairs
searchsorted                                     in the sorted list: the ends themselves
"""

from __future__ import annotations

from math import prod

import torch

from fusion.analysis.intervals import bounds, is_exact, uncast
from fusion.analysis.rounding import unscaled
from fusion.graph import Dim, Value

_EXACT = {torch.float32, torch.float64, torch.int32, torch.int64}
"""Dtypes in which so many rows are counted one by one."""


def lies_below(experts: Value, count: Dim) -> bool:
    """Whether a list is proven to hold numbers 0 … count - 1 alone."""
    low, high = bounds(experts)
    return isinstance(count, int) and 0 <= low <= high < count


def counted(ends: Value, count: Dim) -> Value | None:
    """The list of which `ends` says where the numbers 0 … count - 1 end once it is sorted."""
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
        return listed if counts.attrs == (count,) and lies_below(listed, count) else None
    if ends.shape != (count,):
        return None
    if counts.op == "histogram":
        return _unsorted(_uncast(counts.arg))
    if counts.op == "add_rows" and counts.arg.op == counts.args[1].below("expand").op == "full":
        numbers = (counts.arg.attrs[0], counts.args[1].below("expand").attrs[0])
        return _unsorted(counts.args[2]) if numbers == (0, 1) else None
    return _summed(counts)


def counted_outside(ends: Value) -> bool:
    """True if `ends` are an input of the graph, or the sums of one."""
    ends = _uncast(ends)
    return (_uncast(ends.arg) if ends.op == "cumsum" else ends).op == "input"


def _uncast(x: Value) -> Value:
    """Numbers of rows before casts to dtypes that hold them."""
    while x.op == "reshape" or (x.op == "cast" and (x.dtype in _EXACT or is_exact(x))):
        x = x.arg
    return x


def _unsorted(x: Value) -> Value:
    """A list, of which a sort holds the same numbers."""
    x = uncast(x, "reshape")
    return uncast(x.arg, "reshape") if x.op == "ascending" else x


def _searched(ends: Value, count: Dim) -> Value | None:
    """How many of a sorted list are not larger than 0, 1, …, or smaller than 1, 2, …"""
    listed, numbers = (uncast(each, "reshape") for each in ends.args)
    first = 0 if ends.attrs == (True,) else 1
    counts = (numbers.op, numbers.attrs, numbers.shape) == ("arange", (first, 1), (count,))
    return uncast(listed.arg, "reshape") if counts and listed.op == "ascending" and listed.rank == 1 else None


def _summed(counts: Value) -> Value | None:
    """The list whose pairs are compared with each number, and the truths added up."""
    below, factor = unscaled(counts)
    below = below.below("reshape")
    if below.op not in ("mean", "total") or below.dtype not in _EXACT:
        return None
    told = below.arg
    if factor != (1 if below.op == "total" else prod(told.shape[axis] for axis in below.attrs)):
        return None
    told, axes = _truths(told, below.attrs)
    return _compared(told, axes) or _chosen(told, axes)


def _truths(x: Value, axes: tuple[int, ...]) -> tuple[Value, tuple[int, ...]]:
    """What is true, before that was made 0 or 1 or turned, and its dims that are added up."""
    while x.op in ("cast", "permute") or _is_flag(x):
        if x.op == "permute":
            axes = tuple(sorted(x.attrs[axis % x.rank] - x.rank for axis in axes))
        x = x.arg
    return x, axes


def _is_flag(x: Value) -> bool:
    """Whether it is 1 where something is true, and 0 elsewhere."""
    return x.op == "where" and [(each.op, each.attrs) for each in x.args[1:]] == [("full", (1,)), ("full", (0,))]


def _compared(told: Value, axes: tuple[int, ...]) -> Value | None:
    """A list that is compared with 0, 1, … along the one dim over which nothing is added."""
    left = [axis for axis in range(-told.rank, 0) if axis not in axes]
    if (told.op, told.attrs) != ("compare", ("eq",)) or len(left) != 1:
        return None
    for listed, numbers in (told.args, told.args[::-1]):
        line = uncast(numbers, "reshape")
        along = [place - numbers.rank for place, size in enumerate(numbers.shape) if size != 1]
        whole = prod(listed.shape) * line.shape[0] == prod(told.shape) if line.rank else False
        if (line.op, line.attrs) == ("arange", (0, 1)) and along == left and whole:
            return uncast(_unsorted(listed), "reshape")
    return None


def _chosen(told: Value, axes: tuple[int, ...]) -> Value | None:
    """A list whose rows name no number twice, by what it chooses."""
    distinct = told.op == "chosen" and told.arg.op == "largest_index"
    return told.arg if distinct and tuple(axes) == tuple(range(-told.rank, -1)) else None
