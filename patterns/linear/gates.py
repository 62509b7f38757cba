"""The facets of a gated activation: the sources of gate a and up b, and their bounds.

Merged       two halves, or alternate lanes, of one tensor
MergedUpFirst    two halves of one tensor, up first
MergedWide   two halves, or alternate lanes, of a tensor that is cast to float32
Projected    two projections of one input, whose weights are concatenated
Int8Projected    two projections in W8A8 of one input

Unbounded    silu(a) · b
GeluGate     gelu(a) · b
WrittenGeluGate  gelu(a) · b, with gelu in primitive operators
Clipped      a · sigmoid(alpha · a) · b, a ≤ limit, |b| ≤ limit
Shifted      a · sigmoid(alpha · a) · (b + shift), a ≤ limit, |b| ≤ limit
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, attribute, bounded, require, scalar, tensor
from patterns.linear.joined_projections import NOT_PARAMETERS
from patterns.quant.quantised_linear import multiplied, prepared, refuse

f32 = torch.float32
GELU_CODES = ("none", "tanh")
"""How gelu is computed, at the number that npu_geglu has for it."""
ALTERNATE_LANES = (
    "gate, up: they are every second lane of one tensor; npu_geglu requires its halves; order the rows of the weight "
    "of their projection so"
)


@dataclass(frozen=True)
class Merged(Group):
    """Gate and up of one tensor, the gate first, each or the tensor perhaps cast to float32.

    Attributes:
        x: the tensor [*B, 2 · H].
        interleaved: true if gate and up alternate by lane.
    """

    x: Any = tensor("*B D")
    interleaved: Any = attribute()
    gate_first = True

    def terms(self, p, gate_first: bool = True) -> tuple[Any, Any]:
        """Build the terms of gate and up, perhaps in float32; up first unless `gate_first`."""
        wide = p.maybe_cast(self.x, to=f32)
        lanes = [p.gate_lanes(x=wide, second=each, interleaved=self.interleaved) for each in (False, True)]
        gate, up = (p.maybe_cast(each, to=f32) for each in (lanes if gate_first else lanes[::-1]))
        return gate, up

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Build the terms of gate and up, each cast to float32."""
        gate, up = (
            p.cast(p.gate_lanes(x=self.x, second=each, interleaved=self.interleaved), to=f32) for each in (False, True)
        )
        return gate, up

    @property
    def like(self) -> Any:
        """A tensor in the dtype of the result."""
        return self.x

    def refuse(self) -> None:
        """Accept gate and up, which are one tensor already."""

    def joined(self) -> Tensor:
        """Return gate and up as one tensor [*B, 2 · H]."""
        return self.x


@dataclass(frozen=True)
class MergedUpFirst(Merged):
    """Gate and up as halves of one tensor, the gate second, as in diffusion models."""

    gate_first = False

    def terms(self, p, gate_first: bool = False) -> tuple[Any, Any]:
        """Match gate and up, perhaps in float32; up first unless `gate_first`."""
        return super().terms(p, gate_first)

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Build the terms of gate and up, each cast to float32."""
        up, gate = super().wide_terms(p)
        return gate, up


@dataclass(frozen=True)
class MergedWide(Merged):
    """Gate and up of one tensor that is cast to float32 before it is split."""

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Build the terms of gate and up as lanes of the tensor cast to float32."""
        wide = p.cast(self.x, to=f32)
        gate, up = (p.gate_lanes(x=wide, second=each, interleaved=self.interleaved) for each in (False, True))
        return gate, up


@dataclass(frozen=True)
class Projected(Group):
    """Gate and up as linear layers of one input `x`, with weights `gate` [H, K] and `up` [H, K]."""

    x: Any = tensor("*B K")
    gate: Any = tensor("H K")
    gate_bias: Any = tensor("H", optional=True)
    gate_is_parameter_only: Any = attribute()
    up: Any = tensor("H J")
    up_bias: Any = tensor("H", optional=True)
    up_is_parameter_only: Any = attribute()
    interleaved = False
    gate_first = True

    def terms(self, p, up_input: Any = None) -> tuple[Any, Any]:
        """Build the terms of gate and up, perhaps in float32; up is projected from `up_input` if given."""
        gate, up = self.projections(p, up_input)
        return p.maybe_cast(gate, to=f32), p.maybe_cast(up, to=f32)

    def wide_terms(self, p) -> tuple[Any, Any]:
        """Build the terms of gate and up, each cast to float32."""
        gate, up = self.projections(p)
        return p.cast(gate, to=f32), p.cast(up, to=f32)

    def projections(self, p, up_input: Any = None) -> tuple[Any, Any]:
        """Build the terms of both linear layers; up is projected from `up_input` if given."""
        gate = dict(weight=self.gate, bias=self.gate_bias, is_parameter_only=self.gate_is_parameter_only)
        up = dict(weight=self.up, bias=self.up_bias, is_parameter_only=self.up_is_parameter_only)
        other = self.x if up_input is None else up_input
        return p.linear(x=self.x, **gate), p.linear(x=other, **up)

    @property
    def like(self) -> Any:
        """A tensor in the dtype of the result."""
        return self.x

    def refuse(self) -> None:
        """Refuse weights that are not from Parameters, and a bias of only one layer.

        Concatenating the weights would cost a copy at every call.
        """
        fixed = self.gate_is_parameter_only and self.up_is_parameter_only
        require(fixed, NOT_PARAMETERS)
        require(
            (self.gate_bias is None) == (self.up_bias is None),
            "bias: one of gate and up alone has one; one matmul of both requires a bias of each; give the "
            "other projection a bias of zeros",
        )

    def bias(self) -> Tensor | None:
        """Return the concatenated biases [2 · H]; None without biases."""
        return None if self.gate_bias is None else torch.cat([self.gate_bias, self.up_bias])

    def joined(self) -> Tensor:
        """Emit one matmul for gate and up [*B, 2 · H]."""
        with bounded():  # the model holds gate and up in the dtype of x as well
            return F.linear(self.x, torch.cat([self.gate, self.up]), self.bias())


@dataclass(frozen=True)
class Int8Projected(Projected):
    """Gate and up as layers in W8A8 of one int8 input."""

    tokens: Any = tensor("*B 1")
    gate_scale: Any = tensor("H")
    up_scale: Any = tensor("H")
    dtype: Any = attribute()

    def projections(self, p, up_input: Any = None) -> tuple[Any, Any]:
        """Build the terms of both layers in W8A8."""
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
        """The dtype of the result, where other sources give a tensor in it."""
        return self.dtype

    def refuse(self) -> None:
        """Refuse what `Projected` refuses, and dtypes that npu_quant_matmul does not return."""
        super().refuse()
        refuse(self.dtype)

    def joined(self) -> Tensor:
        """Emit one npu_quant_matmul for gate and up [*B, 2 · H]."""
        scale, weight = torch.cat([self.gate_scale, self.up_scale]), prepared(torch.cat([self.gate, self.up]))
        with bounded():  # the model holds gate and up in this dtype as well
            return multiplied(self.x, weight, scale, self.tokens.float().reshape(-1), self.bias(), self.dtype)


@dataclass(frozen=True)
class Unbounded(Group):
    """No bounds: silu(a) · b."""

    def gated(self, p, gate):
        """Build the term of silu of the gate."""
        return p.silu(gate)

    def linear(self, p, up):
        """Return `up`, the other factor, unchanged."""
        return up

    def refuse(self, interleaved: bool) -> None:
        """Refuse gate and up that alternate lane by lane, if `interleaved`: npu_swiglu reads halves."""
        require(
            not interleaved,
            "gate, up: they are every second lane of one tensor; npu_swiglu requires its halves; order the "
            "rows of the weight of their projection so",
        )

    def run(self, merged: Tensor, source: Any) -> Tensor:
        """Emit npu_swiglu on gate and up of `source`, `merged` [*B, 2 · H] as halves."""
        return torch.ops.npu.npu_swiglu(merged, -1)


@dataclass(frozen=True)
class GeluGate(Group):
    """No bounds, and gelu in place of silu: gelu(a) · b.

    Attributes:
        approximate: how gelu is computed: "none" by erf, or "tanh".
    """

    approximate: Any = attribute()

    def gated(self, p, gate):
        """Match gelu of the gate."""
        return p.gelu(gate, self.approximate)

    def linear(self, p, up):
        """Match the other factor, up."""
        return up

    def refuse(self, interleaved: bool) -> None:
        """Refuse gate and up that alternate lane by lane, if `interleaved`: npu_geglu reads halves."""
        require(not interleaved, ALTERNATE_LANES)

    def run(self, merged: Tensor, source: Any) -> Tensor:
        """Emit npu_geglu on gate and up of `source`, `merged` [*B, 2 · H] as halves in either order."""
        return torch.ops.npu.npu_geglu(merged, -1, GELU_CODES.index(self.approximate), source.gate_first)[0]


@dataclass(frozen=True)
class WrittenGeluGate(GeluGate):
    """Gelu of the gate, in primitive operators."""

    def gated(self, p, gate):
        """Match gelu of the gate, written out."""
        return p.written_gelu(x=gate, approximate=self.approximate)


@dataclass(frozen=True)
class Clipped(Group):
    """Bounds of gate and up: a · sigmoid(alpha · a) · b with a and b clamped.

    Attributes:
        floor: the lower bound of the gate.
        limit: the upper bound of the gate.
        low: the lower bound of up.
        high: the upper bound of up.
        alpha: the factor of the gate in the sigmoid.
    """

    floor: Any = scalar()
    limit: Any = scalar()
    low: Any = scalar()
    high: Any = scalar()
    alpha: Any = scalar()
    shift = 0.0

    def gated(self, p, gate):
        """Build the term of a · sigmoid(alpha · a) of the clamped gate a."""
        a = p.maybe_cast(p.clip(gate, self.floor, self.limit), to=f32)
        return a * p.sigmoid(p.maybe_scaled(a, self.alpha))

    def linear(self, p, up):
        """Build the term of the other factor: `up` clamped to [`low`, `high`]."""
        return p.clip(up, self.low, self.high)

    def refuse(self, interleaved: bool) -> None:
        """Refuse bounds that npu_clipped_swiglu does not have; it takes `interleaved` lanes and halves."""
        require(
            self.floor == -math.inf,
            "gate: it is clamped from below as well, at {floor}; npu_clipped_swiglu requires an upper "
            "bound alone; leave the lower one out",
            floor=self.floor,
        )
        symmetric = (self.low, self.high) == (-self.limit, self.limit)
        between = (
            "up: it is clamped between {low} and {high}; npu_clipped_swiglu requires ±{limit}, the limit of "
            "the gate; clamp up by that"
        )
        require(symmetric, between, low=self.low, high=self.high, limit=self.limit)

    def run(self, merged: Tensor, source: Any) -> Tensor:
        """Emit npu_clipped_swiglu on gate and up of `source`, `merged` [*B, 2 · H] as halves or lane by lane."""
        return torch.ops.npu.npu_clipped_swiglu(
            merged, dim=-1, alpha=self.alpha, limit=self.limit, bias=self.shift, interleaved=source.interleaved
        )


@dataclass(frozen=True)
class Shifted(Clipped):
    """Bounds of gate and up, with a constant `shift` added to up: a · sigmoid(alpha · a) · (b + shift)."""

    shift: Any = scalar()

    def linear(self, p, up):
        """Build the term of the other factor: `up`, clamped, plus `shift`."""
        return p.shift(super().linear(p, up), self.shift)


SOURCES: tuple[Any, ...] = (Merged, Projected, Int8Projected)
WIDE_SOURCES: tuple[Any, ...] = (*SOURCES, MergedWide)
HALVES: tuple[Any, ...] = (*SOURCES, MergedUpFirst)
BOUNDS: tuple[Any, ...] = (Unbounded, Clipped, Shifted)
GELUS: tuple[Any, ...] = (GeluGate, WrittenGeluGate)


def activated(p: Any, bounds: Any, terms: tuple[Any, Any], like: Any) -> Any:
    """Build the term of the activated gate times the other factor, the pair `terms`, by the functions of `bounds`.

    The activated gate may be cast to the dtype of `like` before the product.
    """
    gate, up = terms
    return p.maybe_cast(bounds.gated(p, gate), to=like) * bounds.linear(p, up)
