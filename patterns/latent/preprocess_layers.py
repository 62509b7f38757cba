"""W8A8 layers of the prologue of latent attention as `npu_mla_preprocess` takes them: by token, or static.

by token:  x8 = round(127 x / max|x|)      static:  x8 = round((x + β) / s + z),  y = d · (W x8 + b)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor


@dataclass(frozen=True)
class RowOrder:
    """In which order the operator reads what belongs to rows of layers: rotated lanes of every head by halves, last."""

    heads: int
    rotated: int
    source: str

    def joined(self, dq: Tensor, dkv: Tensor, uq: Tensor) -> tuple[Tensor, Tensor]:
        """Of the layers of x, W_dkv before W_dq, and of all heads."""
        return torch.cat((self._by_halves(dkv, 1), dq)), self._by_halves(uq, self.heads)

    def _by_halves(self, rows: Tensor, heads: int) -> Tensor:
        """Of rows [N · W, ..]."""
        if self.source == "half":
            return rows
        each = rows.unflatten(0, (heads, -1))
        kept, pairs = each[:, : -self.rotated], each[:, -self.rotated :]
        return torch.cat((kept, pairs[:, ::2], pairs[:, 1::2]), dim=1).flatten(0, 1)


@dataclass(frozen=True)
class Int8Layers(Group):
    """Three layers with int8 weights and a scale of each channel: W_dq and W_dkv of x, W_uq of the queries' latent."""

    dq: Any = tensor("Hcq He")
    dq_scale: Any = tensor("Hcq")
    uq: Any = tensor("Nq Hcq")
    uq_scale: Any = tensor("Nq")
    dkv: Any = tensor("Nk He")
    dkv_scale: Any = tensor("Nk")
    layer_dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def linear(self, p, x, weight, scale, **more):
        """The term of one layer."""
        how = dict(dtype=self.layer_dtype, fixed=self.is_parameter_only)
        return p.whole_linear(x=p.reshaped(x), weight=weight, scale=scale, **how, **more)

    def betas(self, gamma: Tensor, gamma_cq: Tensor) -> tuple[Tensor, Tensor]:
        """What the norms of x and of the queries' latent add behind their gain."""
        return _beta(None, gamma), _beta(None, gamma_cq)

    def weights(self, order: RowOrder) -> tuple[Tensor, Tensor]:
        """Of x, and of all heads."""
        return order.joined(self.dq, self.dkv, self.uq)

    def scales(self, order: RowOrder) -> tuple[Tensor, ...]:
        """Of their channels, in float32."""
        return tuple(each.float() for each in order.joined(self.dq_scale, self.dkv_scale, self.uq_scale))


@dataclass(frozen=True)
class TokenInt8Layers(Int8Layers):
    """W8A8 by token: each token is divided by a scale of its own."""

    scale_dtype: Any = attribute()

    def down(self, p, norm):
        """The latent of the queries and the row of both caches, of a norm of x."""
        x8, scale = self._quantised(p, norm)
        layers = ((self.dq, self.dq_scale), (self.dkv, self.dkv_scale))
        return tuple(self.linear(p, x8, *each, tokens=p.reshaped(scale)) for each in layers)

    def heads(self, p, norm):
        """All heads of the queries, of a norm of their latent."""
        c8, scale = self._quantised(p, norm)
        return self.linear(p, c8, self.uq, self.uq_scale, tokens=p.reshaped(scale))

    def _quantised(self, p, x):
        scale = p.token_scale(x=p.reshaped(x), dtype=self.scale_dtype)
        return p.quantise(x=p.reshaped(x), scale=scale, dtype=self.scale_dtype, scheme="dynamic"), scale

    def guard(self) -> None:
        """The operator finds the scales itself."""

    def arguments(self, x: Tensor, order: RowOrder) -> dict[str, Any]:
        """As the operator is told."""
        return dict(quant_mode="per_token_quant_symm")


@dataclass(frozen=True)
class StaticInt8Layers(Int8Layers):
    """W8A8 static: n / s + z of constants s and z, behind a norm that may add a bias; layers may add one in int32."""

    beta: Any = tensor("He", optional=True)
    beta_cq: Any = tensor("Hcq", optional=True)
    dq_bias: Any = tensor("Hcq", optional=True)
    uq_bias: Any = tensor("Nq", optional=True)
    dkv_bias: Any = tensor("Nk", optional=True)
    scale: Any = tensor("1", optional=True)
    zero_point: Any = tensor("1", optional=True)
    scale_cq: Any = tensor("1", optional=True)
    zero_point_cq: Any = tensor("1", optional=True)
    factor: Any = scalar()
    shift: Any = scalar()
    factor_cq: Any = scalar()
    shift_cq: Any = scalar()

    def down(self, p, norm):
        """The latent of the queries and the row of both caches, of a norm of x."""
        by = dict(scheme="static", scale=self.scale, by=self.factor, zero_point=self.zero_point, shift=self.shift)
        x8 = p.quantise(x=p.reshaped(norm), bias=self.beta, **by)
        layers = ((self.dq, self.dq_scale, self.dq_bias), (self.dkv, self.dkv_scale, self.dkv_bias))
        return tuple(self.linear(p, x8, weight, scale, bias=bias) for weight, scale, bias in layers)

    def heads(self, p, norm):
        """All heads of the queries, of a norm of their latent."""
        by = dict(
            scheme="static", scale=self.scale_cq, by=self.factor_cq, zero_point=self.zero_point_cq, shift=self.shift_cq
        )
        c8 = p.quantise(x=p.reshaped(norm), bias=self.beta_cq, **by)
        return self.linear(p, c8, self.uq, self.uq_scale, bias=self.uq_bias)

    def guard(self) -> None:
        """Refuse biases that are not added to the int8 products."""
        biases = [each for each in (self.dq_bias, self.uq_bias, self.dkv_bias) if each is not None]
        other = next((each.dtype for each in biases if each.dtype != torch.int32), torch.int32)
        require(other == torch.int32, "a layer adds a bias of {dtype}, the operator one of int32", dtype=other)

    def betas(self, gamma: Tensor, gamma_cq: Tensor) -> tuple[Tensor, Tensor]:
        """What both norms add behind their gain."""
        return _beta(self.beta, gamma), _beta(self.beta_cq, gamma_cq)

    def arguments(self, x: Tensor, order: RowOrder) -> dict[str, Any]:
        """As the operator is told."""
        layers = ((self.dq_bias, self.dq), (self.dkv_bias, self.dkv), (self.uq_bias, self.uq))
        biases = order.joined(*(_bias(*each) for each in layers))
        return dict(
            quant_mode="per_tensor_quant_asymm",
            quant_scale0=scale_of(self.scale, self.factor, x),
            quant_offset0=_zero_point(self.zero_point, self.shift, x),
            bias0=biases[0],
            quant_scale1=scale_of(self.scale_cq, self.factor_cq, x),
            quant_offset1=_zero_point(self.zero_point_cq, self.shift_cq, x),
            bias1=biases[1],
        )


def scale_of(scale: Tensor | None, factor: float, like: Tensor) -> Tensor:
    """The scale [1] in the dtype of `like`, which must hold it as it is."""
    if scale is None:
        lanes = math.frexp(factor)[0] * 2 / torch.finfo(like.dtype).eps
        require(abs(lanes - round(lanes)) < 1e-9, "the dtype of x does not hold the scale {by} as it is", by=factor)
        return torch.full((1,), factor, dtype=like.dtype, device=like.device)
    same = scale.dtype == like.dtype and factor == 1
    require(same, "a scale of {dtype} is not one in the dtype of x, as the operator takes it", dtype=scale.dtype)
    return scale


def _zero_point(zero_point: Tensor | None, shift: float, like: Tensor) -> Tensor:
    if zero_point is not None:
        return zero_point
    return torch.full((1,), int(shift), dtype=torch.int8, device=like.device)


def _beta(beta: Tensor | None, gamma: Tensor) -> Tensor:
    return torch.zeros_like(gamma) if beta is None else beta


def _bias(bias: Tensor | None, weight: Tensor) -> Tensor:
    if bias is not None:
        return bias
    return torch.zeros((weight.shape[0],), dtype=torch.int32, device=weight.device)
