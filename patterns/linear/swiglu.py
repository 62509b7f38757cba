"""y = silu(a) · b; or y = a · sigmoid(alpha · a) · (b + shift), both bounded  (Shazeer, 2020; gpt-oss, 2025).

*Matches* silu written in any way, of the halves or lanes of a merged projection, or of two projections of one input
whose weights are Parameters; with bounds of both, or without; as it is, in float32 as a factor of more, or quantised
for the next layer in W8A8, each row with its own scale, where nothing else reads it. *Replaces with* `npu_swiglu`,
`npu_clipped_swiglu`, or `npu_swiglu_quant`, which quantises what was activated before it would be rounded to 16 bits;
two projections become one matmul of the joined weights, in floats or in W8A8, prepared once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, scalar, tensor, variants
from patterns.kit.results import Plain, TokenScales
from patterns.linear.gates import BOUNDS, SOURCES, WIDE_SOURCES, Clipped, Merged, Projected, Unbounded, activated

f32 = torch.float32


@dataclass(frozen=True)
class Unrounded(Plain):
    """In float32, computed of 16 bits: a factor of more, such as the weight of a token for its expert."""


@dataclass(frozen=True)
class GatedActivation(Rule):
    """The gated activation of gate and up."""

    def reference(self, x: Tensor) -> Tensor:
        """The meaning without bounds: x [*B, 2·H]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @pattern
    @variants(source=SOURCES, bounds=BOUNDS, result=(Plain,))
    def gated(self, p, source, bounds, result):
        """Gate first, up second."""
        return result.terms(p, p.as_dtype(activated(p, bounds, source.terms(p), source.like), like=source.like))

    @pattern
    @variants(source=SOURCES, bounds=(Unbounded,), result=(TokenScales,))
    def quantised(self, p, source, bounds, result):
        """The same in int8."""
        return self.gated(p, source, bounds, result)

    @pattern
    @variants(source=WIDE_SOURCES, bounds=(Unbounded,), result=(TokenScales,))
    def quantised_in_float32(self, p, source, bounds, result):
        """Quantise what is not rounded to the dtype of its source before."""
        return self.in_float32(p, source, bounds, result)

    @pattern
    @variants(source=WIDE_SOURCES, bounds=BOUNDS, result=(Unrounded,))
    def in_float32(self, p, source, bounds, result):
        """The same that is not rounded to the dtype of its source."""
        gate, up = source.wide_terms(p)
        return result.terms(p, bounds.gated(p, gate) * bounds.linear(p, up))

    @variants(bounds=BOUNDS)
    @lookalike(
        "gate and up are in the wrong order; the operator requires the gate in the first half, "
        "or lanes; exchange both in the weight of their projection"
    )
    def swapped(self, p, bounds, source: Any = Merged):
        """The gate second."""
        return activated(p, bounds, source.terms(p, gate_first=False), source.like)

    @lookalike(
        "the gate is multiplied by {factor} before silu; npu_swiglu requires silu of the gate "
        "as it is; multiply the weight of its projection by {factor} instead"
    )
    def scaled(self, p, gate=tensor("*B D"), up=tensor("*B D"), factor=scalar()):
        """Silu of a gate times a number."""
        scaled = p.maybe_cast(p.scale(p.maybe_cast(gate, to=f32), factor), to=f32)
        return p.maybe_cast(p.silu(scaled), to=gate) * up

    @variants(source=SOURCES)
    @lookalike(
        "the gate is multiplied by a tensor before silu; the operator multiplies neither half of its input; where that "
        "tensor has one number for each channel, multiply the weight of the projection of the gate by it instead"
    )
    def factor_of_gate(self, p, source, factor=tensor("*F")):
        """Multiply the gate by a tensor before silu."""
        gate, up = source.terms(p)
        product = p.maybe_cast(gate * factor, to=f32)
        return p.maybe_cast(p.silu(product), to=source.like) * up

    @variants(source=SOURCES)
    @lookalike(
        "silu of the gate, or up, is multiplied by another tensor before both are multiplied with each other; the "
        "operator multiplies them alone; write (silu(gate) * up) * factor"
    )
    def factor_between(self, p, source, factor=tensor("*F")):
        """Multiply one side by a tensor before the product of both."""
        gate, up = source.terms(p)
        return p.maybe_cast(p.silu(gate), to=source.like) * up * factor

    @lookalike(
        "gate and up are other slices of one tensor than the first and second halves of its "
        "last dim; npu_swiglu requires these; order the rows of the weight of their projection "
        "so"
    )
    def slices(self, p, x=tensor("*B D")):
        """Of any two slices."""
        gate, up = (p.maybe_cast(p.op("slice", x), to=f32) for _ in range(2))
        return p.maybe_cast(p.silu(gate), to=x) * up

    @lookalike(
        "gate and up are projections of different inputs; npu_swiglu requires both in one "
        "tensor, as one matmul gives them of one input",
        apart=("source.x", "z"),
    )
    def two_inputs(self, p, z=tensor("*B J"), source: Any = Projected):
        """Silu of one, times the other."""
        gate, up = source.terms(p, beside=z)
        return p.maybe_cast(p.silu(gate), to=source.x) * up

    @variants(bounds=BOUNDS)
    @lookalike(
        "gate and up are neither the halves, or lanes, of one tensor nor two linear layers of one input; the operator "
        "reads both from one tensor",
        apart=("gate", "up"),
    )
    def two_tensors(self, p, bounds, gate=tensor("*B D"), up=tensor("*B D")):
        """Of any two tensors."""
        return activated(p, bounds, (p.maybe_cast(gate, to=f32), p.maybe_cast(up, to=f32)), gate)

    @lookalike("the gate is clamped behind silu; npu_clipped_swiglu requires the bound before silu")
    def behind_silu(self, p, gate=tensor("*B D"), up=tensor("*B D"), bounds: Any = Clipped):
        """Silu, then a bound."""
        activated = p.maybe_cast(p.silu(p.maybe_cast(gate, to=f32)), to=gate)
        return p.clip(activated, bounds.floor, bounds.limit) * bounds.linear(p, p.maybe_cast(up, to=f32))

    @lookalike("the gate is gelu, not silu; npu_swiglu computes silu alone")
    def gelu_gate(self, p, gate=tensor("*B D"), up=tensor("*B D")):
        """Gelu(gate) · up."""
        return p.op("gelu", gate) * up

    def guard(self, source: Any, bounds: Any):
        """What the operator takes, and when joining is free."""
        bounds.refuse(source.interleaved)
        source.refuse()

    @lowering
    @variants(result=(Plain,))
    def npu(self, source: Any, bounds: Any, result: Plain):
        """One operator, behind one matmul where projections are joined."""
        return bounds.run(source.joined(), source.interleaved)

    @lowering
    @variants(result=(Unrounded,))
    def npu_in_float32(self, source: Any, bounds: Any, result: Unrounded):
        """The same operator over what is cast."""
        return bounds.run(source.joined().to(f32), source.interleaved)

    @lowering
    @variants(result=(TokenScales,))
    def by_token(self, source: Any, result: TokenScales):
        """The same; a scale in 16 bits is cast."""
        int8, inverse = torch.ops.npu.npu_swiglu_quant(source.joined(), activate_left=True, quant_mode=1)
        return int8, result.restored(inverse.reciprocal())  # it gives 127 / rowmax
