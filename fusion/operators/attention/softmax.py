"""softmax(scale · q kᵀ) v in plain torch, without a copy of keys or values per query head.

Non-finite numbers propagate as in code that writes the softmax out: a row is NaN if its query is not finite, or if it
sees a key or a value that is NaN. Only a row without a visible key is 0. Masked keys and values may be read or skipped,
as kernels do: results are unspecified where these are not finite, and in rows whose keys are all infinite.
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
from fusion.operators.dtype_sets import compute_dtype


@dataclass(frozen=True)
class Visible:
    """Mask of keys: `keys` broadcasts to [B, N, S, T] (True: visible; None: all); or upper-left causal if `causal`."""

    keys: Tensor | None = None
    causal: bool = False


def shared_matmul(left: Tensor, right: Tensor) -> Tensor:
    """Multiply `left` [*, N, S, K] by `right` [*, M, K, T] to [*, N, S, T]; each of the M heads of `right` serves N / M
    heads of `left`, without a copy of `right`."""
    if left.dim() == right.dim() == 3 and known_true(left.shape[0] == right.shape[0]):
        return left.bmm(right)  # matmul would compute the same behind four views
    if left.dim() < 3 or left.shape[-3] == right.shape[-3]:
        return left @ right
    shared = left.shape[-3] // right.shape[-3] * left.shape[-2]
    folded = left.reshape(*left.shape[:-3], right.shape[-3], shared, left.shape[-1])
    return (folded @ right).reshape(*left.shape[:-1], right.shape[-1])


def fused_softmax(query: Tensor, key: Tensor, value: Tensor, visible: Visible, scale: float) -> Tensor:
    """Compute attention of `query` [B, N, S, D] over `key` and `value` [B, M, T, D] by torch's fused kernels; return
    the output [B, N, S, D], 0 for rows without a visible key."""
    if scale <= 0:  # the CPU's causal kernel scales masked scores, too: -inf would become +inf or NaN
        query, scale = (-query, -scale) if scale else (query * 0.0, 1.0)
    rows = _in_one_head(query, key, visible)
    out = scaled_dot_product_attention(
        rows, key, value, visible.keys, is_causal=visible.causal, scale=scale, enable_gqa=True
    ).reshape(*query.shape[:-1], value.shape[-1])
    # The CPU's kernel returns 0 if all scores are NaN: then the query is not finite, or the first key is NaN.
    out = out + (query - query).sum(-1, keepdim=True)
    blind = _blind(visible)
    if blind is not None:
        return out.masked_fill(blind, 0.0)
    wide = compute_dtype(query)
    first = shared_matmul(query.to(wide), key[..., :1, :].to(wide).transpose(-2, -1))
    return out + first.clamp(0.0, 0.0).to(out.dtype)  # 0, or NaN


def _in_one_head(query: Tensor, key: Tensor, visible: Visible) -> Tensor:
    """Return `query` [B, N, 1, D] as [B, M, N / M, D]: the heads that share a head of `key` [B, M, T, D] as its rows.

    Kernels then read each key once. Returns `query` unchanged if it has several rows, or a mask for each head.
    """
    batch, heads, rows, width = query.shape
    shared = visible.keys is None or visible.keys.dim() < 4 or known_true(visible.keys.shape[1] == 1)
    if visible.causal or not shared or heads == key.shape[1] or not known_true(rows == 1):
        return query
    return query.reshape(batch, key.shape[1], heads // key.shape[1], width)


def written_softmax(
    pairs: Sequence[tuple[Tensor, Tensor]], value: Tensor, visible: Visible, scale: float, sink: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute attention in primitive ops, for calls that torch's fused kernels do not take; return the output
    [B, N, S, Dv] and the log-sum-exp [B, N, S, 1] in the wide dtype.

    `pairs` are queries [B, N, S, D] with their keys [B, M, T, D], whose scores add up; `value` is [B, M, T, Dv]; `sink`
    [N] is a logit per head that has no value; `bias` [B or 1, N, >= S, >= T] is cropped to S and T and added to scaled
    scores. The output is computed in float32 or wider, and rounded once to the dtype of `value`. A row without a
    visible key is 0, its log-sum-exp +inf.
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
    """Compute attention like kernels that round the weights before they divide by their sum; return the output, the
    largest score and the sum of exp(score - largest) of each row.

    Shapes are those of `written_softmax`; the batch dim may be missing if each head has its own keys. The weights
    exp(score - largest) are rounded to `stored` (int8: to multiples of 1/127) for the product with the values, but not
    for their sum; `bias` [B, N, S, T] is added to scaled scores, and masks where it is -inf. A row without a visible
    key is 0 in all three results. The output is not rounded yet.
    """
    if bias is not None:
        shown = bias != -math.inf
        visible = Visible(shown if visible.keys is None else visible.keys & shown)
    scores = _scores(pairs, visible, scale)
    biased = scores if bias is None else scores + bias.to(scores.dtype)
    top, weights, total = _weighted(biased, None, _blind(visible))
    blind = total == 0
    rounded = (weights * 127).round() / 127 if stored == torch.int8 else weights.to(stored).to(scores.dtype)
    out = shared_matmul(rounded, value.to(scores.dtype)) / total
    return out.masked_fill(blind, 0.0), top.masked_fill(blind, 0.0), total


def softmax_statistics(
    pairs: Sequence[tuple[Tensor, Tensor]], visible: Visible, scale: float, sink: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest score and the sum of exp(score - largest) of each row, [B, N, S, 1] each, sink included.

    Arguments are those of `written_softmax`.
    """
    top, _, total = _weighted(_scores(pairs, visible, scale), sink, _blind(visible))
    return top, total


def _scores(
    pairs: Sequence[tuple[Tensor, Tensor]], visible: Visible, scale: float, bias: Tensor | None = None
) -> Tensor:
    """Compute the scores [B, N, S, T] in the wide dtype: scaled products, summed over `pairs`, plus `bias`; -inf where
    masked."""
    wide = compute_dtype(pairs[0][0])
    scores = reduce(torch.add, [shared_matmul(q.to(wide) * scale, k.to(wide).transpose(-2, -1)) for q, k in pairs])
    if bias is not None:
        scores = scores + bias[..., : scores.shape[-2], : scores.shape[-1]].to(wide)
    seen = visible.keys
    if visible.causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    return scores if seen is None else scores.masked_fill(~seen, -math.inf)


def _weighted(scores: Tensor, sink: Tensor | None, blind: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row the largest score, the weights exp(score - largest), and the sum of the weights.

    Largest and sum take account of `sink`, if given. Without one, the sum is 0 for rows that `blind` marks as seeing no
    key.
    """
    top = scores.amax(-1, keepdim=True)
    extra = None if sink is None else sink.to(scores.dtype).reshape(-1, 1, 1)
    top = top if extra is None else torch.maximum(top, extra)
    if blind is not None:
        top = top.masked_fill(blind & (top == -math.inf), torch.finfo(scores.dtype).min)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return top, weights, total if extra is None else total + (extra - top).exp()


def _blind(visible: Visible) -> Tensor | None:
    """Return the mask [B, N, S, 1] of rows without a visible key, None if `visible` has no mask."""
    return None if visible.keys is None else ~visible.keys.any(-1, keepdim=True)
