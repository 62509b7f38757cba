"""RoPE on the pairs (x[2i], x[2i + 1]) that leaves them as halves, as people write it."""

from __future__ import annotations

from functools import partial

import torch

from .rope import (
    LAST_64,
    Rope,
    both,
    complex_rows,
    cos_sin,
    cos_sin_rows_float,
    indexed_tables,
    spelling,
)
from .rope_half import rotate_half


def hf_interleave(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    q1, q2 = q[..., 0::2], q[..., 1::2]
    k1, k2 = k[..., 0::2], k[..., 1::2]
    q_embed = torch.cat([q1 * cos - q2 * sin, q2 * cos + q1 * sin], dim=-1)
    k_embed = torch.cat([k1 * cos - k2 * sin, k2 * cos + k1 * sin], dim=-1)
    return q_embed, k_embed


def hf_interleave_full_tables(q, k, cos, sin, position_ids):
    cos, sin = cos[position_ids], sin[position_ids]
    return hf_interleave(q, k, cos[..., : cos.shape[-1] // 2], sin[..., : sin.shape[-1] // 2])


def viewed_then_halves(q, k, cos, sin):
    cos, sin = torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((sin, sin), -1).unsqueeze(1)
    b, h, s, d = q.shape
    q = q.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    b, h, s, d = k.shape
    k = k.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return (q * cos) + (rotate_half(q) * sin), (k * cos) + (rotate_half(k) * sin)


def viewed_then_halves_by_position(x, cos, sin, position_ids):
    cos, sin = cos[position_ids].unsqueeze(1), sin[position_ids].unsqueeze(1)
    b, h, s, d = x.shape
    x = x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)
    return x * cos + rotate_half(x) * sin


def gathered_then_halves(x, cos, sin):
    x = torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(2), sin.unsqueeze(2)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def unbound_to_halves(x, cos, sin):
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[None, :, None], sin[None, :, None]
    return torch.cat((even * cos - odd * sin, even * sin + odd * cos), dim=-1).type_as(x)


def complex_to_halves(x, freqs_cis):
    rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs_cis[None, None]
    return torch.cat((rotated.real, rotated.imag), dim=-1).to(x.dtype)


def complex_then_transposed(x, freqs_cis):
    rotated = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2)) * freqs_cis[None, None]
    return torch.view_as_real(rotated).transpose(-1, -2).flatten(-2).to(x.dtype)


def assigned_to_halves(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    h = x.shape[-1] // 2
    out = x.new_empty(x.shape)
    out[..., :h] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., h:] = x[..., 1::2] * cos + x[..., ::2] * sin
    return out


def partial_last_to_halves(x, cos, sin):
    nope, pe = x.split([128, 64], dim=-1)
    even, odd = pe[..., ::2], pe[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((nope, even * cos - odd * sin, odd * cos + even * sin), dim=-1)


_halves = partial(Rope, family="rope_interleaved_to_half", tables=cos_sin)

SPELLINGS = (
    spelling("hf_interleave", "transformers 5: DeepSeek-V3, GLM-5", _halves(hf_interleave)),
    spelling(
        "hf_interleave_full_tables",
        "same, full tables gathered and cut",
        _halves(hf_interleave_full_tables, tables=indexed_tables),
    ),
    spelling("viewed_then_halves", "transformers 4: view, transpose, rotate_half", _halves(viewed_then_halves)),
    spelling(
        "viewed_then_halves_by_position",
        "DeepSeek remote code: cos[position_ids]",
        _halves(both(viewed_then_halves_by_position), tables=indexed_tables),
    ),
    spelling(
        "alone_one_head",
        "MLA: the shared rope key",
        _halves(viewed_then_halves_by_position, tables=indexed_tables, alone=True, q_heads=1),
    ),
    spelling(
        "gathered_then_halves",
        "even channels, then odd; [B, S, N, D]",
        _halves(both(gathered_then_halves), layout="BSND"),
    ),
    spelling(
        "unbound_to_halves",
        "pairs unbound, float32 inside",
        _halves(both(unbound_to_halves), tables=cos_sin_rows_float, layout="BSND", per_sequence=False),
    ),
    spelling(
        "complex_to_halves",
        "real and imaginary parts in one cat",
        _halves(both(complex_to_halves), tables=complex_rows, per_sequence=False),
    ),
    spelling(
        "complex_then_transposed",
        "view_as_real, pair axis moved in front",
        _halves(both(complex_then_transposed), tables=complex_rows, per_sequence=False),
    ),
    spelling("assigned_to_halves", "strided reads, half-width assignments", _halves(both(assigned_to_halves))),
    spelling(
        "partial_last_to_halves",
        "MLA query in one cat of three: last 64 of 192",
        _halves(both(partial_last_to_halves), D=192, part=LAST_64),
    ),
)
