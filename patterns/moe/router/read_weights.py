"""Rows of numbers of which the largest are kept where they stand, beside others: routers that give a weight to all.

    kept = x where the list of its k largest names it, otherwise -inf, or 0
    softmax(kept) = the softmax over the k largest where they stand, 0 elsewhere

Kept by a bound, x ≥ the least of the k largest, more than k may stay: all that are as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fusion import reader
from fusion.analysis.rounding import exact, is_float
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.proof import proven
from patterns.moe.router.list_masks import Masked, lists_largest, masked
from patterns.moe.words import KEPT

RULE = "expert_routing"


@reader(gives=(KEPT,))
def kept_largest(graph: Graph) -> Iterator[Found]:
    """Every row of which the largest are kept; why others are none."""
    for value in list(graph.places) if lists_largest(graph) else ():
        found = kept(graph.algebra, value) or _other(value) if is_float(value) else None
        if isinstance(found, Miss):
            yield value, found
        elif found is not None:
            yield value, Reading("kept", {"x": found.x, "count": found.places.attrs[0], "fill": found.fill})


class Kept(NamedTuple):
    """Numbers, the list of the largest of them, and what stands in the place of all others."""

    x: Value
    places: Value
    fill: float


def kept(a: Algebra, value: Value) -> Kept | None:
    """Of which numbers a value keeps the largest, and what the others become."""
    return _placed(a, value) or _masked(value)


def _placed(a: Algebra, value: Value) -> Kept | None:
    """The largest put among -inf, where they stood."""
    if value.op != "placed" or (value.arg.op, value.arg.attrs) != ("full", (-math.inf,)):
        return None
    _, places, numbers = value.args
    source = _of_largest(a, numbers)
    named = source is not None and places.op == "largest_index" and _ranked(source) is _ranked(places.arg)
    return Kept(proven(source), places, -math.inf) if named else None


def _of_largest(a: Algebra, x: Value) -> Value | None:
    """Of which numbers these are the largest, perhaps widened, with something added to whole rows."""
    if x.op == "largest":
        return x.arg
    if x.op == "cast":
        source = _of_largest(a, x.arg) if exact(x) is not x else None
        return None if source is None else a.cast(source, x.dtype)
    for rows, added in (x.args, x.args[::-1]) if x.op == "add" else ():
        source = _of_largest(a, rows) if added.shape[-1:] == (1,) else None
        if source is not None:
            return a.add(source, added)
    return None


def _ranked(x: Value) -> Value:
    """What has the order of `x` in every row: before it was widened, and without what is added to whole rows."""
    x = exact(x)
    for rows, added in (x.args, x.args[::-1]) if x.op == "add" else ():
        if rows.shape == x.shape and added.shape[-1:] == (1,):
            return _ranked(rows)
    return x


def _masked(value: Value) -> Kept | None:
    """Numbers of which others are filled, multiplied by 0 or lowered by infinity."""
    found = masked(value, lambda of: of.size is None)
    if found is None or found.fill is None or found.of.is_bound or not _are_ranked(found):
        return None
    return Kept(found.choice, found.of.places, found.fill)


def _other(value: Value) -> Miss | None:
    """Why numbers that a list or a bound changes are not the largest alone."""
    found = masked(value, lambda of: of.size is None)
    if found is None or value.rank > 3:  # of more dims they are scores of heads
        return None
    if found.of.is_bound:
        return Miss(RULE, _BOUND)
    return Miss(RULE, _OTHERS) if found.fill is None and _are_ranked(found) else None


def _are_ranked(found: Masked) -> bool:
    """Whether the list is of the largest of these numbers, or of a softmax of them."""
    places = found.of.places
    return places.op == "largest_index" and _ranked(_logits(found.choice)) is _ranked(places.arg)


def _logits(x: Value) -> Value:
    """What has the order of `x`: before a softmax over it."""
    below = x.below("cast")
    return below.arg if below.op == "softmax" and below.attrs[0] == -1 else x


_OTHERS = "what the list of the largest does to them is something else than to keep them and hide all others"
_BOUND = (
    "what is not below the least of the largest is kept, and where several are as large, more of them than there are "
    "largest: the operator chooses just so many, as the list of topk does"
)
