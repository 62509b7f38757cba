"""s = max|x| / 127, q = round(x / s): every token in int8, with a scale of its own.

*Matches* the largest magnitude of each row, the quotient and its rounding, with or without bounds that change nothing;
rows as they are, or turned by a matrix such as Hadamard's, where nothing else reads them. *Replaces with*
`npu_dynamic_quant`, which computes in float32, or `npu_rotate_quant`, which rounds the product as the layer does. A
quotient halfway between two whole numbers, or one that the model rounds to 16 bits before, may go to the other of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor, variants

INT8 = 1
"""The number by which the operator is told the dtype of its result."""


def quantised_rows(p, x, dtype, **times):
    """The terms of rows in whole numbers, and of their scales in this dtype, perhaps times a number."""
    scale = p.token_scale(x=x, dtype=dtype, **times)
    return p.quantise(x=x, scale=scale, dtype=dtype, scheme="dynamic", **times), scale


@dataclass(frozen=True)
class Rows(Group):
    """Rows as they are."""

    x: Any = tensor("*B D")

    def terms(self, p) -> Any:
        """What is quantised."""
        return self.x

    def refuse(self) -> None:
        """Any will do."""

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Whole numbers [*B, D] and scales [*B, 1] in float32."""
        whole, scale = torch.ops.npu.npu_dynamic_quant(self.x)
        return whole, scale.unsqueeze(-1)


@dataclass(frozen=True)
class RotatedRows(Group):
    """Rows times a matrix [D, D], the weight of a layer, and perhaps times a positive number."""

    x: Any = tensor("*B D")
    rotation: Any = tensor("D D")
    is_parameter_only: Any = attribute()
    factor: Any = scalar()

    def terms(self, p) -> Any:
        """What is quantised."""
        y = p.linear(x=self.x, weight=self.rotation, is_parameter_only=self.is_parameter_only)
        return p.maybe_scaled(y, self.factor)

    def refuse(self) -> None:
        """A factor of all lanes is one of the scale alone, if it turns no sign."""
        why = "the turned rows are multiplied by {factor}, which is not positive"
        require(self.factor > 0, why, factor=self.factor)

    def quantised(self) -> tuple[Tensor, Tensor]:
        """Whole numbers [*B, D] and scales [*B, 1] in float32."""
        rows = self.x.reshape(-1, self.x.shape[-1])
        whole, scale = torch.ops.npu.npu_rotate_quant(rows, self.rotation.t(), dst_dtype=INT8)
        scale = scale if self.factor == 1 else scale * self.factor
        return whole.reshape(self.x.shape), scale.reshape(*self.x.shape[:-1], 1)


@dataclass(frozen=True)
class DynamicQuant(Rule):
    """Symmetric quantisation of each token to int8."""

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning: x [*B, D]; returns whole numbers [*B, D] and scales [*B, 1]."""
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().to(torch.int8), scale

    @pattern
    @variants(rows=(Rows, RotatedRows))
    def per_token(self, p, rows, dtype=attribute()):
        """Whole numbers and their scale."""
        return quantised_rows(p, rows.terms(p), dtype)

    @pattern
    @variants(rows=(Rows, RotatedRows))
    def largest(self, p, rows, dtype=attribute(), times=scalar()):
        """Whole numbers, and of their scale a multiple, such as the largest magnitude itself."""
        return quantised_rows(p, rows.terms(p), dtype, times=times)

    def guard(self, rows: Any):
        """What the rows are multiplied by."""
        rows.refuse()

    @lowering
    def npu(self, rows: Any, dtype: torch.dtype, times: float | None):
        """One operator; a scale in 16 bits is cast, another multiple of it computed."""
        whole, scale = rows.quantised()
        return whole, (scale if times is None else scale * times).to(dtype)
