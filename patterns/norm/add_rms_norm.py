"""s = a + b; y = rms_norm(s) · gamma: the residual add and the norm that follows, both results kept.

*Matches* the sum in the tensors' own dtype, or in float32 with the norm on the unrounded sum, the gain γ, 1 + weight or
none. *Replaces with* `npu_add_rms_norm`, which returns the norm and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, require, scalar, tensor
from patterns.norm.gain import GAIN, Gain
from patterns.norm.rms_norm import RMSNorm

f32 = torch.float32


@dataclass(frozen=True)
class AddRMSNorm(Rule):
    """Residual add and RMS norm in one."""

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The meaning: a and b [*B, D], gamma [D]; returns (norm, sum)."""
        s = a + b
        return RMSNorm().reference(s, gamma, eps), s

    @pattern
    def rounded_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=GAIN, weight=GAIN, eps=scalar()):
        """The norm of the sum as the next layer reads it."""
        s = a + b
        return p.rms_norm(x=s, gamma=gamma, weight=weight, eps=eps), s

    @pattern
    def float32_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=GAIN, weight=GAIN, eps=scalar()):
        """The norm of the sum in float32, before it is rounded for the next layer."""
        s = p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32)
        return p.as_dtype(p.rms_norm(x=s, gamma=gamma, weight=weight, eps=eps), like=a), p.as_dtype(s, like=a)

    @pattern
    def float32_sum_rounded_norm(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """The same with the norm rounded before the weight."""
        s = p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32)
        unit = s * p.rsqrt(p.mean(p.square(s)) + eps)
        y = p.maybe_cast(unit, to=a) * p.maybe_cast(gamma, to=f32)
        return p.as_dtype(y, like=a), p.as_dtype(s, like=a)

    @pattern
    def float32_sum_unused(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=GAIN, weight=GAIN, eps=scalar()):
        """The same where nothing else reads the sum."""
        s = p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32)
        return p.as_dtype(p.rms_norm(x=s, gamma=gamma, weight=weight, eps=eps), like=a)

    @lookalike("one addend is broadcast or scaled: the operator adds two tensors of the same shape, as they are")
    def other_sum(self, p, a=tensor("*A"), b=tensor("*C"), gamma=GAIN, weight=GAIN, eps=scalar()):
        """Norm of any other sum."""
        return p.rms_norm(x=a + b, gamma=gamma, weight=weight, eps=eps)

    def remark(self, a: Any, gamma: Any, weight: Any) -> str:
        """What the dtype of the gain means."""
        return Gain(gamma, weight).remark(a, "npu_add_rms_norm")

    @lowering
    def npu(self, a: Tensor, b: Tensor, gamma: Tensor | None, weight: Tensor | None, eps: float):
        """One operator, which takes the gain in the dtype of the addends."""
        require(a.dtype == b.dtype, "the addends have different dtypes")
        y, _, s = torch.ops.npu.npu_add_rms_norm(a, b, Gain(gamma, weight).like(a), eps)
        return y, s
