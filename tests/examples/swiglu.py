"""Gated activations of a merged projection, and gates that the operator does not compute."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from tests.examples.gelu import new
from tests.examples.inputs import tensors

X = tensors((2, 3, 128))


def gated(x: Tensor, activation: Callable[[Tensor], Tensor] = F.silu, gate_first: bool = True) -> Tensor:
    """One half of the lanes times what is activated of the other."""
    gate, up = x.chunk(2, dim=-1) if gate_first else reversed(x.chunk(2, dim=-1))
    return activation(gate) * up


def viewed(x: Tensor) -> Tensor:
    """The halves as two rows, silu written out."""
    gate, up = x.view(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return up * (torch.sigmoid(gate) * gate)


def in_float32(x: Tensor, row: Tensor) -> Tensor:
    """Weigh the gated product in float32, of gate and up in bfloat16."""
    gate, up = (each.float() for each in x.bfloat16().chunk(2, dim=-1))
    return F.silu(gate) * up * row.float()


def by_gelu_in_float32(x: Tensor, gate_first: bool = True) -> Tensor:
    """The product in float32, of gate and up in bfloat16."""
    gate, up = x.bfloat16().chunk(2, dim=-1) if gate_first else reversed(x.bfloat16().chunk(2, dim=-1))
    return F.gelu(gate.float()) * up.float()


def with_factors(
    x: Tensor, before: Tensor | None = None, between: Tensor | None = None, after: Tensor | None = None
) -> Tensor:
    """Multiply the gate before silu, silu of the gate, or the gated product."""
    gate, up = x.chunk(2, dim=-1)
    activated = F.silu(gate if before is None else gate * before)
    product = (activated if between is None else activated * between) * up
    return product if after is None else product * after


WITH_CHANNELS = tensors((2, 3, 128), (64,))
tanh = partial(F.gelu, approximate="tanh")
written_out = partial(gated, activation=lambda gate: gate / (1 + torch.exp(-gate)))
EXAMPLES = (
    Example("two chunks", gated, X),
    Example("cast as a whole, silu written out", lambda x: written_out(x.float()).to(x.dtype), X),
    Example("viewed as two rows", viewed, X),
    Example("behind other lanes", lambda x: gated(x[..., 32:]), X),
    Example("second half first", partial(gated, gate_first=False), X, "the first half, or lane, is up"),
    Example(
        "two tensors", lambda gate, up: F.silu(gate) * up, tensors((2, 3, 64), (2, 3, 64)),
        "they are neither halves, or lanes, of one",
    ),
    Example("before other lanes", lambda x: F.silu(x[..., :48]) * x[..., 48:96], X),
    Example("slices that do not meet", lambda x: F.silu(x[..., :48]) * x[..., 64:112], X, "other slices of one tensor"),
    Example(
        "halves of rows", lambda x: F.silu(x.chunk(2, dim=-2)[0]) * x.chunk(2, dim=-2)[1], tensors((2, 4, 64)),
        "other slices of one tensor",
    ),
    Example("scaled gate", partial(gated, activation=lambda gate: F.silu(0.5 * gate)), X, "multiplied by 0.5 before"),
    Example("weighted later", lambda x, row: with_factors(x, after=row), WITH_CHANNELS),
    Example("weighted in float32", in_float32, tensors((2, 3, 128), (2, 3, 1))),
    Example("gate times a tensor", with_factors, WITH_CHANNELS, "multiplied by a tensor before silu"),
    Example("weighted between", lambda x, row: with_factors(x, between=row), WITH_CHANNELS, "write (silu(gate) * up)"),
    Example("sigmoid gate", partial(gated, activation=torch.sigmoid), X, "it is a sigmoid alone"),
    Example("by gelu", partial(gated, activation=F.gelu), X),
    Example("by gelu of tanh, second half first", partial(gated, activation=tanh, gate_first=False), X),
    Example("by gelu written out", partial(gated, activation=new), X),
    Example(
        "by gelu, two tensors", lambda gate, up: F.gelu(gate) * up, tensors((2, 3, 64), (2, 3, 64)),
        "they are neither halves of one tensor nor two linear",
    ),
    Example("by gelu, in float32", by_gelu_in_float32, X, "it stays in float32"),
    Example(
        "by gelu in float32, second half first", partial(by_gelu_in_float32, gate_first=False), X, "it stays in float32"
    ),
    Example(
        "by gelu, alternate lanes", lambda x: F.gelu(x[..., ::2]) * x[..., 1::2], X,
        "every second lane of one tensor; npu_geglu",
    ),
)  # fmt: skip

TRIED = {"activation": EXAMPLES}
