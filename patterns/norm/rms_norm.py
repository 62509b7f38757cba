"""y = x / sqrt(mean(x²) + eps) · gamma  (Zhang and Sennrich, Root Mean Square Layer Normalization, 2019).

*Matches* the mean of squares over the last dim in float32 or in x's own dtype, the gain before or after the cast back,
as gamma, 1 + weight, or none; without a gain the sum of squares as well, as in L2 norms:
x / sqrt(n · mean(x²) + eps) = x / sqrt(mean(x²) + eps / n) / sqrt(n).
*Replaces with* `npu_rms_norm` or `npu_gemma_rms_norm`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor
from patterns.norm.gain import unit_gain

f32 = torch.float32


@dataclass(frozen=True)
class RMSNorm(Rule):
    """Root mean square normalisation over the last dim, accumulated in float32."""

    aliases = ("gemma_rms_norm",)

    def reference(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """Compute the RMS norm of `x` [*B, D] with the gain `gamma` [D], in float32."""
        h = x.float()
        return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * gamma.float()).to(x.dtype)

    def _unit(self, p, h, eps):
        return h * p.rsqrt(p.mean(p.maybe_cast(p.square(h), to=f32)) + eps)

    @pattern
    def one_plus_weight(self, p, x=tensor("*B D"), weight=tensor("D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps) · (1 + weight)"""
        y = self._unit(p, p.maybe_cast(x, to=f32), eps)
        gain = p.maybe_cast(p.shift(p.maybe_cast(weight, to=f32), 1.0), to=f32)
        return p.as_dtype(p.maybe_cast(y, to=x) * gain, like=x)

    @pattern
    def weighted(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps) · gamma"""
        y = self._unit(p, p.maybe_cast(x, to=f32), eps)
        return p.as_dtype(p.maybe_cast(y, to=x) * p.maybe_cast(gamma, to=f32), like=x)

    @pattern
    def weighted_narrow(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps) · gamma, with the root in float32, rounded to x's own dtype for the product"""
        h = p.maybe_cast(x, to=f32)
        root = p.rsqrt(p.mean(p.maybe_cast(p.square(h), to=f32)) + eps)
        return p.as_dtype(p.maybe_cast(x * p.maybe_cast(root, to=x), to=x) * p.maybe_cast(gamma, to=f32), like=x)

    @pattern
    def weighted_narrow_squares(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps) · gamma, with squares in x's own dtype, averaged in float32"""
        root = p.rsqrt(p.mean(p.maybe_cast(p.square(x), to=f32)) + eps)
        return p.as_dtype(p.maybe_cast(p.maybe_cast(x, to=f32) * root, to=x) * p.maybe_cast(gamma, to=f32), like=x)

    @pattern
    def unweighted(self, p, x=tensor("*B D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps)"""
        return p.as_dtype(self._unit(p, p.maybe_cast(x, to=f32), eps), like=x)

    @pattern
    def unweighted_narrow(self, p, x=tensor("*B D"), eps=scalar()):
        """x / sqrt(mean(x²) + eps), with the root in float32, rounded to x's own dtype for the product"""
        h = p.maybe_cast(x, to=f32)
        root = p.rsqrt(p.mean(p.maybe_cast(p.square(h), to=f32)) + eps)
        return p.as_dtype(x * p.maybe_cast(root, to=x), like=x)

    def _over_length(self, p, h, eps, factor):
        return p.rsqrt(p.shift(p.scale(p.maybe_cast(p.mean(p.maybe_cast(p.square(h), to=f32)), to=f32), factor), eps))

    @pattern
    def sum_of_squares(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """x / sqrt(sum(x²) + eps), as in an L2 norm"""
        h = p.maybe_cast(x, to=f32)
        return p.as_dtype(h * self._over_length(p, h, eps, factor), like=x)

    @pattern
    def sum_of_squares_narrow(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """x / sqrt(sum(x²) + eps), with the root in float32, rounded to x's own dtype for the product"""
        h = p.maybe_cast(x, to=f32)
        return p.as_dtype(x * p.maybe_cast(self._over_length(p, h, eps, factor), to=x), like=x)

    def guard(self, eps: float, factor: float | None):
        """Refuse an eps that is not positive, or too large to guard a division, and a negative factor of the mean."""
        require(eps > 0, "eps: it is {eps}; npu_rms_norm requires a positive number; pass one", eps=eps)
        eps /= factor or 1
        require(
            eps <= 0.02,
            "eps: it is {eps}, above 0.02, so that it damps rather than guards a division by zero; "
            "npu_rms_norm requires a small one; pass 1e-6 if that is meant",
            eps=eps,
        )
        require(
            factor is None or factor > 0,
            "mean square: it is multiplied by {factor} under the root; npu_rms_norm requires a positive factor",
            factor=factor,
        )

    @lookalike(
        "x: the tensor that is multiplied by rsqrt(mean(x²) + eps) is not x as it is squared (another "
        "tensor, centred, or cast otherwise), or the weight has other dims than the last; npu_rms_norm "
        "requires x * rsqrt(mean(x²) + eps) * weight [D]; write it so of one x"
    )
    def other_tensor(self, p, x=tensor("*B D"), eps=scalar()):
        """y · rsqrt(mean(x²) + eps)"""
        return p.rsqrt(p.mean(p.square(x)) + eps)

    @lookalike(
        "mean square: it has a factor {factor} under the root, as a sum of squares has, and multiplies "
        "another tensor than x, or a weight stands between; npu_rms_norm requires x * rsqrt(mean(x²) + "
        "eps); write x.pow(2).mean(-1, keepdim=True) of the same x"
    )
    def summed(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """rsqrt(sum(x²) + eps), where the sum is mean(x²) · factor"""
        return p.rsqrt(p.shift(p.scale(p.mean(p.square(x)), factor), eps))

    @lookalike(
        "power: the mean of x to the power {exponent} over dims {dims} is taken to the power {root}; "
        "npu_rms_norm requires (mean of x² over the last dim + eps) to the power -0.5; write "
        "x.pow(2).mean(-1, keepdim=True) if that is meant"
    )
    def other_root(self, p, x=tensor("*B D"), eps=scalar(), dims=attribute(), exponent=attribute(), root=attribute()):
        """(mean(xᵃ) + eps)ᵇ."""
        return p.power(p.mean(p.power(x, exponent), dims) + eps, root)

    @lookalike(
        "variance: it has a factor {factor}, as it is unbiased, beside the squared mean; npu_rms_norm requires "
        "the mean square; write x.pow(2).mean(-1, keepdim=True)"
    )
    def unbiased(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """rsqrt(var(correction=1) + mean² + eps)"""
        average = p.mean(x)
        moment = p.scale(p.mean(p.square(x - average)), factor) + p.square(average)
        return p.rsqrt(p.shift(moment, eps))

    @lookalike(
        "eps: {eps} is added to each square; npu_rms_norm adds it to their mean and requires that; write "
        "rsqrt(mean + eps)"
    )
    def eps_inside(self, p, x=tensor("*B D"), eps=scalar(), root=attribute()):
        """(mean(x² + eps))ᵃ."""
        return p.power(p.mean(p.square(x) + eps), root)

    @lookalike("eps: {eps} is added outside the root; npu_rms_norm requires it under the root; write rsqrt(mean + eps)")
    def eps_outside(self, p, x=tensor("*B D"), eps=scalar()):
        """x / (sqrt(mean(x²)) + eps)"""
        return p.power(p.power(p.mean(p.square(x)), 0.5) + eps, -1.0)

    @lookalike("eps: there is none under the root; npu_rms_norm requires one; write rsqrt(mean + eps)")
    def no_eps(self, p, x=tensor("*B D"), root=attribute(-0.5)):
        """x · rsqrt(mean(x²))"""
        return p.power(p.mean(p.square(x)), root)

    @lookalike("eps: it is a tensor; npu_rms_norm requires a number; pass eps as a Python float")
    def tensor_eps(self, p, x=tensor("*B D"), eps=tensor("*E")):
        """rsqrt(mean(x²) + eps), eps a tensor"""
        return p.rsqrt(p.mean(p.square(x)) + eps)

    @lookalike(
        "mean: it is of absolute values; npu_rms_norm requires the mean of squares under a root; write "
        "x.pow(2).mean(-1, keepdim=True) if that is meant"
    )
    def absolute(self, p, x=tensor("*B D"), eps=scalar(), root=attribute()):
        """x / (mean(|x|) + eps)"""
        return p.power(p.mean(p.op("abs", x)) + eps, root)

    @lookalike(
        "length: it is clamped from below, as F.normalize does; npu_rms_norm requires eps under the root; "
        "write rsqrt(mean + eps)"
    )
    def clamped(self, p, x=tensor("*B D"), root=attribute(), factor=scalar()):
        """x / max(‖x‖, eps), as F.normalize"""
        return p.power(p.op("clip", p.maybe_scaled(p.power(p.mean(p.square(x)), 0.5), factor)), root)

    @lookalike(
        "mean square: it is clamped from below; npu_rms_norm requires eps to be added to it; write rsqrt(mean + eps)"
    )
    def clamped_square(self, p, x=tensor("*B D"), root=attribute()):
        """x / sqrt(max(mean(x²), eps))"""
        return p.power(p.op("clip", p.mean(p.square(x))), root)

    @lowering
    def npu(self, x: Tensor, gamma: Tensor | None, weight: Tensor | None, eps: float, factor: float | None):
        """Emit npu_rms_norm, with gamma in the dtype of x or in float32."""
        require(weight is None, "gain: it is 1 + weight; this call requires a tensor")
        require(factor is None, "squares: they are summed; this call requires their mean")
        gain = unit_gain(x) if gamma is None else gamma
        gain = gain if gain.dtype in (x.dtype, f32) else gain.to(f32)
        return torch.ops.npu.npu_rms_norm(x, gain, eps)[0]

    @lowering
    def scaled(self, x: Tensor, eps: float, factor: Any):
        """Emit npu_rms_norm for a sum of squares, with the constant gain 1 / sqrt(factor)."""
        require(factor is not None, "squares: they are averaged; this call requires their sum")
        gain = torch.full(x.shape[-1:], factor**-0.5, dtype=torch.promote_types(x.dtype, f32), device=x.device)
        return torch.ops.npu.npu_rms_norm(x, gain, eps / factor)[0]

    @lowering
    def gemma(self, x: Tensor, weight: Tensor | None, eps: float):
        """Emit npu_gemma_rms_norm, which adds 1 to the weight."""
        require(weight is not None, "gain: it is no 1 + weight; npu_gemma_rms_norm requires that")
        return torch.ops.npu.npu_gemma_rms_norm(x, weight, eps)[0]

    @lowering
    def shifted(self, x: Tensor, weight: Tensor | None, eps: float):
        """Emit npu_rms_norm with the gain 1 + weight computed in float32, where npu_gemma_rms_norm cannot be used."""
        require(weight is not None, "gain: it is no 1 + weight; npu_gemma_rms_norm requires that")
        return torch.ops.npu.npu_rms_norm(x, 1.0 + weight.to(f32), eps)[0]
