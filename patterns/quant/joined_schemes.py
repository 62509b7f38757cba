"""The same layers, of which both that read x are one: lanes of the queries' latent, and those of a token's row.

[.., c, .., k, k_r, ..] = x W_D        as serving code joins W_DQ and W_DKV
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from fusion import Group, attribute, tensor
from patterns.quant.schemes import FloatLayers, Int8Layers, Int8QueryLayer, int8_layer


@dataclass(frozen=True)
class Joined(Group):
    """W_D, and the lanes that are the latent of the queries."""

    joined: Any = tensor("Nj He")
    low_begin: Any = attribute()
    low_end: Any = attribute()

    def low_and_both(self, p, joined):
        """The latent of the queries, and what holds the row."""
        return p.lanes(p.reshaped(joined), self.low_begin, self.low_end), joined

    def guard_row(self, row: Any) -> None:
        """A row may lie anywhere among its lanes."""

    def apart(self, row: Any) -> Self:
        """The same with a layer of its own for each."""
        return replace(self, dq=self.joined[self.low_begin : self.low_end], dkv=self.joined[row.begin : row.end])


@dataclass(frozen=True)
class JoinedFloatLayers(Joined, FloatLayers):
    """All in floats."""

    def down(self, p, x):
        """Both products of x."""
        joined = p.linear(x=x, weight=self.joined, is_parameter_only=self.is_parameter_only)
        return self.low_and_both(p, joined)


@dataclass(frozen=True)
class JoinedInt8QueryLayer(JoinedFloatLayers, Int8QueryLayer):
    """W_UQ alone in W8A8."""


@dataclass(frozen=True)
class JoinedInt8Layers(Joined, Int8Layers):
    """All in W8A8."""

    joined_scale: Any = tensor("Nj")

    def down(self, p, x):
        """Both products of x."""
        return self.low_and_both(p, int8_layer(p, x, self, "joined", tokens=p.reshaped(self.tokens)))

    def apart(self, row: Any) -> Self:
        """The same with a layer of its own for each, and its scales."""
        low, kept = (
            self.joined_scale[begin:end] for begin, end in ((self.low_begin, self.low_end), (row.begin, row.end))
        )
        return replace(super().apart(row), dq_scale=low, dkv_scale=kept)


JOINED = (JoinedFloatLayers, JoinedInt8QueryLayer, JoinedInt8Layers)
