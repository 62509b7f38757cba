"""Gated activations of a merged projection, and gates that the operator does not compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import tensors

X = tensors((2, 3, 128))


def gated(x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu, gate_first: bool = True) -> Tensor:
    """One half of the lanes times what is activated of the other."""
    gate, up = x.chunk(2, dim=-1) if gate_first else reversed(x.chunk(2, dim=-1))
    return activation(gate) * up


def viewed(x: Tensor) -> Tensor:
    """The halves as two rows, silu written out."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return up * (torch.sigmoid(gate) * gate)


written_out = partial(gated, activation=lambda gate: gate / (1 + torch.exp(-gate)))
EXAMPLES = (
    Example("two chunks", gated, X),
    Example("cast as a whole, silu written out", lambda x: written_out(x.float()).to(x.dtype), X),
    Example("viewed as two rows", viewed, X),
    Example("second half first", partial(gated, gate_first=False), X, "in the wrong order"),
    Example(
        "two tensors", lambda gate, up: F.silu(gate) * up, tensors((2, 3, 64), (2, 3, 64)),
        "are not the first and second halves",
    ),
    Example(
        "halves of rows", lambda x: F.silu(x.chunk(2, dim=-2)[0]) * x.chunk(2, dim=-2)[1], tensors((2, 4, 64)),
        "other slices of one tensor",
    ),
    Example("scaled gate", partial(gated, activation=lambda gate: F.silu(0.5 * gate)), X, "multiplied by 0.5 before"),
    Example("sigmoid gate", partial(gated, activation=torch.sigmoid), X, "the gate is a plain sigmoid"),
    Example("gelu gate", partial(gated, activation=F.gelu), X, "the gate is gelu"),
)  # fmt: skip

TRIED = {"activation": EXAMPLES}
