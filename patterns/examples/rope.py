"""Rotations as models write them, and what resembles one."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, rotated

HEADS = rotated((2, 4, 3, 64), table=(2, 1, 3, 64))
TOKENS = rotated((2, 3, 4, 64), table=(2, 3, 1, 64))
PART = rotated((2, 4, 3, 192), table=(2, 1, 3, 64))
PAIR = rotated((2, 4, 3, 64), (2, 2, 3, 64), table=(2, 1, 3, 64))
DEEP = rotated((2, 2, 4, 3, 64), table=(2, 1, 1, 3, 64))


def _turned(x: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def _half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + _turned(x) * sin


def _products(x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    half = x.shape[-1] // 2
    even, odd, cos, sin = x[..., ::2], x[..., 1::2], cos[..., :half], sin[..., :half]
    return even * cos - odd * sin, odd * cos + even * sin


def _interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.stack(_products(x, cos, sin), dim=-1).flatten(-2)


def _to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(_products(x, cos, sin), dim=-1)


def _halves_to_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    cos, sin = cos.chunk(2, dim=-1)[0], sin.chunk(2, dim=-1)[0]
    return torch.stack((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1).flatten(-2)


def _partial_half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2, rest = x.split((32, 32, 128), dim=-1)
    cos, sin = cos[..., :32], sin[..., :32]
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin, rest), dim=-1)


def _partial_to_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rest, turned = x.split((128, 64), dim=-1)
    return torch.cat((rest, *_products(turned, cos, sin)), dim=-1)


def _inverse(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos - _turned(x) * sin


def _with_residual(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return x * cos + x + _turned(x) * sin


def _no_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin


def _pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _half(q, cos, sin), _half(k, cos, sin)


def _interleaved_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return _interleaved(q, cos, sin), _interleaved(k, cos, sin)


def _tokens(dtype: torch.dtype) -> tuple[Tensor, ...]:
    return rotated((6, 4, 64), (6, 2, 64), table=(6, 1, 64))(dtype)


def _of_rank(rank: int) -> Inputs:
    return rotated((2,) * (rank - 2) + (3, 64), (2,) * (rank - 2) + (3, 64), table=(3, 64))


EXAMPLES = (
    Example("half order, heads first", _half, HEADS),
    Example("half order, tokens first", _half, TOKENS),
    Example("interleaved order", _interleaved, HEADS),
    Example("interleaved to half order", _to_halves, HEADS),
    Example("interleaved to half order, tokens first", _to_halves, TOKENS),
    Example("half to interleaved order", _halves_to_pairs, HEADS),
)
REJECTS = (
    Example("by the negative angle", _inverse, HEADS, "this rotates by the negative angle"),
    Example("a reflection", _no_sign, HEADS, "are not those of a rotation"),
    Example("with a residual", _with_residual, HEADS, "a third term is added"),
    Example("five dims", _half, DEEP, "are more than the four that the operator reads"),
)
PARTIAL_EXAMPLES = (
    Example("first lanes, half order", _partial_half, PART),
    Example("last lanes, interleaved to half order", _partial_to_halves, PART),
)
PAIR_EXAMPLES = (
    Example("queries and keys", _pair, PAIR),
    Example("packed tokens", _pair, _tokens),
    Example("a batch at the same positions", _pair, rotated((2, 4, 3, 64), (2, 2, 3, 64), table=(1, 1, 3, 64))),
)
PAIR_REJECTS = (
    Example("interleaved order", _interleaved_pair, PAIR, "the lanes are interleaved"),
    Example("two ranks", _pair, rotated((2, 4, 3, 64), (4, 3, 64), table=(3, 64)), "their axes differ"),
    Example("two dims", _pair, _of_rank(2), "not three or four"),
)

TRIED = {
    "rope_pair": (*PAIR_EXAMPLES, *PAIR_REJECTS),
    "partial_rope": PARTIAL_EXAMPLES,
    "rope": (*EXAMPLES, *REJECTS),
}
"""Rule -> its examples and rejects."""
