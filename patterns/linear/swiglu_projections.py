"""y = silu(x Gᵀ + g) · (x Uᵀ + u): a gated activation of two projections  (Shazeer, GLU Variants, 2020).

*Matches* silu written in any way over gate and up projections of one input whose weights are Parameters. *Replaces
with* one matmul of the joined weights, prepared once, and `npu_swiglu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, attribute, lookalike, lowering, pattern, require, tensor

f32 = torch.float32


@dataclass(frozen=True)
class SwigluProjections(Rule):
    """The gated activation of separate gate and up projections."""

    def reference(self, x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        """The meaning: x [*B, K], gate and up [H, K]."""
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    @pattern
    def written(
        self,
        p,
        x=tensor("*B K"),
        gate=tensor("H K"),
        up=tensor("H K"),
        gate_bias=tensor("H", optional=True),
        up_bias=tensor("H", optional=True),
        gate_next=tensor("*G", optional=True),
        up_next=tensor("*U", optional=True),
        fixed=attribute(),
    ):
        """Two projections."""
        g = p.maybe_cast(p.linear(x=x, weight=gate, bias=gate_bias, beside=gate_next, fixed=fixed), to=f32)
        u = p.maybe_cast(p.linear(x=x, weight=up, bias=up_bias, beside=up_next, fixed=fixed), to=f32)
        return p.as_dtype(p.maybe_cast(p.silu(g), to=x) * u, like=x)

    @lookalike("gate and up are projections of different inputs", apart=("x", "z"))
    def two_inputs(
        self,
        p,
        x=tensor("*B K"),
        z=tensor("*B J"),
        gate=tensor("H K"),
        up=tensor("H J"),
        gate_bias=tensor("H", optional=True),
        up_bias=tensor("H", optional=True),
        gate_next=tensor("*G", optional=True),
        up_next=tensor("*U", optional=True),
        gate_fixed=attribute(),
        up_fixed=attribute(),
    ):
        """Silu of one, times the other."""
        g = p.maybe_cast(p.linear(x=x, weight=gate, bias=gate_bias, beside=gate_next, fixed=gate_fixed), to=f32)
        u = p.maybe_cast(p.linear(x=z, weight=up, bias=up_bias, beside=up_next, fixed=up_fixed), to=f32)
        return p.maybe_cast(p.silu(g), to=x) * u

    def guard(self, gate_bias, up_bias, fixed: bool):
        """Joining is free only where it is done once."""
        require(fixed, "the weights do not come from Parameters alone: joining them would cost a copy at every call")
        require((gate_bias is None) == (up_bias is None), "only one of gate and up has a bias")

    @lowering
    def npu(self, x: Tensor, gate: Tensor, up: Tensor, gate_bias: Tensor | None, up_bias: Tensor | None):
        """One matmul, one operator."""
        bias = None if gate_bias is None or up_bias is None else torch.cat([gate_bias, up_bias])
        return torch.ops.npu.npu_swiglu(F.linear(x, torch.cat([gate, up]), bias), -1)
