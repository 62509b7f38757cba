"""Schemes of the three linear layers before attention over a latent: in floats, or W8A8.

    c = norm(x W_DQ)      heads = c W_UQ      row = x W_DKV
    W8A8 by token: y = (x8 W8) · s · d, with x8 = round(x / s), s = max|x| / 127 of each token, d of each channel
    W8A8 static:   y = (W8 x8 + b) · d, with x8 = round((x + β) / s + z) of constants s and z

A scheme gives the terms of x W_DQ and x W_DKV (`down`) and of the heads of the queries (`queries`, `heads`), and the
arguments of `npu_mla_prolog_v3` that depend on it (`weights`, `factor`, `arguments`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.kit.int8_scales import STATIC
from patterns.quant.quantisation import quantised_rows, rounded_scale
from patterns.quant.quantised_linear import prepared

Order = Callable[[Tensor], Tensor]
"""A permutation of the rows of a weight."""


def int8_layer(p, x, layers, name, **more):
    """Build the term of W8A8 layer `name` of `layers` on int8 rows `x`; `more` are `tokens` (scales) or a `bias`."""
    weight, scale = getattr(layers, name), getattr(layers, f"{name}_scale")
    how = dict(weight=weight, scale=scale, dtype=layers.layer_dtype, is_parameter_only=layers.is_parameter_only)
    return p.int8_matmul(x=p.reshaped(x), **how, **more)


@dataclass(frozen=True)
class FloatLayers(Group):
    """The three layers in floats.

    Attributes:
        factor_of_lanes: a number that multiplies the lanes of the queries that are rotated.
    """

    dq: Any = tensor("Hcq He")
    uq: Any = tensor("Nq Hcq")
    dkv: Any = tensor("Nk He")
    is_parameter_only: Any = attribute()
    factor_of_lanes: Any = scalar()

    def like(self, x, gamma):
        """Return the term that has the dtype of the model: the hidden states `x`; in a scheme of int8 `x`, the gain
        `gamma`.
        """
        return x

    def down(self, p, x):
        """Build the terms x W_DQ and x W_DKV."""
        return [p.linear(x=x, weight=each, is_parameter_only=self.is_parameter_only) for each in (self.dq, self.dkv)]

    def queries(self, p, norm, queries):
        """Build the terms of queries from their latent `norm`: the lanes to rotate, the absorbed ones, and (latent,).

        Both parts are lanes of `norm` · W_UQ, at the places that `queries` gives (`first`, `begin`, `width`); it gives
        W_UK (`up`) too. The latent is scaled by `queries.factor`, the rotated lanes by `factor_of_lanes`.
        """
        turning, latent = p.maybe_scaled(p.reshaped(norm), self.factor_of_lanes), p.maybe_scaled(norm, queries.factor)
        how = dict(weight=self.uq, width=queries.width)
        lanes = p.head_lanes(x=turning, start=queries.first, heads_first=queries.heads_first, **how)
        return lanes, p.absorbed_query(x=p.reshaped(latent), start=queries.begin, up=queries.up, **how), (latent,)

    def guard(self, queries: Any) -> None:
        """Refuse `queries` whose rotated and absorbed parts are multiplied by different numbers."""
        _guard_factors(self.factor_of_lanes * queries.factor_of_tables, queries.factor)

    def factor(self, behind_norm: float) -> float:
        """Return the factor of the queries' latent that the operator applies, for `behind_norm` of the model."""
        return behind_norm

    def guard_row(self, row: Any) -> None:
        """Refuse a layer W_DKV that gives other lanes than those of the row of a token."""
        row.guard(self.dkv)

    def as_two_layers(self, row: Any) -> Self:
        """Return the scheme itself: W_DQ and W_DKV are two layers already."""
        return self

    def reordered(self, uq_order: Order, dkv_order: Order) -> Self:
        """Return the scheme with the rows of W_UQ permuted by `uq_order`, and those of W_DKV by `dkv_order`."""
        return replace(self, uq=uq_order(self.uq), dkv=dkv_order(self.dkv))

    def weights(self) -> list[Tensor]:
        """Prepare W_DQ, W_UQ and W_DKV as the operators read them, [K, N] in FRACTAL_NZ."""
        return [prepared(each) for each in (self.dq, self.uq, self.dkv)]

    def arguments(self) -> dict[str, Any]:
        """Return the quantisation arguments of `npu_mla_prolog_v3`: none."""
        return {}

    def restored(self, latent: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the results that the model has of the queries' latent: `latent` alone."""
        return (latent,)


@dataclass(frozen=True)
class Int8QueryLayer(FloatLayers):
    """W_UQ in W8A8, W_DQ and W_DKV in floats.

    Attributes:
        factor_of_heads: a number that multiplies the heads that are absorbed.
    """

    uq_scale: Any = tensor("Nq")
    scale_dtype: Any = attribute()
    layer_dtype: Any = attribute()
    factor_of_heads: Any = scalar()

    def like(self, x, gamma):
        """Return the value that has the dtype of the model: the gain of the norm."""
        return gamma

    def queries(self, p, norm, queries):
        """Build the terms of queries from `norm` in int8: the lanes to rotate, the absorbed ones, and (int8, scale).

        `queries` gives the places of both parts in the product with W_UQ, W_UK (`up`), and the factor of `norm`.
        """
        latent = p.maybe_scaled(norm, queries.factor)
        int8, scale = quantised_rows(p, p.reshaped(latent), self.scale_dtype)
        heads = int8_layer(p, int8, self, "uq", tokens=p.reshaped(scale))
        turning, multiplied = (p.maybe_scaled(heads, by) for by in (self.factor_of_lanes, self.factor_of_heads))
        lanes = p.layer_lanes(layer=turning, width=queries.width, start=queries.first, heads_first=queries.heads_first)
        absorbed = p.layer_query(layer=multiplied, width=queries.width, start=queries.begin, up=queries.up)
        return lanes, absorbed, (int8, scale)

    def guard(self, queries: Any) -> None:
        """Refuse `queries` whose rotated and absorbed parts are multiplied by different numbers."""
        _guard_factors(self.factor_of_lanes * queries.factor_of_tables, self.factor_of_heads)

    def reordered(self, uq_order: Order, dkv_order: Order) -> Self:
        """Return the scheme with the rows and scales of W_UQ permuted, and the rows of W_DKV."""
        return replace(super().reordered(uq_order, dkv_order), uq_scale=uq_order(self.uq_scale))

    def factor(self, behind_norm: float) -> float:
        """Return `behind_norm` times the factor of the heads, both of which the int8 latent's scale takes."""
        return behind_norm * self.factor_of_heads

    def arguments(self) -> dict[str, Any]:
        """Return the scale of W_UQ [1, Nq] and the mode of quantisation."""
        return dict(weight_quant_mode=1, dequant_scale_w_uq_qr=_row(self.uq_scale))

    def restored(self, latent: Tensor, scale: Tensor) -> tuple[Tensor, ...]:
        """Return the int8 latent of the queries and its scale [.., 1], divided by the factor of the heads."""
        scale = scale.reshape(*latent.shape[:-1], 1)
        one = scale if self.factor_of_heads == 1 else scale / self.factor_of_heads
        return latent, rounded_scale(one, self.scale_dtype)


@dataclass(frozen=True)
class Int8Layers(Int8QueryLayer):
    """W_DQ, W_UQ and W_DKV in W8A8; the hidden states are int8 with the scales `tokens`."""

    tokens: Any = tensor("*B 1")
    dq_scale: Any = tensor("Hcq")
    dkv_scale: Any = tensor("Nk")

    def down(self, p, x):
        """Build the terms x W_DQ and x W_DKV of int8 hidden states."""
        return [int8_layer(p, x, self, name, tokens=p.reshaped(self.tokens)) for name in ("dq", "dkv")]

    def reordered(self, uq_order: Order, dkv_order: Order) -> Self:
        """Return the scheme with the rows and scales of W_UQ and of W_DKV permuted."""
        return replace(super().reordered(uq_order, dkv_order), dkv_scale=dkv_order(self.dkv_scale))

    def arguments(self) -> dict[str, Any]:
        """Return the scales of x [T, 1] and of the three weights [1, N], and the mode of quantisation."""
        scales = dict(dequant_scale_x=self.tokens.float().reshape(-1, 1), dequant_scale_w_dq=_row(self.dq_scale))
        more = dict(scales, dequant_scale_w_dkv_kr=_row(self.dkv_scale), weight_quant_mode=2)
        return {**super().arguments(), **more}


@dataclass(frozen=True)
class TokenInt8Layers(Group):
    """The three layers in W8A8 with a dynamic scale of each token, of floats that a norm gives.

    For layers dq, uq and dkv, there is the int8 weight, the scale of its channels, and `layer_dtype`, the dtype of
    results.
    """

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
        """Build the terms of the queries' latent and of the row of both caches, of `norm`, the norm of x."""
        x8 = self._quantised(p, norm)
        return self._layer(p, x8, "dq"), self._layer(p, x8, "dkv")

    def heads(self, p, norm):
        """Build the term of all heads of the queries, of `norm`, the norm of their latent."""
        return self._layer(p, self._quantised(p, norm, "_cq"), "uq")

    def _quantised(self, p, x, suffix=""):
        return quantised_rows(p, p.reshaped(x), self.scale_dtype)

    def _layer(self, p, x8, name):
        int8, scale = x8
        return int8_layer(p, int8, self, name, tokens=p.reshaped(scale))

    def guard(self) -> None:
        """Accept any scales."""


@dataclass(frozen=True)
class StaticInt8Layers(TokenInt8Layers):
    """The three layers in W8A8 by constant scales and zero points, with an optional bias in int32 for each layer.

    The input is round((n + beta) / (scale · factor) + zero_point + shift), n the norm of x; fields in `_cq` are those
    of the norm of the queries' latent.
    """

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

    def _quantised(self, p, x, suffix=""):
        names = dict(bias="beta", scale="scale", by="factor", zero_point="zero_point", shift="shift")
        how = {capture: getattr(self, name + suffix) for capture, name in names.items()}
        return p.quantise(x=p.reshaped(x), encoding=STATIC, scheme="static", **how)

    def _layer(self, p, x8, name):
        return int8_layer(p, x8, self, name, bias=getattr(self, f"{name}_bias"))

    def guard(self) -> None:
        """Refuse biases of other dtypes than int32, the dtype of the sums that they are added to."""
        for each in (self.dq_bias, self.uq_bias, self.dkv_bias):
            dtype = torch.int32 if each is None else each.dtype
            require(
                dtype == torch.int32,
                "bias: a layer adds one of {dtype}; npu_mla_preprocess requires int32; store the bias divided "
                "by the scales, as int32",
                dtype=dtype,
            )


def _guard_factors(rotated: float, absorbed: float) -> None:
    is_same, factors = math.isclose(rotated, absorbed, rel_tol=1e-6), dict(rotated=rotated, absorbed=absorbed)
    require(
        is_same,
        "queries: the rotated lanes are multiplied by {rotated}, the absorbed ones by {absorbed}; "
        "npu_mla_prolog requires one factor; multiply both by the same",
        **factors,
    )


def _row(scale: Tensor) -> Tensor:
    """Reshape scales of channels [N] to [1, N], in float32."""
    return scale.float().reshape(1, -1)
