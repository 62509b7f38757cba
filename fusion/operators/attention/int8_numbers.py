"""Numbers of attention that are stored in int8: keys and values that become floats, and results that become int8."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.operators.dtypes import compute_dtype
from fusion.operators.quant.quantisation import int8


@dataclass(frozen=True)
class Grid:
    """The numbers (n + offset) · scale for which int8 stand, by scales as their mode says.

    0: of all [1], or of channels [M · D]; 1: of tokens [1, B, T..]; 2: of heads [M]; 3: of both [B, M, T..].
    """

    scale: Tensor
    offset: Tensor | None
    mode: int

    def applied(self, x: Tensor, like: Tensor) -> Tensor:
        """Return int8 keys or values [B, M, T, D] as floats, in the dtype that queries `like` are computed in."""
        wide = torch.promote_types(compute_dtype(like), self.scale.dtype)
        x = x.to(wide) if self.offset is None else x.to(wide) + self._seen(self.offset, x)
        return x * self._seen(self.scale, x)

    def _seen(self, each: Tensor, x: Tensor) -> Tensor:
        """Return scales or offsets as they broadcast to keys or values [B, M, T, D]."""
        match self.mode:
            case 1 | 3:
                tokens = each.transpose(0, 1) if self.mode == 1 else each
                return tokens[..., : x.shape[2]].unsqueeze(-1)
            case 2:
                return each.reshape(-1, 1, 1)
            case _:
                return each if each.dim() == 1 and each.shape[0] == 1 else each.reshape(x.shape[1], 1, x.shape[3])


def both_grids(scale: Tensor, offset: Tensor | None, mode: int) -> tuple[Grid, Grid]:
    """Return the grids of keys and of values, of scales and offsets [2, ..] that hold one behind the other."""

    def grid(number: int) -> Grid:
        of, zero = (None if each is None else _part(each, number, mode) for each in (scale, offset))
        assert of is not None
        return Grid(of, zero, mode)

    return grid(0), grid(1)


def _part(each: Tensor, number: int, mode: int) -> Tensor:
    """Return [1, B, T] of tokens (mode 1), else one number [1] or channels [M · D]."""
    return each[number : number + 1] if mode == 1 else each[number].reshape(-1)


@dataclass(frozen=True)
class Int8Result:
    """A result rint(y · scale + offset), by one number or by one of each channel of each head."""

    scale: Tensor
    offset: Tensor | None

    def applied(self, y: Tensor) -> Tensor:
        """Return y [B, N, S, D] as int8."""
        wide = y.to(compute_dtype(y))
        scaled = wide * self._seen(self.scale, wide)
        return int8(scaled if self.offset is None else scaled + self._seen(self.offset, wide))

    @staticmethod
    def _seen(each: Tensor, y: Tensor) -> Tensor:
        return (each.reshape(1) if each.numel() == 1 else each.reshape(y.shape[1], 1, y.shape[3])).to(y.dtype)


def int8_result(scale: Tensor | None, offset: Tensor | None) -> Int8Result | None:
    """Return how a result becomes int8, None where there is no `scale`: it stays a float."""
    return None if scale is None else Int8Result(scale, offset)
