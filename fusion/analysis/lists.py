"""Lists that are compared with positions: (places == arange).any(-1), and one_hot(places).sum(-2) of distinct ones.

An entry that may be no position, as -1 is none, names what is cut off on either side.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES


def listed(a: Algebra, x: Value, axis: int, distinct: bool = False) -> Value | None:
    """Any, or the sum if they are `distinct`, over one axis, which stays, of list == position: "chosen", cast as `x`.

    The entries of each row of a list run along that axis, the positions 0, 1, … along another one.
    """
    equal = x.below("cast")
    if (equal.op, equal.attrs) != ("compare", ("eq",)):
        return None
    for places, line in (equal.args, equal.args[::-1]):
        chosen = _chosen_of(a, places, line, axis % x.rank, equal.shape, distinct)
        if chosen is not None:
            return a.cast(chosen, x.dtype)
    return None


def _chosen_of(
    a: Algebra, places: Value, line: Value, axis: int, shape: tuple[Any, ...], distinct: bool
) -> Value | None:
    """The list without the dim of positions and with its entries last; what it chooses, positions where they were."""
    places, line = (a.reshape(each, (*[1] * (len(shape) - each.rank), *each.shape)) for each in (places, line))
    count = uncast(line, "reshape")
    along = [place for place, size in enumerate(line.shape) if size != 1]
    if count.op != "arange" or count.attrs != (0, 1) or len(along) != 1 or along == [axis]:
        return None
    rows, size = [place for place in range(len(shape)) if place not in (axis, *along)], shape[along[0]]
    entries = a.permute(places, (*along, *rows, axis))
    whole = named_by(a.reshape(entries, entries.shape[1:]))
    wanted = (1, *(shape[place] for place in (*rows, axis)))
    if entries.shape != wanted or (distinct and not (whole.op == "largest_index" and _lies_within(whole, size))):
        return None
    chosen = of_entries(a, whole, size)
    if chosen is None:
        return None
    order = sorted(range(len(shape)), key=[*rows, *along, axis].__getitem__)
    return a.permute(a.reshape(chosen, (*chosen.shape, 1)), order)


def named_by(places: Value) -> Value:
    """A list that names the same as `places`: before casts that keep its entries, and before each row was sorted."""
    found = uncast(places)
    return named_by(found.arg) if found.op == "ascending" and found.attrs[0] == found.rank - 1 else found


def of_entries(a: Algebra, places: Value, size: Any) -> Value | None:
    """Which of so many positions the rows of a list name [.., T]; one that is outside names none of them."""
    rows = places.shape[:-1]
    if _lies_within(places, size):
        return a.make("chosen", (places,), (), (*rows, size), torch.bool)
    if places.dtype not in INDEX_DTYPES or not isinstance(size, int) or size >= torch.iinfo(torch.int32).max:
        return None
    low, high = bounds(places)
    inside = (
        places if low >= -1 and high <= size else a.make("clamp", (places,), (-1, size), places.shape, places.dtype)
    )
    wide = a.make("chosen", (a.shift(inside, 1),), (), (*rows, size + 2), torch.bool)
    return a.slice(wide, len(rows), 1, size + 1)


def _lies_within(places: Value, size: Any) -> bool:
    """Whether a list is proven to hold positions of a dim alone."""
    if places.op == "largest_index" and places.arg.shape[-1] == size:
        return True
    low, high = bounds(places)
    return isinstance(size, int) and 0 <= low <= high < size
