"""y = act(a), or act(a) · b: what stands between the matmuls of a feed-forward layer, with a gate or without.

*Matches* silu of a gate times the other factor, with bounds or without, quantised behind it or not (`GatedActivation`);
gelu that is written out (`WrittenGelu`). *Replaces with* `npu_swiglu`, `npu_clipped_swiglu` or `npu_swiglu_quant`; with
gelu of torch or `npu_gelu`.
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
        """The meaning with a gate, without bounds: x [*B, 2·H]; without one that of `WrittenGelu`."""
        return GatedActivation.reference(self, x)

    def guard(self, source: Any, bounds: Any, result: Any):
        """What the operator takes, and when joining is free; of gelu any will do."""
        if not isinstance(result, Ungated):
            GatedActivation.guard(self, source, bounds)
