"""Gated activations with bounds, of a merged projection or of two projections of one input."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.inputs import tensors, with_parameters

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


def projected(x: Tensor, gate: Tensor, up: Tensor, floor: float | None = None, high: float = 4.0) -> Tensor:
    """Silu of a bounded gate of two layers."""
    return F.silu(F.linear(x, gate).clamp(min=floor, max=4.0)) * F.linear(x, up).clamp(-4.0, high)


def shifted(x: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """As gpt-oss writes it, of two layers with biases."""
    a, b = F.linear(x, gate, gate_bias).clamp(max=2.5), F.linear(x, up, up_bias).clamp(min=-2.5, max=2.5)
    return (b + 1) * (a * torch.sigmoid(1.702 * a))


def _one_bias(x: Tensor, gate: Tensor, bias: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate, bias).clamp(max=4.0)) * F.linear(x, up).clamp(-4.0, 4.0)


def _in_float(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    a, b = (F.linear(x, each).to(torch.promote_types(x.dtype, torch.float32)) for each in (gate, up))
    return (b.clamp(-4.0, 4.0) * F.silu(a.clamp(max=4.0))).to(x.dtype)


ROWS, PAIR = (2, 3, 64), ((48, 64), (48, 64))
WEIGHTS = with_parameters(ROWS, *PAIR)
EXAMPLES = (
    Example("bounded: interleaved", gated, X),
    Example("bounded: halves", partial(gated, halves=lambda x: x.chunk(2, dim=-1), alpha=1.5), X),
    Example("bounded: silu in float32", silu, X),
    Example(
        "bounded: gate and up exchanged",
        partial(gated, halves=lambda x: every_second(x)[::-1]),
        X,
        "the first half, or lane, is up",
    ),
    Example("bounded: gate bounded below", partial(gated, floor=-2.5), X, "clamped from below as well"),
    Example("bounded: up bounded otherwise", partial(gated, low=-1.0), X, "up: it is clamped between -1.0 and 2.5"),
    Example("bounded: behind silu", _silu_first, X, "clamped behind silu"),
    Example(
        "bounded: two tensors",
        partial(gated, halves=lambda x: (x.exp(), x.sin())),
        X,
        "they are neither halves, or lanes, of one",
    ),
    Example("bounded projections: silu", projected, WEIGHTS),
    Example("bounded projections: in float32, up first", _in_float, WEIGHTS),
    Example(
        "bounded projections: biased, something added",
        shifted,
        with_parameters(ROWS, (48, 64), (48,), (48, 64), (48,)),
    ),
    Example(
        "bounded projections: weights that are inputs",
        projected,
        tensors(ROWS, *PAIR),
        "they are no Parameters of the module",
    ),
    Example(
        "bounded projections: one bias",
        _one_bias,
        with_parameters(ROWS, (48, 64), (48,), (48, 64)),
        "one of gate and up alone has one",
    ),
    Example(
        "bounded projections: gate bounded below",
        partial(projected, floor=-4.0),
        WEIGHTS,
        "clamped from below as well",
    ),
    Example(
        "bounded projections: up bounded otherwise",
        partial(projected, high=3.0),
        WEIGHTS,
        "up: it is clamped between -4.0 and 3.0",
    ),
)

TRIED = {"activation": EXAMPLES}
