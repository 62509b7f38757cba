"""Rotations as models write them, and what resembles one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import rotated

HEADS = rotated((2, 4, 3, 64), table=(2, 1, 3, 64))
TOKENS = rotated((2, 3, 4, 64), table=(2, 3, 1, 64))
PART = rotated((2, 4, 3, 192), table=(2, 1, 3, 64))
PAIR_PART = rotated((2, 4, 3, 192), (2, 2, 3, 192), table=(2, 1, 3, 64))
ODD = rotated((2, 4, 3, 193), table=(2, 1, 3, 64))
PAIR = rotated((2, 4, 3, 64), (2, 2, 3, 64), table=(2, 1, 3, 64))
SAME = rotated((2, 4, 3, 64), (2, 2, 3, 64), table=(1, 1, 3, 64))
DEEP = rotated((2, 2, 4, 3, 64), table=(2, 1, 1, 3, 64))
Halves = tuple[Tensor, Tensor]


def _swapped(x: Tensor, sign: int = -1) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2 if sign < 0 else x2, x1), dim=-1)


def half(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Halves rotated."""
    return x * cos + _swapped(x) * sin


def _products(x1: Tensor, x2: Tensor, cos: Tensor, sin: Tensor) -> Halves:
    cos, sin = cos[..., : x1.shape[-1]], sin[..., : x1.shape[-1]]
    return x1 * cos - x2 * sin, x2 * cos + x1 * sin


def _of_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Halves:
    return _products(x[..., ::2], x[..., 1::2], cos, sin)


def _joined(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat(_of_pairs(x, cos, sin), dim=-1)


def interleaved(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Pairs of neighbours rotated."""
    return torch.stack(_of_pairs(x, cos, sin), dim=-1).flatten(-2)


def _halves_to_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.chunk(2, dim=-1)
    return torch.stack(_products(x1, x2, cos, sin), dim=-1).flatten(-2)


def _first_lanes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2, rest = x.split((32, 32, 128), dim=-1)
    return torch.cat((*_products(x1, x2, cos, sin), rest), dim=-1)


def _last_lanes(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    rest, turned = x.split((128, 64), dim=-1)
    return torch.cat((rest, *_of_pairs(turned, cos, sin)), dim=-1)


def _wide(rotate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """In float32, rounded back."""
    return lambda x, *tables: rotate(x.float(), *(each.float() for each in tables)).to(x.dtype)


def _among(start: int, stop: int, rotate: Callable[..., Tensor], end: int | None = None) -> Callable[..., Tensor]:
    """Lanes start … stop rotated, as a value of their own, beside the others up to `end`."""

    def function(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned = rotate(x[..., start:stop], cos, sin)
        return torch.cat((x[..., :start], turned) if start else (turned, x[..., stop:end]), dim=-1)

    return function


def _both(rotate: Callable[..., Tensor]) -> Callable[..., Halves]:
    return lambda q, k, cos, sin: (rotate(q, cos, sin), rotate(k, cos, sin))


THIRD = "a third term is added"
EXAMPLES = (
    Example("half order, heads first", half, HEADS),
    Example("half order, tokens first", half, TOKENS),
    Example("interleaved order", interleaved, HEADS),
    Example("interleaved to half order", _joined, HEADS),
    Example("interleaved to half order, tokens first", _joined, TOKENS),
    Example("half to interleaved order", _halves_to_pairs, HEADS),
    Example("half order, in float32", _wide(half), HEADS),
    Example("interleaved order, in float32", _wide(interleaved), HEADS),
    Example("interleaved to half order, in float32", _wide(_joined), HEADS),
    Example("half to interleaved order, in float32", _wide(_halves_to_pairs), HEADS),
    Example("by the negative angle", lambda x, cos, sin: x * cos - _swapped(x) * sin, HEADS),
    Example(
        "a reflection",
        lambda x, cos, sin: x * cos + _swapped(x, 1) * sin,
        HEADS,
        "its terms do not have one plus and one",
    ),
    Example("with a residual", lambda x, cos, sin: x * cos + x + _swapped(x) * sin, HEADS, THIRD),
    Example("five dims", half, DEEP, "requires four at most"),
)
PARTIAL = (
    Example("first lanes, half order", _first_lanes, PART),
    Example("last lanes, interleaved to half order", _last_lanes, PART),
    Example("first lanes of a tensor, interleaved order", _among(0, 64, interleaved), PART),
    Example("first lanes of a tensor, in float32", _among(0, 64, _wide(interleaved)), PART),
    Example("last lanes of a tensor, interleaved order", _among(128, 192, interleaved), PART),
    Example("last lanes of a tensor, in float32", _among(128, 192, _wide(interleaved)), PART),
    Example("first lanes of queries and keys", _both(_among(0, 64, interleaved)), PAIR_PART),
    Example("last lanes of queries and keys", _both(_among(128, 192, interleaved)), PAIR_PART),
    Example(
        "some lanes left out",
        _among(0, 64, interleaved, 128),
        PART,
        "128 of 192 are rotated or passed on",
        instead="Alone",
    ),
    Example(
        "behind lanes of odd number",
        _among(129, 193, interleaved),
        ODD,
        "of them come before the rotated ones",
        instead="Alone",
    ),
)
RANKS = rotated((2, 4, 3, 64), (4, 3, 64), table=(3, 64))
PAIRS = (
    Example("queries and keys", _both(half), PAIR),
    Example("in float32", _both(_wide(half)), PAIR),
    Example("packed tokens", _both(half), rotated((6, 4, 64), (6, 2, 64), table=(6, 1, 64))),
    Example("a batch at the same positions", _both(half), SAME),
    Example(
        "interleaved order", _both(interleaved), PAIR, "they are in interleaved order (2j, 2j + 1)", instead="Alone"
    ),
    Example("two ranks", _both(half), RANKS, "requires the same number", instead="Alone"),
    Example(
        "two dims", _both(half), rotated(*2 * ((3, 64),), table=(3, 64)), "requires three or four", instead="Alone"
    ),
)

TRIED = {"rope": (*EXAMPLES, *PARTIAL, *PAIRS)}
