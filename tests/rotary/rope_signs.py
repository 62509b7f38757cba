"""RoPE by vectors of signs, and by the negative angle, in half order and in pairs."""

from __future__ import annotations

from functools import partial

import torch

from .rope import (
    K_HEADS,
    Q_HEADS,
    Rope,
    both,
    complex_batch,
    complex_rows,
    cos_sin,
    cos_sin_rows,
    doubled_pairs,
    spelling,
)
from .rope_half import rotate_half


def heads(table):
    return table.unsqueeze(1)


def signs_of_ones(x, cos, sin):
    half = x.shape[-1] // 2
    sign = torch.cat((-torch.ones(half), torch.ones(half))).to(x.dtype)
    return x * heads(cos) + x.roll(half, -1) * sign * heads(sin)


def signs_of_numbers(x, cos, sin):
    half = x.shape[-1] // 2
    sign = torch.tensor([-1.0] * half + [1.0] * half).to(x.dtype)
    low, high = x.chunk(2, -1)
    return x * heads(cos) + torch.cat((high, low), -1) * (heads(sin) * sign)


def signs_by_choice(x, cos, sin):
    sign = torch.where(torch.arange(x.shape[-1]) < x.shape[-1] // 2, -1.0, 1.0).to(x.dtype)
    return x * heads(cos) + sign * (torch.roll(x, x.shape[-1] // 2, dims=-1) * heads(sin))


def signs_filled(x, cos, sin):
    sign = torch.ones(x.shape[-1], dtype=x.dtype)
    sign[: x.shape[-1] // 2] = -1
    return x * heads(cos) + x.roll(x.shape[-1] // 2, -1) * sign * heads(sin)


def signs_of_a_stack(x, cos, sin):
    y = x.unflatten(-1, (2, -1)).flip(-2) * torch.tensor([[-1.0], [1.0]]).to(x.dtype)
    return x * heads(cos) + y.flatten(-2) * heads(sin)


def signs_of_pairs(x, cos, sin):
    y = x.unflatten(-1, (-1, 2)).flip(-1) * torch.tensor([-1.0, 1.0]).to(x.dtype)
    return x * heads(cos) + y.flatten(-2) * heads(sin)


def turned_back(x, cos, sin):
    low, high = x.chunk(2, -1)
    return x * heads(cos) + torch.cat((high, -low), -1) * heads(sin)


def negated_sines(x, cos, sin):
    return x * heads(cos) + rotate_half(x) * -heads(sin)


def products_back(x, cos, sin):
    half, (cos, sin) = x.shape[-1] // 2, map(heads, (cos, sin))
    low, high = x[..., :half], x[..., half:]
    return torch.cat([low * cos + high * sin, low * -sin + high * cos], 3)


def pairs_back(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos + odd * sin, odd * cos - even * sin), -1).flatten(-2)


def conjugated(x, table):
    z = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous()) * heads(table.conj())
    return torch.view_as_real(z).flatten(-2).type_as(x)


def halves_cast_before_they_are_joined(x, table):
    z = torch.view_as_complex(torch.stack(x.transpose(1, 2).float().chunk(2, -1), -1)) * table
    y = torch.cat(torch.view_as_real(z).type_as(x).chunk(2, -1), -2)
    return y.reshape(*y.shape[:3], -1).transpose(1, 2)


def pairs_of_projection(q, k, cos, sin):
    def rotate(x, count):
        x = x.view(*x.shape[:2], count, -1).transpose(1, 2)
        turned = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        return (x * heads(cos) + turned * heads(sin)).transpose(1, 2).flatten(2)

    return rotate(q, Q_HEADS), rotate(k, K_HEADS)


_half, _back = partial(Rope, family="rope_half"), partial(Rope, family="rope_half", inverse=True)
_pairs = partial(Rope, family="rope_interleaved")

SPELLINGS = (
    spelling("signs_of_ones", "ports from JAX: roll and signs", _half(both(signs_of_ones))),
    spelling("signs_of_numbers", "a list of signs, with the sines", _half(both(signs_of_numbers), D=128)),
    spelling("signs_by_choice", "where of positions", _half(both(signs_by_choice))),
    spelling("signs_filled", "ones, of which half is set", _half(both(signs_filled))),
    spelling("signs_of_a_stack", "flip of both halves", _half(both(signs_of_a_stack))),
    spelling("turned_back", "after attention in DeepSeek-V4", _back(both(turned_back), D=128)),
    spelling("negated_sines", "-sin", _back(both(negated_sines))),
    spelling("products_back", "nanochat: x1 cos + x2 sin, x2 cos - x1 sin", _back(both(products_back), tables=cos_sin)),
    spelling("cast_in_parts", "gemma_pytorch: complex halves, [B, S, N, D]", Rope(
        both(halves_cast_before_they_are_joined), "rope_half", complex_rows, "BSND", per_sequence=False)),
    spelling("signs_of_pairs", "flip of each pair", _pairs(both(signs_of_pairs), tables=doubled_pairs)),
    spelling("pairs_back", "the negative angle", _pairs(
        both(pairs_back), tables=cos_sin_rows, per_sequence=False, inverse=True)),
    spelling("conjugated", "the conjugate of the table", _pairs(
        both(conjugated), tables=complex_batch, inverse=True)),
    spelling("pairs_of_projection", "transformers: Cohere, GLM, Helium; heads by views, also of one position", _pairs(
        pairs_of_projection, tables=doubled_pairs, layout="BSH")),
)  # fmt: skip
