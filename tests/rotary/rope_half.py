"""RoPE on the pairs (x[i], x[i + D/2]), as people write it."""

from __future__ import annotations

from functools import partial

import torch

from .rope import (
    K_HEADS,
    Q_HEADS,
    Rope,
    both,
    complex_rows,
    cos_sin,
    cos_sin_rows_float,
    doubled_halves_float,
    doubled_halves_plain,
    doubled_halves_row,
    doubled_halves_tokens,
    frequencies,
    indexed_tables,
    joint_cache,
    spelling,
)


def rotate_half(x):
    x1 = x[..., : x.shape[-1] // 2]
    x2 = x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def hf_llama(q, k, cos, sin, unsqueeze_dim=1):
    cos = cos.unsqueeze(unsqueeze_dim)
    sin = sin.unsqueeze(unsqueeze_dim)
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def tokens_first(q, k, cos, sin):
    return hf_llama(q, k, cos, sin, unsqueeze_dim=2)


def packed_tokens(q, k, cos, sin):
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


def from_projection(q, k, cos, sin):
    batch, length = q.shape[:2]
    q = q.view(batch, length, Q_HEADS, -1).transpose(1, 2)
    k = k.view(batch, length, K_HEADS, -1).transpose(1, 2)
    q, k = hf_llama(q, k, cos, sin)
    return q.transpose(1, 2).flatten(2), k.transpose(1, 2).flatten(2)


def gathered_by_position(q, k, cos, sin, position_ids):
    cos = cos[position_ids].unsqueeze(1)
    sin = sin[position_ids].unsqueeze(1)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def chunked(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    rotated = torch.cat((-x2, x1), dim=-1)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


def split(x, cos, sin):
    x1, x2 = torch.split(x, x.shape[-1] // 2, dim=-1)
    return x * cos[:, None] + torch.cat([-x2, x1], dim=-1) * sin[:, None]


def unbound_view(x, cos, sin):
    x1, x2 = x.view(*x.shape[:-1], 2, x.shape[-1] // 2).unbind(dim=-2)
    return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)


def stacked_negation(x, cos, sin):
    x1, x2 = x.unflatten(-1, (2, -1)).unbind(-2)
    rotated = torch.stack((-x2, x1), dim=-2).flatten(-2)
    return x * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)


def negation_by_product(x, cos, sin):
    h = x.shape[-1] // 2
    rotated = torch.cat((x[..., h:] * -1, x[..., :h]), -1)
    return torch.add(torch.mul(x, cos.unsqueeze(1)), torch.mul(rotated, sin.unsqueeze(1)))


def swapped_operands(x, cos, sin):
    return sin[:, None, :, :] * rotate_half(x) + cos[:, None, :, :] * x


def fused_multiply_add(x, cos, sin):
    return torch.addcmul(x * cos.unsqueeze(1), rotate_half(x), sin.unsqueeze(1))


def broadcast_rows(x, cos, sin):
    return ((x * cos) + (rotate_half(x) * sin)).to(dtype=x.dtype)


def computed_in_float(x, cos, sin):
    h = x.float()
    h = h * cos.unsqueeze(1) + rotate_half(h) * sin.unsqueeze(1)
    return h.to(x.dtype)


def accumulated(x, cos, sin):
    out = x * cos.unsqueeze(1)
    out += rotate_half(x) * sin.unsqueeze(1)
    return out


def rolled(x, cos, sin):
    h = x.shape[-1] // 2
    signed = torch.cat((-sin[..., :h], sin[..., h:]), dim=-1)
    return x * cos.unsqueeze(1) + torch.roll(x, h, dims=-1) * signed.unsqueeze(1)


def four_products(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    first, second = torch.chunk(x, 2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def four_products_in_float(x, cos, sin):
    x1, x2 = torch.chunk(x.float(), 2, dim=-1)
    y1 = x1 * cos[None, :, None, :] - x2 * sin[None, :, None, :]
    y2 = x1 * sin[None, :, None, :] + x2 * cos[None, :, None, :]
    return torch.cat((y1, y2), dim=-1).type_as(x)


def plus_negated(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x.tensor_split(2, dim=-1)
    return torch.cat((cos * x1 + sin * -x2, sin * x1 + cos * x2), dim=-1)


def stacked_products(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = x.view(*x.shape[:-1], 2, -1).unbind(-2)
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-2).reshape(x.shape)


def assigned_slices(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    h = x.shape[-1] // 2
    out = torch.empty_like(x)
    out[..., :h] = x[..., :h] * cos - x[..., h:] * sin
    out[..., h:] = x[..., h:] * cos + x[..., :h] * sin
    return out


def tables_widened_by_repeat(x, cos, sin):
    cos = cos.repeat(1, 1, 2).unsqueeze(2)
    sin = sin.repeat(1, 1, 2).unsqueeze(2)
    return x * cos + rotate_half(x) * sin


def tables_widened_by_cat(x, cos, sin):
    cos, sin = torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)
    return x * cos[:, :, None] + rotate_half(x) * sin[:, :, None]


def complex_halves(x, freqs_cis):
    real, imaginary = x.float().chunk(2, dim=-1)
    rotated = torch.complex(real.contiguous(), imaginary.contiguous()) * freqs_cis[None, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)


def complex_tables_in_graph(x, cos, sin):
    x1, x2 = x.float().chunk(2, dim=-1)
    rotated = torch.complex(x1, x2) * torch.complex(cos.float(), sin.float()).unsqueeze(1)
    return torch.cat(torch.view_as_real(rotated).unbind(-1), dim=-1).type_as(x)


def cached_cos_sin(x, cos_sin_cache, positions, head_size=64):
    cos, sin = cos_sin_cache.index_select(0, positions).chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    heads = x.view(positions.shape[0], -1, head_size)
    x1, x2 = torch.chunk(heads, 2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).reshape(x.shape)


def tables_in_graph(q, k, inv_freq, position_ids):
    inv_freq = inv_freq[None, :, None].float().expand(position_ids.shape[0], -1, 1)
    freqs = (inv_freq @ position_ids[:, None, :].float()).transpose(1, 2)
    emb = torch.cat((freqs, freqs), dim=-1)
    return hf_llama(q, k, emb.cos().to(q.dtype), emb.sin().to(q.dtype))


def tables_by_outer_product(q, k, inv_freq, position_ids):
    freqs = torch.einsum("bs,d->bsd", position_ids.to(inv_freq.dtype), inv_freq)
    cos, sin = freqs.cos().to(q.dtype), freqs.sin().to(q.dtype)
    return four_products(q, cos, sin), four_products(k, cos, sin)


_half = partial(Rope, family="rope_half")

SPELLINGS = (
    spelling("hf_llama", "transformers: Llama, Qwen, Mistral", _half(hf_llama, D=128)),
    spelling(
        "one_row_for_the_batch",
        "same, tables [1, S, D]",
        _half(hf_llama, tables=doubled_halves_row, per_sequence=False),
    ),
    spelling("tokens_first", "transformers: indexers, [B, S, N, D]", _half(tokens_first, layout="BSND", D=128)),
    spelling(
        "packed_tokens", "serving code: [T, N, D]", _half(packed_tokens, tables=doubled_halves_tokens, layout="TND")
    ),
    spelling("from_projection", "views and transposes around it, [B, S, N * D]", _half(from_projection, layout="BSH")),
    spelling(
        "gathered_by_position",
        "transformers 4.3x: cos[position_ids]",
        _half(gathered_by_position, tables=indexed_tables),
    ),
    spelling("alone", "one tensor, for instance an indexer's query", _half(chunked, alone=True, D=128)),
    spelling("alone_one_head", "one shared key head", _half(four_products, tables=cos_sin, alone=True, q_heads=1)),
    spelling("chunked", "chunk", _half(both(chunked))),
    spelling("split", "split, tables indexed by None", _half(both(split), D=128)),
    spelling("unbound_view", "view as two halves, unbind", _half(both(unbound_view))),
    spelling("stacked_negation", "unflatten, stack, flatten", _half(both(stacked_negation))),
    spelling("negation_by_product", "times -1, torch.mul and torch.add", _half(both(negation_by_product))),
    spelling("swapped_operands", "every operand the other way round", _half(both(swapped_operands))),
    spelling("fused_multiply_add", "torch.addcmul", _half(both(fused_multiply_add))),
    spelling(
        "broadcast_rows",
        "LitGPT: tables [S, D] broadcast from the right",
        _half(both(broadcast_rows), tables=doubled_halves_plain, per_sequence=False),
    ),
    spelling("computed_in_float", "float32 inside", _half(both(computed_in_float), tables=doubled_halves_float)),
    spelling("accumulated", "+= on a local", _half(both(accumulated))),
    spelling("rolled", "torch.roll, the sign in the sine table", _half(both(rolled), D=128)),
    spelling(
        "four_products", "transformers: gpt_oss, tables of half the width", _half(both(four_products), tables=cos_sin)
    ),
    spelling(
        "four_products_in_float",
        "nano-vLLM and the native path of vLLM: float32 inside, [B, S, N, D]",
        _half(both(four_products_in_float), tables=cos_sin_rows_float, layout="BSND", per_sequence=False),
    ),
    spelling("plus_negated", "plus a negated half instead of minus", _half(both(plus_negated), tables=cos_sin)),
    spelling("stacked_products", "stack and reshape instead of cat", _half(both(stacked_products), tables=cos_sin)),
    spelling(
        "assigned_slices", "two slice assignments to an empty tensor", _half(both(assigned_slices), tables=cos_sin)
    ),
    spelling(
        "tables_widened_by_repeat",
        "FlashAttention reference: repeat",
        _half(both(tables_widened_by_repeat), tables=cos_sin, layout="BSND"),
    ),
    spelling(
        "tables_widened_by_cat",
        "half tables, cat in the graph",
        _half(both(tables_widened_by_cat), tables=cos_sin, layout="BSND"),
    ),
    spelling(
        "complex_halves",
        "complex product over halves",
        _half(both(complex_halves), tables=complex_rows, per_sequence=False),
    ),
    spelling(
        "complex_tables_in_graph",
        "same, complex table built inside",
        _half(both(complex_tables_in_graph), tables=cos_sin),
    ),
    spelling(
        "cached_cos_sin",
        "vLLM: one cos_sin_cache, tokens [T, N * D]",
        _half(both(cached_cos_sin), tables=joint_cache, layout="TH"),
    ),
    spelling("tables_in_graph", "transformers: rotary embedding inlined", _half(tables_in_graph, tables=frequencies)),
    spelling(
        "tables_by_outer_product",
        "einsum of positions and frequencies",
        _half(tables_by_outer_product, tables=frequencies),
    ),
)
