"""The facet of how the model encodes a result y [*B, D]: `Plain`, as floats, or `TokenScales`, in int8.

Rules have it whose operator can quantise its result in float32, before a rounding to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Group, attribute
from patterns.quant.quantisation import quantised_rows, rounded_scale


@dataclass(frozen=True)
class Plain(Group):
    """A result in floats, which is not quantised."""

    def terms(self, p, y):
        """Return the term `y` unchanged."""
        return y


@dataclass(frozen=True)
class TokenScales(Group):
    """A result in int8 [*B, D] with one scale per token [*B, 1] in `dtype`."""

    dtype: Any = attribute()

    def terms(self, p, y):
        """Build the terms of `y` quantised per token: int8 [*B, D] and scales [*B, 1]."""
        return quantised_rows(p, y, self.dtype)

    def restored(self, scale: Tensor) -> Tensor:
        """Reshape the operator's float32 scales `scale` [*B] to [*B, 1] and cast them to `dtype`; refuse float16."""
        return rounded_scale(scale.unsqueeze(-1), self.dtype)
