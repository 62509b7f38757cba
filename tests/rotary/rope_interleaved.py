"""RoPE on the pairs (x[2i], x[2i + 1]), kept in place, as people write it."""

from __future__ import annotations

from functools import partial

import torch

from .rope import (
    FIRST_64,
    LAST_64,
    Rope,
    both,
    complex_batch,
    complex_rows,
    cos_sin,
    cos_sin_rows,
    cos_sin_rows_float,
    doubled_pairs,
    frequencies,
    spelling,
    stacked_rows,
)


def llama_reference(q, k, freqs_cis):
    q_ = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    k_ = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    shape = [d if i in (1, q_.ndim - 1) else 1 for i, d in enumerate(q_.shape)]
    freqs_cis = freqs_cis.view(*shape)
    q_out = torch.view_as_real(q_ * freqs_cis).flatten(3)
    k_out = torch.view_as_real(k_ * freqs_cis).flatten(3)
    return q_out.type_as(q), k_out.type_as(k)


def deepseek_reference(x, freqs_cis):
    dtype = x.dtype
    x = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
    freqs_cis = freqs_cis.view(1, x.size(1), 1, x.size(-1))
    return torch.view_as_real(x * freqs_cis).flatten(3).to(dtype)


def complex_heads_first(x, freqs_cis):
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(freqs_cis.unsqueeze(1) * pairs).flatten(-2).type_as(x)


def polar_in_graph(x, inv_freq, position_ids):
    freqs = position_ids[..., None].float() * inv_freq
    freqs_cis = torch.polar(torch.ones_like(freqs), freqs)[:, :, None]
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * freqs_cis).reshape(x.shape).to(x.dtype)


def complex_by_hand(x, cos, sin):
    even, odd = x.float()[..., ::2], x.float()[..., 1::2]
    rotated = torch.complex(even, odd) * torch.complex(cos.float(), sin.float()).unsqueeze(1)
    return torch.stack((rotated.real, rotated.imag), dim=-1).flatten(-2).to(x.dtype)


def rotate_every_two(x):
    x1 = x[..., ::2]
    x2 = x[..., 1::2]
    return torch.stack((-x2, x1), dim=-1).flatten(-2)


def tables_repeated_inside(q, k, cos, sin):
    cos = cos.unsqueeze(1).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(1).repeat_interleave(2, dim=-1)
    return q * cos + rotate_every_two(q) * sin, k * cos + rotate_every_two(k) * sin


def tables_repeated_outside(x, cos, sin):
    return (x * cos[:, :, None]) + (rotate_every_two(x) * sin[:, :, None])


def tables_stacked(x, cos, sin):
    cos = torch.stack((cos, cos), dim=-1).flatten(-2).unsqueeze(1)
    sin = torch.stack((sin, sin), dim=-1).flatten(-2).unsqueeze(1)
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    rotated = torch.stack((-pairs[..., 1], pairs[..., 0]), dim=-1).reshape(x.shape)
    return sin * rotated + cos * x


def even_and_odd(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def unbound_pairs(x, cos, sin):
    cos, sin = cos[None, :, None], sin[None, :, None]
    a, b = x.view(*x.shape[:-1], -1, 2).unbind(-1)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], dim=-1).view(x.shape)


def chunked_pairs(x, cos, sin):
    cos, sin = cos[None, None, :, :, None], sin[None, None, :, :, None]
    a, b = x.float().unflatten(-1, (-1, 2)).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).type_as(x)


def real_table_of_pairs(x, freqs_cis):
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    freqs = freqs_cis.view(1, pairs.size(1), 1, pairs.size(3), 2)
    out = torch.stack(
        [
            pairs[..., 0] * freqs[..., 0] - pairs[..., 1] * freqs[..., 1],
            pairs[..., 1] * freqs[..., 0] + pairs[..., 0] * freqs[..., 1],
        ],
        -1,
    )
    return out.flatten(3).type_as(x)


def assigned_slices(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    out = torch.empty_like(x)
    out[..., ::2] = x[..., ::2] * cos - x[..., 1::2] * sin
    out[..., 1::2] = x[..., 1::2] * cos + x[..., ::2] * sin
    return out


def rotation_matrices(x, cos, sin):
    cos, sin = cos.float(), sin.float()
    matrix = torch.stack((cos, -sin, sin, cos), dim=-1).unflatten(-1, (2, 2)).unsqueeze(1)
    pairs = x.float().reshape(*x.shape[:-1], -1, 1, 2)
    return (matrix[..., 0] * pairs[..., 0] + matrix[..., 1] * pairs[..., 1]).reshape(x.shape).type_as(x)


def fused_multiply_add(x, cos, sin):
    return torch.addcmul(x * cos.unsqueeze(1), rotate_every_two(x), sin.unsqueeze(1))


def partial_first(q, k, cos, sin):
    cos = cos.unsqueeze(1).repeat_interleave(2, dim=-1)
    sin = sin.unsqueeze(1).repeat_interleave(2, dim=-1)
    q_rot, q_pass = q[..., :64], q[..., 64:]
    k_rot, k_pass = k[..., :64], k[..., 64:]
    q_rot = (q_rot * cos) + (rotate_every_two(q_rot) * sin)
    k_rot = (k_rot * cos) + (rotate_every_two(k_rot) * sin)
    return torch.cat((q_rot, q_pass), dim=-1), torch.cat((k_rot, k_pass), dim=-1)


def partial_last(x, freqs_cis):
    nope, pe = torch.split(x, [128, 64], dim=-1)
    return torch.cat([nope, deepseek_reference(pe.contiguous(), freqs_cis)], dim=-1)


_pairs = partial(Rope, family="rope_interleaved", tables=cos_sin)

SPELLINGS = (
    spelling(
        "llama_reference",
        "original Llama code: view_as_complex",
        _pairs(llama_reference, tables=complex_rows, layout="BSND", D=128, per_sequence=False),
    ),
    spelling(
        "deepseek_reference",
        "DeepSeek reference code",
        _pairs(both(deepseek_reference), tables=complex_rows, layout="BSND", per_sequence=False),
    ),
    spelling(
        "complex_heads_first", "transformers: DeepSeek-V2", _pairs(both(complex_heads_first), tables=complex_batch)
    ),
    spelling("polar_in_graph", "table made by polar", _pairs(both(polar_in_graph), tables=frequencies, layout="BSND")),
    spelling("complex_by_hand", "torch.complex of even and odd", _pairs(both(complex_by_hand))),
    spelling("tables_repeated_inside", "transformers: GPT-J, GLM-4", _pairs(tables_repeated_inside, D=128)),
    spelling(
        "tables_repeated_outside",
        "GPT-J, Cohere: full tables",
        _pairs(both(tables_repeated_outside), tables=doubled_pairs, layout="BSND"),
    ),
    spelling("tables_stacked", "rotary-embedding-torch: stack, reshape", _pairs(both(tables_stacked))),
    spelling("even_and_odd", "slices with a step, stack", _pairs(both(even_and_odd))),
    spelling("alone", "one tensor", _pairs(even_and_odd, alone=True)),
    spelling(
        "alone_one_head",
        "one shared key head",
        _pairs(complex_heads_first, tables=complex_batch, alone=True, q_heads=1),
    ),
    spelling(
        "unbound_pairs",
        "tables [S, D / 2], unbind",
        _pairs(both(unbound_pairs), tables=cos_sin_rows, layout="BSND", per_sequence=False),
    ),
    spelling(
        "chunked_pairs",
        "x-transformers: chunk of the pair axis, float32 inside",
        _pairs(both(chunked_pairs), tables=cos_sin_rows_float, per_sequence=False),
    ),
    spelling(
        "real_table_of_pairs",
        "gpt-fast, torchtune: real table [S, D / 2, 2]",
        _pairs(both(real_table_of_pairs), tables=stacked_rows, layout="BSND", D=128, per_sequence=False),
    ),
    spelling("assigned_slices", "two strided assignments", _pairs(both(assigned_slices))),
    spelling("rotation_matrices", "FLUX: 2 x 2 matrices", _pairs(both(rotation_matrices))),
    spelling("fused_multiply_add", "torch.addcmul", _pairs(both(fused_multiply_add), tables=doubled_pairs)),
    spelling("partial_first", "transformers: GLM-4, first 64 of 128", _pairs(partial_first, D=128, part=FIRST_64)),
    spelling(
        "partial_last",
        "DeepSeek reference query: last 64 of 192",
        _pairs(both(partial_last), tables=complex_rows, layout="BSND", D=192, part=LAST_64, per_sequence=False),
    ),
)
