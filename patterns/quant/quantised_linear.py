"""y = x Wᵀ (+ b): a linear layer whose weight is kept in int8.

    W8A8          y = (x8 W8ᵀ) · s · c (+ b), of int8 by a scale s of each token, c of each output channel
    weight only   y = x ((W8 + z) · c)ᵀ (+ b), of floats, c and z of each output channel or of groups of its inputs

*Matches* `_int_mm`, or a product of int8 in int32, float32 or bfloat16, multiplied by both scales in any order and
cast; and a weight of int8 that is made floats for the product, in any order that means this. *Replaces with*
`npu_quant_matmul`, whose sums are exact and which rounds once, the weight of Parameters prepared once, transposed and
in FRACTAL_NZ; or with `npu_weight_quant_batchmatmul`, which reads the int8 weight as it lies and rounds each of its
products with a scale.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, alternative, attribute, lowering, pattern, require, rounding, tensor, variants

NZ = 29  # the storage format in which the operator reads a weight fastest
CODES = {torch.float16: 5, torch.bfloat16: 15}
"""The numbers by which the operator is told the dtype of its result."""


def prepared(weight: Tensor) -> Tensor:
    """A weight [N, K] as the operator reads it, [K, N]."""
    return torch.ops.npu.npu_format_cast(weight.t().contiguous(), NZ)


def refuse(dtype: torch.dtype) -> None:
    """Refuse results that the operator does not give."""
    require(dtype in CODES, "the result is of {dtype}, the operator gives float16 and bfloat16", dtype=dtype)


def multiplied(
    x: Tensor, weight: Tensor, scale: Tensor, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [*B, K] of int8 times a weight [K, N] as the operator reads it, times scales [N] and those of rows."""
    as_given = bias is not None and (bias.dtype == torch.int32 or bias.dtype == dtype == torch.bfloat16)
    more = {} if bias is None else {"bias": bias if as_given else bias.float()}
    y = torch.ops.npu.npu_quant_matmul(
        x.reshape(-1, x.shape[-1]), weight, scale.float(), pertoken_scale=rows, output_dtype=CODES[dtype], **more
    )
    return y.reshape(*x.shape[:-1], weight.shape[-1])


@dataclass(frozen=True)
class W8A8(Group):
    """Rows in int8, with a scale of each token, if there is one, and one of each channel."""

    x: Any = tensor("*B K")
    weight: Any = tensor("N K")
    scale: Any = tensor("N")
    tokens: Any = tensor("*B 1", optional=True)
    bias: Any = tensor("N", optional=True)
    dtype: Any = attribute()
    is_parameter_only: Any = attribute()

    def term(self, p) -> Any:
        """The layer."""
        return p.int8_matmul(**vars(self))

    def refuse(self) -> None:
        """What the operator returns."""
        refuse(self.dtype)


@dataclass(frozen=True)
class WeightOnly(Group):
    """Rows in floats; of the weight a scale, and perhaps a zero point; the result seen in heads, if it is.

    Attributes:
        dtype: that in which the model holds the weight times its scale.
    """

    x: Any = tensor("*B K")
    weight: Any = tensor("N K")
    scale: Any = tensor("*G C")
    offset: Any = tensor("*G C", optional=True)
    bias: Any = tensor("N", optional=True)
    heads: Any = attribute()
    dtype: Any = attribute()

    def term(self, p) -> Any:
        """The layer."""
        return p.int8_weight_linear(**vars(self))

    def refuse(self) -> None:
        """The operator returns what the rows are."""


@dataclass(frozen=True)
class QuantisedLinear(Rule):
    """Linear layer whose weight is kept in int8."""

    aliases = ("quantized_linear", "quant_matmul", "weight_only_linear", "weight_quant_batchmatmul")

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor, tokens: Tensor | None = None) -> Tensor:
        """The meaning: x [*B, K], weight [N, K] of int8, scale [N]; in W8A8 x of int8, tokens [*B, 1].

        Returns [*B, N].
        """
        if tokens is None:
            return x @ (weight.to(x.dtype) * scale[:, None]).t()
        return (x.double() @ weight.double().t()).float() * tokens * scale

    @pattern
    @variants(layer=(W8A8,))
    def scaled(self, p, layer):
        """Rows in int8."""
        return layer.term(p)

    @alternative
    @pattern
    @variants(layer=(WeightOnly,))
    def scaled_weight(self, p, layer):
        """Rows in floats, perhaps of int8 that is dequantised first."""
        return layer.term(p)

    def guard(self, layer: W8A8 | WeightOnly):
        """What the operator returns."""
        layer.refuse()

    @lowering
    @variants(layer=(W8A8,))
    def int8(self, layer: W8A8):
        """One operator over the rows of all tokens."""
        rows = None if layer.tokens is None else layer.tokens.float().reshape(-1)
        weight = prepared(layer.weight) if layer.is_parameter_only else layer.weight.t()
        return multiplied(layer.x, weight, layer.scale, rows, layer.bias, layer.dtype)

    @lowering
    @variants(layer=(WeightOnly,))
    def weight_only(self, layer: WeightOnly):
        """Run one operator over the rows of all tokens; a bias beside bfloat16 in float32."""
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
