"""Int8 tensors of attention: keys and values that are dequantised, and results that are quantised."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.operators import encodings
from fusion.operators.dtype_sets import compute_dtype


@dataclass(frozen=True)
class Grid:
    """Scales and offsets by which stored n stand for (n + offset) · scale, with shapes by `mode`.

    0: one for all [1], or one per channel [M · D]; 1: per token [1, B, T..]; 2: per head [M]; 3: per head and token
    [B, M, T..].
    """

    scale: Tensor
    offset: Tensor | None
    mode: int

    def dequantised(self, x: Tensor, like: Tensor) -> Tensor:
        """Dequantise keys or values `x` [B, M, T, D] in the dtype in which queries `like` are computed, or in that of
        the scales if it is wider."""
        wide = torch.promote_types(compute_dtype(like), self.scale.dtype)
        offset = None if self.offset is None else self._broadcastable(self.offset, x)
        return encodings.STORED[x.dtype].dequantised(x, self._broadcastable(self.scale, x).to(wide), offset)

    def _broadcastable(self, each: Tensor, x: Tensor) -> Tensor:
        """Return scales or offsets `each` in a shape that broadcasts to keys or values `x` [B, M, T, D]."""
        match self.mode:
            case 1 | 3:
                tokens = each.transpose(0, 1) if self.mode == 1 else each
                return tokens[..., : x.shape[2]].unsqueeze(-1)
            case 2:
                return each.reshape(-1, 1, 1)
            case _:
                return each if each.dim() == 1 and each.shape[0] == 1 else each.reshape(x.shape[1], 1, x.shape[3])


def both_grids(scale: Tensor, offset: Tensor | None, mode: int) -> tuple[Grid, Grid]:
    """Return the grid of keys and the grid of values; `scale` and `offset` are [2, ..], those of keys, then those of
    values.
    """

    def grid(number: int) -> Grid:
        return Grid(_part(scale, number, mode), None if offset is None else _part(offset, number, mode), mode)

    return grid(0), grid(1)


def _part(each: Tensor, number: int, mode: int) -> Tensor:
    """Select entry `number` of `each` [2, ..] in the shape that `Grid` has in `mode`: [1, B, T] for 1, else flat."""
    return each[number : number + 1] if mode == 1 else each[number].reshape(-1)


@dataclass(frozen=True)
class Int8Result:
    """Quantisation of a result to int8, rint(y · scale + offset), by one number or by one per head and channel."""

    scale: Tensor
    offset: Tensor | None

    def quantised(self, y: Tensor) -> Tensor:
        """Quantise `y` [B, N, S, D] to int8."""
        wide = y.to(compute_dtype(y))
        scaled = wide * self._broadcastable(self.scale, wide)
        return encodings.INT8.stored(scaled if self.offset is None else scaled + self._broadcastable(self.offset, wide))

    @staticmethod
    def _broadcastable(each: Tensor, y: Tensor) -> Tensor:
        return (each.reshape(1) if each.numel() == 1 else each.reshape(y.shape[1], 1, y.shape[3])).to(y.dtype)


def int8_result(scale: Tensor | None, offset: Tensor | None) -> Int8Result | None:
    """Return the quantisation of a result by `scale` and `offset`, None without a scale: the result is a float."""
    return None if scale is None else Int8Result(scale, offset)
