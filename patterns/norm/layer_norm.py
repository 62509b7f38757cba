"""y = (x - mean(x)) / sqrt(var(x) + eps) · gamma + beta  (Ba, Kiros and Hinton, Layer Normalization, 2016).

*Matches* the norm written out by hand. *Replaces with* `aten.native_layer_norm`, one kernel everywhere; a call of
`F.layer_norm` is that kernel already and stays as it is, but other rules match it as this norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, lookalike, lowering, pattern, require, scalar, tensor

f32 = torch.float32


@dataclass(frozen=True)
class LayerNorm(Rule):
    """Normalisation to zero mean and unit variance over the last dim, accumulated in float32."""

    def reference(self, x: Tensor, gamma: Tensor, beta: Tensor, eps: float) -> Tensor:
        """Compute the layer norm of `x` [*B, D] with `gamma` and `beta` [D]."""
        return F.layer_norm(x, x.shape[-1:], gamma, beta, eps)

    def _centred(self, p, x):
        h = p.maybe_cast(x, to=f32)
        return h - p.mean(h)

    def _unit(self, p, x, eps):
        d = self._centred(p, x)
        return d * p.rsqrt(p.mean(p.square(d)) + eps)

    @pattern
    def affine(self, p, x=tensor("*B D"), gamma=tensor("D"), beta=tensor("D"), eps=scalar()):
        """(x - mean(x)) / sqrt(var(x) + eps) · gamma + beta"""
        y = p.maybe_cast(self._unit(p, x, eps), to=x) * p.maybe_cast(gamma, to=f32)
        return p.as_dtype(p.maybe_cast(y, to=x) + p.maybe_cast(beta, to=f32), like=x)

    @pattern
    def weighted(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """(x - mean(x)) / sqrt(var(x) + eps) · gamma"""
        return p.as_dtype(p.maybe_cast(self._unit(p, x, eps), to=x) * p.maybe_cast(gamma, to=f32), like=x)

    @pattern
    def plain(self, p, x=tensor("*B D"), eps=scalar()):
        """(x - mean(x)) / sqrt(var(x) + eps)"""
        return p.as_dtype(self._unit(p, x, eps), like=x)

    def guard(self, eps: float):
        """Refuse an eps that is not positive."""
        require(eps > 0, "eps: it is {eps}; native_layer_norm requires a positive number; pass one", eps=eps)

    @lookalike(
        "variance: it has a factor {factor}, as it is unbiased; native_layer_norm requires the biased one; "
        "write x.var(-1, correction=0)"
    )
    def unbiased(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """(x - mean) · rsqrt(var(correction=1) + eps)"""
        return p.rsqrt(p.shift(p.scale(p.mean(p.square(self._centred(p, x))), factor), eps))

    @lookalike(
        "eps: {eps} is added to the standard deviation; native_layer_norm requires it under the root; write (x "
        "- mean) * rsqrt(var + eps)"
    )
    def eps_outside(self, p, x=tensor("*B D"), eps=scalar()):
        """(x - mean) / (std + eps)"""
        deviation = p.power(p.mean(p.square(self._centred(p, x))), 0.5)
        return p.power(p.maybe_cast(deviation, to=x) + eps, -1.0)

    @lookalike(
        "eps: {eps} is added to an unbiased standard deviation; native_layer_norm requires it under the root "
        "of the biased variance; write (x - mean) * rsqrt(x.var(-1, correction=0) + eps)"
    )
    def eps_outside_unbiased(self, p, x=tensor("*B D"), eps=scalar(), factor=scalar()):
        """(x - mean) / (std(correction=1) + eps)"""
        deviation = p.scale(p.power(p.mean(p.square(self._centred(p, x))), 0.5), factor)
        return p.power(p.maybe_cast(deviation, to=x) + eps, -1.0)

    @lookalike(
        "x: what is divided by the root of the variance is another tensor than the centred one, or the weight "
        "has other dims than the last; native_layer_norm requires (x - mean) * rsqrt(var + eps) * weight [D]; "
        "write it so"
    )
    def not_centred(self, p, x=tensor("*B D"), eps=scalar()):
        """x · rsqrt(var + eps), or a centred tensor with a weight of other dims"""
        return p.rsqrt(p.mean(p.square(self._centred(p, x))) + eps)

    @lookalike(
        "x: it is centred, and divided by the root of its second moment, mean(x²); native_layer_norm requires "
        "the root of its variance; write rsqrt(x.var(-1, correction=0) + eps)"
    )
    def second_moment(self, p, x=tensor("*B D"), eps=scalar()):
        """(x - mean) · rsqrt(mean(x²) + eps)"""
        h = p.maybe_cast(x, to=f32)
        return (h - p.mean(h)) * p.rsqrt(p.mean(p.square(h)) + eps)

    @lowering
    def native(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, eps: float):
        """Emit native_layer_norm, with weight and bias both in the dtype of x or both in float32."""
        require(x.is_floating_point(), "x: it is {dtype}; native_layer_norm requires floats; cast it", dtype=x.dtype)
        given = [each for each in (gamma, beta) if each is not None]
        same = {each.dtype for each in given} <= {x.dtype}
        gamma, beta = (each if same or each is None else each.to(f32) for each in (gamma, beta))
        return torch.ops.aten.native_layer_norm.default(x, x.shape[-1:], gamma, beta, eps)[0]
