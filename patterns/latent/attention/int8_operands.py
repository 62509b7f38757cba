"""Attention over a latent that lies in int8, and what its queries are.

    scores = c · ((q8 k8ᵀ) · tokens · of_keys + q_rope k_ropeᵀ)        out = P k8 · of_values

`query` [B, N, S, C] and `latent` are int8; `tokens` [B, N, S, 1] holds a scale for each token and head. The latent has
one scale, for keys `of_keys` [1] times the number `keys_by`; without a tensor the number alone. The model may multiply
by scales before the products or behind them, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion.analysis.factored_products import WIDE, ScaledInt8, factors_of, product_of, scaled_int8
from fusion.analysis.row_layout import arranged, once, row_step, uncast
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.latent.read.read import joined_parts

Parts = tuple[dict[str, Any], dict[Value, Reading | Miss]]


@proof
def parts(a: Algebra, q: Value, k: Value, v: Value) -> Parts | Miss | None:
    """What attention over such a latent consists of, and what its queries are; why it is none; None if nothing is."""
    values = proven(_once(a, scaled_int8(a, v)))
    must(values.base.shape[1] == 1)
    pieces = [(start, each, _once(a, scaled_int8(a, each))) for start, each in joined_parts(a, k)]
    latents = [each for each in pieces if each[2] is not None and each[2].base is values.base]
    ropes = [each for each in pieces if each[2] is None]
    must(len(latents) == 1 and len(ropes) == 1 and len(pieces) == 2)
    (start, lanes, keys), (offset, k_rope, _) = latents[0], ropes[0]
    nope, rotated = (_lanes(a, q, at, at + of.shape[-1]) for at, of in ((start, lanes), (offset, k_rope)))
    query, keys = scaled_int8(a, nope), proven(keys)
    if query is None:
        return _miss("the latent lies in whole numbers and the queries do not: no operator multiplies both")
    if query.rows is None:
        return _miss("whole queries have no scale for each token and head")
    if keys.rows is not None or values.rows is not None:
        return _miss("the latent has a scale for each token, where the operator takes one for all")
    rotated, k_rope = (uncast(a, each) for each in (_cancelled(a, rotated), once(a, k_rope)))
    if rotated.dtype != k_rope.dtype or k_rope.shape[1] != 1:
        return _miss("rotated queries and keys have different dtypes, or heads have keys of their own")
    of_keys, of_values = _one(a, (*query.ones, *keys.ones)), _one(a, values.ones)
    how = {"tokens": query.rows, "of_keys": of_keys}
    by = query.number * keys.number
    folded = _folded(a, rotated, query.rows, of_keys, by)
    found = {"query": query.base, "rope": folded, "latent": values.base, "k_rope": k_rope, **how, "keys_by": by}
    said = found | {"of_values": of_values, "values_by": values.number}
    return said, {folded: Reading("folded_query", {"rope": rotated, **how, "by": by})}


def _miss(reason: str) -> Miss:
    return Miss("int8_latent_attention", reason)


def _lanes(a: Algebra, x: Value, start: Any, stop: Any) -> Value:
    """Some lanes of what may be joined below views that leave lanes alone."""
    step = row_step(x)
    if step is None:
        return proven(a.slice(x, -1, start, stop))
    return arranged(a, _lanes(a, x.arg, start, stop), [step])


def _once(a: Algebra, found: ScaledInt8 | None) -> ScaledInt8 | None:
    """The same without the repetition of heads."""
    return None if found is None else replace(found, base=once(a, found.base))


def _cancelled(a: Algebra, x: Value) -> Value:
    """`x` without factors that it is multiplied by and divided by."""
    factors = factors_of(a, x)
    inverses = [(each, a.power(each, -1)) for each in factors]
    left = list(factors)
    for each, inverse in inverses:
        if each in left and inverse in left and each is not inverse:
            left.remove(each)
            left.remove(inverse)
    return left[0] if len(left) == 1 and left[0].shape == x.shape else x


def _one(a: Algebra, ones: Sequence[Value]) -> Value | None:
    """The product of factors of a whole tensor, in float32 [1]; None without any."""
    return product_of(a, [a.cast(each, WIDE) for each in ones])


def _folded(a: Algebra, rotated: Value, tokens: Value, of_keys: Value | None, by: float) -> Value:
    """Rotated queries divided by what the operator multiplies them by."""
    scale = a.scale(tokens, by) if of_keys is None else proven(a.mul(a.scale(tokens, by), of_keys))
    quotient = proven(a.mul(a.cast(rotated, WIDE), a.power(scale, -1)))
    return a.cast(quotient, rotated.dtype)
