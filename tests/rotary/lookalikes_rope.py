"""Rotations, and failed ones, that resemble the fused operators, and must be refused."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.corpus.base import APPLY_ROTARY, INTERLEAVE_ROPE, ROTARY_MUL, Form, LookAlike

from .rope import Rope, Tables, cos_sin, doubled_halves
from .rope_half import rotate_half

ROTATIONS = (ROTARY_MUL, APPLY_ROTARY, INTERLEAVE_ROPE)


def one_wrong_sign(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos + x1 * sin), dim=-1)


def signs_of_quarters(x, cos, sin):
    ones = torch.ones(x.shape[-1] // 4)
    sign = torch.cat((-ones, ones, -ones, ones)).to(x.dtype)
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sign * sin


def signs_of_one_kind(x, cos, sin):
    return x * cos + x.roll(x.shape[-1] // 2, -1) * torch.tensor([-1.0] * x.shape[-1]).to(x.dtype) * sin


def signs_of_other_sizes(x, cos, sin):
    half = x.shape[-1] // 2
    sign = torch.tensor([-1.0] * half + [2.0] * half).to(x.dtype)
    return x * cos + torch.roll(x, half, -1) * (sign * sin)


def signs_of_tokens(x, cos, sin):
    sign = torch.where(torch.arange(x.shape[-2]) < 1, -1.0, 1.0).to(x.dtype)[:, None]
    return x * cos + torch.roll(x, x.shape[-1] // 2, -1) * sign * sin


def no_sign(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin


def mixed_widths(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    h = x1.shape[-1]
    return torch.cat((x1 * cos[..., :h] - x2 * sin[..., :h], x2 * cos[..., ::2] + x1 * sin[..., ::2]), dim=-1)


def split_off_centre(x, cos, sin):
    x1, x2 = x.split((24, 40), dim=-1)
    return x * cos + torch.cat((-x2, x1), dim=-1) * sin


def over_tokens(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-2)
    return x * cos + torch.cat((-x2, x1), dim=-2) * sin


def quarter_shift(x, cos, sin):
    D = x.shape[-1]
    rolled = torch.roll(x, D // 4, dims=-1)
    return x * cos + torch.cat((-rolled[..., : D // 2], rolled[..., D // 2 :]), dim=-1) * sin


def not_rotated(x, cos, sin):
    return x * cos + x * sin


def third_term_inside(x, cos, sin):
    return x * cos + x + rotate_half(x) * sin


def rotated_another(q, k, cos, sin):
    return q * cos + rotate_half(k) * sin, k * cos + rotate_half(k) * sin


def negated_odd_only(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)


def pairs_from_two_ends(x, cos, sin):
    half = x.shape[-1] // 2
    x1, x2 = x[..., :half], x[..., half:].flip(-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def halves_out_of_order(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x2 * cos + x1 * sin, x1 * cos - x2 * sin), dim=-1)


def halves_to_pairs(x, cos, sin):
    x1, x2 = x.chunk(2, dim=-1)
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def odd_before_even(x, cos, sin):
    odd, even = x[..., ::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2)


def odd_half_first(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((odd * cos + even * sin, even * cos - odd * sin), dim=-1)


def even_channels_twice(x, cos, sin):
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.cat((even * cos - odd * sin, even * cos + odd * sin), dim=-1)


def heads_broadcast(tables: Tables) -> Tables:
    """The same tables with an axis for the heads, [B, 1, S, R]."""

    def broadcast(inputs, dtype: torch.dtype) -> tuple[Tensor, ...]:
        return tuple(t.unsqueeze(1) for t in tables(inputs, dtype))

    return broadcast


def _not_rope(
    form: Form,
    reason: str,
    family: str = "rope_half",
    tables: Tables = doubled_halves,
    pair: bool = False,
    note: str = "",
    forbid: tuple[str, ...] = ROTATIONS,
) -> LookAlike:
    """`form` takes x, or q and k, [B, N, S, D] and the tables; the reference is the rotation of `family`."""
    rope = Rope(form, family, heads_broadcast(tables), alone=not pair, q_heads=2)
    return LookAlike(f"{family}/not/{form.__name__}", family, rope.make, reason, forbid, rope.reference, note)


def _tokens_rotated(form: Form, reason: str) -> LookAlike:
    rope = Rope(form, "rope_half", heads_broadcast(doubled_halves), alone=True)

    def make(dtype: torch.dtype, B: int, S: int):
        return rope.make(dtype, B, 2 * S)

    def reference(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return rope.reference(dtype, B, 2 * S)

    return LookAlike(f"rope_half/not/{form.__name__}", "rope_half", make, reason, ROTATIONS, reference)


LOOKALIKES = (
    _not_rope(one_wrong_sign, "sign", tables=cos_sin),
    _not_rope(signs_of_quarters, "one plus and one minus"),
    _not_rope(signs_of_one_kind, "sign"),
    _not_rope(signs_of_other_sizes, "sign"),
    _not_rope(signs_of_tokens, "", note="signs of positions, not of lanes"),
    _not_rope(no_sign, "sign"),
    _not_rope(mixed_widths, "width|table|different"),
    _not_rope(split_off_centre, "half|halves"),
    _tokens_rotated(over_tokens, "last dim|dim(ension)? -?\\d"),
    _not_rope(quarter_shift, "half|halves|shift|quarter"),
    _not_rope(not_rotated, "rotat|partner"),
    _not_rope(third_term_inside, "term|rotat"),
    _not_rope(
        rotated_another,
        "another tensor|different|not the same",
        pair=True,
        forbid=(APPLY_ROTARY,),
        note="k alone may fuse",
    ),
    _not_rope(pairs_from_two_ends, "half|halves|pair|flip|order", tables=cos_sin),
    _not_rope(halves_out_of_order, "sign|order|half|halves|factor", tables=cos_sin),
    _not_rope(
        halves_to_pairs,
        "",
        tables=cos_sin,
        forbid=(APPLY_ROTARY, INTERLEAVE_ROPE),
        note="the pairs are reordered after",
    ),
    _not_rope(negated_odd_only, "sign", "rope_interleaved", cos_sin),
    _not_rope(odd_before_even, "order|sign|pair|factor", "rope_interleaved", cos_sin),
    _not_rope(odd_half_first, "order|half|halves|sign|factor", "rope_interleaved_to_half", cos_sin),
    _not_rope(even_channels_twice, "term|pair|different tensors", "rope_interleaved_to_half", cos_sin),
)
