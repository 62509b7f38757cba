"""s = max|x| / 127, q = round(x / s): every token in whole numbers of 8 bits, with a scale of its own.

*Matches* the largest magnitude of each row, the quotient and its rounding, with or without bounds that change nothing.
*Replaces with* `npu_dynamic_quant`, which computes in float32. A quotient halfway between two whole numbers, or one
that the model rounds to 16 bits before, may go to the other of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, scalar, tensor


def quantised_rows(p, x, dtype, **times):
    """The terms of rows in whole numbers, and of their scales in this dtype, perhaps times a number."""
    scale = p.token_scale(x=x, dtype=dtype, **times)
    return p.quantise(x=x, scale=scale, dtype=dtype, scheme="dynamic", **times), scale


@dataclass(frozen=True)
class DynamicQuant(Rule):
    """Symmetric quantisation of each token to int8."""

    def reference(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning: x [*B, D]; returns whole numbers [*B, D] and scales [*B, 1]."""
        scale = x.float().abs().amax(-1, keepdim=True) / 127
        return (x / scale).round().to(torch.int8), scale

    @pattern
    def per_token(self, p, x=tensor("*B D"), dtype=attribute()):
        """Whole numbers and their scale."""
        return quantised_rows(p, x, dtype)

    @pattern
    def largest(self, p, x=tensor("*B D"), dtype=attribute(), times=scalar()):
        """Whole numbers, and of their scale a multiple, such as the largest magnitude itself."""
        return quantised_rows(p, x, dtype, times=times)

    @lowering
    def npu(self, x: Tensor, dtype: torch.dtype, times: float | None):
        """One operator; a scale in 16 bits is cast, another multiple of it computed."""
        whole, scale = torch.ops.npu.npu_dynamic_quant(x)
        scale = scale if times is None else scale * times
        return whole, scale.unsqueeze(-1).to(dtype)
