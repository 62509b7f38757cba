"""out = softmax(scale · q kᵀ + mask) v, of keys and values that one latent gives, without computing either.

    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

*Matches* attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1), or that absorbs the
projections itself. *Replaces with* `npu_fused_infer_attention_score_v2` on the latent, its rotated lanes apart, and
`npu_transpose_batchmatmul` for both projections. Keys and values stay expanded where that costs less: see `Attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fusion import Example, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.examples import latent_attention
from patterns.primitives import attention_calls as calls
from patterns.primitives import latent_calls

SEVERAL = dict(values=("transposed", "multiplied"), version=(2, 1))
"""How the values are expanded, and which version of the operator runs."""


@dataclass(frozen=True)
class LatentAttention(Rule):
    """Softmax attention over a latent that all heads share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    def written(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """What the canonicaliser has read; masks as in `Attention.written`."""
        return p.softmax_attention(
            q=p.latent_queries(nope=nope, rope=q_rope, absorbed=absorbed),
            k=p.latent_keys(latent=latent, rope=k_rope, up=up_key), v=p.latent_values(latent=latent, up=up_value),
            mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @lowering
    @variants(**SEVERAL)
    def told(self, absorbed, q_rope, latent, k_rope, up_value, length, scale, order, window, known, finish, values,
             version):  # fmt: skip
        """What is seen, told in words."""
        seen = _seen(order, window, known, length, absorbed)
        y = _attended(absorbed, q_rope, latent, k_rope, scale, version, seen)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def told_of_heads(self, nope, up_key, q_rope, latent, k_rope, up_value, length, scale, order, window, known, finish,
                      values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        absorbed = _absorbed(nope, up_key)
        seen = _seen(order, window, known, length, absorbed)
        y = _attended(absorbed, q_rope, latent, k_rope, scale, version, seen)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def shown(self, absorbed, q_rope, latent, k_rope, up_value, mask, scale, empty, finish, values, version):
        """What is seen, shown by the mask."""
        require(mask is not None, "there is no mask")
        y = _attended(absorbed, q_rope, latent, k_rope, scale, version, mask=mask, empty=empty)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def shown_of_heads(self, nope, up_key, q_rope, latent, k_rope, up_value, mask, scale, empty, finish, values,
                       version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        require(mask is not None, "there is no mask")
        y = _attended(_absorbed(nope, up_key), q_rope, latent, k_rope, scale, version, mask=mask, empty=empty)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(latent_attention.EXAMPLES)

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused."""
        return iter(latent_attention.REJECTS)


def _absorbed(nope: Tensor | None, up_key: Tensor | None) -> Tensor:
    require(nope is not None and up_key is not None, "the model itself absorbs the projection of the keys")
    assert nope is not None
    assert up_key is not None
    return latent_calls.absorb(nope, up_key)


def _seen(order: str, window: int | None, known: Any, length: Tensor | None, q: Tensor) -> calls.Seen:
    """What the operator is told: its causal order ends at the last key, never begins at the first."""
    require(order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
    seen = calls.Seen(order, window, known, length)
    return replace(seen, order="right", known=q.shape[2]) if order == "left" else seen


def _attended(
    absorbed: Tensor, q_rope: Tensor, latent: Tensor, k_rope: Tensor, scale: float, version: int,
    seen: calls.Seen = calls.Seen(), mask: Tensor | None = None, empty: str = "",
) -> Tensor:  # fmt: skip
    """Queries [B, N, S, C + Dr] over a latent [.., C] and [.., Dr], as [B, S, N, C]."""
    batch, heads, queries = absorbed.shape[:3]
    rows, ropes = (each.reshape(batch, -1, 1, each.shape[-1]) for each in (latent, k_rope))
    require(not seen.known or seen.known <= rows.shape[1], "there are fewer keys than queries")
    if mask is None:
        told = seen.arguments(absorbed.device, queries)
    else:
        told = dict(atten_mask=mask, **(dict(inner_precise=2) if queries != 1 else {}))
    lengths = seen.length if seen.known is None else [seen.known]
    y, _ = calls.fused(
        absorbed.transpose(1, 2), rows, rows, lengths, version, query_rope=q_rope.transpose(1, 2), key_rope=ropes,
        num_query_heads=heads, num_key_value_heads=1, softmax_scale=scale, input_layout="BSND", **told,
    )  # fmt: skip
    if mask is None:
        return y
    return calls.where_empty(y.transpose(1, 2), rows.transpose(1, 2), mask, empty).transpose(1, 2)
