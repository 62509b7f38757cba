"""q, s = quantised(silu(a) · b): the gated activation as the next layer in W8A8 reads it, each row with its own scale.

*Matches* a gated silu, as `swiglu` has it, and the quantisation of its rows where nothing else reads them. *Replaces
with* `npu_swiglu_quant`, which quantises what was activated before it would be rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, variants
from patterns.linear.gates import SOURCES, Unbounded, activated
from patterns.linear.swiglu import Swiglu
from patterns.quant.dynamic_quant import DynamicQuant, quantised_rows


@dataclass(frozen=True)
class SwigluQuant(Rule):
    """The gated activation of gate and up, in int8."""

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning: x [*B, 2·H]; returns whole numbers [*B, H] and scales [*B, 1]."""
        return DynamicQuant().reference(Swiglu().reference(x))

    @pattern
    @variants(source=SOURCES)
    def quantised(self, p, source, bounds: Any = Unbounded, dtype=attribute()):
        """Whole numbers and their scale."""
        return quantised_rows(
            p, p.as_dtype(activated(p, bounds, source.terms(p), source.like), like=source.like), dtype
        )

    def guard(self, source: Any, bounds: Unbounded):
        """What the operator takes, and when joining is free."""
        bounds.refuse(source.interleaved)
        source.refuse()

    @lowering
    def npu(self, source: Any, dtype: torch.dtype):
        """One operator, behind one matmul where projections are joined; a scale in 16 bits is cast."""
        whole, scale = torch.ops.npu.npu_swiglu_quant(source.joined(), activate_left=True, quant_mode=1)
        return whole, scale.unsqueeze(-1).to(dtype)
