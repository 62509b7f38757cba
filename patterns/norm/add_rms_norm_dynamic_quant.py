"""s = a + b, n = rms_norm(s) · γ, in whole numbers of 8 bits with a scale of each token: what a quantised layer reads.

*Matches* the residual add, the norm and the quantisation of its rows where nothing else reads the norm. *Replaces with*
`npu_add_rms_norm_dynamic_quant`, which quantises the norm before it would be rounded to 16 bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.norm.add_rms_norm import AddRMSNorm
from patterns.quant.dynamic_quant import DynamicQuant, quantised_rows

f32 = torch.float32


@dataclass(frozen=True)
class AddRMSNormDynamicQuant(Rule):
    """Residual add, RMS norm and quantisation in one."""

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The meaning: a and b [*B, D], gamma [D]; returns whole numbers [*B, D], scales [*B, 1], and the sum."""
        norm, s = AddRMSNorm().reference(a, b, gamma, eps)
        return *DynamicQuant().reference(norm), s

    @pattern
    def rounded_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=tensor("D"), eps=scalar(), dtype=attribute()):
        """The norm of the sum as the next layer reads it."""
        s = a + b
        return *quantised_rows(p, p.rms_norm(x=s, gamma=gamma, eps=eps), dtype), s

    @pattern
    def float32_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=tensor("D"), eps=scalar(), dtype=attribute()):
        """The norm of the sum in float32, before it is rounded for the next layer."""
        s = p.as_dtype(p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32), like=a)
        return *quantised_rows(p, p.add_rms_norm(a=a, b=b, gamma=gamma, eps=eps), dtype), s

    @lowering
    def npu(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float, dtype: torch.dtype):
        """One operator; a scale in 16 bits is cast."""
        require(a.dtype == b.dtype, "the addends of the norm have different dtypes")
        y, _, s, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
            a, b, gamma.to(a.dtype), epsilon=eps, output_mask=[True, False]
        )
        return y, scale.unsqueeze(-1).to(dtype), s
