"""y[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j]  (Su et al., RoFormer, 2021).

*Matches* the rotation of pairs of lanes in every spelling, real or complex: the canonicaliser proves it lane by lane
and gives full-width tables. Pairs are (j, j + D/2), "half", or (2j, 2j + 1), "interleaved"; input and output may
differ. *Replaces with* `npu_rotary_mul` or `npu_interleave_rope`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor


def four_dims(x: Tensor) -> Tensor:
    """Give x [.., D] leading dims of size 1 up to four dims; the kernels read four."""
    require(x.dim() <= 4, "{rank} dims are more than the four that the operator reads", rank=x.dim())
    for _ in range(4 - x.dim()):
        x = x.unsqueeze(0)
    return x


def dims_of(y: Tensor, x: Tensor) -> Tensor:
    """Take from y the dims of size 1 that `four_dims` has given to x."""
    return y if y.dim() == x.dim() else y.reshape(x.shape)


def to_halves(x: Tensor) -> Tensor:
    """Lanes (2p, 2p + 1) to (p, p + D/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def to_pairs(x: Tensor) -> Tensor:
    """Lanes (p, p + D/2) to (2p, 2p + 1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, order: str, matrix: Tensor | None = None) -> Tensor:
    """One operator, both sides in one order; x and the tables [.., D], read in the order in which x lies in memory.

    With a matrix [D, D] the operator multiplies by it where else it would turn the lanes itself.
    """
    ranked = [four_dims(each) for each in (x, cos, sin)]
    swapped = ranked[0].stride(1) < ranked[0].stride(2)
    if swapped:
        ranked = [each.transpose(1, 2) for each in ranked]
    y = torch.ops.npu.npu_rotary_mul(*ranked, order, matrix)
    return (y.transpose(1, 2) if swapped else y).reshape(x.shape)


def turning(like: Tensor) -> Tensor:
    """The matrix [D, D] that turns pairs, x · matrix = (-x₁, x₀, -x₃, x₂, …), for lanes of a tensor [.., D]."""
    width: Any = like.shape[-1]
    first, second = torch.eye(width, dtype=like.dtype, device=like.device).reshape(-1, 2, width).unbind(1)
    return torch.stack((second, -first), dim=1).reshape(width, width)


def for_batch(table: Tensor, batch: int) -> Tensor:
    """A table [1, .., D] written out for every sequence, for chips whose kernels do not broadcast the batch."""
    table = four_dims(table)
    require(table.shape[0] != batch, "the tables are there for every sequence")
    return table.expand(batch, -1, -1, -1).contiguous()


@dataclass(frozen=True)
class Rope(Rule):
    """Rotary position embedding of one tensor."""

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The meaning in half order: x [*B, D], tables broadcast to it."""
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    @pattern
    def rotated(
        self,
        p,
        x=tensor("*B D"),
        cos=tensor("*T D"),
        sin=tensor("*U D"),
        source=attribute(),
        result=attribute(),
        dtype=attribute(),
    ):
        """All lanes are rotated."""
        return p.rotation(x=x, cos=cos, sin=sin, source=source, result=result, dtype=dtype)

    @lowering
    def half(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """Half order on both sides."""
        require(source == result == "half", "the lanes are not in half order")
        return rotary_mul(x, cos, sin, "half").to(dtype)

    @lowering
    def pairs(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """Interleaved order on both sides."""
        require(source == result == "interleaved", "the lanes are not in interleaved order")
        return rotary_mul(x, cos, sin, "interleave").to(dtype)

    @lowering
    def pairs_by_matrix(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """The same by a constant matrix, for compilers that cannot say which lanes are turned."""
        require(source == result == "interleaved", "the lanes are not in interleaved order")
        return rotary_mul(x, cos, sin, "interleave", turning(x)).to(dtype)

    @lowering
    def pairs_to_half(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """Interleaved in, half out: x [B, N, S, D] with tables that do not depend on N."""
        require((source, result) == ("interleaved", "half"), "the lanes do not go from interleaved to half order")
        rotated = torch.ops.npu.npu_interleave_rope(four_dims(x), four_dims(cos), four_dims(sin))
        return rotated.reshape(x.shape).to(dtype)

    @lowering
    def pairs_to_half_by_batch(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """The same with tables for every sequence."""
        cos, sin = (for_batch(each, four_dims(x).shape[0]) for each in (cos, sin))
        return self.pairs_to_half(x, cos, sin, source, result, dtype)

    @lowering
    def rows_to_half(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """The same for x [B, S, N, D]: every position is a batch entry of its own."""
        one = all(each.dim() == 4 and each.shape[2] == 1 for each in (cos, sin))
        require(x.dim() == 4 and one, "the tables depend on the heads")
        cos, sin = (each.expand(*x.shape[:2], 1, x.shape[3]).reshape(-1, 1, 1, x.shape[3]) for each in (cos, sin))
        rows = x.reshape(-1, x.shape[2], 1, x.shape[3])
        return self.pairs_to_half(rows, cos, sin, source, result, dtype).reshape(x.shape)

    @lowering
    def through_half(self, x: Tensor, cos: Tensor, sin: Tensor, source: str, result: str, dtype: torch.dtype):
        """Any orders, by reordering lanes around the rotation in half order."""
        require("interleaved" in (source, result), "the lanes are in half order already")
        if source == "interleaved":
            x = to_halves(x)
        if result == "interleaved":
            return to_pairs(rotary_mul(x, to_halves(cos), to_halves(sin), "half")).to(dtype)
        return rotary_mul(x, cos, sin, "half").to(dtype)
