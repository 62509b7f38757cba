"""n = rms_norm(x) · γ (+ β), perhaps of a sum x = a + b, as its users read it: in int8, or also in float32.

    per token     q = round(n / s), s = max|n| / 127        static     q = round(n / s + z) for constants s and z

*Matches* the norm and the quantisation of its rows if nothing else uses the norm, as in front of a quantised layer,
with the residual add before it; and a norm of a sum that is also used in float32, as by a router of experts. *Replaces
with* `npu_add_rms_norm_dynamic_quant`, `npu_add_rms_norm_quant` or `npu_rms_norm_quant`, which quantise the norm before
it would be rounded to 16 bits, or `npu_add_rms_norm_cast`, which casts the rounded norm to float32.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, rounding, scalar, tensor, variants
from patterns.kit.int8_scales import STATIC, exact_scale, int8_zero_point, scale_of
from patterns.norm.add_norm import AddNorm, float32_sum, rounded_before_gain
from patterns.norm.gain import Gain, unit_gain
from patterns.quant.quantisation import Quantisation
from patterns.quant.results import TokenScales

f32 = torch.float32
_OPERATORS = {
    "by_token": "npu_add_rms_norm_dynamic_quant",
    "static_sum": "npu_add_rms_norm_quant",
    "static": "npu_rms_norm_quant",
    "widened": "npu_add_rms_norm_cast",
}
"""The operator that each lowering emits."""


@dataclass(frozen=True)
class Alone(Group):
    """A norm of a tensor x that is no sum, or whose sum another norm uses."""

    x: Any = tensor("*B D")

    def terms(self, p, gain, eps):
        """Build the term of the RMS norm of x with `gain` and `eps`; there are no other results."""
        return p.rms_norm(x=self.x, **vars(gain), eps=eps), ()


@dataclass(frozen=True)
class RoundedSum(Group):
    """A norm of the sum a + b in the dtype that the next layer reads.

    Attributes: a: the first addend. b: the second addend. total: the dtype in which the model has the sum.
    """

    a: Any = tensor("*B D")
    b: Any = tensor("*B D")
    total: Any = attribute()

    def terms(self, p, gain, eps):
        """Build the terms of the RMS norm of a + b with `gain` and `eps`, and of the sum, a second result."""
        s = p.typed(self.a + self.b, self.total)
        return p.rms_norm(x=s, **vars(gain), eps=eps), (s,)


@dataclass(frozen=True)
class Float32Sum(RoundedSum):
    """A norm of the sum a + b in float32; both are rounded to the dtype of the addends afterwards."""

    def terms(self, p, gain, eps):
        """Build the terms of `norm` of the sum in float32, rounded, and of the rounded sum, a second result."""
        s = p.typed(float32_sum(p, self.a, self.b), self.total)
        return p.as_dtype(self.norm(p, s, gain, eps), like=self.a), (p.as_dtype(s, like=self.a),)

    def norm(self, p, s, gain, eps):
        """Build the term of the RMS norm of the sum `s` in float32 with `gain` and `eps`."""
        return p.rms_norm(x=s, **vars(gain), eps=eps)


@dataclass(frozen=True)
class RoundedNorm(Float32Sum):
    """A norm of the sum a + b in float32, rounded to the dtype of a before it is multiplied by its gain."""

    def norm(self, p, s, gain, eps):
        """Build the term of the norm of the sum `s`, rounded to the dtype of the addends before its gain."""
        return rounded_before_gain(p, s, gain.gamma, eps, self.a)


SUMS = (RoundedSum, Float32Sum, RoundedNorm)


@dataclass(frozen=True)
class Static(Group):
    """Quantisation of the norm by static scales.

    Attributes:
        scale: the scale [1], or that of each channel [D]; None for the number `by` alone.
        by: the constant factor of the scale.
        zero_point: the zero point [1]; None for the number `shift`.
        shift: the constant zero point.
        bias: the bias [D] that is added to the norm.
    """

    scale: Any = tensor("S", optional=True)
    by: Any = scalar()
    zero_point: Any = tensor("1", optional=True)
    shift: Any = scalar()
    bias: Any = tensor("D", optional=True)

    def terms(self, p, norm):
        """Build the term of the quantised norm in int8."""
        return (p.quantise(x=norm, encoding=STATIC, scheme="static", **vars(self)),)

    def offset(self, dtype: torch.dtype, device: torch.device, operator: str) -> Tensor:
        """Return the zero point [1] of `operator` in `dtype`, in which the model holds it unless that is int8."""
        if self.zero_point is not None and self.zero_point.dtype == dtype:
            return self.zero_point
        return int8_zero_point(self.zero_point, self.shift, device, operator).to(dtype)


@dataclass(frozen=True)
class Widened(Group):
    """The norm in its own dtype and in float32, the latter perhaps with other dims."""

    def terms(self, p, norm):
        """Build the terms of the norm cast to float32, and the norm."""
        return p.cast(p.reshaped(norm), to=f32), norm


@dataclass(frozen=True)
class EncodedNorm(Rule):
    """RMS norm and its quantisation or cast in one operator, perhaps with the residual add before it."""

    aliases = ("add_rms_norm_cast", "add_rms_norm_quant", "add_rms_norm_dynamic_quant", "rms_norm_quant", "norm_quant")

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """Compute the RMS norm of `a` + `b` [*B, D] in int8, its scales [*B, 1], and the sum; `gamma` is [D]."""
        norm, s = AddNorm().reference(a, b, gamma, eps)
        return *Quantisation().reference(norm), s

    @pattern
    @variants(source=SUMS, result=(TokenScales, Static, Widened))
    def added(self, p, source, result, gain: Any = Gain, eps=scalar()):
        """n = rms_norm(a + b) · γ, quantised or also cast to float32, and the sum a + b"""
        norm, others = source.terms(p, gain, eps)
        return *result.terms(p, norm), *others

    @pattern
    @variants(source=(Alone,), result=(Static,))
    def alone(self, p, source, result, gain: Any = Gain, eps=scalar()):
        """n = rms_norm(x) · γ, quantised by static scales"""
        norm, _ = source.terms(p, gain, eps)
        return result.terms(p, norm)

    def remark(self, source: Any, gain: Gain, lowering: str) -> str:
        """Describe the rounding of the gain to the dtype of the addends by the operator of `lowering`."""
        return gain.remark(source.x if isinstance(source, Alone) else source.a, _OPERATORS[lowering.partition("[")[0]])

    @lowering
    @variants(source=SUMS, result=(TokenScales,))
    def by_token(self, source: RoundedSum, result: TokenScales, gain: Gain, eps: float):
        """Emit npu_add_rms_norm_dynamic_quant, and cast its scales to the dtype of the model."""
        addends, weight = _addends(source, "npu_add_rms_norm_dynamic_quant"), gain.like(source.a)
        with _rounded(source):
            y, _, s, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
                *addends, weight, epsilon=eps, output_mask=[True, False]
            )
        return y, result.restored(scale), s

    @lowering
    @variants(source=SUMS, result=(Static,))
    def static_sum(self, source: RoundedSum, result: Static, gain: Gain, eps: float):
        """Emit npu_add_rms_norm_quant, with scale and zero point of each channel, in bfloat16 for such addends."""
        x, bias = source.a, result.bias
        narrow, name = x.dtype == torch.bfloat16, "npu_add_rms_norm_quant"
        if narrow:
            scale = exact_scale(result.scale, result.by, x, name)
            offset = result.offset(x.dtype, x.device, name)
        else:
            scale = scale_of(result.scale, result.by, x.device)
            offset = result.offset(torch.int32, x.device, name)
        lines = [each.expand(x.shape[-1]).contiguous() for each in (scale, offset)]
        given = (
            *_addends(source, name),
            gain.like(x),
            *lines,
            None if bias is None else _exact_bias(bias, x),
        )
        with _rounded(source):
            y, _, s = torch.ops.npu.npu_add_rms_norm_quant(*given, epsilon=eps)
        return y, s

    @lowering
    @variants(source=(Alone,), result=(Static,))
    def static(self, source: Alone, result: Static, gain: Gain, eps: float):
        """Emit npu_rms_norm_quant, with one scale in the dtype of x, and a bias of zeros where there is none."""
        x = source.x
        bias = torch.zeros_like(unit_gain(x)) if result.bias is None else _exact_bias(result.bias, x)
        name = "npu_rms_norm_quant"
        scale, offset = exact_scale(result.scale, result.by, x, name), result.offset(torch.int8, x.device, name)
        return torch.ops.npu.npu_rms_norm_quant(x, gain.like(x), bias, scale, offset, eps)

    @lowering
    @variants(source=SUMS, result=(Widened,), tokens=("apart", "in one dim"))
    def widened(self, source: RoundedSum, gain: Gain, eps: float, tokens: str):
        """Emit npu_add_rms_norm_cast; the float32 result may have the tokens of all sequences in one dim [T, D]."""
        addends, weight = _addends(source, "npu_add_rms_norm_cast"), gain.like(source.a)
        with _rounded(source):
            wide, y, _, s = torch.ops.npu.npu_add_rms_norm_cast(*addends, weight, eps)
        return wide if tokens == "apart" else wide.flatten(0, -2), y, s


def _addends(source: RoundedSum, operator: str) -> tuple[Tensor, Tensor]:
    require(
        source.a.dtype == source.b.dtype,
        "addends: their dtypes differ; {operator} requires one; cast one of them to that of the other",
        operator=operator,
    )
    return source.a, source.b


def _rounded(source: RoundedSum) -> AbstractContextManager[None]:
    """State for the calls inside that they round the sum, which the model has in `total`, to the dtype of the
    addends.
    """
    return rounding("the sum of the addends", source.total, source.a.dtype)


def _exact_bias(bias: Tensor, x: Tensor) -> Tensor:
    reason = (
        "bias of the norm: it is {dtype}; npu_rms_norm_quant requires it in the dtype of x; store it in the dtype of x"
    )
    require(bias.dtype == x.dtype, reason, dtype=bias.dtype)
    return bias
