"""Masks of the positions in a list: (places == arange).any(-1), and one_hot(places).sum(-2) for distinct entries.

They become the canonical op "chosen". An entry that may be outside the positions, such as -1, selects an extra position
at either end, which is sliced off.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES


def listed(a: Algebra, x: Value, axis: int, distinct: bool = False) -> Value | None:
    """Build `x`.any(`axis`), with keepdim, for `x` = (list == position), by the op "chosen", in the dtype of `x`.

    The entries of a list are along `axis`, the positions 0, 1, … along another dim. With `distinct` it is the sum in
    the place of "any", which is the same if the entries of a list are proven distinct; None if they are not. None for
    any other `x`.
    """
    equal = x.below("cast")
    if (equal.op, equal.attrs) != ("compare", ("eq",)):
        return None
    for places, line in equal.operands():
        chosen = _chosen(a, places, line, axis % x.rank, equal.shape, distinct)
        if chosen is not None:
            return a.cast(chosen, x.dtype)
    return None


def _chosen(a: Algebra, places: Value, line: Value, axis: int, shape: tuple[Any, ...], distinct: bool) -> Value | None:
    """Build the mask of the positions that the entries of `places` along `axis` name.

    Args:
        a: the algebra of the graph.
        places: the lists.
        line: the positions 0, 1, … along another dim.
        axis: the dim of the entries of a list.
        shape: the dims of the comparison of `places` with `line`.
        distinct: True if the result stands for a sum, which requires distinct entries.

    Returns:
        Booleans of `shape`, with size 1 along `axis`; None if `line` does not count positions.
    """
    places, line = (a.reshape(each, (*[1] * (len(shape) - each.rank), *each.shape)) for each in (places, line))
    count = uncast(line, "reshape")
    along = [place for place, size in enumerate(line.shape) if size != 1]
    if count.op != "arange" or count.attrs != (0, 1) or len(along) != 1 or along == [axis]:
        return None
    rows, size = [place for place in range(len(shape)) if place not in (axis, *along)], shape[along[0]]
    entries = a.permute(places, (*along, *rows, axis))
    lists = named_by(a.reshape(entries, entries.shape[1:]))
    wanted = (1, *(shape[place] for place in (*rows, axis)))
    if entries.shape != wanted or (distinct and not (lists.op == "largest_index" and _is_within(lists, size))):
        return None
    chosen = _mask_of_entries(a, lists, size)
    if chosen is None:
        return None
    order = sorted(range(len(shape)), key=[*rows, *along, axis].__getitem__)
    return a.permute(a.reshape(chosen, (*chosen.shape, 1)), order)


def named_by(places: Value) -> Value:
    """Strip from lists `places` [.., T] what does not change the set of their entries: lossless casts, and sorts of a
    list.
    """
    below = uncast(places)
    return named_by(below.arg) if below.op == "ascending" and below.attrs[0] == below.rank - 1 else below


def _mask_of_entries(a: Algebra, places: Value, size: Any) -> Value | None:
    """Build the mask [.., size] that is True at the entries of the lists `places` [.., T]; entries outside are ignored.

    None if entries may be outside and cannot be clamped.
    """
    rows = places.shape[:-1]
    if _is_within(places, size):
        return a.make("chosen", (places,), (), (*rows, size), torch.bool)
    if places.dtype not in INDEX_DTYPES or not isinstance(size, int) or size >= torch.iinfo(torch.int32).max:
        return None
    low, high = bounds(places)
    inside = (
        places if low >= -1 and high <= size else a.make("clamp", (places,), (-1, size), places.shape, places.dtype)
    )
    wide = a.make("chosen", (a.shift(inside, 1),), (), (*rows, size + 2), torch.bool)
    return a.slice(wide, len(rows), 1, size + 1)


def _is_within(places: Value, size: Any) -> bool:
    """Return True if all entries of `places` are proven to be in 0 … size - 1."""
    if places.op == "largest_index" and places.arg.shape[-1] == size:
        return True
    low, high = bounds(places)
    return isinstance(size, int) and 0 <= low <= high < size
