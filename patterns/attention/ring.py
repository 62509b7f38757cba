"""out, lse = softmax(scale · q kᵀ + mask) v, log Σ exp(scale · q kᵀ + mask): attention over some of the keys.

*Matches* attention whose log-sum-exp is used beside it, alone, or merged with what other keys gave:

    lse' = log(exp(lse₀) + exp(lse))      out' = exp(lse₀ - lse') out₀ + exp(lse - lse') out

*Replaces with* atb's `npu_ring_mla`, which takes queries and keys in two parts: lanes like those of values, and the
rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.attention import calls

TRIANGLE = 512


@dataclass(frozen=True)
class RingMla(Rule):
    """Attention over some of the keys, with what other keys gave."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E], [B, N, S, 1]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1, keepdim=True)

    @pattern
    def first(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Of nothing but these keys."""
        seen = dict(mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty)
        return p.softmax_attention(q=q, k=k, v=v, finish=finish, **seen), p.attention_log_sum(q=q, k=k, **seen)

    @pattern
    def with_others(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True), before=tensor("B N S E"), sums=tensor("B N S I"), scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), inner=attribute(),
    ):  # fmt: skip
        """Merged with what other keys gave."""
        seen = dict(mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty)
        lse = p.attention_log_sum(q=q, k=k, **seen)
        out = p.reshaped(p.softmax_attention(q=q, k=k, v=v, finish=inner, **seen))
        top = p.op("aten.maximum.default", sums, lse)
        old, new = p.op("exp", sums - top), p.op("exp", lse - top)
        total = old + new
        y = p.maybe_cast(before, to=torch.float32) * old + p.maybe_cast(out, to=torch.float32) * new
        return p.as_dtype(y * p.power(total, -1.0), q), top + p.op("log", total)

    def guard(self, q: Any, k: Any, v: Any, order: str, window: Any, known: Any, length: Any):
        """What the operator can be told."""
        rows, keys = q.shape[2], k.shape[2]
        numbers = all(isinstance(each, int) for each in (q.shape[0], rows, keys))
        require(window is None and known is None and length is None, "only a part of the keys is seen")
        require(order != "mask", "what the mask lets through is not proven to be causal")
        require(order == "full" or rows == keys, "the causal order is not that of a square")
        require(numbers and rows <= keys, "there are fewer keys than queries, or their numbers are not known before")
        require(q.shape[3] > v.shape[3], "queries have no lanes beside as many as values have")

    @lowering
    def alone(self, q, k, v, scale, order, finish):
        """One call, over sequences that are packed one after the other."""
        require(finish is not None, "what other keys gave is merged with it")
        y, lse = _stepped(q, k, v, scale, order, calc_type="calc_type_first_ring")
        return calls.viewed(y, finish), lse

    @lowering
    def merged(self, q, k, v, before, sums, scale, order):
        """The same, with the merge."""
        require(before is not None, "there is nothing to merge it with")
        pre_out = before.transpose(1, 2).flatten(0, 1)
        prev_lse = sums.squeeze(-1).transpose(0, 1).flatten(1)
        return _stepped(q, k, v, scale, order, calc_type="calc_type_default", pre_out=pre_out, prev_lse=prev_lse)


def _stepped(q: Tensor, k: Tensor, v: Tensor, scale: float, order: str, **how: Any) -> tuple[Tensor, Tensor]:
    """Output [B, N, S, E] and log-sum-exp [B, N, S, 1]."""
    batch, heads, rows = q.shape[:3]
    width: Any = v.shape[3]
    packed = (each.transpose(1, 2).flatten(0, 1) for each in (q, k, v))
    query, key, value = packed
    causal = order != "full"
    lengths = [torch.full((batch,), size, dtype=torch.int32) for size in (rows, k.shape[2])]
    made: dict[str, Any] = dict(dtype=q.dtype, device=q.device)
    hidden = 1.0 if q.dtype == torch.bfloat16 else -10000.0  # the kernel multiplies what it is given in bfloat16
    mask = torch.full((TRIANGLE, TRIANGLE), hidden, **made).triu(1) if causal else torch.empty((1, 1), **made)
    y, lse = torch.ops.atb.npu_ring_mla(
        query[..., :width], query[..., width:], key[..., :width], key[..., width:], value, mask,
        lengths[0] if causal else torch.stack(lengths), heads, k.shape[1], qk_scale=scale,
        kernel_type="kernel_type_high_precision", mask_type="mask_type_triu" if causal else "no_mask",
        input_layout="type_bsnd", **how,
    )  # fmt: skip
    return y.unflatten(0, (batch, rows)).transpose(1, 2), lse.unflatten(1, (batch, rows)).transpose(0, 1).unsqueeze(-1)
