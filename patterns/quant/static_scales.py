"""Rows quantised to int8 by constant scales, one of each head, of each channel or of all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from fusion.analysis.dtypes import is_exact

QINT8 = 12
"""The code of torch.qint8, by which npu_quantize takes the dtype of its result."""


@dataclass(frozen=True)
class ConstantScales(Group):
    """The operands of x / scale + zero, or of x · scale + zero, with a tensor or a number as zero point.

    Attributes:
        scale: the scale, with as many dims as x, 1 along those that share an entry.
        zero: the zero point, likewise; None for a number, or none.
        shift: the zero point as a number; None for a tensor, or none.
        divided: True if x is divided by the scale, False if multiplied.
    """

    x: Any = tensor("*B D")
    scale: Any = tensor("*S Ds")
    zero: Any = tensor("*Z Dz", optional=True)
    shift: Any = scalar()
    divided: Any = attribute()

    def refuse(self) -> None:
        """Accept any operands."""

    def quantised(self, wide: torch.dtype | None = None) -> Tensor:
        """Emit npu_quantize [*B, D], with `x`, scale and zero point cast to the dtype `wide` if given.

        The operator takes scales of the last dim, so that the dims along which the scales vary are flattened to it.
        """
        x, operands = self.x, self._operands()
        if wide is not None:
            x, operands = x.to(wide), [each.to(wide) if each.is_floating_point() else each for each in operands]
        dims = [axis for axis in range(x.dim()) if any(each.shape[axis] != 1 for each in operands)]
        if not dims:
            return self._quantize(x, [each.reshape(1) for each in operands])
        dims = [*dims, *([] if dims[-1] == x.dim() - 1 else [x.dim() - 1])]
        order = [*(axis for axis in range(x.dim()) if axis not in dims), *dims]
        sizes = [x.shape[axis] for axis in dims]
        shape = [x.shape[axis] if axis in dims else 1 for axis in range(x.dim())]
        rows = x.permute(order).flatten(-len(dims))
        int8 = self._quantize(rows, [each.expand(shape).reshape(-1) for each in operands])
        return int8.unflatten(-1, sizes).permute([order.index(axis) for axis in range(x.dim())])

    def _operands(self) -> list[Tensor]:
        """Return the scale, and the zero point, if any, in a dtype that the operator takes."""
        zero = self.zero
        if zero is None:
            return [self.scale] if self.shift is None else [self.scale, self._number(self.shift)]
        return [self.scale, zero if self.divided and not zero.is_floating_point() else zero.to(self.x.dtype)]

    def _number(self, shift: float) -> Tensor:
        """Return the zero point `shift` for each entry of the scale."""
        dtype = torch.int32 if self.divided else self.x.dtype
        reason = "the zero point {shift} is not represented in {dtype}, as npu_quantize requires it; round it"
        require(is_exact(shift, dtype), reason, shift=shift, dtype=dtype)
        return torch.full_like(self.scale, int(shift) if self.divided else shift, dtype=dtype)

    def _quantize(self, x: Tensor, operands: list[Tensor]) -> Tensor:
        scale, zero = operands if len(operands) == 2 else (*operands, None)
        return torch.ops.npu.npu_quantize(x, scale, zero, QINT8, -1, self.divided)


@dataclass(frozen=True)
class KnownScale(Group):
    """The operands of x · by + shift, for constant numbers `by` and `shift`."""

    x: Any = tensor("*B D")
    by: Any = scalar()
    shift: Any = scalar()

    def refuse(self) -> None:
        """Accept any numbers."""

    def quantised(self) -> Tensor:
        """Emit npu_quantize [*B, D] in the dtype of `x` if that represents both numbers exactly, else in float32."""
        fits = all(is_exact(each, self.x.dtype) for each in (self.by, self.shift))
        x = self.x if fits else self.x.to(torch.float32)
        scale = torch.full((1,), self.by, dtype=x.dtype, device=x.device)
        zero = torch.full_like(scale, self.shift) if self.shift else None
        return torch.ops.npu.npu_quantize(x, scale, zero, QINT8, -1, False)
