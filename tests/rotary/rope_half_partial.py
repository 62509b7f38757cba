"""RoPE in halves on a part of the channels, as people write it."""

from __future__ import annotations

from functools import partial

import torch

from .rope import FIRST_64, LAST_64, Rope, both, cos_sin, spelling
from .rope_half import rotate_half


def partial_first(q, k, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    rotary_dim = cos.shape[-1]
    q_rot, q_pass = q[..., :rotary_dim], q[..., rotary_dim:]
    k_rot, k_pass = k[..., :rotary_dim], k[..., rotary_dim:]
    q_embed = (q_rot * cos) + (rotate_half(q_rot) * sin)
    k_embed = (k_rot * cos) + (rotate_half(k_rot) * sin)
    return torch.cat((q_embed, q_pass), dim=-1), torch.cat((k_embed, k_pass), dim=-1)


def partial_one_cat(x, cos, sin):
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2, rest = x.split((32, 32, 64), dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


def partial_last(x, cos, sin):
    nope, pe = torch.split(x, [128, 64], dim=-1)
    pe = pe * cos.unsqueeze(1) + rotate_half(pe) * sin.unsqueeze(1)
    return torch.cat([nope, pe], dim=-1)


def partial_assigned(x, cos, sin):
    out = x.clone()
    head = x[..., :64]
    out[..., :64] = head * cos.unsqueeze(1) + rotate_half(head) * sin.unsqueeze(1)
    return out


_half = partial(Rope, family="rope_half")

SPELLINGS = (
    spelling(
        "partial_first", "transformers: GPT-NeoX, Phi, GLM: first 64 of 128", _half(partial_first, D=128, part=FIRST_64)
    ),
    spelling(
        "partial_one_cat", "one cat of three parts", _half(both(partial_one_cat), tables=cos_sin, D=128, part=FIRST_64)
    ),
    spelling("partial_last", "MLA query: last 64 of 192", _half(both(partial_last), D=192, part=LAST_64)),
    spelling("partial_assigned", "slice assignment to a copy", _half(both(partial_assigned), D=128, part=FIRST_64)),
)
