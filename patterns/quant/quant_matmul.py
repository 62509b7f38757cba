"""y = (q Wᵀ) · s · c (+ b): int8, a scale of each token, one of each output channel.

*Matches* `_int_mm`, or a product of such numbers in int32, float32 or bfloat16, multiplied by both scales in any order
and cast. *Replaces with* `npu_quant_matmul`, whose sums are exact and which rounds once; the weight of Parameters is
prepared once, transposed and in FRACTAL_NZ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor

NZ = 29  # the storage format in which the operator reads a weight fastest
CODES = {torch.float16: 5, torch.bfloat16: 15}
"""The numbers by which the operator is told the dtype of its result."""


def prepared(weight: Tensor) -> Tensor:
    """A weight [N, K] as the operator reads it, [K, N]."""
    return torch.ops.npu.npu_format_cast(weight.t().contiguous(), NZ)


def refuse(dtype: torch.dtype) -> None:
    """Refuse results that the operator does not give."""
    require(dtype in CODES, "the result is of {dtype}, the operator gives float16 and bfloat16", dtype=dtype)


@dataclass(frozen=True)
class QuantMatmul(Rule):
    """Linear layer in int8."""

    def reference(self, x: Tensor, weight: Tensor, scale: Tensor, tokens: Tensor) -> Tensor:
        """The meaning: x [*B, K] and weight [N, K] of int8, scale [N], tokens [*B, 1]; returns [*B, N]."""
        return (x.double() @ weight.double().t()).float() * tokens * scale

    @pattern
    def scaled(
        self,
        p,
        x=tensor("*B K"),
        weight=tensor("N K"),
        scale=tensor("N"),
        tokens=tensor("*B 1", optional=True),
        bias=tensor("N", optional=True),
        dtype=attribute(),
        is_parameter_only=attribute(),
    ):
        """A scale of each token, if there is one, and one of each channel."""
        return p.int8_matmul(
            x=x, weight=weight, scale=scale, tokens=tokens, bias=bias, dtype=dtype, is_parameter_only=is_parameter_only
        )

    def guard(self, dtype: torch.dtype):
        """What the operator returns."""
        refuse(dtype)

    @lowering
    def npu(self, x, weight, scale, tokens, bias, dtype, is_parameter_only):
        """One operator over the rows of all tokens."""
        rows = None if tokens is None else tokens.float().reshape(-1)
        return multiplied(x, prepared(weight) if is_parameter_only else weight.t(), scale, rows, bias, dtype)


def multiplied(
    x: Tensor, weight: Tensor, scale: Tensor, rows: Tensor | None, bias: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """x [*B, K] of int8 times a weight [K, N] as the operator reads it, times scales [N] and those of rows."""
    more = {} if bias is None else {"bias": bias if bias.dtype in (torch.int32, dtype) else bias.float()}
    y = torch.ops.npu.npu_quant_matmul(
        x.reshape(-1, x.shape[-1]), weight, scale.float(), pertoken_scale=rows, output_dtype=CODES[dtype], **more
    )
    return y.reshape(*x.shape[:-1], weight.shape[-1])
