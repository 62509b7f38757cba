"""y = silu(a) · b with a and b the halves of one tensor  (Shazeer, GLU Variants Improve Transformer, 2020).

*Matches* silu written in any way, on the first half of a merged projection. *Replaces with* `npu_swiglu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, scalar, tensor

f32 = torch.float32


@dataclass(frozen=True)
class Swiglu(Rule):
    """The gated activation of a merged gate-and-up projection."""

    def reference(self, x: Tensor) -> Tensor:
        """The meaning: x [*B, 2·H]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @pattern
    def halves(self, p, x=tensor("*B D")):
        """Gate first, up second."""
        gate = p.maybe_cast(p.part(x, 0, of=2), to=f32)
        up = p.maybe_cast(p.part(x, 1, of=2), to=f32)
        return p.as_dtype(p.maybe_cast(p.silu(gate), to=x) * up, like=x)

    @pattern
    def cast_halves(self, p, x=tensor("*B D")):
        """The halves of a tensor that was cast as a whole."""
        h = p.maybe_cast(x, to=f32)
        return p.as_dtype(p.maybe_cast(p.silu(p.part(h, 0, of=2)), to=x) * p.part(h, 1, of=2), like=x)

    @lookalike("the halves are in the wrong order: silu is on the second half, the operator's is on the first half")
    def swapped(self, p, x=tensor("*B D")):
        """Silu of the second half."""
        gate = p.maybe_cast(p.part(x, 1, of=2), to=f32)
        up = p.maybe_cast(p.part(x, 0, of=2), to=f32)
        return p.maybe_cast(p.silu(gate), to=x) * up

    @lookalike("the gate is multiplied by {factor} before silu")
    def scaled(self, p, gate=tensor("*B D"), up=tensor("*B D"), factor=scalar()):
        """Silu of a gate times a number."""
        return p.maybe_cast(p.silu(p.scale(p.maybe_cast(gate, to=f32), factor)), to=gate) * up

    @lookalike("gate and up are other slices of one tensor than the first and second halves of its last dim")
    def slices(self, p, x=tensor("*B D")):
        """Of any two slices."""
        gate, up = (p.maybe_cast(p.op("slice", x), to=f32) for _ in range(2))
        return p.maybe_cast(p.silu(gate), to=x) * up

    @lookalike(
        "gate and up are not the first and second halves of one tensor but two tensors, or other slices; joining them "
        "would cost a copy"
    )
    def two_tensors(self, p, gate=tensor("*B D"), up=tensor("*B D")):
        """Silu(gate) · up of any two tensors."""
        g = p.maybe_cast(gate, to=f32)
        return p.maybe_cast(p.silu(g), to=gate) * up

    @lookalike("the gate is gelu, not silu")
    def gelu_gate(self, p, gate=tensor("*B D"), up=tensor("*B D")):
        """Gelu(gate) · up."""
        return p.op("aten.gelu.default", gate) * up

    @lowering
    def npu(self, x: Tensor):
        """One operator over the merged tensor."""
        return torch.ops.npu.npu_swiglu(x, -1)
