"""Gated activations with bounds, of two projections of one input."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear, silu

from fusion import Example
from patterns.examples.inputs import tensors, with_parameters

X, PAIR = (2, 3, 64), ((48, 64), (48, 64))


def gated(x: Tensor, gate: Tensor, up: Tensor, floor: float | None = None, high: float = 4.0) -> Tensor:
    """Silu of a bounded gate."""
    return silu(linear(x, gate).clamp(min=floor, max=4.0)) * linear(x, up).clamp(-4.0, high)


def shifted(x: Tensor, gate: Tensor, gate_bias: Tensor, up: Tensor, up_bias: Tensor) -> Tensor:
    """As gpt-oss writes it, of two layers with biases."""
    a, b = linear(x, gate, gate_bias).clamp(max=2.5), linear(x, up, up_bias).clamp(min=-2.5, max=2.5)
    return (b + 1) * (a * torch.sigmoid(1.702 * a))


def _one_bias(x: Tensor, gate: Tensor, bias: Tensor, up: Tensor) -> Tensor:
    return silu(linear(x, gate, bias).clamp(max=4.0)) * linear(x, up).clamp(-4.0, 4.0)


def _in_float(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    a, b = (linear(x, each).to(torch.promote_types(x.dtype, torch.float32)) for each in (gate, up))
    return (b.clamp(-4.0, 4.0) * silu(a.clamp(max=4.0))).to(x.dtype)


WEIGHTS = with_parameters(X, *PAIR)
EXAMPLES = (
    Example("silu", gated, WEIGHTS),
    Example("in float32, up first", _in_float, WEIGHTS),
    Example("with biases, something added", shifted, with_parameters(X, (48, 64), (48,), (48, 64), (48,))),
    Example("weights that are inputs", gated, tensors(X, *PAIR), "do not come from Parameters alone"),
    Example("one bias", _one_bias, with_parameters(X, (48, 64), (48,), (48, 64)), "only one of gate and up has a bias"),
    Example("gate bounded below", partial(gated, floor=-4.0), WEIGHTS, "clamped from below as well"),
    Example("up bounded otherwise", partial(gated, high=3.0), WEIGHTS, "up is clamped between -4.0 and 3.0"),
)

TRIED = {"clipped_swiglu_projections": EXAMPLES}
