"""Rows that become int8 by scales which the model holds, of each head, of each channel or of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, tensor

QINT8 = 12
"""The number by which the operator is told the dtype of its result."""


@dataclass(frozen=True)
class HeldScales(Group):
    """x / scale + zero, or x · scale + zero; both with as many dims as x, of which they share some."""

    x: Any = tensor("*B D")
    scale: Any = tensor("*S Ds")
    zero: Any = tensor("*Z Dz", optional=True)
    divided: Any = attribute()

    def refuse(self) -> None:
        """Any will do."""

    def quantised(self) -> Tensor:
        """Whole numbers [*B, D]."""
        x, given = self.x, self._given()
        dims = [axis for axis in range(x.dim()) if any(each.shape[axis] != 1 for each in given)]
        if not dims:
            return self._called(x, [each.reshape(1) for each in given])
        dims = [*dims, *([] if dims[-1] == x.dim() - 1 else [x.dim() - 1])]
        order = [*(axis for axis in range(x.dim()) if axis not in dims), *dims]
        sizes = [x.shape[axis] for axis in dims]
        shape = [x.shape[axis] if axis in dims else 1 for axis in range(x.dim())]
        rows = x.permute(order).flatten(-len(dims))
        whole = self._called(rows, [each.expand(shape).reshape(-1) for each in given])
        return whole.unflatten(-1, sizes).permute([order.index(axis) for axis in range(x.dim())])

    def _given(self) -> list[Tensor]:
        """The scale, and the zero point in a dtype that the operator takes, if there is one."""
        zero = self.zero
        if zero is None:
            return [self.scale]
        return [self.scale, zero if self.divided and not zero.is_floating_point() else zero.to(self.x.dtype)]

    def _called(self, x: Tensor, given: list[Tensor]) -> Tensor:
        scale, zero = given if len(given) == 2 else (*given, None)
        return torch.ops.npu.npu_quantize(x, scale, zero, QINT8, -1, self.divided)
