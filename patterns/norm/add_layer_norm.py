"""s = a + b; y = layer_norm(s) · gamma + beta: the residual add and the norm that follows, both results kept.

*Matches* the sum in the tensors' own dtype, or in float32 with the norm on the unrounded sum. *Replaces with*
`npu_add_layer_norm`, which returns the norm and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, require, scalar, tensor
from patterns.norm.gain import unit_gain
from patterns.norm.layer_norm import LayerNorm

f32 = torch.float32
LINE = tensor("D", optional=True)


@dataclass(frozen=True)
class AddLayerNorm(Rule):
    """Residual add and layer norm in one."""

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The meaning: a and b [*B, D], gamma and beta [D]; returns (norm, sum)."""
        s = a + b
        return LayerNorm().reference(s, gamma, beta, eps), s

    @pattern
    def rounded_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=LINE, beta=LINE, eps=scalar()):
        """The norm of the sum as the next layer reads it."""
        s = a + b
        return p.layer_norm(x=s, gamma=gamma, beta=beta, eps=eps), s

    @pattern
    def float32_sum(self, p, a=tensor("*B D"), b=tensor("*B D"), gamma=LINE, beta=LINE, eps=scalar()):
        """The norm of the sum in float32, before it is rounded for the next layer."""
        s = p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32)
        return p.as_dtype(p.layer_norm(x=s, gamma=gamma, beta=beta, eps=eps), like=a), p.as_dtype(s, like=a)

    @lookalike("one addend is broadcast or scaled: the operator adds two tensors of the same shape, as they are")
    def other_sum(self, p, a=tensor("*A"), b=tensor("*C"), gamma=LINE, beta=LINE, eps=scalar()):
        """Norm of any other sum."""
        return p.layer_norm(x=a + b, gamma=gamma, beta=beta, eps=eps)

    @lowering
    def npu(self, a: Tensor, b: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float):
        """One operator; weight and bias in the dtype of the addends, or in float32 alike."""
        require(a.dtype == b.dtype, "the addends of the norm have different dtypes")
        lines = unit_gain(a) if gamma is None else gamma, torch.zeros_like(unit_gain(a)) if beta is None else beta
        kept = a.dtype if {each.dtype for each in lines} == {a.dtype} else f32
        y, _, _, s = torch.ops.npu.npu_add_layer_norm(a, b, *(each.to(kept) for each in lines), eps, True)
        return y, s
