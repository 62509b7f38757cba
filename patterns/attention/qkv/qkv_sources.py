"""Where queries, keys and values of grouped heads come from, and all of them as one tensor.

    one projection      lanes of one tensor
    projections         three layers of one input
    anywhere            each a tensor of its own

A source gives the heads of queries and of keys, and values as they are written, as terms (`heads`), what has the dtype
of the model (`like`), what speaks against it (`guard`), all of them as [T, W] (`joined`), and the shape that queries
have as heads of tokens (`of_queries`).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.linear.joined_projections import Layers


@dataclass(frozen=True)
class OneProjection(Group):
    """Lanes of one tensor [.., W], those of all heads of queries first, then of keys, then of values."""

    qkv: Any = tensor("*B W")
    keys: Any = attribute()
    values: Any = attribute()
    end: Any = attribute()

    def heads(self, p):
        """Lanes of the heads of each, values as they are written."""
        bounds = (0, self.keys, self.values, self.end)
        return [p.reshaped(p.lanes(self.qkv, *each)) for each in pairwise(bounds)]

    def like(self):
        """What has the dtype of the model."""
        return self.qkv

    def guard(self) -> None:
        """Refuse a projection that gives other lanes as well."""
        require(self.end == self.qkv.shape[-1], "queries, keys and values do not make up one projection")

    def joined(self, tokens: int) -> Tensor:
        """All of them, [T, W]."""
        return self.qkv.reshape(tokens, -1)

    def of_queries(self, width: int) -> tuple[int, ...]:
        """[.., N, D] of heads of `width` lanes."""
        return (*self.qkv.shape[:-1], self.keys // width, width)


@dataclass(frozen=True)
class Projections(Group):
    """Three linear layers of one input, whose weights are joined once."""

    x: Any = tensor("*B K")
    layers: Any = Layers

    def heads(self, p):
        """What each layer gives, values as they are written."""
        how = dict(x=self.x, is_parameter_only=self.layers.is_parameter_only)
        three = list(zip(self.layers.weights(), self.layers.biases(), strict=True))[:3]
        return [p.reshaped(p.linear(weight=weight, bias=bias, **how)) for weight, bias in three]

    def like(self):
        """What has the dtype of the model."""
        return self.x

    def guard(self) -> None:
        """Refuse weights that would be joined at every call, and biases of some layers alone."""
        self.layers.refuse()
        require(len(self.layers.biases()) in (0, 3), "some of the projections have a bias, others have none")

    def joined(self, tokens: int) -> Tensor:
        """All of them, [T, W]."""
        return self.layers.joined(self.x).reshape(tokens, -1)

    def of_queries(self, width: int) -> tuple[int, ...]:
        """[.., N, D] of heads of `width` lanes."""
        return (*self.x.shape[:-1], self.layers.first.shape[0] // width, width)


@dataclass(frozen=True)
class Anywhere(Group):
    """Queries and keys from anywhere, [B, S, N, D] or [T, N, D], and values with the same lanes."""

    q: Any = tensor("*B Nq D")
    k: Any = tensor("*B Nk D")
    v: Any = tensor("*Lines")
    differing: ClassVar[tuple[str, ...]] = ("q", "k")

    def heads(self, p):
        """Heads of queries and of keys, and values as they are written."""
        return [self.q, self.k, self.v]

    def like(self):
        """What has the dtype of the model."""
        return self.q

    def guard(self) -> None:
        """Nothing speaks against them."""

    def joined(self, tokens: int) -> Tensor:
        """All of them, [T, W], which is a copy."""
        return torch.cat([each.reshape(tokens, -1) for each in (self.q, self.k, self.v)], dim=-1)

    def of_queries(self, width: int) -> tuple[int, ...]:
        """The shape of queries."""
        return tuple(self.q.shape)


SOURCES = (OneProjection, Projections, Anywhere)
