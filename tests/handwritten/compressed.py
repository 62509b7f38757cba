"""The half of a DeepSeek-V4 layer around its attention as code for an NPU writes it: by operators of packages alone.

It takes the weights of `DeepseekV4DecoderLayer` of transformers, and its arguments.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from . import torch_npu

WINDOW = 127


def norm(module: Any, x: Tensor) -> Tensor:
    """Return the norm of `x` with the weight, float32 in the model, of `module`."""
    return torch_npu.npu_rms_norm(x, module.weight.to(x.dtype), epsilon=module.variance_epsilon)[0]


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the last lanes of `x` [B, S, N, D], in pairs, by tables [B, S, R / 2] of each pair."""
    tables = [each.repeat_interleave(2, dim=-1).unsqueeze(2).to(x.dtype) for each in (cos, sin)]
    lanes = tables[0].shape[-1]
    last = torch_npu.npu_rotary_mul(x[..., -lanes:].contiguous(), *tables, rotary_mode="interleave")
    return torch.cat((x[..., :-lanes], last), dim=-1)


def attended(q: Tensor, keys: Tensor, sinks: Tensor, scale: float) -> Tensor:
    """Return attention of q [B, S, N, D] to the last 128 of the keys [B, W, 1, D] up to each row, with sinks [N]."""
    modes: dict[str, Any] = dict(
        cmp_ratio=1, cmp_mask_mode=0, ori_mask_mode=4, ori_win_left=WINDOW, ori_win_right=0, layout_q="BSND",
        layout_kv="BSND",
    )  # fmt: skip
    ops = torch.ops.cann_ops_transformer
    schedule = ops.sparse_flash_mla_metadata(
        q.shape[2], 1, q.shape[3], batch_size=q.shape[0], max_seqlen_q=q.shape[1], max_seqlen_ori_kv=keys.shape[1],
        has_ori_kv=True, has_cmp_kv=False, **modes,
    )  # fmt: skip
    return ops.sparse_flash_mla(
        q, ori_kv=keys, sinks=sinks.float(), metadata=schedule, softmax_scale=scale, **modes
    )[0]  # fmt: skip


def v4_window_attention(attention: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return attention of tokens x [B, S, H] to the window alone."""
    batch, rows, _ = x.shape
    heads, width, groups = attention.num_heads, attention.head_dim, attention.o_a_proj.n_groups
    q = attention.q_b_proj(norm(attention.q_a_norm, attention.q_a_proj(x))).view(batch, rows, heads, width)
    q = torch_npu.npu_rms_norm(q, torch.ones(width, dtype=x.dtype), epsilon=attention.q_b_norm.eps)[0]
    keys = norm(attention.kv_norm, attention.kv_proj(x)).unsqueeze(2)
    out = attended(turned(q, cos, sin), turned(keys, cos, sin), attention.sinks, attention.scaling)
    grouped = turned(out, cos, -sin).view(batch * rows, groups, -1)
    weight = attention.o_a_proj.weight.view(groups, -1, grouped.shape[-1]).transpose(1, 2)
    low = torch_npu.npu_transpose_batchmatmul(grouped, weight, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    return attention.o_b_proj(low.reshape(batch, rows, -1))


def v4_attention_half(layer: Any, streams: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the streams [B, S, 4, H] behind the attention of `layer`."""
    gates = layer.attn_hc
    mixed, post, matrices, *_ = torch.ops.cann_ops_transformer.mhc_pre_sinkhorn(
        streams, gates.fn, gates.scale, gates.base, gates.hc_mult, gates.hc_sinkhorn_iters, gates.hc_eps,
        gates.input_norm.eps, False,
    )  # fmt: skip
    out = v4_window_attention(layer.self_attn, norm(layer.input_layernorm, mixed), cos, sin)
    return torch.ops.cann_ops_transformer.mhc_post(streams, matrices.unflatten(-1, (gates.hc_mult, -1)), out, post)


def v4_routed(router: Any, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Return weights and experts of tokens [T, H] by scores, or by the table of `router` for the tokens `ids` [T]."""
    listed = {} if ids is None else dict(input_ids=ids, tid2eid=router.tid2eid)
    bias = None if ids is not None else router.e_score_correction_bias
    logits = torch.nn.functional.linear(x, router.weight)
    weights, experts, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
        logits.to(torch.promote_types(x.dtype, torch.float32)), router.top_k, bias=bias, norm_type=2,
        routed_scaling_factor=router.routed_scaling_factor, **listed,
    )  # fmt: skip
    return weights, experts
