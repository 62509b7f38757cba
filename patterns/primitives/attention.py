"""out = softmax(scale · q kᵀ, masked) v  (Vaswani et al., Attention Is All You Need, 2017).

*Matches* attention in every layout and spelling that the canonicaliser reads: sdpa, matmuls around a softmax, grouped
heads, masks that are added, chosen or filled in, windows, sinks. *Replaces with* `npu_fused_infer_attention_score_v2`,
told in words what the mask lets through where that is proven, with the mask itself where it is not; with its first
version where the second is left out; or with `npu_fusion_attention` for an encoder.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.primitives import attention_calls as calls


@dataclass(frozen=True)
class Attention(Rule):
    """Softmax attention of queries over keys and values, which several query heads may share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    def written(
        self,
        p,
        q=tensor("B N S D"),
        k=tensor("B M T D"),
        v=tensor("B M T E"),
        mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True),
        sink=tensor("N", optional=True),
        scale=scalar(),
        order=attribute(),
        window=attribute(),
        known=attribute(),
        empty=attribute(),
        finish=attribute(),
    ):
        """What the canonicaliser has read.

        `mask` is true where a key is hidden; `length` [B] or `known` say how many keys are seen; `order` is "full",
        "left" (key j ≤ query i), "right" (the last query sees the last key) or "mask" (as the mask says); `window` is
        how many keys before its own a query sees; `empty` is what a query without keys gives: "zero", "mean" (of all
        values) or "nan"; always "zero" where every query is known to see a key.
        """
        return p.softmax_attention(
            q=q, k=k, v=v, mask=mask, length=length, sink=sink, scale=scale, order=order, window=window, known=known,
            empty=empty, finish=finish,
        )  # fmt: skip

    @lowering
    def encoder(self, q, k, v, sink, scale, order, known, length, finish):
        """Every query sees every key."""
        require(q.shape[2] != 1 and known is None and length is None, "not a whole sequence attends to itself")
        require(order == "full", "a query does not see every key")
        require(sink is None, "the operator for encoders takes no sink")
        return calls.finished(calls.encoder(q, k, v, scale), finish)

    @lowering
    def told(self, q, k, v, length, sink, scale, order, window, known, finish):
        """What is seen, told in words."""
        require(order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
        require(sink is None, "with a sink the operator reads packed sequences")
        seen = calls.Seen(order, window, known, length)
        return calls.finished(calls.batched(q, k, v, scale, seen)[0], finish)

    @lowering
    def packed(self, q, k, v, length, sink, scale, order, window, known, finish):
        """The same with the sequences packed one after the other."""
        require(order != "mask", "packed sequences take no mask")
        return calls.finished(calls.packed(q, k, v, sink, scale, calls.Seen(order, window, known, length)), finish)

    @lowering
    def paged(self, q, k, v, length, sink, scale, order, window, known, finish):
        """The same with the keys of a sequence as one page of a paged cache, as they lie."""
        require(order != "mask", "packed sequences take no mask")
        return calls.finished(calls.paged(q, k, v, sink, scale, calls.Seen(order, window, known, length)), finish)

    @lowering
    def shown(self, q, k, v, mask, sink, scale, empty, finish):
        """What is seen, shown by the mask."""
        require(mask is not None, "there is no mask")
        require(sink is None, "with a sink the operator reads packed sequences")
        y = calls.batched(q, k, v, scale, mask=mask)[0]
        return calls.finished(calls.where_empty(y, v, mask, empty), finish)

    @lowering
    def told_beside_sink(self, q, k, v, length, sink, scale, order, window, known, finish):
        """Attention without the sink, and the share that the sink takes, from the log-sum-exp of the scores."""
        require(sink is not None, "there is no sink")
        require(order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
        y, lse = calls.batched(q, k, v, scale, calls.Seen(order, window, known, length), lse=True)
        return calls.finished(calls.beside_sink(y, lse, sink), finish)

    @lowering
    def shown_beside_sink(self, q, k, v, mask, sink, scale, finish):
        """The same with the mask."""
        require(sink is not None, "there is no sink")
        require(mask is not None, "there is no mask")
        y, lse = calls.batched(q, k, v, scale, mask=mask, lse=True)
        return calls.finished(calls.beside_sink(y, lse, sink), finish)

    @lowering
    def told_v1(self, q, k, v, length, sink, scale, order, window, known, finish):
        """`told`, for whom the second version of the operator is left out."""
        require(order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
        require(sink is None, "the first version of the operator takes no sink")
        seen = calls.Seen(order, window, known, length)
        return calls.finished(calls.batched(q, k, v, scale, seen, version=1)[0], finish)

    @lowering
    def shown_v1(self, q, k, v, mask, sink, scale, empty, finish):
        """`shown`, likewise."""
        require(mask is not None, "there is no mask")
        require(sink is None, "the first version of the operator takes no sink")
        y = calls.batched(q, k, v, scale, mask=mask, version=1)[0]
        return calls.finished(calls.where_empty(y, v, mask, empty), finish)

    @lowering
    def packed_v1(self, q, k, v, length, sink, scale, order, window, known, finish):
        """`packed`, likewise."""
        require(order != "mask", "packed sequences take no mask")
        require(sink is None, "the first version of the operator takes no sink")
        seen = calls.Seen(order, window, known, length)
        return calls.finished(calls.packed(q, k, v, None, scale, seen, version=1), finish)
