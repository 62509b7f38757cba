"""n = rms_norm(x) · γ (+ β), perhaps of a sum x = a + b, as its readers have it: in int8, or in float32 as well.

    of each token     q = round(n / s), s = max|n| / 127        static     q = round(n / s + z) of constants s and z

*Matches* the norm and the quantisation of its rows where nothing else reads the norm, as a quantised layer has it, with
the residual add before it; and a norm of a sum that is read in float32 too, as a router of experts has it beside them.
*Replaces with* `npu_add_rms_norm_dynamic_quant`, `npu_add_rms_norm_quant` or `npu_rms_norm_quant`, which quantise the
norm before it would be rounded to 16 bits, or `npu_add_rms_norm_cast`, which widens the norm that it has rounded.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, rounding, scalar, tensor, variants
from patterns.kit.int8_scales import exact_scale, scale_of
from patterns.kit.results import TokenScales
from patterns.norm.add_norm import AddNorm, float32_sum, rounded_before_gain
from patterns.norm.gain import Gain, unit_gain
from patterns.quant.quantisation import Quantisation

f32 = torch.float32


@dataclass(frozen=True)
class Alone(Group):
    """A norm of a tensor that something else computes."""

    x: Any = tensor("*B D")

    def terms(self, p, gain, eps):
        """The norm, and what else is kept."""
        return p.rms_norm(x=self.x, **vars(gain), eps=eps), ()


@dataclass(frozen=True)
class RoundedSum(Group):
    """The norm of a sum as the next layer reads it.

    Attributes:
        a: one addend.
        b: the other.
        total: the dtype in which the model holds their sum.
    """

    a: Any = tensor("*B D")
    b: Any = tensor("*B D")
    total: Any = attribute()

    def terms(self, p, gain, eps):
        """The norm, and what else is kept."""
        s = p.typed(self.a + self.b, self.total)
        return p.rms_norm(x=s, **vars(gain), eps=eps), (s,)


@dataclass(frozen=True)
class Float32Sum(RoundedSum):
    """The norm of a sum in float32, before it is rounded for the next layer."""

    def terms(self, p, gain, eps):
        """The norm, and what else is kept."""
        s = p.typed(float32_sum(p, self.a, self.b), self.total)
        return p.as_dtype(self.norm(p, s, gain, eps), like=self.a), (p.as_dtype(s, like=self.a),)

    def norm(self, p, s, gain, eps):
        """Of the sum, in float32."""
        return p.rms_norm(x=s, **vars(gain), eps=eps)


@dataclass(frozen=True)
class RoundedNorm(Float32Sum):
    """The same with the norm rounded before the weight."""

    def norm(self, p, s, gain, eps):
        """Of the sum, rounded to the dtype of the addends."""
        return rounded_before_gain(p, s, gain.gamma, eps, self.a)


SUMS = (RoundedSum, Float32Sum, RoundedNorm)


@dataclass(frozen=True)
class Static(Group):
    """By one scale, or one of each channel, and a zero point; the norm may add a bias."""

    scale: Any = tensor("S", optional=True)
    by: Any = scalar()
    zero_point: Any = tensor("1", optional=True)
    shift: Any = scalar()
    bias: Any = tensor("D", optional=True)

    def terms(self, p, norm):
        """Whole numbers."""
        return (p.quantise(x=norm, scheme="static", **vars(self)),)

    def offset(self, dtype: torch.dtype, device: torch.device) -> Tensor:
        """The zero point [1]."""
        if self.zero_point is None:
            return torch.full((1,), int(self.shift), dtype=dtype, device=device)
        return self.zero_point.to(dtype)


@dataclass(frozen=True)
class Widened(Group):
    """As it is, and in float32, there perhaps with other dims."""

    def terms(self, p, norm):
        """The norm is found in its cast."""
        return p.cast(p.reshaped(norm), to=f32), norm


@dataclass(frozen=True)
class EncodedNorm(Rule):
    """RMS norm and what its readers make of it in one, perhaps with the residual add before it."""

    aliases = ("add_rms_norm_cast", "add_rms_norm_quant", "add_rms_norm_dynamic_quant", "rms_norm_quant", "norm_quant")

    def reference(self, a: Tensor, b: Tensor, gamma: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
        """The meaning: a and b [*B, D], gamma [D]; returns whole numbers [*B, D], scales [*B, 1], and the sum."""
        norm, s = AddNorm().reference(a, b, gamma, eps)
        return *Quantisation().reference(norm), s

    @pattern
    @variants(of=SUMS, result=(TokenScales, Static, Widened))
    def added(self, p, of, result, gain: Any = Gain, eps=scalar()):
        """Of a sum."""
        norm, kept = of.terms(p, gain, eps)
        return *result.terms(p, norm), *kept

    @pattern
    @variants(of=(Alone,), result=(Static,))
    def alone(self, p, of, result, gain: Any = Gain, eps=scalar()):
        """Of what is no sum, or of a sum that another norm reads."""
        norm, _ = of.terms(p, gain, eps)
        return result.terms(p, norm)

    def remark(self, of: Any, gain: Gain) -> str:
        """What the dtype of the gain means."""
        return gain.remark(of.x if isinstance(of, Alone) else of.a, "the operator")

    @lowering
    @variants(of=SUMS, result=(TokenScales,))
    def by_token(self, of: RoundedSum, result: TokenScales, gain: Gain, eps: float):
        """One operator; a scale in 16 bits is cast."""
        addends, weight = _addends(of), gain.like(of.a)
        with _rounded(of):
            y, _, s, scale, _ = torch.ops.npu.npu_add_rms_norm_dynamic_quant(
                *addends, weight, epsilon=eps, output_mask=[True, False]
            )
        return y, result.restored(scale), s

    @lowering
    @variants(of=SUMS, result=(Static,))
    def static_sum(self, of: RoundedSum, result: Static, gain: Gain, eps: float):
        """One operator, that takes a scale and a zero point of each channel: beside bfloat16 in that dtype."""
        x, bias = of.a, result.bias
        narrow = x.dtype == torch.bfloat16
        if narrow:
            scale, offset = exact_scale(result.scale, result.by, x), result.offset(x.dtype, x.device)
        else:
            scale = scale_of(result.scale, result.by, x.device)
            offset = result.offset(torch.int32, x.device)
        lines = [each.expand(x.shape[-1]).contiguous() for each in (scale, offset)]
        given = (*_addends(of), gain.like(x), *lines, None if bias is None else _exact_bias(bias, x))
        with _rounded(of):
            y, _, s = torch.ops.npu.npu_add_rms_norm_quant(*given, epsilon=eps)
        return y, s

    @lowering
    @variants(of=(Alone,), result=(Static,))
    def static(self, of: Alone, result: Static, gain: Gain, eps: float):
        """One operator, that takes one scale in the dtype of x, and always a bias."""
        x = of.x
        bias = torch.zeros_like(unit_gain(x)) if result.bias is None else _exact_bias(result.bias, x)
        scale, offset = exact_scale(result.scale, result.by, x), result.offset(torch.int8, x.device)
        return torch.ops.npu.npu_rms_norm_quant(x, gain.like(x), bias, scale, offset, eps)

    @lowering
    @variants(of=SUMS, result=(Widened,), tokens=("apart", "in one dim"))
    def widened(self, of: RoundedSum, gain: Gain, eps: float, tokens: str):
        """One operator; the tokens of all sequences in one dim [T, D] where a router reads them so."""
        addends, weight = _addends(of), gain.like(of.a)
        with _rounded(of):
            wide, y, _, s = torch.ops.npu.npu_add_rms_norm_cast(*addends, weight, eps)
        return wide if tokens == "apart" else wide.flatten(0, -2), y, s


def _addends(of: RoundedSum) -> tuple[Tensor, Tensor]:
    require(
        of.a.dtype == of.b.dtype,
        "the addends of the norm have different dtypes; the operator requires one; cast one of "
        "them to that of the other",
    )
    return of.a, of.b


def _rounded(of: RoundedSum) -> AbstractContextManager[None]:
    """State in which dtype the model holds the sum that the operators round to that of the addends."""
    return rounding("the sum of the addends", of.total, of.a.dtype)


def _exact_bias(bias: Tensor, x: Tensor) -> Tensor:
    said = "the norm adds a bias of {dtype}, the operator one in the dtype of x"
    require(bias.dtype == x.dtype, said, dtype=bias.dtype)
    return bias
