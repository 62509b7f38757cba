"""Queries in whole numbers of 8 bits by one factor of each head: q8 = int8(clamp(round(x · s))).

heads_quantised(x, scale)           x [B, N, S, C], scale [N]
"""

from __future__ import annotations

from collections.abc import Iterator

from fusion import reader
from fusion.analysis.rounding import exact, rounded, unscaled
from fusion.graph import Algebra, Graph, Miss, Reading, Value
from patterns.quant.read import Found, rounded_to_int8

_DIVIDED = "queries are divided by a scale of each head, where the operator multiplies by one"
_BOUNDS = "whole queries are bounded by {low:g} and {high:g}, those of the operator by -128 and 127"


@reader(gives=("heads_quantised",))
def by_head(graph: Graph) -> Iterator[Found]:
    """All queries that are quantised so; why others are not."""
    for value in rounded_to_int8(graph):
        made = _read(graph.algebra, value)
        if made is not None:
            yield value, Miss("heads_quantised", made) if isinstance(made, str) else made


def _read(a: Algebra, value: Value) -> Reading | str | None:
    below = rounded(value.arg)
    product = below.quotient
    for x, factor in (product.args, product.args[::-1]) if product.op == "mul" else ():
        heads = x.shape[1] if x.rank == 4 else 1
        if heads == 1 or (1,) * (4 - factor.rank) + factor.shape != (1, heads, 1, 1) or not below.rounded:
            continue
        scale = exact(a.reshape(factor, (heads,)))
        if unscaled(scale)[0].op == "power":
            return _DIVIDED
        if (below.low, below.high) != (-128, 127):
            return _BOUNDS.format(low=below.low, high=below.high)
        return Reading("heads_quantised", {"x": exact(x), "scale": scale})
    return None
