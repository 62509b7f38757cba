"""y = x · Φ(x), written out: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) or x / 2 · (1 + erf(x / √2)).

Or the like of it by a sigmoid, y = x · sigmoid(1.702 · x)  (Hendrycks and Gimpel, 2016).

*Matches* these formulas in primitive operators, in any order and with x³ as a power or as products, in the dtype of x
or in float32 and cast (GPT-2, GPT-J, "gelu_new", CLIP's "quick_gelu"). *Replaces with* gelu of torch, which on an NPU
is always the one with tanh, with `npu_gelu`, which computes erf, or with `npu_fast_gelu`: each rounds once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor

f32 = torch.float32
SLOPE = 1.702
"""The factor of x in the sigmoid of npu_fast_gelu."""


@dataclass(frozen=True)
class Gelu(Rule):
    """The Gaussian error linear unit, written out or by a sigmoid."""

    aliases = ("quick_gelu", "fast_gelu")

    def reference(self, x: Tensor) -> Tensor:
        """Compute gelu of `x` [*B, D] by tanh."""
        return F.gelu(x, approximate="tanh")

    @pattern
    def written(self, p, x=tensor("*B D"), approximate=attribute()):
        """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), or x / 2 · (1 + erf(x / √2))"""
        return p.as_dtype(p.written_gelu(x=x, approximate=approximate), like=x)

    @pattern
    def by_sigmoid(self, p, x=tensor("*B D"), slope=scalar()):
        """x · sigmoid(slope · x)"""
        wide = p.maybe_cast(x, to=f32)
        return p.as_dtype(wide * p.sigmoid(p.scale(wide, slope)), like=x)

    def guard(self, slope: float | None):
        """Refuse another `slope` of the sigmoid than that of npu_fast_gelu."""
        require(
            slope is None or math.isclose(slope, SLOPE, rel_tol=1e-6),
            "slope: x is multiplied by {slope} in the sigmoid; npu_fast_gelu requires {meant}; nothing to change",
            slope=slope,
            meant=SLOPE,
        )

    @lowering
    def gelu(self, x: Tensor, approximate: str | None):
        """Emit torch's gelu if `approximate` is "tanh", npu_gelu if it is "none", and npu_fast_gelu without it."""
        if approximate is None:
            return torch.ops.npu.npu_fast_gelu(x)
        return F.gelu(x, approximate="tanh") if approximate == "tanh" else torch.ops.npu.npu_gelu(x)
