"""Schemes whose layers W_DQ and W_DKV are one: [.., c, .., k, k_r, ..] = x W_D, as serving code joins them.

c is the latent of the queries; k and k_r are the row of a token, its latent and its key before rotation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Self

from fusion import Group, attribute, tensor
from patterns.latent.prolog.layers import FloatLayers, Int8Layers, Int8QueryLayer, int8_layer


@dataclass(frozen=True)
class Joined(Group):
    """Base of schemes with one layer W_D, `joined`: lanes low_begin:low_end of its product are the latent of the
    queries.
    """

    joined: Any = tensor("Nj He")
    low_begin: Any = attribute()
    low_end: Any = attribute()

    def latent_and_joined(self, p, joined):
        """Return the terms of the queries' latent, and of the joined product, of which others read the row."""
        return p.lanes(p.reshaped(joined), self.low_begin, self.low_end), joined

    def guard_row(self, row: Any) -> None:
        """Accept a `row` at any lanes of the joined product: each scheme here reads it from there."""

    def as_two_layers(self, row: Any) -> Self:
        """Return the scheme with slices of W_D as W_DQ and W_DKV; `row` are the lanes of a token's row."""
        return replace(self, dq=self.joined[self.low_begin : self.low_end], dkv=self.joined[row.begin : row.end])


@dataclass(frozen=True)
class JoinedFloatLayers(Joined, FloatLayers):
    """W_D and W_UQ in floats."""

    def down(self, p, x):
        """Build the terms of the queries' latent, lanes low_begin:low_end of x W_D, and of the whole product x W_D.

        W_D, `joined`, holds W_DQ and W_DKV in one weight.
        """
        joined = p.linear(x=x, weight=self.joined, is_parameter_only=self.is_parameter_only)
        return self.latent_and_joined(p, joined)


@dataclass(frozen=True)
class JoinedInt8QueryLayer(JoinedFloatLayers, Int8QueryLayer):
    """W_D in floats, W_UQ in W8A8."""


@dataclass(frozen=True)
class JoinedInt8Layers(Joined, Int8Layers):
    """W_D and W_UQ in W8A8."""

    joined_scale: Any = tensor("Nj")

    def down(self, p, x):
        """Build the terms of the queries' latent, lanes low_begin:low_end of x W_D, and of the whole product x W_D.

        W_D, `joined`, holds W_DQ and W_DKV in one weight.
        """
        return self.latent_and_joined(p, int8_layer(p, x, self, "joined", tokens=p.reshaped(self.tokens)))

    def as_two_layers(self, row: Any) -> Self:
        """Return the scheme with slices of W_D and of its scales as W_DQ and W_DKV; `row` are the lanes of a token's
        row.
        """
        low_scale, row_scale = (
            self.joined_scale[begin:end] for begin, end in ((self.low_begin, self.low_end), (row.begin, row.end))
        )
        return replace(super().as_two_layers(row), dq_scale=low_scale, dkv_scale=row_scale)


JOINED = (JoinedFloatLayers, JoinedInt8QueryLayer, JoinedInt8Layers)
