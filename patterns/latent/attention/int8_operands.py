"""Operands of attention over an int8 latent, and of its queries.

    scores = c · ((q8 k8ᵀ) · tokens · of_keys + q_rope k_ropeᵀ)        out = P k8 · of_values

`query` [B, N, S, C] and `latent` are int8; `tokens` [B, N, S, 1] are scales for each token and head. The latent has one
scale, which is `of_keys` [1] · `keys_by` as keys and `of_values` [1] · `values_by` as values: tensors, which may be
absent, times numbers. The model may multiply by scales before or after the products, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fusion.analysis.factored_products import WIDE, ScaledInt8, factors_of, product_of, scaled_int8
from fusion.analysis.row_layout import arranged, once, row_step, unwidened
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.kit.lanes import joined_parts

Parts = tuple[dict[str, Any], dict[Value, Reading | Miss]]


@proof
def parts(a: Algebra, q: Value, k: Value, v: Value) -> Parts | Miss | None:
    """Return the captures of int8_latent_attention for `q`, `k` and `v`, and the reading of its folded_query.

    A Miss if the operator does not take the scales or operands; None if nothing looks like such an attention.
    """
    values = proven(_once(a, scaled_int8(a, v)))
    must(values.base.shape[1] == 1)
    pieces = [(start, each, _once(a, scaled_int8(a, each))) for start, each in joined_parts(a, k)]
    latents = [each for each in pieces if each[2] is not None and each[2].base is values.base]
    ropes = [each for each in pieces if each[2] is None]
    must(len(latents) == 1 and len(ropes) == 1 and len(pieces) == 2)
    (start, lanes, keys), (offset, k_rope, _) = latents[0], ropes[0]
    nope, rotated = (_lanes(a, q, at, at + part.shape[-1]) for at, part in ((start, lanes), (offset, k_rope)))
    query, keys = scaled_int8(a, nope), proven(keys)
    if query is None:
        return _miss(
            "queries: they are floats over an int8 latent; npu_fused_infer_attention_score_v2 and "
            "npu_multi_head_latent_attention require int8 of both or floats of both; quantise the queries by "
            "token and head, or dequantise the latent"
        )
    if query.rows is None:
        return _miss(
            "scale of queries: it is not one of each token and head; npu_fused_infer_attention_score_v2 "
            "requires amax(|q|, -1, keepdim=True) / 127"
        )
    if keys.rows is not None or values.rows is not None:
        return _miss(
            "scale of the latent: there is one of each token; npu_fused_infer_attention_score_v2 requires "
            "one number for all; quantise the cache by one static scale"
        )
    rotated, k_rope = (unwidened(a, each) for each in (_cancelled(a, rotated), once(a, k_rope)))
    if rotated.dtype != k_rope.dtype or k_rope.shape[1] != 1:
        return _miss(
            "rotated queries, keys: their dtypes differ, or heads have rotated keys of their own; "
            "npu_fused_infer_attention_score_v2 requires one dtype, and one rotated key for all heads"
        )
    key_scale, value_scale = _one(a, (*query.ones, *keys.ones)), _one(a, values.ones)
    scales = {"tokens": query.rows, "of_keys": key_scale}
    by = query.number * keys.number
    folded = _folded(a, rotated, query.rows, key_scale, by)
    captures = {"query": query.base, "rope": folded, "latent": values.base, "k_rope": k_rope, **scales, "keys_by": by}
    captures |= {"of_values": value_scale, "values_by": values.number}
    return captures, {folded: Reading("folded_query", {"rope": rotated, **scales, "by": by})}


def _miss(reason: str) -> Miss:
    return Miss("int8_latent_attention", reason)


def _lanes(a: Algebra, x: Value, start: Any, stop: Any) -> Value:
    """Slice lanes `start` … `stop` of `x` below its views of rows, and apply the views to the slice."""
    step = row_step(x)
    if step is None:
        return proven(a.slice(x, -1, start, stop))
    return arranged(a, _lanes(a, x.arg, start, stop), [step])


def _once(a: Algebra, scaled: ScaledInt8 | None) -> ScaledInt8 | None:
    """Return `scaled` with its int8 tensor as one head, if it is repeated for the heads; None if `scaled` is None."""
    return None if scaled is None else replace(scaled, base=once(a, scaled.base))


def _cancelled(a: Algebra, x: Value) -> Value:
    """Remove pairs of a factor and its inverse from the product `x`.

    Return `x` itself unless exactly one factor is left, of the shape of `x`.
    """
    factors = factors_of(a, x)
    inverses = [(each, a.power(each, -1)) for each in factors]
    left = list(factors)
    for each, inverse in inverses:
        if each in left and inverse in left and each is not inverse:
            left.remove(each)
            left.remove(inverse)
    return left[0] if len(left) == 1 and left[0].shape == x.shape else x


def _one(a: Algebra, ones: Sequence[Value]) -> Value | None:
    """Multiply the scales `ones`, of one element each, to one tensor [1] in float32; None if there are none."""
    return product_of(a, [a.cast(each, WIDE) for each in ones])


def _folded(a: Algebra, rotated: Value, tokens: Value, key_scale: Value | None, by: float) -> Value:
    """Divide the `rotated` queries by tokens · key_scale · by, the scales by which the operator multiplies scores."""
    scale = a.scale(tokens, by) if key_scale is None else proven(a.mul(a.scale(tokens, by), key_scale))
    quotient = proven(a.mul(a.cast(rotated, WIDE), a.power(scale, -1)))
    return a.cast(quotient, rotated.dtype)
