"""Queries in int8 by one factor of each head: q8 = int8(clamp(round(x · s))), x [B, N, S, C], s [N]."""

from __future__ import annotations

from fusion.analysis.rounding import exact, rounded, unscaled
from fusion.graph import Algebra, Reading, Value

_DIVIDED = "queries are divided by a scale of each head, where the operator multiplies by one"
_BOUNDS = "whole queries are bounded by {low:g} and {high:g}, those of the operator by -128 and 127"


def by_head(a: Algebra, value: Value) -> Reading | str | None:
    """`value`, of int8, as queries by a factor of each head; why it is not; None if nothing is like it."""
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
        return Reading("quantise", {"x": exact(x), "scale": scale, "scheme": "head"})
    return None
