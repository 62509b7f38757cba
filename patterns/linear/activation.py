"""y = act(a), or act(a) · b: the activation between the matmuls of a feed-forward layer, with a gate or without.

*Matches* silu of a gate times the other factor, with bounds or without, quantised afterwards or not
(`GatedActivation`); gelu that is written out (`WrittenGelu`). *Replaces with* `npu_swiglu`, `npu_clipped_swiglu` or
`npu_swiglu_quant`; with gelu of torch or `npu_gelu`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from patterns.linear.gelu import Ungated, WrittenGelu
from patterns.linear.swiglu import GatedActivation


@dataclass(frozen=True)
class Activation(GatedActivation, WrittenGelu):
    """The activation of a feed-forward layer."""

    aliases = (
        "swiglu",
        "geglu",
        "gelu",
        "silu_and_mul",
        "gated_activation",
        "written_gelu",
        "clipped_swiglu",
        "swiglu_quant",
        "swiglu_projections",
    )

    def reference(self, x: Tensor) -> Tensor:
        """Compute silu(a) · b of the halves of `x` [*B, 2·H]; without a gate, `WrittenGelu` has the reference."""
        return GatedActivation.reference(self, x)

    def guard(self, source: Any, bounds: Any, result: Any):
        """Refuse gated activations that the operator cannot compute; accept any gelu."""
        if not isinstance(result, Ungated):
            GatedActivation.guard(self, source, bounds)
