"""The facets of a gated activation: where gate and up come from, and what bounds them.

Merged       two halves, or every second lane, of one tensor
MergedWide   those of one that is cast to float32
Projected    two projections of one input, whose weights are joined
Int8Projected    the same in W8A8

Unbounded    silu(a) · b
Clipped      a · sigmoid(alpha · a) · b, a ≤ limit, |b| ≤ limit
Shifted      the same with something added to b
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, attribute, bounded, require, scalar, tensor
from patterns.quant.quantised_linear import multiplied, prepared, refuse

f32 = torch.float32


@dataclass(frozen=True)
class Merged(Group):
    """Gate and up of one tensor, the gate first, perhaps cast as a whole."""

    x: Any = tensor("*B D")
    interleaved: Any = attribute()

    def terms(self, p, gate_first: bool = True) -> tuple[Any, Any]:
        """Both, perhaps in float32."""
        wide = p.maybe_cast(self.x, to=f32)
        lanes = [p.gate_lanes(x=wide, second=each, interleaved=self.interleaved) for each in (False, True)]
        gate, up = (p.maybe_cast(each, to=f32) for each in (lanes if gate_first else lanes[::-1]))
        return gate, up

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Return both, each cast to float32."""
        gate, up = (
            p.cast(p.gate_lanes(x=self.x, second=each, interleaved=self.interleaved), to=f32) for each in (False, True)
        )
        return gate, up

    @property
    def like(self) -> Any:
        """What has the dtype of the result."""
        return self.x

    def refuse(self) -> None:
        """They lie in one tensor already."""

    def joined(self) -> Tensor:
        """Both, [*B, 2 · H]."""
        return self.x


@dataclass(frozen=True)
class MergedWide(Merged):
    """Gate and up of one tensor that is cast to float32 as a whole."""

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Return both, of a tensor in float32."""
        wide = p.cast(self.x, to=f32)
        gate, up = (p.gate_lanes(x=wide, second=each, interleaved=self.interleaved) for each in (False, True))
        return gate, up


@dataclass(frozen=True)
class Projected(Group):
    """Gate and up as linear layers of one input."""

    x: Any = tensor("*B K")
    gate: Any = tensor("H K")
    gate_bias: Any = tensor("H", optional=True)
    gate_is_parameter_only: Any = attribute()
    up: Any = tensor("H J")
    up_bias: Any = tensor("H", optional=True)
    up_is_parameter_only: Any = attribute()
    interleaved = False

    def terms(self, p, beside: Any = None) -> tuple[Any, Any]:
        """Both, perhaps in float32; up of another input where there is one `beside`."""
        gate, up = self.projections(p, beside)
        return p.maybe_cast(gate, to=f32), p.maybe_cast(up, to=f32)

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Return both, each cast to float32."""
        gate, up = self.projections(p)
        return p.cast(gate, to=f32), p.cast(up, to=f32)

    def projections(self, p, beside: Any = None) -> tuple[Any, Any]:
        """Return both layers as they are; up of another input where there is one `beside`."""
        gate = dict(weight=self.gate, bias=self.gate_bias, is_parameter_only=self.gate_is_parameter_only)
        up = dict(weight=self.up, bias=self.up_bias, is_parameter_only=self.up_is_parameter_only)
        other = self.x if beside is None else beside
        return p.linear(x=self.x, **gate), p.linear(x=other, **up)

    @property
    def like(self) -> Any:
        """What has the dtype of the result."""
        return self.x

    def refuse(self) -> None:
        """Joining is free only where it is done once."""
        fixed = self.gate_is_parameter_only and self.up_is_parameter_only
        require(
            fixed,
            "the weights do not come from Parameters alone: joining them would cost a copy at "
            "every call; pass them as Parameters of the module",
        )
        require(
            (self.gate_bias is None) == (self.up_bias is None),
            "only one of gate and up has a bias; one matmul of both requires a bias of each; give "
            "the other projection a bias of zeros",
        )

    def bias(self) -> Tensor | None:
        """Those of both, [2 · H]."""
        return None if self.gate_bias is None else torch.cat([self.gate_bias, self.up_bias])

    def joined(self) -> Tensor:
        """Return both, [*B, 2 · H], by one matmul."""
        with bounded():  # the model holds gate and up in the dtype of x as well
            return F.linear(self.x, torch.cat([self.gate, self.up]), self.bias())


@dataclass(frozen=True)
class Int8Projected(Projected):
    """Gate and up as layers in W8A8 of one input in int8."""

    tokens: Any = tensor("*B 1")
    gate_scale: Any = tensor("H")
    up_scale: Any = tensor("H")
    dtype: Any = attribute()

    def projections(self, p, beside: Any = None) -> tuple[Any, Any]:
        """Return both layers as they are."""
        gate, up = (
            p.int8_matmul(
                x=self.x, weight=getattr(self, name), scale=getattr(self, f"{name}_scale"), tokens=self.tokens,
                bias=getattr(self, f"{name}_bias"), is_parameter_only=getattr(self, f"{name}_is_parameter_only"),
                dtype=self.dtype,
            )
            for name in ("gate", "up")
        )  # fmt: skip
        return gate, up

    @property
    def like(self) -> Any:
        """The dtype of the result."""
        return self.dtype

    def refuse(self) -> None:
        """What the operator returns; joining is free only where it is done once."""
        super().refuse()
        refuse(self.dtype)

    def joined(self) -> Tensor:
        """Return both, [*B, 2 · H], by one product."""
        scale, weight = torch.cat([self.gate_scale, self.up_scale]), prepared(torch.cat([self.gate, self.up]))
        with bounded():  # the model holds gate and up in this dtype as well
            return multiplied(self.x, weight, scale, self.tokens.float().reshape(-1), self.bias(), self.dtype)


@dataclass(frozen=True)
class Unbounded(Group):
    """No bounds."""

    def gated(self, p, gate):
        """Silu."""
        return p.silu(gate)

    def linear(self, p, up):
        """The other factor."""
        return up

    def refuse(self, interleaved: bool) -> None:
        """Refuse every second lane."""
        require(
            not interleaved,
            "gate and up are every second lane of one tensor; npu_swiglu requires its halves; "
            "order the rows of the weight of their projection so",
        )

    def run(self, merged: Tensor, interleaved: bool) -> Tensor:
        """The operator."""
        return torch.ops.npu.npu_swiglu(merged, -1)


@dataclass(frozen=True)
class Clipped(Group):
    """Bounds of gate and up, and by what the gate is multiplied in the sigmoid."""

    floor: Any = scalar()
    limit: Any = scalar()
    low: Any = scalar()
    high: Any = scalar()
    alpha: Any = scalar()
    shift = 0.0

    def gated(self, p, gate):
        """A · sigmoid(alpha · a)."""
        a = p.maybe_cast(p.clip(gate, self.floor, self.limit), to=f32)
        return a * p.sigmoid(p.maybe_scaled(a, self.alpha))

    def linear(self, p, up):
        """The other factor."""
        return p.clip(up, self.low, self.high)

    def refuse(self, interleaved: bool) -> None:
        """Refuse bounds that the operator has not."""
        require(
            self.floor == -math.inf,
            "the gate is clamped from below as well, at {floor}; npu_clipped_swiglu requires an "
            "upper bound alone; leave the lower one out",
            floor=self.floor,
        )
        kept = (self.low, self.high) == (-self.limit, self.limit)
        between = "up is clamped between {low} and {high}, where the operator has one limit for gate and up: {limit}"
        require(kept, between, low=self.low, high=self.high, limit=self.limit)

    def run(self, merged: Tensor, interleaved: bool) -> Tensor:
        """The operator."""
        return torch.ops.npu.npu_clipped_swiglu(
            merged, dim=-1, alpha=self.alpha, limit=self.limit, bias=self.shift, interleaved=interleaved
        )


@dataclass(frozen=True)
class Shifted(Clipped):
    """The same with something added to up."""

    shift: Any = scalar()

    def linear(self, p, up):
        """The other factor."""
        return p.shift(super().linear(p, up), self.shift)


SOURCES: tuple[Any, ...] = (Merged, Projected, Int8Projected)
WIDE_SOURCES: tuple[Any, ...] = (*SOURCES, MergedWide)
BOUNDS: tuple[Any, ...] = (Unbounded, Clipped, Shifted)


def activated(p: Any, bounds: Any, terms: tuple[Any, Any], like: Any) -> Any:
    """What is activated of the gate, in the dtype of `like` or not, times the other factor."""
    gate, up = terms
    return p.maybe_cast(bounds.gated(p, gate), to=like) * bounds.linear(p, up)
