"""y = x Wᵀ (+ b): a linear layer whose weight is stored in int8.

    W8A8          y = (x8 W8ᵀ) · s · c (+ b), x8 in int8, a scale s of each token and c of each output channel
    weight only   y = x ((W8 + z) · c)ᵀ (+ b), x in floats, c and z of each output channel or of groups of inputs

*Matches* `_int_mm`, or a product of int8 in int32, float32 or bfloat16, multiplied by both scales in any order and
cast; and an int8 weight that is dequantised for the product, by any order of the same operations. *Replaces with*
`npu_quant_matmul`, whose sums are exact and which rounds once: a weight that is a Parameter is transposed and cast to
FRACTAL_NZ once, before the first call. Or *replaces with* `npu_weight_quant_batchmatmul`, which reads the int8 weight
in place and rounds each of its entries times a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, alternative, attribute, lowering, pattern, require, rounding, tensor, variants

NZ = 29  # code of FRACTAL_NZ, the storage format in which the operator reads a weight fastest
CODES = {torch.float16: 5, torch.bfloat16: 15}
"""Codes of dtypes, as the operator takes the dtype of its result."""


def prepared(weight: Tensor) -> Tensor:
    """Transpose `weight` [N, K] to [K, N], and cast it to FRACTAL_NZ."""
    return torch.ops.npu.npu_format_cast(weight.t().contiguous(), NZ)


def refuse(dtype: torch.dtype) -> None:
    """Refuse results in another `dtype` than float16 and bfloat16, those of npu_quant_matmul."""
    require(
        dtype in CODES,
        "result: it is {dtype}; npu_quant_matmul requires float16 or bfloat16; cast the product to the dtype "
        "of the model before it is used",
        dtype=dtype,
    )


def multiplied(
    x: Tensor, weight: Tensor, scale: Tensor, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """Emit npu_quant_matmul: `x` [*B, K] int8, `weight` [K, N] int8, `scale` [N], `rows` [T] scales of tokens.

    Returns [*B, N] in `dtype`, with `bias` [N] added.
    """
    as_given = bias is not None and (bias.dtype == torch.int32 or bias.dtype == dtype == torch.bfloat16)
    more = {} if bias is None else {"bias": bias if as_given else bias.float()}
    y = torch.ops.npu.npu_quant_matmul(
        x.reshape(-1, x.shape[-1]), weight, scale.float(), pertoken_scale=rows, output_dtype=CODES[dtype], **more
    )
    return y.reshape(*x.shape[:-1], weight.shape[-1])


@dataclass(frozen=True)
class W8A8(Group):
    """A product of int8 rows `x` and an int8 `weight`, with a `scale` of each channel, and optionally of `tokens`."""

    x: Any = tensor("*B K")
    weight: Any = tensor("N K")
    scale: Any = tensor("N")
    tokens: Any = tensor("*B 1", optional=True)
    bias: Any = tensor("N", optional=True)
    dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def term(self, p) -> Any:
        """Build the term of the layer."""
        return p.int8_matmul(**vars(self))

    def refuse(self) -> None:
        """Refuse results other than float16 and bfloat16."""
        refuse(self.dtype)


@dataclass(frozen=True)
class WeightOnly(Group):
    """A product of rows `x` in floats and an int8 `weight`, dequantised by a `scale` and optionally an `offset`.

    Attributes:
        heads: H if the model views the result as [*B, H, D], None for [*B, N].
        dtype: the dtype of the dequantised weight in the model.
    """

    x: Any = tensor("*B K")
    weight: Any = tensor("N K")
    scale: Any = tensor("*G C")
    offset: Any = tensor("*G C", optional=True)
    bias: Any = tensor("N", optional=True)
    heads: Any = attribute()
    dtype: Any = attribute()

    def term(self, p) -> Any:
        """Build the term of the layer."""
        return p.int8_weight_linear(**vars(self))

    def refuse(self) -> None:
        """Accept any rows: the operator returns their dtype."""


@dataclass(frozen=True)
class QuantisedLinear(Rule):
    """A linear layer whose weight is stored in int8."""

    aliases = ("quantized_linear", "quant_matmul", "weight_only_linear", "weight_quant_batchmatmul")

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor, tokens: Tensor | None = None) -> Tensor:
        """Compute [*B, N] of `x` [*B, K], `weight` [N, K] int8, `scale` [N]; `tokens` [*B, 1] if x is int8 (W8A8)."""
        if tokens is None:
            return x @ (weight.to(x.dtype) * scale[:, None]).t()
        return (x.double() @ weight.double().t()).float() * tokens * scale

    @pattern
    @variants(layer=(W8A8,))
    def scaled(self, p, layer):
        """(x8 W8ᵀ) · s · c (+ b), of int8 rows"""
        return layer.term(p)

    @alternative
    @pattern
    @variants(layer=(WeightOnly,))
    def scaled_weight(self, p, layer):
        """x ((W8 + z) · c)ᵀ (+ b), of rows in floats, which may be dequantised int8"""
        return layer.term(p)

    def guard(self, layer: W8A8 | WeightOnly):
        """Refuse a W8A8 `layer` whose result is not float16 or bfloat16, which npu_quant_matmul returns."""
        layer.refuse()

    @lowering
    @variants(layer=(W8A8,))
    def int8(self, layer: W8A8):
        """Emit npu_quant_matmul on rows [*B, K] in int8, a Parameter's weight prepared."""
        rows = None if layer.tokens is None else layer.tokens.float().reshape(-1)
        weight = prepared(layer.weight) if layer.is_parameter_only else layer.weight.t()
        return multiplied(layer.x, weight, layer.scale, rows, layer.bias, layer.dtype)

    @lowering
    @variants(layer=(WeightOnly,))
    def weight_only(self, layer: WeightOnly):
        """Emit npu_weight_quant_batchmatmul on rows [T, K]; the bias in float32 if x is bfloat16."""
        x, (outputs, inputs), scale, bias = layer.x, layer.weight.shape, layer.scale, layer.bias
        with rounding("the weight times its scale", layer.dtype, x.dtype):
            y = torch.ops.npu.npu_weight_quant_batchmatmul(
                x.reshape(-1, inputs),
                layer.weight.t(),
                scale,
                antiquant_offset=layer.offset,
                bias=bias.float() if bias is not None and x.dtype == torch.bfloat16 else bias,
                antiquant_group_size=inputs // scale.shape[0] if scale.dim() == 2 else 0,
            )
        lanes = (outputs,) if layer.heads is None else (layer.heads, outputs // layer.heads)
        return y.reshape(*x.shape[:-1], *lanes)
