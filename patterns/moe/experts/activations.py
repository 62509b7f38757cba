"""The facet of the activation between the two products of an expert, other than the gated silu of `linear.gates`.

GATED          gelu(gate) · up, which adds to `BOUNDS` of `linear.gates`
ACTIVATIONS    relu, silu or gelu of one product, without a gate
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, attribute
from patterns.linear.gates import GeluGate


@dataclass(frozen=True)
class Relu(Group):
    """max(x, 0)."""

    def activated(self, p, x):
        """Build the term of relu(`x`)."""
        return p.op("relu", x)

    def refuse(self, interleaved: bool) -> None:
        """Accept gate and up in any order, `interleaved` or not: `halves` splits both, and without a gate there is
        none.
        """

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute relu(`x`); `source`, which knows the order of gate and up in `x`, has no effect without a gate."""
        return F.relu(x)


@dataclass(frozen=True)
class Silu(Relu):
    """x · sigmoid(x)."""

    def activated(self, p, x):
        """Build the term of silu(`x`)."""
        return p.silu(x)

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute silu(`x`)."""
        return F.silu(x)


@dataclass(frozen=True)
class Gelu(Relu):
    """gelu(x) as one call in the model; `approximate` is "none" or "tanh"."""

    approximate: Any = attribute()

    def activated(self, p, x):
        """Build the term of gelu(`x`)."""
        return p.gelu(x, self.approximate)

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute gelu(`x`) by F.gelu."""
        return F.gelu(x, approximate=self.approximate)


def halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Split `x` [R, 2 · I] into gate and up [R, I]: even and odd lanes if `interleaved`, otherwise the two halves."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return gate, up


@dataclass(frozen=True)
class GatedGelu(Gelu):
    """gelu(gate) · up, the gelu as one call in the model."""

    def gated(self, p, gate):
        """Build the term of the activated gate."""
        return self.activated(p, gate)

    def linear(self, p, up):
        """Return the term `up`, which is multiplied by the activated gate, unchanged."""
        return up

    def as_operator(self) -> GeluGate:
        """Return the gate of the same gelu whose `run` emits npu_geglu."""
        return GeluGate(approximate=self.approximate)

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute gelu(gate) · up by F.gelu, of the `halves` of `x` [R, 2 · I], which `source` may interleave."""
        gate, up = halves(x, source.interleaved)
        return F.gelu(gate, approximate=self.approximate) * up


def written_gelu(x: Tensor, approximate: str) -> Tensor:
    """Compute gelu(`x`) from erf in float32, or by F.gelu where `approximate` is "tanh"."""
    # F.gelu computes the tanh form on an NPU whatever `approximate` is, and not every chip has an erf form of gelu
    if approximate == "tanh":
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


@dataclass(frozen=True)
class WrittenGelu(Gelu):
    """gelu(x) = x · Φ(x) written out in the model by erf or tanh; `approximate` is "none" or "tanh"."""

    def activated(self, p, x):
        """Build the term of the written gelu(`x`)."""
        return p.written_gelu(x=x, approximate=self.approximate)

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute `written_gelu` of `x`."""
        return written_gelu(x, self.approximate)


@dataclass(frozen=True)
class WrittenGatedGelu(WrittenGelu, GatedGelu):
    """gelu(gate) · up, the gelu written out in the model by erf or tanh."""

    def run(self, x: Tensor, source: Any) -> Tensor:
        """Compute `written_gelu`(gate) · up of the `halves` of `x` [R, 2 · I], which `source` may interleave."""
        gate, up = halves(x, source.interleaved)
        return written_gelu(gate, self.approximate) * up


ACTIVATIONS: tuple[Any, ...] = (Relu, Silu, Gelu, WrittenGelu)
GATED: tuple[Any, ...] = (GatedGelu, WrittenGatedGelu)
