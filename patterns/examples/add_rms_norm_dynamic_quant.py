"""Residual adds whose norm is quantised, and one that the operator does not take."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.quantisation import EPS, K, N, in_int32, quantised, scales, weights


def inputs(*rows: int, other: bool = False) -> Inputs:
    """Two addends [*rows, K], the second of another dtype if asked for, a gain, a weight and its scale."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        narrow = torch.float16 if other and dtype == torch.float32 else dtype
        second = torch.float32 if other else dtype
        given = normal(0, *rows, K).to(narrow), normal(1, *rows, K).to(second), normal(2, K).to(narrow)
        return *given, *(torch.nn.Parameter(each, requires_grad=False) for each in (weights(3, N, K), scales(4, N)))

    return make


def unit(x: Tensor) -> Tensor:
    """X / sqrt(mean(x²) + eps)."""
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)


def layer(norm: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
    """A quantised layer."""
    return in_int32(*quantised(norm), weight, scale)


def decoder(x: Tensor, residual: Tensor, gain: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The next layer of a decoder."""
    residual = residual + x
    return layer(gain * unit(residual.float()).to(x.dtype), weight, scale), residual


def two_readers(x: Tensor, residual: Tensor, gain: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
    """Two layers that read the same rows."""
    residual = residual + x
    rows = quantised(gain * unit(residual.float()).to(x.dtype))
    return *(in_int32(*rows, each, scale) for each in (weight, -weight)), residual


def wide_sum(x: Tensor, residual: Tensor, gain: Tensor, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the unrounded sum."""
    s = x.float() + residual.float()
    return layer((gain * unit(s)).to(x.dtype), weight, scale), s.to(x.dtype)


EXAMPLES = (
    Example("the next layer", decoder, inputs(5)),
    Example("two layers", two_readers, inputs(2, 3)),
    Example("norm of the unrounded sum", wide_sum, inputs(5)),
)
REJECTS = (Example("addends of two dtypes", wide_sum, inputs(5, other=True), "the addends of the norm have different"),)

TRIED = {"add_rms_norm_dynamic_quant": (*EXAMPLES, *REJECTS)}
