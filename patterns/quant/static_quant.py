"""q = round(x / s + z), or x · s: rows in int8 by scales that the model holds, as a cache keeps them (C8).

*Matches* the quotient or the product, its rounding and its bounds, with a scale of each head, of each channel or of
all. *Replaces with* `npu_quantize`, which computes in float32. A quotient halfway between two whole numbers, or one
that the model rounds to 16 bits before, may go to the other of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor

QINT8 = 12
"""The number by which the operator is told the dtype of its result."""


@dataclass(frozen=True)
class StaticQuant(Rule):
    """Quantisation to int8 by scales that are the same for all tokens."""

    def reference(self, x: Tensor, scale: Tensor) -> Tensor:
        """The meaning: x [*B, D], a scale that broadcasts to it; returns whole numbers [*B, D]."""
        return (x.float() / scale).round().clamp(-128, 127).to(torch.int8)

    def within(self) -> frozenset[str]:
        """The norm before it."""
        return frozenset({"encoded_norm"})

    @pattern
    def by_channel(
        self, p, x=tensor("*B D"), scale=tensor("*S Ds"), zero=tensor("*Z Dz", optional=True), divided=attribute()
    ):  # fmt: skip
        """With or without a zero point."""
        return p.int8_rows(x=x, scale=scale, zero=zero, divided=divided)

    @lowering
    def npu(self, x: Tensor, scale: Tensor, zero: Tensor | None, divided: bool):
        """One operator, over rows whose scales are those of their last dim: heads and channels in one."""
        given = (
            [scale] if zero is None else [scale, zero if divided and not zero.is_floating_point() else zero.to(x.dtype)]
        )
        dims = [axis for axis in range(x.dim()) if any(each.shape[axis] != 1 for each in given)]
        if not dims:
            return _quantised(x, [each.reshape(1) for each in given], divided)
        dims = [*dims, *([] if dims[-1] == x.dim() - 1 else [x.dim() - 1])]
        order = [*(axis for axis in range(x.dim()) if axis not in dims), *dims]
        sizes = [x.shape[axis] for axis in dims]
        shape = [x.shape[axis] if axis in dims else 1 for axis in range(x.dim())]
        rows = x.permute(order).flatten(-len(dims))
        whole = _quantised(rows, [each.expand(shape).reshape(-1) for each in given], divided)
        return whole.unflatten(-1, sizes).permute([order.index(axis) for axis in range(x.dim())])


def _quantised(x: Tensor, given: list[Tensor], divided: bool) -> Tensor:
    scale, zero = given if len(given) == 2 else (*given, None)
    return torch.ops.npu.npu_quantize(x, scale, zero, QINT8, -1, divided)
