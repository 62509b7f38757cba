"""y = silu(x Gᵀ + g) · (x Uᵀ + u): a gated activation of two projections  (Shazeer, GLU Variants, 2020).

*Matches* silu written in any way over gate and up projections of one input whose weights are Parameters. *Replaces
with* one matmul of the joined weights, prepared once, and `npu_swiglu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, tensor

f32 = torch.float32


@dataclass(frozen=True)
class Gate(Group):
    """A projection."""

    weight: Any = tensor("H K")
    bias: Any = tensor("H", optional=True)
    is_parameter_only: Any = attribute()

    def term(self, p, x):
        """What it gives, perhaps in float32."""
        return p.maybe_cast(p.linear(x=x, **vars(self)), to=f32)

    def refuse_beside(self, up: Gate) -> None:
        """Joining is free only where it is done once."""
        fixed = self.is_parameter_only and up.is_parameter_only
        require(fixed, "the weights do not come from Parameters alone: joining them would cost a copy at every call")
        require((self.bias is None) == (up.bias is None), "only one of gate and up has a bias")


@dataclass(frozen=True)
class Up(Gate):
    """The same of an input that may be another."""

    weight: Any = tensor("H J")


@dataclass(frozen=True)
class SwigluProjections(Rule):
    """The gated activation of separate gate and up projections."""

    def reference(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """The meaning: x [*B, K], gate and up [H, K]."""
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    @pattern
    def written(self, p, x=tensor("*B K"), gate: Any = Gate, up: Any = Up):
        """Two projections."""
        return p.as_dtype(p.maybe_cast(p.silu(gate.term(p, x)), to=x) * up.term(p, x), like=x)

    @lookalike("gate and up are projections of different inputs", apart=("x", "z"))
    def two_inputs(self, p, x=tensor("*B K"), z=tensor("*B J"), gate: Any = Gate, up: Any = Up):
        """Silu of one, times the other."""
        return p.maybe_cast(p.silu(gate.term(p, x)), to=x) * up.term(p, z)

    def guard(self, gate: Gate, up: Up):
        """Joining is free only where it is done once."""
        gate.refuse_beside(up)

    @lowering
    def npu(self, x: Tensor, gate: Gate, up: Up):
        """One matmul, one operator."""
        return torch.ops.npu.npu_swiglu(joined(x, gate, up), -1)


def joined(x: Tensor, gate: Gate, up: Gate) -> Tensor:
    """Gate and up [*B, 2·H] by one matmul."""
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias])
    return F.linear(x, torch.cat([gate.weight, up.weight]), bias)
