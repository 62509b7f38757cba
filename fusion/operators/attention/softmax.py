"""softmax(scale · q kᵀ) v in plain torch, without a copy of keys or values per query head.

What is not finite is passed on, as by code that writes the softmax out: a row is NaN whose query is not finite, or that
sees a key or a value that is NaN. Only a row that its mask leaves no key is 0. Keys and values that are hidden may be
read or skipped, as kernels do: what they give where they are not finite is not promised, nor what a row gives all of
whose keys are infinite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion._torch.tensors import known_true
from fusion.operators.dtypes import compute_dtype


@dataclass(frozen=True)
class Visible:
    """Which keys a query sees: `keys` broadcasts to [B, N, S, T] (True: seen; None: all), or plainly causal."""

    keys: Tensor | None = None
    causal: bool = False


def shared_matmul(left: Tensor, right: Tensor) -> Tensor:
    """left [*, N, S, K] @ right [*, M, K, T] -> [*, N, S, T]; each of the M right heads serves N / M left ones."""
    if left.dim() == right.dim() == 3 and known_true(left.shape[0] == right.shape[0]):
        return left.bmm(right)  # what matmul comes to, behind four views
    if left.dim() < 3 or left.shape[-3] == right.shape[-3]:
        return left @ right
    shared = left.shape[-3] // right.shape[-3] * left.shape[-2]
    folded = left.reshape(*left.shape[:-3], right.shape[-3], shared, left.shape[-1])
    return (folded @ right).reshape(*left.shape[:-1], right.shape[-1])


def fused_softmax(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scale: float) -> Tensor:
    """query [B, N, S, D], key [B, M, T, D], value [B, M, T, D] -> [B, N, S, D]; a row that sees no key is 0."""
    if scale <= 0:  # the CPU's causal kernel multiplies what it has hidden as well: -inf would be shown, or be NaN
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    out = scaled_dot_product_attention(
        query, key, value, visible.keys, is_causal=visible.causal, scale=scale, enable_gqa=True
    )
    # The CPU's kernel gives 0 where no score is a number: then the query is not finite, or the first key is NaN.
    out = out + (query - query).sum(-1, keepdim=True)
    blind = _blind(visible)
    if blind is not None:
        return out.masked_fill(blind, 0.0)
    wide = compute_dtype(query)
    first = shared_matmul(query.to(wide), key[..., :1, :].to(wide).transpose(-2, -1))
    return out + first.clamp(0.0, 0.0).to(out.dtype)  # 0, or NaN


def written_softmax(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, visible: Visible, scale: float, sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The same as (output, log-sum-exp [B, N, S, 1] in the wide dtype), for what the fused kernels cannot do.

    pairs are queries [B, N, S, D] with their keys [B, M, T, D], whose scores add up; value [B, M, T, Dv] may have
    another width; sink [N] is a logit of each head that no value belongs to; bias [B or 1, N, S.., T..], which may
    have more rows and keys than there are, is added to scaled scores. All in float32, rounded once. A row that sees no
    key is 0 and has the log-sum-exp +inf.
    """
    scores = _scores(pairs, visible, scale, bias)
    top, weights, total = _weighted(scores, sink, _blind(visible))
    blind = total == 0  # never with a sink, whose rows without keys are 0 by themselves
    out = (shared_matmul(weights, value.to(scores.dtype)) / total).masked_fill(blind, 0.0)
    return out.to(value.dtype), (top + total.log()).masked_fill(blind, math.inf)


def rounded_softmax(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, visible: Visible, scale: float, stored: torch.dtype,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(output, largest score, sum of exp(score - largest)), as kernels that round the weights before they divide.

    Shapes are those of `written_softmax`, without a batch if heads share no keys. The weights exp(score - largest) are
    rounded to `stored` (int8: to steps of 1/127) before they meet the values, their sum is not; `bias` [B, N, S, T] is
    added to scaled scores. A row that sees no key is 0 in all three. The output is not rounded yet.
    """
    if bias is not None:
        shown = bias != -math.inf
        visible = Visible(shown if visible.keys is None else visible.keys & shown)
    scores = _scores(pairs, visible, scale)
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    top, weights, total = _weighted(biased, None, _blind(visible))
    blind = total == 0
    kept = (weights * 127).round() / 127 if stored == torch.int8 else weights.to(stored).to(scores.dtype)
    out = shared_matmul(kept, value.to(scores.dtype)) / total
    return out.masked_fill(blind, 0.0), top.masked_fill(blind, 0.0), total


def softmax_statistics(
    pairs: Sequence[tuple[Tensor, Tensor]], visible: Visible, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Largest score and sum of exp(score - largest) of each row, [B, N, S, 1], sink included."""
    top, _, total = _weighted(_scores(pairs, visible, scale), sink, _blind(visible))
    return top, total


def _scores(
    pairs: Sequence[tuple[Tensor, Tensor]], visible: Visible, scale: float, bias: Tensor | None = None
) -> Tensor:
    wide = compute_dtype(pairs[0][0])
    scores = reduce(torch.add, [shared_matmul(q.to(wide) * scale, k.to(wide).transpose(-2, -1)) for q, k in pairs])
    if bias is not None:
        scores = scores + bias[..., : scores.shape[-2], : scores.shape[-1]].to(wide)
    seen = visible.keys
    if visible.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def _weighted(scores: Tensor, sink: Tensor | None, blind: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Largest score of each row, exp(score - largest), and their sum, sink included, which is 0 of blind rows."""
    top = scores.amax(-1, keepdim=True)
    extra = None if sink is None else sink.to(scores.dtype).reshape(-1, 1, 1)
    top = top if extra is None else torch.maximum(top, extra)
    if blind is not None:
        top = top.masked_fill(blind & (top == -math.inf), torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return top, weights, total if extra is None else total + (extra - top).exp()


def _blind(visible: Visible) -> Tensor | None:
    """Rows that the mask leaves no key, [B, N, S, 1]; None where there are none."""
    return None if visible.keys is None else ~visible.keys.any(-1, keepdim=True)
