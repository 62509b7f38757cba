"""y = a · sigmoid(alpha · a) · (b + bias), a ≤ limit, |b| ≤ limit, of two projections a and b  (MiniMax-M3, 2025).

*Matches* what `clipped_swiglu` matches of halves, over gate and up projections of one input whose weights are
Parameters. *Replaces with* one matmul of the joined weights, prepared once, and `npu_clipped_swiglu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, lowering, pattern, scalar, tensor, variants
from patterns.linear.clipped_swiglu import Clipped
from patterns.linear.swiglu_projections import Gate, Up, joined


@dataclass(frozen=True)
class ClippedSwigluProjections(Rule):
    """The gated activation, with bounds, of separate gate and up projections."""

    def reference(self, x: Tensor, gate: Tensor, up: Tensor, alpha: float, limit: float, bias: float) -> Tensor:
        """The meaning: x [*B, K], gate and up [H, K]."""
        a, b = F.linear(x, gate).clamp(max=limit), F.linear(x, up).clamp(-limit, limit)
        return a * torch.sigmoid(alpha * a) * (b + bias)

    @pattern
    @variants(shifted=(True, False))
    def written(
        self, p, x=tensor("*B K"), gate: Any = Gate, up: Any = Up, clipped: Any = Clipped, bias=scalar(), shifted=None
    ):
        """Two projections; something may be added to up."""
        linear = clipped.linear(p, up.term(p, x))
        activated = p.maybe_cast(clipped.gated(p, gate.term(p, x)), to=x)
        return p.as_dtype(activated * (p.shift(linear, bias) if shifted else linear), like=x)

    def guard(self, gate: Gate, up: Up, clipped: Clipped):
        """Bounds that the operator has; joining is free only where it is done once."""
        clipped.refuse()
        gate.refuse_beside(up)

    @lowering
    def npu(self, x: Tensor, gate: Gate, up: Up, clipped: Clipped, bias: float | None):
        """One matmul, one operator."""
        return torch.ops.npu.npu_clipped_swiglu(
            joined(x, gate, up), dim=-1, alpha=clipped.alpha, limit=clipped.limit, bias=bias or 0.0, interleaved=False
        )
