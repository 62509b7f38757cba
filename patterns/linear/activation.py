"""y = silu(a) · b or gelu(a) · b; or y = a · sigmoid(alpha · a) · (b + shift), a and b bounded.

After Shazeer (2020) and gpt-oss (2025).

*Matches* silu and gelu in any spelling, of halves or alternate lanes of a merged projection, or of two projections of
one input whose weights are Parameters; silu with bounds of a and b, or without; rounded, in float32 for another factor,
or quantised for the next layer in W8A8, each row with its own scale, if nothing else uses it. *Replaces with*
`npu_swiglu`, `npu_geglu`, `npu_clipped_swiglu`, or `npu_swiglu_quant`, which quantises the activation before it would
be rounded to 16 bits; two projections become one matmul of the concatenated weights, in floats or in W8A8, prepared
once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, scalar, tensor, variants
from patterns.linear.gates import (
    BOUNDS,
    GELUS,
    HALVES,
    SOURCES,
    WIDE_SOURCES,
    Clipped,
    Merged,
    Projected,
    Unbounded,
    activated,
)
from patterns.quant.results import Plain, TokenScales

f32 = torch.float32


@dataclass(frozen=True)
class Unrounded(Plain):
    """The result in float32 of operands in 16 bits, for another factor, such as the weight of an expert."""


@dataclass(frozen=True)
class Activation(Rule):
    """The gated activation of a feed-forward layer, of gate and up."""

    aliases = (
        "swiglu",
        "geglu",
        "silu_and_mul",
        "gated_activation",
        "clipped_swiglu",
        "swiglu_quant",
        "swiglu_projections",
    )

    def reference(self, x: Tensor) -> Tensor:
        """Compute silu(a) · b of the halves a and b of `x` [*B, 2·H]."""
        gate, up = x.chunk(2, dim=-1)
        return F.silu(gate) * up

    @pattern
    @variants(source=SOURCES, bounds=BOUNDS, result=(Plain,))
    def gated(self, p, source, bounds, result):
        """silu(a) · b or its bounded form, rounded to the dtype of its source"""
        return result.terms(p, p.as_dtype(activated(p, bounds, source.terms(p), source.like), like=source.like))

    @pattern
    @variants(source=HALVES, bounds=GELUS, result=(Plain,))
    def by_gelu(self, p, source, bounds, result):
        """gelu(a) · b, rounded to the dtype of its source"""
        return self.gated(p, source, bounds, result)

    @pattern
    @variants(source=SOURCES, bounds=(Unbounded,), result=(TokenScales,))
    def quantised(self, p, source, bounds, result):
        """q = round(y / s), s = max|y| / 127 of each token, with y = silu(a) · b rounded to the dtype of its source"""
        return self.gated(p, source, bounds, result)

    @pattern
    @variants(source=WIDE_SOURCES, bounds=(Unbounded,), result=(TokenScales,))
    def quantised_in_float32(self, p, source, bounds, result):
        """q = round(y / s), s = max|y| / 127 of each token, with y = silu(a) · b in float32"""
        return self.in_float32(p, source, bounds, result)

    @pattern
    @variants(source=WIDE_SOURCES, bounds=BOUNDS, result=(Unrounded,))
    def in_float32(self, p, source, bounds, result):
        """silu(a) · b or its bounded form, in float32"""
        gate, up = source.wide_terms(p)
        return result.terms(p, bounds.gated(p, gate) * bounds.linear(p, up))

    @variants(bounds=BOUNDS)
    @lookalike(
        "gate, up: the first half, or lane, is up; npu_swiglu requires the gate there; exchange both in "
        "the weight of their projection"
    )
    def swapped(self, p, bounds, source: Any = Merged):
        """y = a · silu(b), with the gate in the second half or in odd lanes"""
        return activated(p, bounds, source.terms(p, gate_first=False), source.like)

    @lookalike(
        "gate: it is multiplied by {factor} before silu; npu_swiglu requires silu of the gate as it is; "
        "multiply the weight of its projection by {factor} instead"
    )
    def scaled(self, p, gate=tensor("*B D"), up=tensor("*B D"), factor=scalar()):
        """silu(factor · a) · b"""
        scaled = p.maybe_cast(p.scale(p.maybe_cast(gate, to=f32), factor), to=f32)
        return p.maybe_cast(p.silu(scaled), to=gate) * up

    @variants(source=SOURCES)
    @lookalike(
        "gate: it is multiplied by a tensor before silu; npu_swiglu requires it as it is; where that "
        "tensor has one number for each channel, multiply the weight of the projection of the gate by it "
        "instead"
    )
    def factor_of_gate(self, p, source, factor=tensor("*F")):
        """silu(a · tensor) · b"""
        gate, up = source.terms(p)
        product = p.maybe_cast(gate * factor, to=f32)
        return p.maybe_cast(p.silu(product), to=source.like) * up

    @variants(source=SOURCES)
    @lookalike(
        "gate, up: one of silu(gate) and up is multiplied by another tensor before their product; "
        "npu_swiglu requires them alone; write (silu(gate) * up) * factor"
    )
    def factor_between(self, p, source, factor=tensor("*F")):
        """(silu(a) · tensor) · b"""
        gate, up = source.terms(p)
        return p.maybe_cast(p.silu(gate), to=source.like) * up * factor

    @lookalike(
        "gate, up: they are other slices of one tensor than the halves of its last dim; npu_swiglu "
        "requires these; order the rows of the weight of their projection so"
    )
    def slices(self, p, x=tensor("*B D")):
        """silu(a) · b of any two slices of one tensor"""
        gate, up = (p.maybe_cast(p.op("slice", x), to=f32) for _ in range(2))
        return p.maybe_cast(p.silu(gate), to=x) * up

    @lookalike(
        "gate, up: they are projections of different inputs; npu_swiglu requires both in one tensor, as "
        "one matmul gives them of one input; project both from one input",
        apart=("source.x", "z"),
    )
    def two_inputs(self, p, z=tensor("*B J"), source: Any = Projected):
        """silu(x W_aᵀ) · (z W_bᵀ), projections of different inputs"""
        gate, up = source.terms(p, up_input=z)
        return p.maybe_cast(p.silu(gate), to=source.x) * up

    @variants(bounds=BOUNDS)
    @lookalike(
        "gate, up: they are neither halves, or lanes, of one tensor nor two linear layers of one input; "
        "npu_swiglu requires them in one tensor; write one linear layer for both, and chunk(2, -1)",
        apart=("gate", "up"),
    )
    def two_tensors(self, p, bounds, gate=tensor("*B D"), up=tensor("*B D")):
        """silu(a) · b of any two tensors"""
        return activated(p, bounds, (p.maybe_cast(gate, to=f32), p.maybe_cast(up, to=f32)), gate)

    @lookalike(
        "gate: it is clamped behind silu; npu_clipped_swiglu requires the bound before silu; clamp the gate before silu"
    )
    def behind_silu(self, p, gate=tensor("*B D"), up=tensor("*B D"), bounds: Any = Clipped):
        """clamp(silu(a)) · clamp(b)"""
        activated = p.maybe_cast(p.silu(p.maybe_cast(gate, to=f32)), to=gate)
        return p.clip(activated, bounds.floor, bounds.limit) * bounds.linear(p, p.maybe_cast(up, to=f32))

    @variants(source=HALVES, bounds=GELUS)
    @lookalike(
        "result: it stays in float32, of gate and up in 16 bits; npu_geglu requires the dtype of its input; cast the "
        "product to that"
    )
    def wide_by_gelu(self, p, source, bounds):
        """gelu(a) · b, in float32"""
        gate, up = source.wide_terms(p)
        return bounds.gated(p, gate) * bounds.linear(p, up)

    @variants(bounds=GELUS)
    @lookalike(
        "gate, up: they are neither halves of one tensor nor two linear layers of one input; npu_geglu "
        "requires them in one tensor; write one linear layer for both, and chunk(2, -1)",
        apart=("gate", "up"),
    )
    def two_tensors_by_gelu(self, p, bounds, gate=tensor("*B D"), up=tensor("*B D")):
        """gelu(a) · b of any two tensors"""
        return activated(p, bounds, (p.maybe_cast(gate, to=f32), p.maybe_cast(up, to=f32)), gate)

    def guard(self, source: Any, bounds: Any):
        """Refuse bounds that the operator does not compute, alternate lanes that it does not read, and weights joined
        per call.
        """
        bounds.refuse(source.interleaved)
        source.refuse()

    @lowering
    @variants(result=(Plain,))
    def npu(self, source: Any, bounds: Any, result: Plain):
        """Emit npu_swiglu, npu_geglu or npu_clipped_swiglu, behind one matmul for projections."""
        return bounds.run(source.joined(), source)

    @lowering
    @variants(result=(Unrounded,))
    def npu_in_float32(self, source: Any, bounds: Any, result: Unrounded):
        """Emit npu_swiglu or npu_clipped_swiglu on gate and up cast to float32."""
        return bounds.run(source.joined().to(f32), source)

    @lowering
    @variants(result=(TokenScales,))
    def by_token(self, source: Any, result: TokenScales):
        """Emit npu_swiglu_quant with a scale of each token, cast to the dtype of the model."""
        int8, inverse = torch.ops.npu.npu_swiglu_quant(source.joined(), activate_left=True, quant_mode=1)
        return int8, result.restored(inverse.reciprocal())  # the operator returns 127 / rowmax
