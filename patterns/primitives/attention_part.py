"""out, lse = softmax(scale · q kᵀ, masked) v, log Σ exp(scale · q kᵀ, masked): attention over a part of the keys.

*Matches* attention whose log-sum-exp is used beside it, to merge it with attention over other keys (ring and chunked
attention, split keys). *Replaces with* `npu_fused_infer_attention_score_v2`, which gives both, or its first version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.primitives import attention_calls as calls


@dataclass(frozen=True)
class Part(Rule):
    """What the rules of attention over a part of the keys mean."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The meaning without a mask: q [B, N, S, D], k [B, M, T, D], v [B, M, T, E] → [B, N, S, E], [B, N, S, 1]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class AttentionPart(Part):
    """Attention over some of the keys, and the log-sum-exp of its scores."""

    @pattern
    def written(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True), sink=tensor("N", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """What the canonicaliser has read; see `Attention.written`."""
        seen = dict(
            mask=mask, length=length, sink=sink, scale=scale, order=order, window=window, known=known, empty=empty
        )
        return p.softmax_attention(q=q, k=k, v=v, finish=finish, **seen), p.attention_log_sum(q=q, k=k, **seen)

    def guard(self, sink: Any, empty: str):
        """What the log-sum-exp of the operator is of."""
        require(sink is None, "the log-sum-exp of the operator does not count the sink")
        require(empty != "mean", "a query without keys has a finite log-sum-exp, of which the operator says +inf")

    @lowering
    @variants(version=(2, 1))
    def told(self, q, k, v, length, scale, order, window, known, finish, version):
        """What is seen, told in words."""
        seen = calls.Seen(order, window, known, length)
        calls.require_a_key(seen, q.shape[2], k.shape[2])
        y, lse = calls.batched(q, k, v, scale, seen, lse=True, version=version)
        return calls.finished(y, finish), lse

    @lowering
    @variants(version=(2, 1))
    def shown(self, q, k, v, mask, scale, empty, finish, version):
        """What is seen, shown by the mask."""
        require(mask is not None, "there is no mask")
        y, lse = calls.batched(q, k, v, scale, mask=mask, lse=True, version=version)
        return calls.finished(calls.where_empty(y, v, mask, empty), finish), calls.sum_where_empty(lse, mask)
