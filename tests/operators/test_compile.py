"""Operators in a compiled function: kept or inlined, the result is the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch import config as functorch_config
from torch._inductor.compile_fx import compile_fx
from torch._inductor.decomposition import select_decomp_table

from fusion.operators import OPERATORS, decompositions, ensure


@pytest.fixture(autouse=True)
def registered():
    ensure()
    torch._dynamo.reset()
    with functorch_config.patch(enable_autograd_cache=False):  # its key does not hold the decompositions
        yield
    torch._dynamo.reset()


def block(x: Tensor, residual: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """A slice of a decoder layer that uses every functional operator that every device has."""
    npu = torch.ops.npu
    y, _, residual = npu.npu_add_rms_norm(x, residual, gamma)
    y = npu.npu_add_rms_norm_cast(y, residual, gamma)[1]
    y = npu.npu_rms_norm(y, gamma, 1e-5)[0] + npu.npu_gemma_rms_norm(y, gamma)[0]
    heads = y.view(y.shape[0], y.shape[1], -1, 64)
    q, k = npu.npu_apply_rotary_pos_emb(heads, heads[:, :, :1], cos, sin)
    q = npu.npu_rotary_mul(q.transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2), "interleave")
    q = npu.npu_interleave_rope(q.transpose(1, 2).transpose(1, 2), cos.transpose(1, 2), sin.transpose(1, 2))
    k = npu.npu_scatter_nd_update(k, torch.zeros(1, 2, dtype=torch.int64), k[:1, -1])
    out = npu.npu_swiglu(q.transpose(1, 2).reshape(y.shape))
    k = npu.scatter_update(k, torch.zeros(k.shape[0], dtype=torch.int64), k[:, 1:], 1)
    pages = k.new_zeros(2, 4, 1, 64)
    pages, _ = npu.npu_scatter_pa_kv_cache_functional(
        k[0], k[0], pages, pages, torch.arange(k.shape[1]), cache_mode="Norm"
    )
    slots = torch.arange(k.shape[1], dtype=torch.int32)
    pages, _ = torch.ops.atb._npu_reshape_and_cache.functional(k[0], k[0], pages, pages, slots)
    where = torch.arange(2, dtype=torch.int32)[:, None], torch.full((2,), 4, dtype=torch.int32)
    kept, _ = npu.npu_gather_pa_kv_cache_functional(pages, pages, *where, *[k.new_empty(8, 1, 64)] * 2)
    pages = pages + kept.view(pages.shape)
    rows, _, _, row_scales, _ = npu.npu_add_rms_norm_dynamic_quant(y[0], residual[0], gamma)
    whole, scales = npu.npu_dynamic_quant(y[0])
    product = npu.npu_quant_matmul(whole, rows.t(), row_scales, pertoken_scale=scales, output_dtype=15)
    turned, _ = npu.npu_rotate_quant(y[0], residual[0].new_ones(y.shape[-1], y.shape[-1]), dst_dtype=1)
    rows = rows + npu.npu_quantize(y[0], gamma.abs() + 1, None, 12, -1)
    fixed, _, _ = npu.npu_add_rms_norm_quant(y[0], residual[0], gamma, gamma.abs() + 1, None)
    alone = npu.npu_rms_norm_quant(y[0], gamma, gamma, gamma[:1].abs() + 1, rows[0, :1])
    centred, *_ = npu.npu_add_layer_norm(y, residual, gamma, gamma, 1e-5, True)
    product = product + npu.npu_weight_quant_batchmatmul(y[0], turned.t(), y[0, :, 0][None].abs() + 1).sign()
    choice = npu.npu_moe_gating_top_k_softmax_v2(y, k=2)[:2]
    choice = *choice, *npu.npu_moe_gating_top_k(y[0].float(), 2, norm_type=1)[:2]
    out = out + experts(y[0], weights=choice[0][0], chosen=choice[1][0]).sum(-1)[None, :, None].sign()
    out = out + npu.npu_clipped_swiglu(y).sum(-1, keepdim=True).sign()
    gated = npu.npu_gelu(y), npu.npu_swiglu_quant(y[0], activate_left=True, quant_mode=1)[1], gated_experts(y[0])
    out = out + sum(each.sum().sign() for each in (*gated, *grouped(y[0, :1], gamma, cos[0, :1, 0])))
    parts = y[0].float(), residual[0].float()
    merged = npu.npu_attention_update([each.sum(-1) for each in parts], list(parts), 0)[0]
    # Compilers need not round to bfloat16 in the middle of a kernel, so of the product only signs are compared.
    return out, k, pages, residual, attended(heads), *latent(x), *choice, merged, product.sign(), fixed, alone, centred


def experts(x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """Tokens [T, D] through the experts that each has chosen [T, K]."""
    npu, count = torch.ops.npu, 4
    matrices = x.new_ones(count, x.shape[1], x.shape[1]).cumsum(0)
    how = dict(active_num=0, expert_num=count, expert_tokens_num_type=1, expert_tokens_num_flag=True)
    rows, places, counts, _ = npu.npu_moe_init_routing_v2(x, chosen % count, active_expert_range=[0, count], **how)
    products = npu.npu_grouped_matmul(
        [rows.sign()], [matrices], group_list=counts, split_item=2, group_type=0, group_list_type=1
    )
    finished = npu.npu_moe_finalize_routing(
        products[0].sign(), None, None, None, weights.to(x.dtype), places, None, drop_pad_mode=2
    )
    return finished.sign()


def gated_experts(x: Tensor) -> Tensor:
    """The scales of tokens [T, D] in int8 behind the gates of two experts, the second of which has all of them."""
    matrices, scales = x.new_ones(2, x.shape[1], x.shape[1]).to(torch.int8), x.new_ones(2, x.shape[1]).float()
    counts = torch.tensor([0, x.shape[0]])
    found = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
        x.sign().to(torch.int8), [matrices], [scales], scales[0, :1].expand(x.shape[0]), counts, group_list_type=1
    )
    return found[1]


def grouped(x: Tensor, gamma: Tensor, turn: Tensor) -> tuple[Tensor, ...]:
    """Heads of 64 lanes of a token [1, 128], two of queries and one of keys and of values, and their pages."""
    gain, slots = gamma[:64], torch.zeros(1, dtype=torch.int64)
    pages = x.new_zeros(2, 4, 8, 16)
    sizes = [1, 1, 4, 64], [2, 1, 1]  # which are numbers
    *_, q, keys, values = torch.ops.npu.npu_qkv_rms_norm_rope_cache_functional(
        torch.cat((x, x), -1), gain, gain, turn.cos(), turn.sin(), slots, x, pages, pages, *sizes
    )
    return q, keys, values


def latent(x: Tensor) -> tuple[Tensor, ...]:
    """[B, S, 128] through the prolog, the indexer, attention over listed keys, and products per head; its cache."""
    npu = torch.ops.npu
    b, s, width = x.shape
    weights = [x.new_ones(shape).cumsum(0).sin() for shape in ((width, 32), (32, 4 * 32), (4, 16, 64), (width, 80))]
    gammas, angle = (x.new_ones(32), x.new_ones(64)), x[..., :16]
    caches = x.new_zeros(b + 1, 16, 1, 64), x.new_zeros(b + 1, 16, 1, 16)
    slots = torch.arange(b * s, device=x.device).view(b, s) + 16
    query, rope, _, _, _, keys, ropes = npu.npu_mla_prolog_v3_functional(
        x, *weights, *gammas, angle.sin(), angle.cos(), *caches, cache_index=slots
    )
    wide = x[:, None, :, :80], gammas[1], angle[:, None].cos(), angle[:, None].sin(), slots.flatten()
    line = dict(cache_mode="PA")
    _, _, ropes, keys = npu.npu_kv_rmsnorm_rope_cache_v2_functional(*wide, ropes, keys, **line)
    for older in (npu.npu_mla_prolog, npu.npu_mla_prolog_v2):
        index = slots, keys, ropes
        query, rope, keys, ropes = older.functional(x, *weights, *gammas, angle.sin(), angle.cos(), *index)
    table = torch.arange(b, device=x.device, dtype=torch.int32)[:, None] + 1
    lengths = torch.full((b,), s, device=x.device, dtype=torch.int32)
    of = {"actual_seq_lengths_query": lengths, "layout_query": "BSND", "block_table": table}
    indices, _ = npu.npu_lightning_indexer(
        query, keys, query[..., 0], actual_seq_lengths_key=lengths, layout_key="PA_BSND", sparse_count=3, **of
    )
    call = {"actual_seq_lengths_kv": lengths, "layout_kv": "PA_BSND", "query_rope": rope, "key_rope": ropes}
    out, _, _ = npu.npu_sparse_flash_attention(query, keys, keys, indices, 0.1, attention_mode=2, **of, **call)
    listed = by_int8(query, keys, of | {"actual_seq_lengths_key": lengths, "layout_key": "PA_BSND"})
    packed = torch.zeros(*keys.shape[:-1], 64 + 32 + 4, dtype=torch.int8, device=x.device)
    rows = {"attention_mode": 2, "tile_size": 64, "rope_head_dim": 16, **of, "layout_kv": "PA_BSND"}
    whole = torch.cat([query, rope], -1), packed, packed, listed, 0.1, 2, 2
    out = out + npu.npu_kv_quant_sparse_flash_attention(*whole, actual_seq_lengths_kv=lengths, **rows)
    y = npu.npu_transpose_batchmatmul(out.flatten(0, 1), weights[2].mT, perm_x1=[1, 0, 2])
    return y, *by_atb(query.flatten(0, 1), rope.flatten(0, 1), keys, ropes), keys


def by_int8(query: Tensor, keys: Tensor, of: dict[str, Any]) -> Tensor:
    """The keys that the int8 indexer lists for queries [B, S, N, D]."""
    whole = [each.sign().to(torch.int8) for each in (query, keys)]
    scale, of_keys = query[..., 0].abs().half(), keys[..., 0].abs().half()
    return torch.ops.npu.npu_quant_lightning_indexer(*whole, scale, scale, of_keys, 0, 0, sparse_count=3, **of)


def by_atb(query: Tensor, rope: Tensor, keys: Tensor, ropes: Tensor) -> tuple[Tensor, ...]:
    """Every token [T, N, D] with all keys, through attention of atb, one step over parts, and what stands before."""
    atb, rows, heads = torch.ops.atb, query.shape[0], query.shape[1]
    table = query.new_zeros((rows, 1), dtype=torch.int32) + 1
    call = (heads, 0.1, 1)
    mla, how = atb.npu_multi_head_latent_attention, {"cache_mode": "krope_ctkv"}
    lengths = torch.full((rows,), 2, device=query.device)
    y = mla.tensor_lengths(query, rope, keys, ropes, table, lengths, *call, **how)
    y = mla.default(y, rope, keys, ropes, table[:1], [2], *call, calc_type="calc_type_spec", qseqlen=[rows], **how)
    one = [each[:1] for each in (y, rope)]
    y, _ = mla.lse(*one, keys, ropes, table[:1], [2], *call, True, calc_type="calc_type_ring", **how)
    seqlen = torch.ones(1, dtype=torch.int32)
    y, lse = atb.npu_ring_mla(y, rope[:1], y, rope[:1], y, keys[0, :, 0], seqlen, heads, heads)
    x, lines = y[:, 0], torch.ones(1, 4, 96, 16, dtype=torch.int8)
    ones = [x.new_ones(size) for size in (64, 64, 96, 16, 16, 96, 64)]
    weights = torch.ones(1, 1, 96, 16, dtype=torch.int8)
    turn = [rope[:1, 0].cos(), rope[:1, 0].sin()]
    found = atb.npu_mla_preprocess.functional(
        x, ones[0], ones[1], lines, ones[2], ones[3], ones[4], weights, ones[5], ones[6], *turn,
        x.new_ones(3, 16, 64), keys, ropes, seqlen, q_out0=x.new_empty(1, 3, 64), kv_cache_out0=keys,
        q_out1=x.new_empty(1, 3, 16), kv_cache_out1=ropes, **how,
    )  # fmt: skip
    return lse, *found


def attended(x: Tensor) -> Tensor:
    """[B, S, N, D] through every attention, with lengths of both kinds."""
    npu = torch.ops.npu
    heads, scale = x.shape[2], 0.125
    lengths = torch.full(x.shape[:1], x.shape[1], device=x.device)
    first, second = npu.npu_fused_infer_attention_score, npu.npu_fused_infer_attention_score_v2
    v1 = {"num_heads": heads, "scale": scale, "input_layout": "BSND", "sparse_mode": 3}
    v2 = {"num_query_heads": heads, "softmax_scale": scale, "input_layout": "BSND", "sparse_mode": 3}
    x = first.default(x, x, x, **v1)[0]
    x = first.tensor_lengths(x, x, x, actual_seq_lengths_kv=lengths, **v1)[0]
    x = second.default(x, x, x, actual_seq_kvlen=[2], **v2)[0]
    x = second.tensor_lengths(x, x, x, actual_seq_kvlen=lengths - 1, **v2)[0]
    older = {"num_heads": heads, "scale_value": scale, "input_layout": "BSND"}
    x, single = npu.npu_prompt_flash_attention(x, x, x, **older), npu.npu_incre_flash_attention
    x = x + single.default(x[:, :1], x, x, **older)
    x = x + single.tensor_lengths(x[:, :1], x, x, actual_seq_lengths=lengths, **older)
    table, lengths = torch.arange(x.shape[0], dtype=torch.int32)[:, None], lengths.int()
    row = torch.ops.atb._npu_paged_attention.functional(x[:, 0], x, x, heads, heads, scale, table, lengths, x[:, 1])
    x = x + row[:, None]
    return npu.npu_format_cast(npu.npu_fusion_attention(x, x, x, heads, "BSND", scale=scale)[0], 29)


def inputs(batch: int = 2, tokens: int = 3, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    wide = [torch.randn(batch, tokens, 128) for _ in range(2)]
    small = [torch.randn(128), torch.randn(batch, tokens, 1, 64), torch.randn(batch, tokens, 1, 64)]
    return tuple(tensor.to(dtype) for tensor in (*wide, *small))


def counted(seen: list[set[str]], **options: Any) -> Callable[..., Any]:
    """An AOT backend that notes which fused operators reach the compiler."""

    def compiler(graph: torch.fx.GraphModule, example: Any) -> Any:
        seen.append({str(node.target) for node in graph.graph.nodes if str(node.target).startswith(("npu.", "atb."))})
        return graph

    return aot_autograd(fw_compiler=compiler, **options)


@pytest.mark.rotates(9)
@pytest.mark.parametrize("dynamic", [False, True])
def test_aot_keeps_the_operators(dynamic: bool):
    seen: list[set[str]] = []
    compiled = torch.compile(block, backend=counted(seen), dynamic=dynamic, fullgraph=True)
    for batch, tokens in ((2, 3), (4, 5)) if dynamic else ((2, 3),):
        torch.testing.assert_close(compiled(*inputs(batch, tokens)), block(*inputs(batch, tokens)))
    functional = [name for name, op in OPERATORS.items() if not op.written and not name.startswith("custom")]
    assert [len(names) for names in seen] == [len(functional)]


@pytest.mark.rotates(12)
def test_aot_inlines_with_the_table():
    seen: list[set[str]] = []
    compiled = torch.compile(block, backend=counted(seen, decompositions=decompositions()), fullgraph=True)
    torch.testing.assert_close(compiled(*inputs()), block(*inputs()))
    assert seen == [set()]


@pytest.mark.rotates(6)
def test_aot_eager():
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs(dtype=torch.bfloat16)), block(*inputs(dtype=torch.bfloat16)))


@pytest.mark.rotates(8)
def test_inductor_calls_the_operators():
    compiled = torch.compile(block, backend="inductor", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs()), block(*inputs()), rtol=1e-4, atol=1e-5)


@pytest.mark.rotates
def test_inductor_inlines_with_the_table():
    table = {**select_decomp_table(), **decompositions()}
    compiled = torch.compile(block, backend=lambda graph, example: compile_fx(graph, example, decompositions=table))
    torch.testing.assert_close(compiled(*inputs()), block(*inputs()), rtol=1e-4, atol=1e-5)
