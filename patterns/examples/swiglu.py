"""Gated activations of a merged projection, and gates that the operator does not compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

X = tensors((2, 3, 128))


def _chunked(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _in_float(x: Tensor) -> Tensor:
    gate, up = x.float().chunk(2, dim=-1)
    return (gate / (1 + torch.exp(-gate)) * up).to(x.dtype)


def _viewed(x: Tensor) -> Tensor:
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return up * (torch.sigmoid(gate) * gate)


def _swapped(x: Tensor) -> Tensor:
    up, gate = x.chunk(2, dim=-1)
    return F.silu(gate) * up


def _two_tensors(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


def _sigmoid(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return torch.sigmoid(gate) * up


def _gelu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, dim=-1)
    return F.gelu(gate) * up


EXAMPLES = (
    Example("two chunks", _chunked, X),
    Example("cast as a whole, silu written out", _in_float, X),
    Example("viewed as two rows", _viewed, X),
)
REJECTS = (
    Example("second half first", _swapped, X, "the halves are in the wrong order"),
    Example("two tensors", _two_tensors, tensors((2, 3, 64), (2, 3, 64)), "are not the first and second halves"),
    Example("sigmoid gate", _sigmoid, X, "the gate is a plain sigmoid"),
    Example("gelu gate", _gelu, X, "the gate is gelu"),
)

TRIED = {"swiglu": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
