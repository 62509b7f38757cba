"""Rotations as models write them, and what resembles one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import rotated

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


def _no_sign(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return x * cos + torch.cat((x2, x1), dim=-1) * sin


def _both(rotate: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Tensor]]:
    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


EXAMPLES = (
    Example("half order, heads first", _half, HEADS),
    Example("half order, tokens first", _half, TOKENS),
    Example("interleaved order", _interleaved, HEADS),
    Example("interleaved to half order", lambda *given: torch.cat(_products(*given), dim=-1), HEADS),
    Example("interleaved to half order, tokens first", lambda *given: torch.cat(_products(*given), dim=-1), TOKENS),
    Example("half to interleaved order", _halves_to_pairs, HEADS),
)
REJECTS = (
    Example(
        "by the negative angle",
        lambda x, cos, sin: x * cos - _turned(x) * sin,
        HEADS,
        "this rotates by the negative angle",
    ),
    Example("a reflection", _no_sign, HEADS, "are not those of a rotation"),
    Example("with a residual", lambda x, cos, sin: x * cos + x + _turned(x) * sin, HEADS, "a third term is added"),
    Example("five dims", _half, DEEP, "are more than the four that the operator reads"),
)
PARTIAL_EXAMPLES = (
    Example("first lanes, half order", _partial_half, PART),
    Example("last lanes, interleaved to half order", _partial_to_halves, PART),
)
HALVES = _both(_half)
SAME = rotated((2, 4, 3, 64), (2, 2, 3, 64), table=(1, 1, 3, 64))
PAIRS = (
    Example("queries and keys", HALVES, PAIR),
    Example("packed tokens", HALVES, rotated((6, 4, 64), (6, 2, 64), table=(6, 1, 64))),
    Example("a batch at the same positions", HALVES, SAME),
    Example("interleaved order", _both(_interleaved), PAIR, "the lanes are interleaved"),
    Example("two ranks", HALVES, rotated((2, 4, 3, 64), (4, 3, 64), table=(3, 64)), "their axes differ"),
    Example("two dims", HALVES, rotated(*2 * ((3, 64),), table=(3, 64)), "not three or four"),
)

TRIED = {"rope_pair": PAIRS, "partial_rope": PARTIAL_EXAMPLES, "rope": (*EXAMPLES, *REJECTS)}
