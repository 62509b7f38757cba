"""Residual adds with the layer norm that follows, and sums that the operator does not take."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.add_rms_norm import mixed
from tests.examples.inputs import tensors, under
from tests.examples.norm import LAYER_EPS, mean

TWO_AND_LINES = tensors((2, 3, 64), (2, 3, 64), (64,), (64,))


def layer_norm(x: Tensor, *lines: Tensor) -> Tensor:
    """Over the last dim."""
    return F.layer_norm(x, x.shape[-1:], *lines, eps=LAYER_EPS)


def before(x: Tensor, residual: Tensor, *lines: Tensor) -> tuple[Tensor, Tensor]:
    """The norm before the next layer, and the sum."""
    residual = residual + x
    return layer_norm(residual, *lines), residual


def behind(x: Tensor, residual: Tensor, *lines: Tensor) -> Tensor:
    """The norm behind a layer: the sum is not read again."""
    return layer_norm(x + residual, *lines)


def by_hand(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """Written out."""
    h = x + residual
    d = h.float() - mean(h.float())
    return (d * torch.rsqrt(mean(d.square()) + LAYER_EPS)).to(h.dtype) * weight + bias, h


def wide(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of the unrounded sum, by a weight in float32."""
    s = x.float() + residual.float()
    return layer_norm(s, weight.float(), bias.float()).to(x.dtype), s.to(x.dtype)


EXAMPLES = (
    Example("the next layer's norm", before, TWO_AND_LINES),
    Example("the sum is not read again", behind, TWO_AND_LINES),
    Example("written out", by_hand, TWO_AND_LINES),
    Example("norm of the unrounded sum", wide, TWO_AND_LINES),
    Example("no bias", before, tensors((2, 3, 64), (2, 3, 64), (64,))),
    Example("neither", before, tensors((2, 3, 64), (2, 3, 64))),
    Example("addends of two dtypes, summed in float32", wide, mixed(TWO_AND_LINES)),
    Example("bias", before, tensors((2, 3, 64), (64,), (64,), (64,)), "one of them is broadcast or multiplied"),
)

TRIED = {"add_norm": under("layer norm", EXAMPLES)}
