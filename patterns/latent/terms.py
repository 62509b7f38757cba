"""Terms that rules about the rows of a latent share: rotated lanes, and one row of both caches.

    [k, k_r] = x W_DKV      latent = s norm(k)      key_rope = rope(k_r)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion import Group, attribute, scalar, tensor


@dataclass(frozen=True)
class Tables(Group):
    """cos and sin of every token, which queries and keys are rotated by."""

    cos: Any = tensor("T U Dr")
    sin: Any = tensor("T U Dr")


@dataclass(frozen=True)
class LatentRow(Group):
    """The row of a token: lanes up to `split` are its latent, those from there to `end` its rotated key."""

    gamma: Any = tensor("Hckv")
    eps: Any = scalar()
    factor: Any = scalar()
    split: Any = attribute()
    end: Any = attribute()
    dtype: Any = attribute()

    def terms(self, p, both, tables, like):
        """The latent, which may be multiplied by a number, and the rotated key; `both` projects x to them."""
        latent, turning = (p.lanes(p.reshaped(both), *of) for of in ((0, self.split), (self.split, self.end)))
        norm = p.rms_norm(x=latent, gamma=self.gamma, eps=self.eps)
        return p.maybe_scaled(norm, self.factor), rotated_lanes(p, turning, tables.cos, tables.sin, self.dtype, like)

    @property
    def widths(self) -> tuple[Any, Any]:
        """Lanes of the latent, and of the rotated key."""
        return self.split, self.end - self.split


def rotated_lanes(p, x, cos, sin, dtype, like, heads_first=None, factor=1.0, source="interleaved"):
    """Computed in float32, as by the operators, or in the dtype of the model."""
    tables = (p.per_token(p.maybe_cast(each, to=torch.float32), x, heads_first) for each in (cos, sin))
    cos, sin = (each if factor == 1 else p.maybe_scaled(each, factor) for each in tables)
    wide = p.maybe_cast(x, to=torch.float32)
    return p.as_dtype(p.rotation(x=wide, cos=cos, sin=sin, source=source, result="half", dtype=dtype), like)
