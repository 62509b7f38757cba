"""Residual adds with the norm that follows, and sums that the operator does not take."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import normal, tensors

EPS = 1e-6
TWO_AND_WEIGHT = tensors((2, 3, 64), (2, 3, 64), (64,))


def _root(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    h = x.float()
    return weight * (h * _root(h)).to(x.dtype)


def _decoder(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    residual = residual + x
    return _norm(residual, weight), residual


def _float32_sum(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x.float() + residual.float()
    return (weight * (s * _root(s))).to(x.dtype), s.to(x.dtype)


def _serving(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    s = x.float() + residual.float()
    residual = s.to(x.dtype)
    return (s * _root(s)).to(x.dtype) * weight, residual


def _norm_alone(x: Tensor, residual: Tensor, weight: Tensor) -> Tensor:
    s = x.float() + residual.float()
    return (weight * (s * _root(s))).to(x.dtype)


def _mixed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    other = torch.float32 if dtype != torch.float32 else torch.bfloat16
    return normal(0, 2, 3, 64).to(dtype), normal(1, 2, 3, 64).to(other), normal(2, 64).to(dtype)


EXAMPLES = (
    Example("the next layer's norm", _decoder, TWO_AND_WEIGHT),
    Example("norm of the unrounded sum", _float32_sum, TWO_AND_WEIGHT),
    Example("the same, rounded before the weight", _serving, TWO_AND_WEIGHT),
    Example("the sum is not read again", _norm_alone, TWO_AND_WEIGHT),
    Example("addends of two dtypes, summed in float32", _norm_alone, _mixed),
)
REJECTS = (Example("bias", _decoder, tensors((2, 3, 64), (64,), (64,)), "one addend is broadcast"),)

TRIED = {"add_rms_norm": (*EXAMPLES, *REJECTS)}
