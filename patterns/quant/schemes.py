"""How the three linear layers before attention over a latent are computed: in floats, or W8A8.

    c = norm(x W_DQ)      heads = c W_UQ      row = x W_DKV
    W8A8 by token: y = (x8 W8) · s · d, with x8 = round(x / s), s = max|x| / 127 of each token, d of each channel
    W8A8 static:   y = (W8 x8 + b) · d, with x8 = round((x + β) / s + z) of constants s and z

A scheme gives both latents (`down`), what the heads of the queries are read from (`queries`, `heads`), and what
`npu_mla_prolog_v3` is told (`weights`, `factor`, `arguments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.quant.quantisation import quantised_rows, rounded_scale
from patterns.quant.quantised_linear import prepared

Order = Callable[[Tensor], Tensor]
"""What puts rows of a layer in another order."""


def int8_layer(p, x, layers, name, **more):
    """The term of the W8A8 layer of this name among others; `more` are scales of tokens, or a bias."""
    weight, scale = getattr(layers, name), getattr(layers, f"{name}_scale")
    how = dict(weight=weight, scale=scale, dtype=layers.layer_dtype, is_parameter_only=layers.is_parameter_only)
    return p.int8_matmul(x=p.reshaped(x), **how, **more)


@dataclass(frozen=True)
class FloatLayers(Group):
    """All three layers in floats."""

    dq: Any = tensor("Hcq He")
    uq: Any = tensor("Nq Hcq")
    dkv: Any = tensor("Nk He")
    is_parameter_only: Any = attribute()
    factor_of_lanes: Any = scalar()

    def like(self, x, gamma):
        """What has the dtype of the model."""
        return x

    def down(self, p, x):
        """x W_DQ and x W_DKV."""
        return [p.linear(x=x, weight=each, is_parameter_only=self.is_parameter_only) for each in (self.dq, self.dkv)]

    def queries(self, p, norm, of):
        """Lanes to rotate, absorbed queries, and their latent."""
        turning, latent = p.maybe_scaled(p.reshaped(norm), self.factor_of_lanes), p.maybe_scaled(norm, of.factor)
        how = dict(weight=self.uq, width=of.width)
        lanes = p.head_lanes(x=turning, start=of.first, heads_first=of.heads_first, **how)
        return lanes, p.absorbed_query(x=p.reshaped(latent), start=of.begin, up=of.up, **how), (latent,)

    def guard(self, of: Any) -> None:
        """Refuse queries of which both parts are not multiplied alike."""
        _alike(self.factor_of_lanes * of.factor_of_tables, of.factor)

    def factor(self, behind_norm: float) -> float:
        """What the latent of the queries is multiplied by, if the model multiplies its norm by this number."""
        return behind_norm

    def guard_row(self, row: Any) -> None:
        """Refuse a layer of x that gives more than the row of a token."""
        row.guard(self.dkv)

    def apart(self, row: Any) -> Self:
        """The same with a layer of its own for the row of a token."""
        return self

    def reordered(self, of_heads: Order, of_row: Order) -> Self:
        """The same with the rows of W_UQ and of W_DKV in other orders."""
        return replace(self, uq=of_heads(self.uq), dkv=of_row(self.dkv))

    def weights(self) -> list[Tensor]:
        """W_DQ, W_UQ and W_DKV as the operators read them."""
        return [prepared(each) for each in (self.dq, self.uq, self.dkv)]

    def arguments(self) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of scales."""
        return {}

    def restored(self, latent: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """The latent of the queries as the model has it."""
        return (latent,)


@dataclass(frozen=True)
class Int8QueryLayer(FloatLayers):
    """W_UQ alone in W8A8; the heads that it gives may be multiplied by a number."""

    uq_scale: Any = tensor("Nq")
    scale_dtype: Any = attribute()
    layer_dtype: Any = attribute()
    factor_of_heads: Any = scalar()

    def like(self, x, gamma):
        """What has the dtype of the model."""
        return gamma

    def queries(self, p, norm, of):
        """As in floats, their latent in int8 with its scale."""
        latent = p.maybe_scaled(norm, of.factor)
        int8, scale = quantised_rows(p, p.reshaped(latent), self.scale_dtype)
        heads = int8_layer(p, int8, self, "uq", tokens=p.reshaped(scale))
        turning, multiplied = (p.maybe_scaled(heads, by) for by in (self.factor_of_lanes, self.factor_of_heads))
        lanes = p.layer_lanes(layer=turning, width=of.width, start=of.first, heads_first=of.heads_first)
        absorbed = p.layer_query(layer=multiplied, width=of.width, start=of.begin, up=of.up)
        return lanes, absorbed, (int8, scale)

    def guard(self, of: Any) -> None:
        """Refuse queries of which both parts are not multiplied alike."""
        _alike(self.factor_of_lanes * of.factor_of_tables, self.factor_of_heads)

    def reordered(self, of_heads: Order, of_row: Order) -> Self:
        """The same with the rows of W_UQ and of W_DKV, and their scales, in other orders."""
        return replace(super().reordered(of_heads, of_row), uq_scale=of_heads(self.uq_scale))

    def factor(self, behind_norm: float) -> float:
        """The same times the number of the heads: int8 stays as it is, its scale takes both."""
        return behind_norm * self.factor_of_heads

    def arguments(self) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of scales."""
        return dict(weight_quant_mode=1, dequant_scale_w_uq_qr=_row(self.uq_scale))

    def restored(self, latent: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """The latent of the queries in int8, and its scale [.., 1] without the number of the heads."""
        scale = scale.reshape(*latent.shape[:-1], 1)
        one = scale if self.factor_of_heads == 1 else scale / self.factor_of_heads
        return latent, rounded_scale(one, self.scale_dtype)


@dataclass(frozen=True)
class Int8Layers(Int8QueryLayer):
    """All three layers in W8A8; `tokens` are the scales of x."""

    tokens: Any = tensor("*B 1")
    dq_scale: Any = tensor("Hcq")
    dkv_scale: Any = tensor("Nk")

    def down(self, p, x):
        """x W_DQ and x W_DKV."""
        return [int8_layer(p, x, self, name, tokens=p.reshaped(self.tokens)) for name in ("dq", "dkv")]

    def reordered(self, of_heads: Order, of_row: Order) -> Self:
        """The same with the rows of W_UQ and of W_DKV, and their scales, in other orders."""
        return replace(super().reordered(of_heads, of_row), dkv_scale=of_row(self.dkv_scale))

    def arguments(self) -> dict[str, Any]:
        """What `npu_mla_prolog_v3` is told of scales."""
        of_x = dict(dequant_scale_x=self.tokens.float().reshape(-1, 1), dequant_scale_w_dq=_row(self.dq_scale))
        more = dict(of_x, dequant_scale_w_dkv_kr=_row(self.dkv_scale), weight_quant_mode=2)
        return {**super().arguments(), **more}


@dataclass(frozen=True)
class TokenInt8Layers(Group):
    """All three layers in W8A8 of norms that stand in the model, each token with a scale of its own."""

    dq: Any = tensor("Hcq He")
    dq_scale: Any = tensor("Hcq")
    uq: Any = tensor("Nq Hcq")
    uq_scale: Any = tensor("Nq")
    dkv: Any = tensor("Nk He")
    dkv_scale: Any = tensor("Nk")
    layer_dtype: Any = attribute()
    scale_dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def down(self, p, norm):
        """The latent of the queries and the row of both caches, of a norm of x."""
        x8 = self._quantised(p, norm)
        return self._layer(p, x8, "dq"), self._layer(p, x8, "dkv")

    def heads(self, p, norm):
        """All heads of the queries, of a norm of their latent."""
        return self._layer(p, self._quantised(p, norm, "_cq"), "uq")

    def _quantised(self, p, x, of=""):
        return quantised_rows(p, p.reshaped(x), self.scale_dtype)

    def _layer(self, p, x8, name):
        int8, scale = x8
        return int8_layer(p, int8, self, name, tokens=p.reshaped(scale))

    def guard(self) -> None:
        """Nothing speaks against them."""


@dataclass(frozen=True)
class StaticInt8Layers(TokenInt8Layers):
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

    def _quantised(self, p, x, of=""):
        names = dict(bias="beta", scale="scale", by="factor", zero_point="zero_point", shift="shift")
        how = {said: getattr(self, name + of) for said, name in names.items()}
        return p.quantise(x=p.reshaped(x), scheme="static", **how)

    def _layer(self, p, x8, name):
        return int8_layer(p, x8, self, name, bias=getattr(self, f"{name}_bias"))

    def guard(self) -> None:
        """Refuse biases that are not added to the int8 products."""
        for each in (self.dq_bias, self.uq_bias, self.dkv_bias):
            dtype = torch.int32 if each is None else each.dtype
            require(dtype == torch.int32, "a layer adds a bias of {dtype}, the operator one of int32", dtype=dtype)


def _alike(rotated: float, absorbed: float) -> None:
    alike, both = math.isclose(rotated, absorbed, rel_tol=1e-6), dict(rotated=rotated, absorbed=absorbed)
    require(alike, "rotated queries are multiplied by {rotated}, absorbed ones by {absorbed}", **both)


def _row(scale: Tensor) -> Tensor:
    """Scales of channels [N] in float32, [1, N]."""
    return scale.float().reshape(1, -1)
