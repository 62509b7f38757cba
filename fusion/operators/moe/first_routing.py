"""Mixture of experts as its first operators split it: rows sorted by expert, ends of groups, rows of other ranks.

Rules emit their successors (`routing`, `gating_top_k`); code that is written for an NPU still calls these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOAT32, FLOATS, HALVES, INT8, INT32, INT64, compute_dtype
from fusion.operators.limits import A2_A3, CHIPS, HOST, Limit
from fusion.operators.moe.gating_top_k import largest
from fusion.operators.operator import Operator
from fusion.operators.quant.quantisation import group_of_rows

A2, _, A5 = CHIPS


def _gating(x: Tensor, k: int, finished: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    shares = x.to(compute_dtype(x)).softmax(-1)
    index = largest(shares, k)
    y = shares.gather(-1, index).to(x.dtype)
    index = index if finished is None else index.masked_fill(finished.unsqueeze(-1), x.shape[-1])
    rows = x[..., 0].numel()
    row = torch.arange(rows * k, dtype=torch.int32, device=x.device).view(k, rows).t().contiguous()
    return y, index.to(torch.int32), row.view(index.shape)


def _gated(x: Tensor, k: int) -> tuple[Tensor, Tensor, Tensor]:
    y = x.new_empty((*x.shape[:-1], k))
    return y, torch.empty_like(y, dtype=torch.int32), torch.empty_like(y, dtype=torch.int32)


MOE_GATING_TOP_K_SOFTMAX = Operator(
    schema=("npu::npu_moe_gating_top_k_softmax(Tensor x, Tensor? finished=None, int k=1) -> (Tensor, Tensor, Tensor)"),
    compute=_gating,
    outputs=_gated,
    dims={"x": "*B E", "finished": "*B"},
    dtypes={"x": FLOATS, "finished": frozenset({torch.bool})},
    limits={
        HOST: (
            Limit("rank(x) in (2, 3)", because="x is [tokens, experts] or [B, S, experts]; flatten the leading dims"),
            "0 < k and k <= E",
        ),
        **dict.fromkeys(A2_A3, ("k <= 1024",)),
    },
    source="op-plugin: torch_npu.npu_moe_gating_top_k_softmax, test_npu_moe_gating_top_k_softmax.py",
    summary="y, index = top-k of softmax(x), in float32, of equal ones the first; the index of a finished row is E; "
    "row[t, i] = i · rows + t",
)


def _init_routing(x: Tensor, row_idx: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    experts, order = expert_idx.flatten().sort(stable=True)
    source = row_idx.flatten()[order].long()
    tokens = source[: torch.sym_min(active_num, x.shape[0]) * expert_idx.shape[1]] % x.shape[0]
    place = torch.arange(source.shape[0], dtype=torch.int32, device=x.device)
    return x[tokens], torch.empty_like(place).scatter(0, source, place), experts


def _routed(x: Tensor, expert_idx: Tensor, active_num: int) -> tuple[Tensor, Tensor, Tensor]:
    choices = expert_idx.new_empty(expert_idx.numel())
    rows: Any = torch.sym_min(active_num, x.shape[0]) * expert_idx.shape[1]
    return x.new_empty((rows, x.shape[1])), choices, torch.empty_like(choices)


MOE_INIT_ROUTING = Operator(
    schema=(
        "npu::npu_moe_init_routing(Tensor x, Tensor row_idx, Tensor expert_idx, int active_num) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_init_routing,
    outputs=_routed,
    dims={"x": "T H", "row_idx": "T K", "expert_idx": "T K"},
    dtypes={"x": FLOATS, "row_idx expert_idx": INT32},
    limits={HOST: ("active_num > 0",), A2: ("T * H < 16777216",)},
    moves=True,
    source="op-plugin: torch_npu.npu_moe_init_routing (A2 alone), its equivalent code in numpy",
    summary=(
        "experts, order = stable sort of expert_idx [T · K]; row = row_idx[order]; expanded_x[i] = x[row[i] mod T] for "
        "the first min(active_num, T) · K; expanded_row_idx[row[i]] = i"
    ),
)


MOE_COMPUTE_EXPERT_TOKENS = Operator(
    schema="npu::npu_moe_compute_expert_tokens(Tensor sorted_expert_for_source_row, int num_expert) -> Tensor",
    compute=lambda sorted_expert_for_source_row, num_expert: torch.searchsorted(
        sorted_expert_for_source_row,
        torch.arange(num_expert, dtype=sorted_expert_for_source_row.dtype, device=sorted_expert_for_source_row.device),
        right=True,
    ).to(sorted_expert_for_source_row.dtype),
    outputs=lambda sorted_expert_for_source_row, num_expert: sorted_expert_for_source_row.new_empty(num_expert),
    dims={"sorted_expert_for_source_row": "I"},
    dtypes={"sorted_expert_for_source_row": INT32},
    limits={HOST: ("num_expert > 0",), **dict.fromkeys((A2, A5), ("num_expert <= 2048", "I < 16777216"))},
    source="op-plugin: torch_npu.npu_moe_compute_expert_tokens (A2 and 950)",
    summary="out[e] = number of rows of experts up to e: where the rows of each expert end",
)


def _re_routing(
    tokens: Tensor, expert_token_num_per_rank: Tensor, per_token_scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    counts = expert_token_num_per_rank
    run = group_of_rows(counts.flatten().cumsum(0), tokens.shape[0])
    expert = (run % counts.shape[1]).masked_fill(run == counts.numel(), counts.shape[1])
    order = expert.sort(stable=True)[1]
    scales = tokens.new_zeros(tokens.shape[0], dtype=torch.float32)
    scales = scales if per_token_scales is None else per_token_scales[order]
    return tokens[order], scales, order.to(torch.int32), counts.sum(0).to(counts.dtype)


def _re_routed(
    tokens: Tensor, expert_token_num_per_rank: Tensor, per_token_scales: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    index = tokens.new_empty(tokens.shape[0], dtype=torch.int32)
    dtype = torch.float32 if per_token_scales is None else per_token_scales.dtype
    scales = torch.empty_like(index, dtype=dtype)
    counts = expert_token_num_per_rank.new_empty(expert_token_num_per_rank.shape[1])
    return tokens.new_empty(tokens.shape), scales, index, counts


MOE_RE_ROUTING = Operator(
    schema=(
        "npu::npu_moe_re_routing(Tensor tokens, Tensor expert_token_num_per_rank, *, Tensor? per_token_scales=None, "
        "int expert_token_num_type=1, int idx_type=0, int? tokens_dtype=None) -> (Tensor, Tensor, Tensor, Tensor)"
    ),
    compute=_re_routing,
    uncomputed={
        "expert_token_num_type": "its page has counts alone",
        "idx_type": "its page has indices to gather by alone",
        "tokens_dtype": "formats of 8 and 4 bits are not decomposed",
    },
    outputs=_re_routed,
    dims={"tokens": "A H", "expert_token_num_per_rank": "N E", "per_token_scales": "A"},
    dtypes={
        "tokens": HALVES | INT8,
        "expert_token_num_per_rank": INT32 | INT64,
        "per_token_scales": FLOAT32,
    },
    limits={HOST: (), **dict.fromkeys(A2_A3, ("H < 16384",))},
    moves=True,
    source="op-plugin: torch_npu.npu_moe_re_routing (A2 and A3)",
    summary=(
        "tokens lie by rank, and by expert within a rank; order = stable sort of their experts; tokens[order], "
        "per_token_scales[order] (0 where absent), order, Σ of expert_token_num_per_rank over ranks; rows beyond the "
        "sum of all counts are not documented, here the last ones as they are"
    ),
)
