"""Attention over a window of keys and over compressed keys, their own values, with a sink (DeepSeek-V4, 2026).

    row i sees      key j of the window for p - left <= j <= p, p = W - S + i
                    compressed entry e < t, t = (C · ratio + residual - S + i + 1) // ratio, all or the listed ones

Entry e stands for the tokens e · ratio .. e · ratio + ratio - 1. Package cann_ops_transformer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, INT32, compute_dtype
from fusion.operators.flops import scores, unlisted
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.operator import Operator

WINDOW = 127
"""The only `ori_win_left` of Atlas A2 and A3: a row sees 128 keys, its own included."""
LISTED = (512, 1024)
"""Lengths of a list of compressed entries."""
METADATA = 1024
"""Number of int32 in the schedule of a call."""


@dataclass(frozen=True)
class _Keys:
    """Scores of keys [B, N, S, K], -inf for hidden ones, and their values: [B, T, D], or [B, S, K, D] of each row."""

    scores: Tensor
    values: Tensor

    def mixed(self, weights: Tensor) -> Tensor:
        """Multiply `weights` [B, N, S, K] by the values: [B, N, S, D]."""
        if self.values.dim() == 3:
            return weights @ self.values.unsqueeze(1)
        return (weights.transpose(1, 2) @ self.values).transpose(1, 2)


def _sparse_flash_mla(given: Given) -> tuple[Tensor, Tensor]:
    q, sinks = given["q"], given["sinks"]
    wide = compute_dtype(q)
    query = q.to(wide).transpose(1, 2) * given["softmax_scale"]
    seen = [_window(given, query), *_compressed(given, query)]
    joined = torch.cat([each.scores for each in seen], dim=-1)
    top = joined.amax(-1, keepdim=True)
    if sinks is not None:
        top = torch.maximum(top, sinks.to(wide).reshape(-1, 1, 1))
    top = top.masked_fill(top == -math.inf, 0.0)
    weights = (joined - top).exp()
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + (sinks.to(wide).reshape(-1, 1, 1) - top).exp()
    blind = (joined == -math.inf).all(-1, keepdim=True)
    rounded = weights.to(q.dtype).to(wide).split([each.scores.shape[-1] for each in seen], dim=-1)
    out = sum(each.mixed(part) for each, part in zip(seen, rounded, strict=True)) / total.masked_fill(total == 0, 1.0)
    y = out.masked_fill(blind, 0.0).to(q.dtype).transpose(1, 2).contiguous()
    if not given["return_softmax_lse"]:
        return y, _lse(q, False)
    lse = (top + total.log()).masked_fill(blind, 0.0)
    return y, lse.to(torch.promote_types(q.dtype, torch.float32)).permute(0, 3, 2, 1).contiguous()


def _window(given: Given, query: Tensor) -> _Keys:
    """Score the window keys of each row of the scaled `query` [B, N, S, D]."""
    keys = given["ori_kv"].squeeze(2).to(query.dtype)
    room, lengths = keys.shape[1], given["seqused_ori_kv"]
    ends: Any = room if lengths is None else lengths.reshape(-1, 1, 1, 1)
    last = ends - query.shape[2] + torch.arange(query.shape[2], device=query.device).reshape(-1, 1)
    at = torch.arange(room, device=query.device)
    hidden = (at > last) | (at < last - given["ori_win_left"])
    return _Keys((query @ keys.unsqueeze(1).mT).masked_fill(hidden, -math.inf), keys)


def _compressed(given: Given, query: Tensor) -> list[_Keys]:
    """Score the compressed entries, all or the listed ones, of each row of the scaled `query` [B, N, S, D]; [] without
    any."""
    entries, listed, ratio = given["cmp_kv"], given["cmp_sparse_indices"], given["cmp_ratio"]
    if entries is None:
        return []
    keys = entries.squeeze(2).to(query.dtype)
    room, rows = keys.shape[1], query.shape[2]
    at = torch.arange(rows, device=query.device)
    tokens = given["cmp_residual_kv"].to(torch.int64).reshape(-1, 1, 1) + room * ratio  # [B, 1, 1]
    seen = ((tokens - rows + at.reshape(-1, 1) + 1).div(ratio, rounding_mode="floor")).clamp(0, room)  # [B, S, 1]
    if listed is None:
        hidden = torch.arange(room, device=query.device) >= seen
        return [_Keys((query @ keys.unsqueeze(1).mT).masked_fill(hidden.unsqueeze(1), -math.inf), keys)]
    places = listed.squeeze(2).to(torch.int64)  # [B, S, K]
    within = (places >= 0).cumprod(-1).bool() & (torch.arange(places.shape[-1], device=query.device) < seen)
    shown = within & (places < seen)
    batch = torch.arange(keys.shape[0], device=query.device).reshape(-1, 1, 1)
    rows_of = keys[batch, places.clamp(0, room - 1)]  # [B, S, K, D]
    scored = (query.transpose(1, 2) @ rows_of.mT).transpose(1, 2)
    return [_Keys(scored.masked_fill(~shown.unsqueeze(1), -math.inf), rows_of)]


def _lse(q: Tensor, asked: bool) -> Tensor:
    """Make an empty log-sum-exp [B, 1, S, N] in float32, or the scalar that stands for none."""
    batch, rows, heads = q.shape[:3]
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty((batch, 1, rows, heads), dtype=wide) if asked else q.new_zeros((), dtype=wide)


def _schedule() -> Tensor:
    """Make the schedule of a call: zeros, as no number of a result depends on one."""
    return torch.zeros(METADATA, dtype=torch.int32)


def _flops(given: Given) -> float:
    """Estimate the operations of each row with the keys of its window and the compressed entries that it reads."""
    q, entries, listed = given["q"], given["cmp_kv"], given["cmp_sparse_indices"]
    keys = min(hint(given["ori_kv"].shape[1]), given["ori_win_left"] + 1)
    if listed is not None:
        keys += min(hint(entries.shape[1]), hint(listed.shape[3]))
    elif entries is not None:
        keys += hint(entries.shape[1])
    return scores(count(q) / hint(q.shape[-1]) * keys, 2 * hint(q.shape[-1]))


def _skipped_bytes(given: Given) -> float:
    """Estimate how many bytes of compressed entries no list can name."""
    listed = given["cmp_sparse_indices"]
    return 0.0 if listed is None else unlisted(given["cmp_kv"], count(listed))


_HOST = (
    Limit("layout_q == 'BSND' and layout_kv == 'BSND'", because="packed and paged keys are not decomposed"),
    Limit("given(ori_kv)", because="the Meta kernel reads its shape"),
    "ori_mask_mode == 4 and ori_win_right == 0",
    "ori_win_left >= 0",
    Limit("cmp_mask_mode == 3", when="given(cmp_kv)", because="it hides entries of later tokens"),
    Limit("cmp_ratio >= 1", when="given(cmp_kv)"),
    Limit("cmp_ratio == 1 and cmp_mask_mode in (0, 3)", when="not given(cmp_kv)"),
    Limit("given(cmp_residual_kv)", when="given(cmp_kv)", because="it says how many tokens no entry stands for yet"),
    Limit("given(cmp_kv)", when="given(cmp_sparse_indices) or given(cmp_residual_kv)"),
    "topk_value_mode == 1",
)
_EVERY_KERNEL = (
    Limit("D == 512", because="D is the width of a head"),
    Limit("given(sinks)", because="a page of the operator makes it mandatory"),
    Limit("cmp_ratio == 4", when="given(cmp_sparse_indices)"),
    Limit(f"K in {LISTED}", when="given(cmp_sparse_indices)", because="pad the list with -1"),
    Limit("dtype(ori_kv) == dtype(q)"),
    Limit("dtype(cmp_kv) == dtype(q)", when="given(cmp_kv)"),
)
_A2_A3 = (
    *_EVERY_KERNEL,
    "N in (1, 2, 4, 8, 16, 32, 64, 128)",
    Limit(f"ori_win_left == {WINDOW}", because="a row sees 128 keys of the window"),
    Limit("cmp_ratio == 128", when="given(cmp_kv) and not given(cmp_sparse_indices)"),
)
_950 = (
    *_EVERY_KERNEL,
    "N <= 128",
    Limit("cmp_ratio <= 128", when="given(cmp_kv) and not given(cmp_sparse_indices)"),
    Limit(
        "C == W // cmp_ratio",
        when="given(cmp_kv)",
        because="entries stand for the keys of the window there, by the page of the operator; the kernels of Atlas A2 "
        "and A3 keep both lengths apart",
    ),
)
_SOURCE = (
    "ops-transformer: torch_extension/cann_ops_transformer/ops/sparse_flash_mla.py, docs/zh/sparse_flash_mla.md, "
    "golden of its test, kernel arch22; on Ascend 950 its newer page, and vllm-ascend, which calls it for bfloat16 keys"
)
_OPTIONS = (
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_ori_kv=None, Tensor? cu_seqlens_cmp_kv=None, "
    "Tensor? seqused_q=None, Tensor? seqused_ori_kv=None, Tensor? seqused_cmp_kv=None, Tensor? cmp_residual_kv=None, "
    "Tensor? ori_topk_length=None, Tensor? cmp_topk_length=None, "
)

SPARSE_FLASH_MLA = Operator(
    schema=(
        "cann_ops_transformer::sparse_flash_mla(Tensor q, *, Tensor? ori_kv=None, Tensor? cmp_kv=None, "
        "Tensor? ori_sparse_indices=None, Tensor? cmp_sparse_indices=None, Tensor? ori_block_table=None, "
        f"Tensor? cmp_block_table=None, {_OPTIONS}Tensor? sinks=None, Tensor? metadata=None, float softmax_scale=1., "
        "int cmp_ratio=1, int ori_mask_mode=4, int cmp_mask_mode=3, int ori_win_left=127, int ori_win_right=0, "
        'str layout_q="BSND", str layout_kv="BSND", int topk_value_mode=1, bool return_softmax_lse=False) '
        "-> (Tensor, Tensor)"
    ),
    compute=_sparse_flash_mla,
    uncomputed={
        "ori_sparse_indices ori_topk_length cmp_topk_length": "they are reserved",
        "ori_block_table cmp_block_table": "pages are not decomposed",
        "cu_seqlens_q cu_seqlens_ori_kv cu_seqlens_cmp_kv": "packed sequences are not decomposed",
        "seqused_q seqused_cmp_kv": "padding of queries and entries is not decomposed",
    },
    without_effect=frozenset(
        {"metadata", "layout_q", "layout_kv", "topk_value_mode", "ori_mask_mode", "cmp_mask_mode", "ori_win_right"}
    ),
    outputs=lambda q, return_softmax_lse: (q.new_empty(q.shape), _lse(q, return_softmax_lse)),
    dims={
        "q": "B S N D", "ori_kv": "B W 1 D", "cmp_kv": "B C 1 D", "cmp_sparse_indices": "B S 1 K",
        "seqused_ori_kv cmp_residual_kv": "B", "sinks": "N", "metadata": str(METADATA),
    },
    dtypes={
        "q ori_kv cmp_kv": HALVES, "cmp_sparse_indices seqused_ori_kv cmp_residual_kv metadata": INT32,
        "sinks": FLOAT32,
    },
    limits={"host": _HOST, **dict.fromkeys(A2_A3, _A2_A3), "ascend950": _950},
    lowerings=frozenset({"eager", "npugraph_ex"}),  # no GE converter
    flops=_flops,
    skipped_bytes=_skipped_bytes,
    source=_SOURCE,
    summary=(
        "out = round(Σ round(p) k / (Σ p + exp(sink - max))), p = exp(s - max), s = softmax_scale · q kᵀ in float32, "
        "over the keys of the window and the compressed entries that the row sees; with cmp_sparse_indices the listed "
        "ones up to the first -1; a row without keys is 0; lse counts the sink"
    ),
)  # fmt: skip

SPARSE_FLASH_MLA_METADATA = Operator(
    schema=(
        "cann_ops_transformer::sparse_flash_mla_metadata(int num_heads_q, int num_heads_kv, int head_dim, *, "
        f"{_OPTIONS}int? batch_size=None, int? max_seqlen_q=None, int? max_seqlen_ori_kv=None, "
        "int? max_seqlen_cmp_kv=None, int? ori_topk=None, int? cmp_topk=None, int? cmp_ratio=None, "
        "int? ori_mask_mode=None, int? cmp_mask_mode=None, int? ori_win_left=None, int? ori_win_right=None, "
        "str? layout_q=None, str? layout_kv=None, bool? has_ori_kv=None, bool? has_cmp_kv=None) -> Tensor"
    ),
    compute=_schedule,
    without_effect=frozenset({
        "num_heads_q", "num_heads_kv", "head_dim", "cu_seqlens_q", "cu_seqlens_ori_kv", "cu_seqlens_cmp_kv",
        "seqused_q", "seqused_ori_kv", "seqused_cmp_kv", "cmp_residual_kv", "ori_topk_length", "cmp_topk_length",
        "batch_size", "max_seqlen_q", "max_seqlen_ori_kv", "max_seqlen_cmp_kv", "ori_topk", "cmp_topk", "cmp_ratio",
        "ori_mask_mode", "cmp_mask_mode", "ori_win_left", "ori_win_right", "layout_q", "layout_kv", "has_ori_kv",
        "has_cmp_kv",
    }),
    outputs=_schedule,
    dims={"seqused_ori_kv cmp_residual_kv": "B"},
    dtypes={"seqused_ori_kv cmp_residual_kv": INT32},
    limits={"host": (), **dict.fromkeys(CHIPS, ())},
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source=_SOURCE,
    summary="the schedule of a call of sparse_flash_mla on the cores of a chip, int32 [1024]; here zeros, as no number "
    "of a result depends on them",
)  # fmt: skip
