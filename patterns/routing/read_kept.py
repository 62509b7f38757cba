"""Rows of numbers of which the largest are kept where they stand, beside others: routers that give a weight to all.

    kept = x where the list of its k largest names it, otherwise -inf, or 0
    softmax(kept) = the softmax over the k largest where they stand, 0 elsewhere

Kept by a bound, x ≥ the least of the k largest, more than k may stay: all that are as large.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from fusion import reader
from fusion.analysis.rounding import exact, is_float
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from patterns.routing.list_masks import masked
from patterns.routing.words import KEPT

RULE = "expert_routing"


@reader(gives=(KEPT,))
def kept_largest(graph: Graph) -> Iterator[Found]:
    """Every row of which the largest are kept; why others are none."""
    for value in list(graph.places):
        if is_float(value):
            found = _placed(graph.algebra, value) or _masked(value)
            if found is not None:
                yield value, found


def _placed(a: Algebra, value: Value) -> Reading | None:
    """The largest put among -inf, where they stood."""
    if value.op != "placed" or (value.arg.op, value.arg.attrs) != ("full", (-math.inf,)):
        return None
    _, places, numbers = value.args
    largest = exact(numbers)
    named = places.op == "largest_index" and largest.op == "largest" and exact(largest.arg) is exact(places.arg)
    return _kept(a.cast(largest.arg, value.dtype), places, -math.inf) if named else None


def _masked(value: Value) -> Reading | Miss | None:
    """Numbers of which others are filled, multiplied by 0 or lowered by infinity."""
    found = masked(value, lambda of: of.size is None)
    if found is None or not is_float(found.choice):
        return None
    if found.of.is_bound:
        return Miss(RULE, _BOUND) if value.rank <= 3 else None  # of more dims they are scores of heads
    places = found.of.places
    ranks = places.op == "largest_index" and exact(_logits(found.choice)) is exact(places.arg)
    if not ranks:
        return None
    return Miss(RULE, _OTHERS) if found.fill is None else _kept(found.choice, places, found.fill)


def _logits(x: Value) -> Value:
    """What has the order of `x`: before a softmax over it."""
    return x.below("cast").arg if x.below("cast").op == "softmax" and x.below("cast").attrs[0] == -1 else x


def _kept(x: Value, places: Value, fill: float) -> Reading:
    return Reading("kept", {"x": x, "count": places.attrs[0], "fill": fill})


_OTHERS = "what the list of the largest does to them is something else than to keep them and hide all others"
_BOUND = (
    "what is not below the least of the largest is kept, and where several are as large, more of them than there are "
    "largest: the operator chooses just so many, as the list of topk does"
)
