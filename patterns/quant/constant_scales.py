"""Rows that become int8 by scales which the model holds, of each head, of each channel or of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, scalar, tensor
from fusion.analysis.dtypes import is_exact

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

    def quantised(self, wide: torch.dtype | None = None) -> Tensor:
        """Return whole numbers [*B, D], of `x`, scale and zero point in the dtype `wide` if there is one."""
        x, given = self.x, self._given()
        if wide is not None:
            x, given = x.to(wide), [each.to(wide) if each.is_floating_point() else each for each in given]
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


@dataclass(frozen=True)
class KnownScale(Group):
    """Rows of x · by + shift, numbers of the source."""

    x: Any = tensor("*B D")
    by: Any = scalar()
    shift: Any = scalar()

    def refuse(self) -> None:
        """Accept any numbers."""

    def quantised(self) -> Tensor:
        """Return whole numbers [*B, D], computed in the dtype of `x` if that holds both numbers, else in float32."""
        is_held = all(is_exact(each, self.x.dtype) for each in (self.by, self.shift))
        x = self.x if is_held else self.x.to(torch.float32)
        scale = torch.full((1,), self.by, dtype=x.dtype, device=x.device)
        zero = torch.full_like(scale, self.shift) if self.shift else None
        return torch.ops.npu.npu_quantize(x, scale, zero, QINT8, -1, False)
