"""Gated activations of a merged projection, and gates that the operator does not compute."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

X = tensors((2, 3, 128))
Activation = Callable[[Tensor], Tensor]


def gated(activation: Activation, gate_first: bool = True) -> Callable[[Tensor], Tensor]:
    """One half of the lanes times what is activated of the other."""

    def forward(x: Tensor) -> Tensor:
        gate, up = x.chunk(2, dim=-1) if gate_first else reversed(x.chunk(2, dim=-1))
        return activation(gate) * up

    return forward


def viewed(x: Tensor) -> Tensor:
    """The halves as two rows, silu written out."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return up * (torch.sigmoid(gate) * gate)


written_out = gated(lambda gate: gate / (1 + torch.exp(-gate)))
EXAMPLES = (
    Example("two chunks", gated(F.silu), X),
    Example("cast as a whole, silu written out", lambda x: written_out(x.float()).to(x.dtype), X),
    Example("viewed as two rows", viewed, X),
)
REJECTS = (
    Example("second half first", gated(F.silu, gate_first=False), X, "the halves are in the wrong order"),
    Example(
        "two tensors", lambda gate, up: F.silu(gate) * up, tensors((2, 3, 64), (2, 3, 64)),
        "are not the first and second halves",
    ),
    Example("sigmoid gate", gated(torch.sigmoid), X, "the gate is a plain sigmoid"),
    Example("gelu gate", gated(F.gelu), X, "the gate is gelu"),
)  # fmt: skip

TRIED = {"swiglu": (*EXAMPLES, *REJECTS)}
