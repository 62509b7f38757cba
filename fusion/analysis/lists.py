"""Lists that are compared with positions: (places == arange).any(-1), and one_hot(places).sum(-2) of distinct ones."""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value


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
    rows = [place for place in range(len(shape)) if place not in (axis, *along)]
    entries = a.permute(places, (*along, *rows, axis))
    whole = uncast(a.reshape(entries, entries.shape[1:]))
    wanted = (1, *(shape[place] for place in (*rows, axis)))
    if entries.shape != wanted or not _lies_within(whole, shape[along[0]]):
        return None
    if distinct and whole.op != "largest_index":
        return None
    chosen = a.make("chosen", (whole,), (), (*wanted[1:-1], shape[along[0]]), torch.bool)
    order = sorted(range(len(shape)), key=[*rows, *along, axis].__getitem__)
    return a.permute(a.reshape(chosen, (*chosen.shape, 1)), order)


def _lies_within(places: Value, size: Any) -> bool:
    """Whether a list is proven to hold positions of a dim alone."""
    if places.op == "largest_index" and places.arg.shape[-1] == size:
        return True
    low, high = bounds(places)
    return isinstance(size, int) and 0 <= low <= high < size
