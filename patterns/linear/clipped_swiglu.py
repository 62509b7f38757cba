"""y = a · sigmoid(alpha · a) · (b + bias), a ≤ limit, |b| ≤ limit, of two halves of a tensor  (gpt-oss, 2025).

*Matches* halves, and every second lane; silu, where alpha is 1. *Replaces with* `npu_clipped_swiglu`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants

f32 = torch.float32


@dataclass(frozen=True)
class Clipped(Group):
    """Bounds of gate and up, and by what the gate is multiplied in the sigmoid."""

    floor: Any = scalar()
    limit: Any = scalar()
    low: Any = scalar()
    high: Any = scalar()
    alpha: Any = scalar()

    def gated(self, p, gate):
        """A · sigmoid(alpha · a)."""
        a = p.maybe_cast(p.clip(p.maybe_cast(gate, to=f32), self.floor, self.limit), to=f32)
        return a * p.sigmoid(p.maybe_scaled(a, self.alpha))

    def linear(self, p, up):
        """The other factor, without what is added to it."""
        return p.clip(p.maybe_cast(up, to=f32), self.low, self.high)

    def refuse(self):
        """Refuse bounds that the operator has not."""
        require(self.floor == -math.inf, "the gate is clamped from below as well, at {floor}", floor=self.floor)
        kept = (self.low, self.high) == (-self.limit, self.limit)
        between = "up is clamped between {low} and {high}, where the operator has one limit for gate and up: {limit}"
        require(kept, between, low=self.low, high=self.high, limit=self.limit)


@dataclass(frozen=True)
class ClippedSwiglu(Rule):
    """The gated activation of a merged gate-and-up projection, with bounds."""

    def reference(self, x: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
        """The meaning: x [*B, 2·H], gate and up interleaved."""
        a, b = x[..., ::2].clamp(max=limit), x[..., 1::2].clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + bias)

    @pattern
    def shifted(self, p, x=tensor("*B D"), clipped: Any = Clipped, interleaved=attribute(), bias=scalar()):
        """Something is added to up."""
        gate, up = _halves(p, x, interleaved)
        return p.as_dtype(p.maybe_cast(clipped.gated(p, gate), to=x) * p.shift(clipped.linear(p, up), bias), like=x)

    @pattern
    def plain(self, p, x=tensor("*B D"), clipped: Any = Clipped, interleaved=attribute()):
        """Nothing is."""
        gate, up = _halves(p, x, interleaved)
        return p.as_dtype(p.maybe_cast(clipped.gated(p, gate), to=x) * clipped.linear(p, up), like=x)

    @variants(shifted=(True, False))
    @lookalike("gate and up are in the wrong order: the operator takes the first lanes for the gate")
    def swapped(
        self, p, x=tensor("*B D"), clipped: Any = Clipped, interleaved=attribute(), bias=scalar(), shifted=None
    ):
        """The gate second."""
        up, gate = _halves(p, x, interleaved)
        linear = clipped.linear(p, up)
        return p.maybe_cast(clipped.gated(p, gate), to=x) * (p.shift(linear, bias) if shifted else linear)

    @variants(shifted=(True, False))
    @lookalike(
        "gate and up are not the first and second halves, or lanes, of one tensor but two tensors, or other slices; "
        "joining them would cost a copy",
        apart=("gate", "up"),
    )
    def two_tensors(
        self, p, gate=tensor("*B D"), up=tensor("*B D"), clipped: Any = Clipped, bias=scalar(), shifted=None
    ):
        """Of any two tensors."""
        linear = clipped.linear(p, up)
        return p.maybe_cast(clipped.gated(p, gate), to=gate) * (p.shift(linear, bias) if shifted else linear)

    @lookalike("the gate is clamped behind silu: the operator clamps it before")
    def behind_silu(self, p, gate=tensor("*B D"), up=tensor("*B D"), clipped: Any = Clipped):
        """Silu, then a bound."""
        g = p.maybe_cast(gate, to=f32)
        return p.clip(p.silu(g), clipped.floor, clipped.limit) * clipped.linear(p, up)

    def guard(self, clipped: Clipped):
        """Bounds that the operator has."""
        clipped.refuse()

    @lowering
    def npu(self, x: Tensor, clipped: Clipped, interleaved: bool, bias: float | None):
        """One operator over the merged tensor."""
        return torch.ops.npu.npu_clipped_swiglu(
            x, dim=-1, alpha=clipped.alpha, limit=clipped.limit, bias=bias or 0.0, interleaved=interleaved
        )


def _halves(p: Any, x: Any, interleaved: Any) -> tuple[Any, Any]:
    """The two halves of a tensor, perhaps of one that was cast as a whole."""
    wide = p.maybe_cast(x, to=f32)
    first, second = (p.gate_lanes(x=wide, second=each, interleaved=interleaved) for each in (False, True))
    return first, second
