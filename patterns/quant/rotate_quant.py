"""v = x R, s = max|v| / 127, q = round(v / s): rows turned by a matrix, such as Hadamard's, then in int8 with scales.

*Matches* a linear layer to as many lanes, perhaps times a positive number, and the quantisation of its rows where
nothing else reads them. *Replaces with* `npu_rotate_quant`, which rounds the product as the layer does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.quant.dynamic_quant import DynamicQuant, quantised_rows

INT8 = 1
"""The number by which the operator is told the dtype of its result."""


@dataclass(frozen=True)
class RotateQuant(Rule):
    """Rotation of each row and its quantisation in one."""

    def reference(self, x: Tensor, rotation: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning: x [*B, D], rotation [D, D] as the weight of a layer; returns int8 [*B, D], scales [*B, 1]."""
        return DynamicQuant().reference(x @ rotation.t())

    @pattern
    def rotated(
        self,
        p,
        x=tensor("*B D"),
        rotation=tensor("D D"),
        is_parameter_only=attribute(),
        factor=scalar(),
        dtype=attribute(),
    ):
        """The numbers of a layer, and their scales."""
        y = p.linear(x=x, weight=rotation, is_parameter_only=is_parameter_only)
        return quantised_rows(p, p.maybe_scaled(y, factor), dtype)

    def guard(self, factor: float):
        """A factor of all lanes is one of the scale alone, if it turns no sign."""
        require(factor > 0, "the turned rows are multiplied by {factor}, which is not positive", factor=factor)

    @lowering
    def npu(self, x: Tensor, rotation: Tensor, factor: float, dtype: torch.dtype):
        """One operator; a factor of the rows is one of their scales."""
        int8, scale = torch.ops.npu.npu_rotate_quant(x.reshape(-1, x.shape[-1]), rotation.t(), dst_dtype=INT8)
        scale = scale if factor == 1 else scale * factor
        return int8.reshape(x.shape), scale.reshape(*x.shape[:-1], 1).to(dtype)
