"""y = x · Φ(x), written out: x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))) or x / 2 · (1 + erf(x / √2)).

*Matches* both formulas in primitive operators, in any order and with x³ as a power or as products, in the dtype of x or
in float32 and cast (GPT-2, GPT-J, "gelu_new"). *Replaces with* gelu of torch, which on an NPU is always the one with
tanh, or with `npu_gelu`, which computes erf: each rounds once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor


@dataclass(frozen=True)
class Gelu(Rule):
    """The Gaussian error linear unit, written out."""

    def reference(self, x: Tensor) -> Tensor:
        """Compute gelu of `x` [*B, D] by tanh."""
        return F.gelu(x, approximate="tanh")

    @pattern
    def written(self, p, x=tensor("*B D"), approximate=attribute()):
        """x / 2 · (1 + tanh(√(2/π) · (x + 0.044715 · x³))), or x / 2 · (1 + erf(x / √2))"""
        return p.as_dtype(p.written_gelu(x=x, approximate=approximate), like=x)

    @lowering
    def gelu(self, x: Tensor, approximate: str):
        """Emit torch's gelu if `approximate` is "tanh", else npu_gelu, which computes erf."""
        return F.gelu(x, approximate="tanh") if approximate == "tanh" else torch.ops.npu.npu_gelu(x)
