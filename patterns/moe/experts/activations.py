"""The facet of what experts compute between their products, beside a gated silu: gated gelu, or no gate at all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, attribute


@dataclass(frozen=True)
class Relu(Group):
    """The larger of each number and 0."""

    def activated(self, p, x):
        """The term."""
        return p.op("relu", x)

    def refuse(self, interleaved: bool) -> None:
        """There are no lanes to interleave."""

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """One operator."""
        return F.relu(x)


@dataclass(frozen=True)
class Silu(Relu):
    """x · sigmoid(x)."""

    def activated(self, p, x):
        """The term."""
        return p.silu(x)

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """One operator."""
        return F.silu(x)


@dataclass(frozen=True)
class Gelu(Relu):
    """x · Φ(x), as the model calls it."""

    approximate: Any = attribute()

    def activated(self, p, x):
        """The term."""
        return p.gelu(x, self.approximate)

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """The same call."""
        return F.gelu(x, approximate=self.approximate)


def halves(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up of rows that hold both."""
    gate, up = x.unflatten(-1, (-1, 2)).unbind(-1) if interleaved else x.chunk(2, dim=-1)
    return gate, up


@dataclass(frozen=True)
class GatedGelu(Gelu):
    """gelu(a) · b."""

    def gated(self, p, gate):
        """What is activated."""
        return self.activated(p, gate)

    def linear(self, p, up):
        """The other factor."""
        return up

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """Two operators, of views."""
        gate, up = halves(x, interleaved)
        return F.gelu(gate, approximate=self.approximate) * up


def computed(x: Tensor, approximate: str) -> Tensor:
    """x · Φ(x): gelu of torch is that of tanh on an NPU, and not every chip has an operator for that of erf."""
    if approximate == "tanh":
        return F.gelu(x, approximate="tanh")
    wide = x.float()
    return (0.5 * wide * (1 + torch.erf(wide * math.sqrt(0.5)))).to(x.dtype)


@dataclass(frozen=True)
class WrittenGelu(Gelu):
    """x · Φ(x), written out."""

    def activated(self, p, x):
        """The term."""
        return p.written_gelu(x=x, approximate=self.approximate)

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """One operator, or as it is written."""
        return computed(x, self.approximate)


@dataclass(frozen=True)
class WrittenGatedGelu(WrittenGelu, GatedGelu):
    """The same times b."""

    def run(self, x: Tensor, interleaved: bool) -> Tensor:
        """The same of a view."""
        gate, up = halves(x, interleaved)
        return computed(gate, self.approximate) * up


ACTIVATIONS: tuple[Any, ...] = (Relu, Silu, Gelu, WrittenGelu)
GATED: tuple[Any, ...] = (GatedGelu, WrittenGatedGelu)
