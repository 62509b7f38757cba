"""In which encoding a result is read: as it is, or in int8 by a scale of each token.

A facet of rules whose operator quantises what it computes before that would be rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Group, attribute
from patterns.quant.quantisation import quantised_rows, rounded_scale


@dataclass(frozen=True)
class Plain(Group):
    """As it is."""

    def terms(self, p, y):
        """The result."""
        return y


@dataclass(frozen=True)
class TokenScales(Group):
    """In int8, each token by a scale of its own, which is kept in this dtype."""

    dtype: Any = attribute()

    def terms(self, p, y):
        """Whole numbers [*B, D] and their scales [*B, 1]."""
        return quantised_rows(p, y, self.dtype)

    def restored(self, scale: Tensor) -> Tensor:
        """Return the scales [*B, 1] of the model, of those in float32 [*B] that the operator gives."""
        return rounded_scale(scale.unsqueeze(-1), self.dtype)
