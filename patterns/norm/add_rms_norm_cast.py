"""s = a + b; y = rms_norm(s) · gamma, and y in float32 as well: what a router of experts reads beside the experts.

*Matches* the residual add, the norm in 16 bits, and its cast to float32. *Replaces with* `npu_add_rms_norm_cast`, which
widens the norm that it has rounded, as the model does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, scalar, tensor, variants
from patterns.norm.add_rms_norm import AddRMSNorm
from patterns.norm.norm_quant import SUMS, RoundedSum
from patterns.norm.rms_norm import unit_gain

f32 = torch.float32


@dataclass(frozen=True)
class AddRMSNormCast(Rule):
    """Residual add and RMS norm in one, with the norm in float32 beside it."""

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The meaning: a and b [*B, D], gamma [D]; returns the norm in float32, as it was rounded, and the sum."""
        norm, s = AddRMSNorm().reference(a, b, gamma, eps)
        return norm.to(f32), norm, s

    @pattern
    @variants(of=SUMS)
    def widened(self, p, of, gamma=tensor("D", optional=True), eps=scalar()):
        """The norm is read in both dtypes, in float32 perhaps with other dims."""
        norm, kept = of.terms(p, gamma, eps)
        return p.cast(p.reshaped(norm), to=f32), norm, *kept  # the norm is found in its cast

    @lowering
    def npu(self, of: RoundedSum, gamma: Tensor | None, eps: float):
        """One operator."""
        return _both(of, gamma, eps)

    @lowering
    def of_tokens(self, of: RoundedSum, gamma: Tensor | None, eps: float):
        """The same, and the tokens of all sequences in one dim [T, D], as a router reads them."""
        wide, y, s = _both(of, gamma, eps)
        return wide.flatten(0, -2), y, s


def _both(of: RoundedSum, gamma: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The norm in float32, as it was rounded, and the sum."""
    require(of.a.dtype == of.b.dtype, "the addends have different dtypes")
    gain = unit_gain(of.a) if gamma is None else gamma.to(of.a.dtype)
    wide, y, _, s = torch.ops.npu.npu_add_rms_norm_cast(of.a, of.b, gain, eps)
    return wide, y, s
