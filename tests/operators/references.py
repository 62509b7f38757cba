"""What the operators compute, in float64 and another way than the decompositions: loops, and complex numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tests.operators import atb_references as atb
from tests.operators import attention_references as attention
from tests.operators import (
    compressed_cases,
    first_expert_cases,
    prolog_quant_references,
    pypto_cases,
    recurrent_cases,
    selection_cases,
    stream_cases,
)
from tests.operators import expert_cases as experts
from tests.operators import grouped_line_cases as grouped
from tests.operators import latent_line_cases as line
from tests.operators import paged_atb_cases as paged_atb
from tests.operators import quant_references as quant
from tests.operators import sparse_references as sparse
from tests.operators.cases import BIASED, OLDER


def norm(input: Tensor, gamma: Tensor, epsilon: float = 1e-6, *, plus: float = 0.0) -> tuple[Tensor, Tensor]:
    rows = input.reshape(-1, gamma.numel())
    rstd = torch.stack([1 / (row @ row / row.numel() + epsilon).sqrt() for row in rows])
    y = torch.stack([row * scale * (gamma.reshape(-1) + plus) for row, scale in zip(rows, rstd, strict=True)])
    leading = input.shape[: input.ndim - gamma.ndim]
    return y.reshape(input.shape), rstd.reshape(*leading, *(1,) * gamma.ndim)


def gemma(input: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    return norm(input, gamma, epsilon, plus=1.0)


def add_norm(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor, Tensor]:
    return *norm(x1 + x2, gamma, epsilon), x1 + x2


def add_norm_bias(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor | None = None, epsilon: float = 1e-6
) -> tuple[Tensor, Tensor, Tensor]:
    y, root, x = add_norm(x1, x2, gamma, epsilon)
    return y if beta is None else y + beta, root, x


def add_norm_cast(x1: Tensor, x2: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, ...]:
    y, root, x = add_norm(x1, x2, gamma, epsilon)
    return y, y, root, x


def add_layer_norm(
    x1: Tensor, x2: Tensor, gamma: Tensor, beta: Tensor, epsilon: float = 1e-5, additional_output: bool = False
) -> tuple[Tensor, ...]:
    total = x1 + x2
    rows = total.reshape(-1, total.shape[-1])
    means = torch.stack([row.sum() / row.numel() for row in rows])
    roots = torch.stack([1 / (row.var(correction=0) + epsilon).sqrt() for row in rows])
    y = torch.stack([(row - m) * r * gamma + beta for row, m, r in zip(rows, means, roots, strict=True)])
    lines = (each.reshape(*total.shape[:-1], 1) for each in (means, roots))
    return y.reshape(total.shape), *lines, total if additional_output else torch.zeros_like(total)


def paired(d: int, mode: str) -> tuple[list[int], list[int]]:
    """Positions of the first and the second component of every pair."""
    first = {
        "half": list(range(d // 2)),
        "interleave": list(range(0, d, 2)),
        "quarter": [*range(d // 4), *range(d // 2, d // 4 * 3)],
    }[mode]
    return first, [i + {"half": d // 2, "interleave": 1, "quarter": d // 4}[mode] for i in first]


def rope(x: Tensor, cos: Tensor, sin: Tensor, mode: str) -> Tensor:
    """Real and imaginary part of (a + ib)(cos + i sin), when both components of a pair have one angle."""
    if mode == "interleave-half":
        a, b = paired(x.shape[-1], "interleave")
        return rope(x[..., a + b], cos, sin, "half")
    a, b = paired(x.shape[-1], mode)
    if torch.equal(cos[..., a], cos[..., b]) and torch.equal(sin[..., a], sin[..., b]):
        turned = torch.complex(x[..., a], x[..., b]) * torch.complex(cos[..., a], sin[..., a])
        real, imaginary = turned.real, turned.imag
    else:
        real = x[..., a] * cos[..., a] - x[..., b] * sin[..., a]
        imaginary = x[..., b] * cos[..., b] + x[..., a] * sin[..., b]
    y = torch.empty_like(real.expand(*real.shape[:-1], -1).repeat_interleave(2, -1))
    y[..., a], y[..., b] = real, imaginary
    return y


def rotary_mul(input: Tensor, r1: Tensor, r2: Tensor, rotary_mode: str = "half", rotate: Any = None) -> Tensor:
    return rope(input, r1, r2, rotary_mode) if rotate is None else input * r1 + input @ rotate * r2


def apply_rotary(query: Tensor, key: Tensor, cos: Tensor, sin: Tensor, layout: str, rotary_mode: str) -> Any:
    return rope(query, cos, sin, rotary_mode), rope(key, cos, sin, rotary_mode)


def interleave_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return rope(x, cos, sin, "interleave-half")


def swiglu(input: Tensor, dim: int = -1) -> Tensor:
    half = input.shape[dim] // 2
    a, b = input.narrow(dim, 0, half), input.narrow(dim, half, half)
    return a / (1 + (-a).exp()) * b


def scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    out = input.clone()
    for place, row in zip(indices.long().tolist(), updates, strict=True):
        out[tuple(place)] = row
    return out


def gating(
    x: Tensor, k: int = 1, renorm: int = 0, output_softmax: bool = False, finished: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    shares = x.exp() / x.exp().sum(-1, keepdim=True)
    index = x.argsort(-1, descending=True)[..., :k]
    y = shares.gather(-1, index)
    y = y / y.sum(-1, keepdim=True) if renorm else y
    if finished is not None:
        index[finished] = x.shape[-1]
    return y, index, shares if output_softmax and not renorm else x.new_empty(0)


def _root_of_softplus(x: Tensor) -> Tensor:
    return (1 + x.exp()).log().sqrt()


def grouped_gating(
    x: Tensor,
    k: int,
    bias: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    norm_type: int = 0,
    renorm: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Token by token, in lists: the groups, then the experts in them, of equal ones the first; or those of a table."""
    assert x.isfinite().all(), "what is chosen among NaN is not defined"
    assert bias is None or bias.isfinite().all(), "the same"
    kinds = (lambda x: x.exp() / x.exp().sum(-1, keepdim=True), lambda x: 1 / (1 + (-x).exp()), _root_of_softplus)
    scores = kinds[norm_type](x)
    shares, chosen = [], []
    for token, row in enumerate(scores):
        keys = (row if bias is None else row + bias).tolist()
        size = len(keys) // group_count
        groups = [range(first, first + size) for first in range(0, len(keys), size)]
        best = [sum(sorted((keys[e] for e in each), reverse=True)[: group_select_mode + 1]) for each in groups]
        kept = sorted(range(group_count), key=lambda g: -best[g])[:k_group]
        experts = sorted((e for g in sorted(kept) for e in groups[g]), key=lambda e: -keys[e])[:k]
        if input_ids is not None and tid2eid is not None:
            experts = tid2eid[int(input_ids[token])].tolist()
        share = row[experts]
        shares.append(routed_scaling_factor * (share / (share.sum() + eps) if norm_type or renorm else share))
        chosen.append(experts)
    return torch.stack(shares), torch.tensor(chosen), scores if out_flag else torch.zeros_like(scores)


def gelu(input: Tensor, approximate: str = "none") -> Tensor:
    if approximate == "none":
        return input * (1 + torch.erf(input / 2**0.5)) / 2
    return input * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (input + 0.044715 * input**3))) / 2


def group_norm_silu(
    input: Tensor, weight: Tensor | None, bias: Tensor | None, group: int, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    size, y = input.shape[1] // group, torch.zeros_like(input)
    means, roots = torch.zeros(len(input), group).double(), torch.zeros(len(input), group).double()
    for b in range(len(input)):
        for g in range(group):
            of = input[b, g * size : (g + 1) * size]
            means[b, g], roots[b, g] = of.mean(), 1 / (of.var(correction=0) + eps).sqrt()
            for c in range(g * size, (g + 1) * size):
                n = (input[b, c] - means[b, g]) * roots[b, g]
                n = n if weight is None else n * weight[c]
                n = n if bias is None else n + bias[c]
                y[b, c] = n / (1 + (-n).exp())
    return y, means, roots


def geglu(input: Tensor, dim: int = -1, approximate: int = 1, activate_left: bool = False) -> tuple[Tensor, Tensor]:
    half = input.shape[dim] // 2
    halves = input.narrow(dim, 0, half), input.narrow(dim, half, half)
    activated = gelu(halves[not activate_left], "tanh" if approximate else "none")
    return activated * halves[activate_left], activated


def clipped_swiglu(
    x: Tensor,
    dim: int = -1,
    alpha: float = 1.702,
    limit: float = 7.0,
    bias: float = 1.0,
    interleaved: bool = True,
    group_index: Tensor | None = None,
) -> Tensor:
    """The dims from `dim` on as one; rows behind those that are counted are 0."""
    dim %= x.ndim
    shape = [*x.shape[:dim], x.shape[dim] // 2, *x.shape[dim + 1 :]]
    rows = x.reshape(math.prod(x.shape[:dim]), -1)
    half = rows.shape[1] // 2
    a, b = (rows[:, ::2], rows[:, 1::2]) if interleaved else (rows[:, :half], rows[:, half:])
    a, b = a.minimum(x.new_tensor(limit)), b.minimum(x.new_tensor(limit)).maximum(x.new_tensor(-limit))
    y = a / (1 + (-alpha * a).exp()) * (b + bias)
    if group_index is not None:
        y[int(group_index.sum()) :] = 0
    return y.reshape(shape)


def format_cast(input: Tensor, acl_format: int) -> Tensor:
    return input.clone()


def scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    out = input.clone()
    places = indices.tolist() if indices.ndim == 2 else list(enumerate(indices.tolist()))
    for (batch, start), rows in zip(places, updates, strict=True):
        out[batch].narrow(axis % input.ndim - 1, start, updates.shape[axis]).copy_(rows)
    return out


def pages(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str = "Norm"
) -> tuple[Tensor, Tensor]:
    written = []
    for rows, cache in ((key, key_cache), (value, value_cache)):
        out = cache.clone()
        size = cache.shape[1] if cache_mode == "Norm" else cache.shape[2]
        for slot, row in zip(slot_mapping.tolist(), rows, strict=True):
            block, offset = divmod(slot, size)
            if slot < 0:
                continue
            page = out[block, offset] if cache_mode == "Norm" else out[block, :, offset]
            page.copy_(row.reshape(page.shape))
        written.append(out)
    return tuple(written)


def gathered(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """One row after the other; those behind the last sequence stay as they are."""
    key, value = key.clone(), value.clone()
    if key_cache.shape[2:] != key.shape[1:]:
        key_cache, value_cache = (
            torch.stack([torch.cat(list(page), 1) for page in cache]).unflatten(2, rows.shape[1:])
            for cache, rows in ((key_cache, key), (value_cache, value))
        )
    blocks, size = key_cache.shape[:2]
    lengths = seq_lens.diff().tolist() if is_seq_lens_cumsum else seq_lens.tolist()
    token = 0
    for sequence, length in enumerate(lengths):
        first = 0 if seq_offset is None else int(seq_offset[sequence]) // size
        for place in range(length):
            column = first + place // size
            block = int(block_tables[sequence, column]) if column < block_tables.shape[1] else -1
            for cache, rows in ((key_cache, key), (value_cache, value)):
                rows[token] = cache[block, place % size] if 0 <= block < blocks else 0
            token += 1
    return key, value


def reshape_and_cache(slot_indices: Tensor, **call: Tensor) -> tuple[Tensor, Tensor]:
    return pages(slot_mapping=slot_indices, **call)


def attention_update(lse: list[Tensor], local_out: list[Tensor], update_type: int) -> tuple[Tensor, Tensor]:
    """The parts weighted by their share of the sum, one row at a time."""
    shares = [[each[row].exp() for each in lse] for row in range(lse[0].numel())]
    rows = [
        sum(share * out[row] for share, out in zip(each, local_out, strict=True)) / sum(each)
        for row, each in enumerate(shares)
    ]
    return torch.stack(rows), torch.stack([torch.stack(each).sum().log() for each in shares])


REFERENCES = {
    "npu_attention_update": attention_update,
    "npu_rms_norm": norm,
    "npu_gemma_rms_norm": gemma,
    "npu_add_rms_norm": add_norm,
    "npu_add_rms_norm_cast": add_norm_cast,
    "npu_add_layer_norm": add_layer_norm,
    "npu_rotary_mul": rotary_mul,
    "npu_apply_rotary_pos_emb": apply_rotary,
    "npu_interleave_rope": interleave_rope,
    "npu_swiglu": swiglu,
    "npu_scatter_nd_update": scatter_nd_update,
    "npu_moe_gating_top_k_softmax_v2": gating,
    "npu_moe_gating_top_k": grouped_gating,
    "_C_ascend::moe_gating_top_k_hash": grouped_gating,
    "npu_clipped_swiglu": clipped_swiglu,
    "npu_gelu": gelu,
    "npu_fast_gelu": lambda input: input / (1 + (-1.702 * input).exp()),
    "npu_geglu": geglu,
    "npu_group_norm_silu": group_norm_silu,
    **experts.REFERENCES,
    **first_expert_cases.REFERENCES,
    BIASED: add_norm_bias,
    "npu_format_cast": format_cast,
    "npu_fusion_attention": attention.fusion,
    "npu_incre_flash_attention": attention.incre,
    "npu_incre_flash_attention.tensor_lengths": attention.incre,
    "npu_prompt_flash_attention": attention.prompt,
    **dict.fromkeys(paged_atb.NAMES, paged_atb.reference),
    "npu_fused_infer_attention_score": attention.fused_infer_v1,
    "npu_fused_infer_attention_score.tensor_lengths": attention.fused_infer_v1,
    "npu_fused_infer_attention_score_v2": attention.fused_infer_v2,
    "npu_fused_infer_attention_score_v2.tensor_lengths": attention.fused_infer_v2,
    "npu_scatter_nd_update_": scatter_nd_update,
    "scatter_update": scatter_update,
    "scatter_update_": scatter_update,
    "npu_scatter_pa_kv_cache": pages,
    "npu_scatter_pa_kv_cache_functional": pages,
    **dict.fromkeys(("npu_gather_pa_kv_cache", "npu_gather_pa_kv_cache_functional"), gathered),
    "atb::_npu_reshape_and_cache": reshape_and_cache,
    "atb::_npu_reshape_and_cache.functional": reshape_and_cache,
    **dict.fromkeys(line.NAMES, line.reference),
    **dict.fromkeys(grouped.NAMES, grouped.reference),
    **dict.fromkeys(OLDER, sparse.older_prolog),
    "npu_mla_prolog_v3": prolog_quant_references.prolog,
    "npu_mla_prolog_v3_functional": prolog_quant_references.prolog,
    "npu_transpose_batchmatmul": sparse.product,
    "npu_lightning_indexer": sparse.indexer,
    "npu_sparse_flash_attention": sparse.attention,
    "npu_quant_lightning_indexer": sparse.quant_indexer,
    "npu_kv_quant_sparse_flash_attention": sparse.quant_attention,
    **quant.REFERENCES,
    **pypto_cases.REFERENCES,
    **recurrent_cases.REFERENCES,
    **selection_cases.REFERENCES,
    **stream_cases.REFERENCES,
    **compressed_cases.REFERENCES,
    "atb::npu_multi_head_latent_attention": atb.latent,
    "atb::npu_multi_head_latent_attention.tensor_lengths": atb.latent,
    "atb::npu_multi_head_latent_attention.lse": atb.latent,
    "atb::npu_ring_mla": atb.ring,
    "atb::npu_mla_preprocess.out": atb.preprocess,
    "atb::npu_mla_preprocess.functional": atb.preprocess,
}
"""Of an in-place operator: its results, and what its written arguments hold afterwards."""
