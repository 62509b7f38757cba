"""y = x ((w + z) · s)ᵀ (+ b): a linear layer of floats whose weight is kept in int8.

*Matches* a weight of int8 that is made floats for the product, with a scale (and a zero point before it) of each output
channel, or of each group of inputs of a channel, in any order that means this. *Replaces with*
`npu_weight_quant_batchmatmul`, which reads the int8 weight as it lies and rounds each of its products with a scale.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor


@dataclass(frozen=True)
class WeightOnlyLinear(Rule):
    """Linear layer with an int8 weight."""

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        """The meaning: x [*B, K], weight [N, K] of int8, scale [N]; returns [*B, N]."""
        return x @ (weight.to(x.dtype) * scale[:, None]).t()

    @pattern
    def scaled(
        self,
        p,
        x=tensor("*B K"),
        weight=tensor("N K"),
        scale=tensor("*G C"),
        offset=tensor("*G C", optional=True),
        bias=tensor("N", optional=True),
        heads=attribute(),
    ):
        """With a scale, and perhaps a zero point and a bias; seen in heads, if it is."""
        return p.int8_weight_linear(x=x, weight=weight, scale=scale, offset=offset, bias=bias, heads=heads)

    @lowering
    def npu(self, x: Tensor, weight: Tensor, scale: Tensor, offset: Tensor | None, bias: Tensor | None, heads):
        """One operator over the rows of all tokens; a bias beside bfloat16 in float32."""
        inputs = weight.shape[1]
        group = inputs // scale.shape[0] if scale.dim() == 2 else 0
        bias = bias.float() if bias is not None and x.dtype == torch.bfloat16 else bias
        y = torch.ops.npu.npu_weight_quant_batchmatmul(
            x.reshape(-1, inputs), weight.t(), scale,
            antiquant_offset=offset, bias=bias, antiquant_group_size=group,
        )  # fmt: skip
        lanes = (weight.shape[0],) if heads is None else (heads, weight.shape[0] // heads)
        return y.reshape(*x.shape[:-1], *lanes)
