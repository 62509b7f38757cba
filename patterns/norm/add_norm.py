"""s = a + b; y = norm(s): the residual add and the RMS norm or layer norm that follows, both results returned.

*Matches* the sum in the tensors' own dtype, or in float32 with the norm on the unrounded sum; the gain of an RMS norm
as γ, 1 + weight or none. *Replaces with* `npu_add_rms_norm` or `npu_add_layer_norm`, which return the norm and the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import (
    Group,
    Rule,
    attribute,
    lookalike,
    lowering,
    pattern,
    require,
    rounding,
    scalar,
    tensor,
    variants,
)
from patterns.norm.gain import GAIN, Gain, unit_gain
from patterns.norm.rms_norm import RMSNorm

f32 = torch.float32


@dataclass(frozen=True)
class RmsNorm(Gain):
    """x / sqrt(mean(x²) + eps), times a gain."""

    def term(self, p, x, eps):
        """Build the term of the RMS norm of `x` with `eps` and this gain."""
        return p.rms_norm(x=x, **vars(self), eps=eps)


@dataclass(frozen=True)
class LayerNorm(Group):
    """(x - mean(x)) / sqrt(var(x) + eps), times a gain, plus a bias."""

    gamma: Any = GAIN
    beta: Any = GAIN

    def term(self, p, x, eps):
        """Build the term of the layer norm of `x` with `eps`, this gain and bias."""
        return p.layer_norm(x=x, **vars(self), eps=eps)

    def remark(self, x: Any, operator: str) -> str:
        """Return "": the operator takes the gain in float32, without rounding it."""
        return ""


def rounded_before_gain(p, x, gamma, eps, to) -> Any:
    """Build the term of the RMS norm of `x` in float32, rounded to the dtype of `to` before its gain `gamma` [D]."""
    unit = x * p.rsqrt(p.mean(p.square(x)) + eps)
    return p.maybe_cast(unit, to=to) * p.maybe_cast(gamma, to=f32)


def float32_sum(p, a, b) -> Any:
    """Build the term of the sum of `a` and `b`, each cast to float32."""
    return p.maybe_cast(a, to=f32) + p.maybe_cast(b, to=f32)


@dataclass(frozen=True)
class AddNorm(Rule):
    """Residual add and norm in one operator."""

    aliases = ("add_rms_norm", "add_layer_norm", "residual_norm")

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the RMS norm with `gamma` [D] of the sum of `a` and `b` [*B, D], and the sum."""
        s = a + b
        return RMSNorm().reference(s, gamma, eps), s

    @pattern
    @variants(norm=(RmsNorm, LayerNorm))
    def rounded_sum(self, p, norm, a=tensor("*B D"), b=tensor("*B D"), eps=scalar(), total=attribute()):
        """s = a + b, norm(s), with s in the dtype that is used further"""
        s = p.typed(a + b, total)
        return norm.term(p, s, eps), s

    @pattern
    @variants(norm=(RmsNorm, LayerNorm))
    def float32_sum(self, p, norm, a=tensor("*B D"), b=tensor("*B D"), eps=scalar(), total=attribute()):
        """s = a + b in float32, norm(s) and s both rounded to the dtype of a"""
        s = p.typed(float32_sum(p, a, b), total)
        return p.as_dtype(norm.term(p, s, eps), like=a), p.as_dtype(s, like=a)

    @pattern
    @variants(norm=(RmsNorm,))
    def float32_sum_rounded_norm(self, p, norm, a=tensor("*B D"), b=tensor("*B D"), eps=scalar(), total=attribute()):
        """s = a + b in float32, x = s / sqrt(mean(s²) + eps) rounded before x · γ, and s rounded"""
        s = p.typed(float32_sum(p, a, b), total)
        return p.as_dtype(rounded_before_gain(p, s, norm.gamma, eps, to=a), like=a), p.as_dtype(s, like=a)

    @pattern
    @variants(norm=(RmsNorm,))
    def float32_sum_unused(self, p, norm, a=tensor("*B D"), b=tensor("*B D"), eps=scalar(), total=attribute()):
        """norm(a + b) of the sum in float32, which nothing else uses"""
        return p.as_dtype(norm.term(p, p.typed(float32_sum(p, a, b), total), eps), like=a)

    @variants(norm=(RmsNorm, LayerNorm))
    @lookalike(
        "addends: one of them is broadcast or multiplied; npu_add_rms_norm, as npu_add_layer_norm, requires two "
        "tensors of the same shape, added as they are; expand or multiply it before the sum, or leave both norms as "
        "they are"
    )
    def other_sum(self, p, norm, a=tensor("*A"), b=tensor("*C"), eps=scalar()):
        """norm(a + b) of addends that are broadcast or scaled"""
        return norm.term(p, a + b, eps)

    def remark(self, a: Any, norm: Any) -> str:
        """Describe the rounding of the gain to the dtype of the addends."""
        return norm.remark(a, "npu_add_rms_norm")

    @lowering
    @variants(norm=(RmsNorm,))
    def rms(self, a: Tensor, b: Tensor, norm: Gain, eps: float, total: torch.dtype):
        """Emit npu_add_rms_norm, with the gain in the dtype of the addends."""
        require(
            a.dtype == b.dtype,
            "addends: their dtypes differ; npu_add_rms_norm requires one; cast one of them to that of the other",
        )
        gain = norm.like(a)
        with rounding("the sum of the addends", total, a.dtype):
            y, _, s = torch.ops.npu.npu_add_rms_norm(a, b, gain, eps)
        return y, s

    @lowering
    @variants(norm=(LayerNorm,))
    def layer(self, a: Tensor, b: Tensor, norm: LayerNorm, eps: float):
        """Emit npu_add_layer_norm, with weight and bias both in the dtype of the addends or both in float32."""
        require(
            a.dtype == b.dtype,
            "addends: their dtypes differ; npu_add_layer_norm requires one; cast one of them to that of the other",
        )
        gamma = unit_gain(a) if norm.gamma is None else norm.gamma
        lines = gamma, torch.zeros_like(unit_gain(a)) if norm.beta is None else norm.beta
        dtype = a.dtype if {each.dtype for each in lines} == {a.dtype} else f32
        y, _, _, s = torch.ops.npu.npu_add_layer_norm(a, b, *(each.to(dtype) for each in lines), eps, True)
        return y, s
