"""Lists: where the positions stand that a row names.

x.scatter(-1, places, value)            → where(chosen(places), value, x)   chosen: true at the places that a row lists
x.scatter(-1, places, values)           → placed(x, places, values)
zeros.scatter_add(-1, places, ones)     → where(chosen(places), 1, 0)       of places that differ; scatter_reduce of the
                                                                            greatest does so of any
(places == arange).any(-1)              → chosen(places)                    one_hot(places).sum(-2), if they differ, too
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value, unviewed
from fusion.graph.logic import constant, where
from fusion.graph.proof import must, proven
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.scatter.value")
def _scatter_value(a: Algebra, out: Out, x: Value, dim: int, places: Value, number: Any) -> Translated:
    must(isinstance(number, (int, float)))
    return marked(a, x, dim, places, constant(a, number, (), x.dtype))


def marked(a: Algebra, x: Value, dim: int, places: Value, number: Value) -> Value | None:
    """`x`, which the graph computes, with another number (a value full of it) at the places that each row lists."""
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1]
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input":
        return None
    own = uncast(places)
    if own.op == "expand" and own.arg.shape[-1] == own.shape[-1]:  # one list for all of several rows
        own = own.arg
    chosen = a.make("chosen", (own,), (), (*own.shape[:-1], x.shape[-1]), torch.bool)
    other = constant(a, x.attrs[0], chosen.shape, x.dtype) if x.op == "full" else x
    marks = proven(where(a, chosen, constant(a, number.attrs[0], (), x.dtype), other, x.dtype))
    return a.expand(marks, x.shape)


def counted(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """`x` of zeros with a number, of which `numbers` is full, added at the places of rows that name none twice."""
    zeros = x.op == numbers.op == "full" and x.attrs[0] == 0
    return marked(a, x, dim, places, numbers) if zeros and uncast(places).op == "largest_index" else None


@translates("aten.scatter_reduce.two")
def _scatter_greatest(
    a: Algebra, out: Out, x: Value, dim: int, places: Value, numbers: Value, reduce: str, include_self: bool = True
) -> Translated:
    """The greater of two numbers, of which `x` and `numbers` are full."""
    must(x.op == numbers.op == "full" and reduce == "amax" and numbers.attrs[0] >= x.attrs[0])
    return marked(a, x, dim, places, numbers)


def placed(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """`x`, which the graph computes, with a number of its own at each of the places that a row lists."""
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1] and numbers.shape == places.shape
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input" or numbers.dtype != x.dtype:
        return None
    return a.make("placed", (x, uncast(places), numbers), (), x.shape, x.dtype)


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
