"""Gated activations with bounds, of a merged projection."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

HIDDEN = 32
X = tensors(3 * torch.randn(2, 3, 2 * HIDDEN, generator=torch.Generator().manual_seed(6), dtype=torch.float64))
Halves = Callable[[Tensor], tuple[Tensor, ...]]


def every_second(x: Tensor) -> tuple[Tensor, Tensor]:
    """Gate and up interleaved."""
    return x[..., ::2], x[..., 1::2]


def gated(
    x: Tensor,
    halves: Halves = every_second,
    limit: float = 2.5,
    floor: float | None = None,
    low: float = -2.5,
    alpha: float = 1.702,
) -> Tensor:
    """As gpt-oss writes it."""
    gate, up = halves(x)
    gate, up = gate.clamp(min=floor, max=limit), up.clamp(min=low, max=2.5)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def silu(x: Tensor) -> Tensor:
    """Halves in float32, silu, nothing added."""
    gate, up = x.float().chunk(2, dim=-1)
    return (F.silu(gate.clamp(max=4.0)) * up.clamp(-4.0, 4.0)).to(x.dtype)


def _silu_first(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate).clamp(max=4.0) * up.clamp(-4.0, 4.0)


EXAMPLES = (
    Example("interleaved", gated, X),
    Example("halves", partial(gated, halves=lambda x: x.chunk(2, dim=-1), alpha=1.5), X),
    Example("silu in float32", silu, X),
    Example("gate and up exchanged", partial(gated, halves=lambda x: every_second(x)[::-1]), X, "in the wrong order"),
    Example("gate bounded below", partial(gated, floor=-2.5), X, "clamped from below as well"),
    Example("up bounded otherwise", partial(gated, low=-1.0), X, "up is clamped between -1.0 and 2.5"),
    Example("bounded behind silu", _silu_first, X, "clamped behind silu"),
    Example("two tensors", partial(gated, halves=lambda x: (x.exp(), x.sin())), X, "but two tensors, or other slices"),
)

TRIED = {"clipped_swiglu": EXAMPLES}
