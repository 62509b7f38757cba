"""Experts as code for an NPU writes them: those of Qwen3-MoE, of gpt-oss, and of layers in int8; attention with sinks.

They take the weights of plain modules, and the arguments that these take.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import torch_npu


def qwen3_layer(layer: Any, hidden: Tensor, choices: int) -> Tensor:
    """The layer of `examples/qwen3_moe.py`: norm, router, rows sorted by expert, products in groups, their sum."""
    x, _ = torch_npu.npu_rms_norm(hidden.flatten(0, 1), layer.norm.weight, layer.norm.eps)
    experts, count = layer.experts, layer.experts.gate_up.shape[0]
    shares, chosen, _ = torch_npu.npu_moe_gating_top_k_softmax(layer.router(x).to(wide(x)), None, k=choices)
    weights = shares / shares.sum(-1, keepdim=True)
    rows, places, counts, _ = torch_npu.npu_moe_init_routing_v2(
        x,
        expert_idx=chosen,
        active_num=0,
        expert_num=count,
        expert_tokens_num_type=1,
        expert_tokens_num_flag=True,
        active_expert_range=[0, count],
        quant_mode=-1,
    )
    groups = {"group_list": counts, "group_list_type": 1, "split_item": 3, "group_type": 0}
    gate_up = torch_npu.npu_grouped_matmul([rows], [experts.gate_up.mT], **groups)[0]
    given = torch_npu.npu_grouped_matmul([torch_npu.npu_swiglu(gate_up)], [experts.down.mT], **groups)[0]
    summed = torch_npu.npu_moe_finalize_routing(
        given,
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights.to(given.dtype),
        expanded_src_to_dst_row=places,
        export_for_source_row=None,
        drop_pad_mode=2,
    )
    return hidden + summed.view_as(hidden)


def gpt_oss_experts(router: Any, experts: Any, hidden: Tensor, choices: int) -> Tensor:
    """The experts of gpt-oss by the first operators: choices sorted by column, ends of groups, products with biases."""
    x = hidden.flatten(0, 1)
    logits = torch.nn.functional.linear(x, router.weight, router.bias)
    shares, chosen, row = torch_npu.npu_moe_gating_top_k_softmax(logits, None, k=choices)
    weights = shares / shares.sum(-1, keepdim=True)
    rows, places, sorted_experts = torch_npu.npu_moe_init_routing(
        x, row_idx=row, expert_idx=chosen, active_num=x.shape[0]
    )
    ends = torch_npu.npu_moe_compute_expert_tokens(sorted_experts, logits.shape[-1]).long()
    groups = {"group_list": ends, "split_item": 3, "group_type": 0}
    gate_up = torch_npu.npu_grouped_matmul([rows], [experts.gate_up_proj], bias=[experts.gate_up_proj_bias], **groups)[
        0
    ]
    gated = torch_npu.npu_clipped_swiglu(gate_up, dim=-1, alpha=experts.alpha, limit=experts.limit, interleaved=True)
    given = torch_npu.npu_grouped_matmul([gated], [experts.down_proj], bias=[experts.down_proj_bias], **groups)[0]
    summed = torch_npu.npu_moe_finalize_routing(
        given,
        skip1=None,
        skip2=None,
        bias=None,
        scales=weights,
        expanded_src_to_dst_row=places,
        export_for_source_row=chosen,
    )
    return summed.view_as(hidden)


def gpt_oss_attention(attention: Any, hidden: Tensor, cos: Tensor, sin: Tensor, window: int | None) -> Tensor:
    """Attention of one packed prompt [1, T, H] of gpt-oss: rotated in place of the model, sinks, and a window."""
    x, dim = hidden[0], attention.head_dim
    q, k, v = (each(x).unflatten(-1, (-1, dim)) for each in (attention.q_proj, attention.k_proj, attention.v_proj))
    angles = (torch.cat((each[0], each[0]), -1)[:, None].to(x.dtype) for each in (cos, sin))
    q, k = torch_npu.npu_apply_rotary_pos_emb(q, k, *angles, layout="TND")
    tokens = x.shape[0]
    hidden_keys = torch.ones(2048, 2048, dtype=torch.bool).triu(1)
    attended, _ = torch_npu.npu_fused_infer_attention_score_v2(
        q,
        k,
        v,
        num_query_heads=q.shape[1],
        num_key_value_heads=k.shape[1],
        input_layout="TND",
        softmax_scale=attention.scaling,
        sparse_mode=4 if window else 3,
        pre_tokens=window - 1 if window else 2147483647,
        next_tokens=0,
        actual_seq_qlen=[tokens],
        actual_seq_kvlen=[tokens],
        atten_mask=hidden_keys,
        learnable_sink=attention.sinks,
    )
    return attention.o_proj(attended.flatten(1))[None]


def int8_mlp(x: Tensor, gate_up: Tensor, down: Tensor, gate_up_scale: Tensor, down_scale: Tensor) -> Tensor:
    """A gated layer of int8 weights [K, N] with scales of channels: products, activation and quantisation by int8."""
    quantised, scale = torch_npu.npu_dynamic_quant(x)
    sums = torch_npu.npu_quant_matmul(quantised, gate_up, torch.ones_like(gate_up_scale), output_dtype=torch.int32)
    y, scale = torch_npu.npu_dequant_swiglu_quant(
        sums, weight_scale=gate_up_scale, activation_scale=scale, quant_mode=1, activate_left=True
    )
    return torch_npu.npu_quant_matmul(y, down, down_scale, pertoken_scale=scale, output_dtype=x.dtype)


def regrouped_experts(rows: Tensor, counts: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Experts of rows [A, H] that lie by rank, `counts` [ranks, E] of them, in their order: as after an all-to-all."""
    sorted_rows, _, index, totals = torch_npu.npu_moe_re_routing(rows, counts)
    groups = {"group_list": totals, "group_list_type": 1, "split_item": 3, "group_type": 0}
    hidden = torch_npu.npu_swiglu(torch_npu.npu_grouped_matmul([sorted_rows], [gate_up], **groups)[0])
    given = torch_npu.npu_grouped_matmul([hidden], [down], **groups)[0]
    return given[index.argsort()]


def permuted_experts(x: Tensor, chosen: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Experts of tokens [T, H] by a permutation and its inverse, whose sum takes the weights [T, K] of the choices."""
    rows, places = torch_npu.npu_moe_token_permute(x, chosen)
    counts = torch.nn.functional.one_hot(chosen.flatten().long(), len(gate_up)).sum(0)
    groups = {"group_list": counts, "group_list_type": 1, "split_item": 3, "group_type": 0}
    hidden = torch_npu.npu_swiglu(torch_npu.npu_grouped_matmul([rows], [gate_up], **groups)[0])
    given = torch_npu.npu_grouped_matmul([hidden], [down], **groups)[0]
    return torch_npu.npu_moe_token_unpermute(given, places, weights)


def wide(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
