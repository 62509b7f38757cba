"""Sources of queries, keys and values of grouped heads, and their concatenation.

    one projection      lanes of one tensor
    projections         three layers of one input
    anywhere            each a tensor of its own

A source matches the heads of queries and keys, and values as they are stored (`heads`); it gives a tensor in the dtype
of the model (`like`), refuses what the operator cannot take (`guard`), concatenates all to [T, W] (`joined`), and gives
the shape of queries by heads (`query_shape`).
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
    """Lanes of one tensor [.., W]: all heads of queries, then of keys, then of values.

    Attributes:
        qkv: the tensor.
        keys: the first lane of keys.
        values: the first lane of values.
        end: the end of the lanes of values.
    """

    qkv: Any = tensor("*B W")
    keys: Any = attribute()
    values: Any = attribute()
    end: Any = attribute()

    def heads(self, p):
        """Build the terms of the lanes of queries, keys and values, each with its own shape."""
        bounds = (0, self.keys, self.values, self.end)
        return [p.reshaped(p.lanes(self.qkv, *each)) for each in pairwise(bounds)]

    def like(self):
        """Return a tensor in the dtype of the model."""
        return self.qkv

    def guard(self) -> None:
        """Refuse a projection with other lanes than queries, keys and values."""
        require(
            self.end == self.qkv.shape[-1],
            "queries, keys, values: they are not all the lanes of one projection; npu_qkv_rms_norm_rope_cache "
            "requires q, k and v of one input, joined in this order",
        )

    def joined(self, tokens: int) -> Tensor:
        """Return queries, keys and values of the T = `tokens` tokens as [T, W]."""
        return self.qkv.reshape(tokens, -1)

    def query_shape(self, width: int) -> tuple[int, ...]:
        """Return the shape [.., N, D] of queries with heads of `width` lanes."""
        return (*self.qkv.shape[:-1], self.keys // width, width)


@dataclass(frozen=True)
class Projections(Group):
    """Three linear layers `layers` of one input `x`, for queries, keys and values, whose weights are
    concatenated once.
    """

    x: Any = tensor("*B K")
    layers: Any = Layers

    def heads(self, p):
        """Build the terms of the results of the layers, each with its own shape."""
        how = dict(x=self.x, is_parameter_only=self.layers.is_parameter_only)
        three = list(zip(self.layers.weights(), self.layers.biases(), strict=True))[:3]
        return [p.reshaped(p.linear(weight=weight, bias=bias, **how)) for weight, bias in three]

    def like(self):
        """Return a tensor in the dtype of the model."""
        return self.x

    def guard(self) -> None:
        """Refuse weights that would be concatenated at every call, and biases of some layers only."""
        self.layers.refuse()
        require(
            len(self.layers.biases()) in (0, 3),
            "projections: some have a bias, others none; one matmul of all requires a bias of each; give the "
            "others a bias of zeros",
        )

    def joined(self, tokens: int) -> Tensor:
        """Emit one matmul for queries, keys and values of the T = `tokens` tokens as [T, W]."""
        return self.layers.joined(self.x).reshape(tokens, -1)

    def query_shape(self, width: int) -> tuple[int, ...]:
        """Return the shape [.., N, D] of queries with heads of `width` lanes."""
        return (*self.x.shape[:-1], self.layers.first.shape[0] // width, width)


@dataclass(frozen=True)
class Anywhere(Group):
    """Queries `q` and keys `k` [B, S, N, D] or [T, N, D] from any source, and values `v` with the same lanes."""

    q: Any = tensor("*B Nq D")
    k: Any = tensor("*B Nk D")
    v: Any = tensor("*Lines")
    differing: ClassVar[tuple[str, ...]] = ("q", "k")

    def heads(self, p):
        """Return queries, keys and values as they are."""
        return [self.q, self.k, self.v]

    def like(self):
        """Return a tensor in the dtype of the model."""
        return self.q

    def guard(self) -> None:
        """Accept any queries, keys and values."""

    def joined(self, tokens: int) -> Tensor:
        """Concatenate queries, keys and values of the T = `tokens` tokens to [T, W], which copies them."""
        return torch.cat([each.reshape(tokens, -1) for each in (self.q, self.k, self.v)], dim=-1)

    def query_shape(self, width: int) -> tuple[int, ...]:
        """Return the shape of queries, whose heads are a dim already."""
        return tuple(self.q.shape)


SOURCES = (OneProjection, Projections, Anywhere)
