"""Attention of DeepSeek-R1 and of DeepSeek-V3.2 as code for an NPU writes it: by operators of torch_npu alone.

Each takes the weights of the plain model of `examples`, and the arguments that it takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

from . import torch_npu

NZ = 29
EPS = 1e-6


def turned(weight: Tensor) -> Tensor:
    """Return the weight [N, K] of a linear layer as the prolog reads it: [K, N] in lines of NZ."""
    return torch_npu.npu_format_cast(weight.t().contiguous(), NZ)


def absorbed(kv_b: Tensor, heads: int, nope: int, latent: int) -> tuple[Tensor, Tensor]:
    """Return W_UK [N, D, C] and W_UV [N, C, E] of the joined weight [N · (D + E), C]."""
    per_head = kv_b.view(heads, -1, latent)
    return per_head[:, :nope].contiguous(), per_head[:, nope:].transpose(1, 2).contiguous()


def prolog(
    model: Any, x: Tensor, cos: Tensor, sin: Tensor, uk: Tensor, caches: tuple[Tensor, Tensor], slots: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Write rows of both caches; return queries [T, N, C], their rotated lanes [T, N, R], low-rank queries [T, Q]."""
    query, rope, _, low, _ = torch_npu.npu_mla_prolog_v3(
        x,
        weight_dq=turned(model.q_a.weight),
        weight_uq_qr=turned(model.q_b.weight),
        weight_uk=uk,
        weight_dkv_kr=turned(model.kv_a.weight),
        rmsnorm_gamma_cq=model.q_norm.weight,
        rmsnorm_gamma_ckv=model.kv_norm.weight,
        rope_sin=sin,
        rope_cos=cos,
        kv_cache=caches[0].unsqueeze(2),
        kr_cache=caches[1].unsqueeze(2),
        cache_index=slots,
        rmsnorm_epsilon_cq=EPS,
        rmsnorm_epsilon_ckv=EPS,
        cache_mode="PA_BSND",
        query_norm_flag=True,
    )
    return query, rope, low


def projected(out: nn.Linear, attended: Tensor, uv: Tensor) -> Tensor:
    """Return the result of the output projection of attended latents [T, N, C]."""
    values = torch_npu.npu_transpose_batchmatmul(attended, uv, perm_x1=[1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2])
    return out(values.flatten(1))


def r1_decode(
    model: Any, x: Tensor, cos: Tensor, sin: Tensor, cache: tuple[Tensor, Tensor], slots: Tensor, table: Tensor,
    lengths: Tensor, sizes: Any,
) -> Tensor:  # fmt: skip
    """One token of each sequence, x [B, 1, H], over pages: prolog, attention over latents, both products of values."""
    uk, uv = absorbed(model.kv_b.weight, sizes.HEADS, sizes.NOPE, sizes.LATENT)
    query, rope, _ = prolog(model, x.flatten(0, 1), cos.flatten(0, 1), sin.flatten(0, 1), uk, cache, slots)
    attended, _ = torch_npu.npu_fused_infer_attention_score_v2(
        query,
        cache[0],
        cache[0],
        query_rope=rope,
        key_rope=cache[1],
        actual_seq_qlen=list(range(1, len(lengths) + 1)),
        actual_seq_kvlen=lengths.tolist(),
        block_table=table,
        num_query_heads=sizes.HEADS,
        num_key_value_heads=1,
        softmax_scale=(sizes.NOPE + sizes.ROPE) ** -0.5,
        input_layout="TND",
        block_size=cache[0].shape[1],
    )
    return projected(model.out, attended, uv).view(x.shape)


def v32_layer(
    layer: Any, x: Tensor, residual: Tensor, cos: Tensor, sin: Tensor, caches: tuple[Tensor, ...], slots: Tensor,
    sequences: Tensor, query_ends: Tensor, lengths: Tensor, listed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Packed tokens x [T, H]: norm of the sum, prolog, lightning indexer unless `listed` is given, sparse attention.

    `sequences` [B, M] are the pages of each sequence, `query_ends` [B] where its tokens end, `lengths` [B] its keys.
    """
    of = layer.of
    x, _, residual = torch_npu.npu_add_rms_norm(residual, x, layer.norm.weight, EPS)
    uk, uv = absorbed(layer.kv_b.weight, of.heads, of.nope, of.latent)
    angles = cos.squeeze(1), sin.squeeze(1)
    query, rope, low = prolog(layer, x, *angles, uk, caches[:2], slots)
    paged = {"block_table": sequences, "layout_query": "TND", "sparse_mode": 3, "actual_seq_lengths_query": query_ends}
    if listed is None:
        listed = indexed(layer.indexer, x, low, cos, sin, caches[2], slots, lengths, paged)
    attended, _, _ = torch_npu.npu_sparse_flash_attention(
        query,
        caches[0].unsqueeze(2),
        caches[0].unsqueeze(2),
        listed,
        (of.nope + of.rope) ** -0.5,
        query_rope=rope,
        key_rope=caches[1].unsqueeze(2),
        actual_seq_lengths_kv=lengths,
        layout_kv="PA_BSND",
        attention_mode=2,
        **paged,
    )
    return projected(layer.out, attended, uv), residual, listed


def indexed(
    indexer: Any, x: Tensor, low: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, slots: Tensor, lengths: Tensor,
    paged: dict[str, Any],
) -> Tensor:  # fmt: skip
    """Return the listed keys [T, 1, K] of each token, and write its key."""
    of = indexer.of
    query = indexer.q_b(low).unflatten(-1, (of.index_heads, -1))
    key = layer_norm(indexer.k(x), (of.index,), indexer.k_norm.weight, indexer.k_norm.bias, EPS)[:, None]
    query, key = (_first_lanes_rotated(indexer, each, cos, sin) for each in (query, key))
    torch_npu.npu_scatter_nd_update_(keys.view(-1, of.index), slots.view(-1, 1), key.view(-1, of.index))
    weights = indexer.weights(x) * (of.index_heads * of.index) ** -0.5
    listed, _ = torch_npu.npu_lightning_indexer(
        query,
        keys.unsqueeze(2),
        weights,
        actual_seq_lengths_key=lengths,
        layout_key="PA_BSND",
        sparse_count=of.listed,
        **paged,
    )
    return listed


def _first_lanes_rotated(indexer: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first lanes of x [T, N, D]: in halves as V3.2 does, or by pairs as GLM-5 does."""
    rope, rest = x.split((indexer.of.rope, indexer.of.index - indexer.of.rope), -1)
    if indexer.rotated.__name__ == "halves_rotated":
        turned = torch_npu.npu_rotary_mul(rope[None], cos[None], sin[None])[0]
    else:
        lanes = rope.transpose(0, 1)[None]
        turned = torch_npu.npu_interleave_rope(lanes, cos.view(1, 1, *cos.shape[::2]), sin.view(1, 1, *sin.shape[::2]))
        turned = turned[0].transpose(0, 1)
    return torch.cat((turned, rest), -1)
