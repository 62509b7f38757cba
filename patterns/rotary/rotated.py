"""Lanes that are rotated: x, its tables and the orders of its pairs, and the rotation by npu_rotary_mul."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, bounded, require, tensor


def four_dims(x: Tensor, operator: str) -> Tensor:
    """Reshape `x` [.., D] to the four dims that `operator` reads, with leading dims of size 1; refuse more."""
    require(
        x.dim() <= 4,
        "x: it has {rank} dims; {operator} requires four at most; flatten the leading dims before the rotation",
        rank=x.dim(),
        operator=operator,
    )
    for _ in range(4 - x.dim()):
        x = x.unsqueeze(0)
    return x


def dims_of(y: Tensor, x: Tensor) -> Tensor:
    """Reshape `y` to the dims of `x`, before `four_dims` unsqueezed it."""
    return y if y.dim() == x.dim() else y.reshape(x.shape)


def to_halves(x: Tensor) -> Tensor:
    """Permute the lanes of `x` from interleaved (2p, 2p + 1) to half order (p, p + D/2)."""
    return x.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)


def to_pairs(x: Tensor) -> Tensor:
    """Permute the lanes of `x` from half order (p, p + D/2) to interleaved (2p, 2p + 1)."""
    return x.unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)


def rotary_mul(x: Tensor, cos: Tensor, sin: Tensor, order: str, matrix: Tensor | None = None) -> Tensor:
    """Emit npu_rotary_mul on `x` and tables [.., D] with pairs in one `order`, with dims as `x` has them in memory.

    Where `matrix` [D, D] is given, the operator multiplies by it instead of permuting the lanes.
    """
    ranked = [four_dims(each, "npu_rotary_mul") for each in (x, cos, sin)]
    swapped = ranked[0].stride(1) < ranked[0].stride(2)
    if swapped:
        ranked = [each.transpose(1, 2) for each in ranked]
    y = torch.ops.npu.npu_rotary_mul(*ranked, order, matrix)
    return (y.transpose(1, 2) if swapped else y).reshape(x.shape)


def rotate_matrix(like: Tensor) -> Tensor:
    """Build the matrix [D, D] with x · matrix = (-x₁, x₀, -x₃, x₂, …), for lanes as those of `like` [.., D]."""
    width: Any = like.shape[-1]
    first, second = torch.eye(width, dtype=like.dtype, device=like.device).reshape(-1, 2, width).unbind(1)
    return torch.stack((second, -first), dim=1).reshape(width, width)


@dataclass(frozen=True)
class Rotated(Group):
    """Lanes that are rotated.

    Attributes:
        x: the lanes.
        cos: the cosines.
        sin: the sines.
        source: the order of pairs of `x`, "half" or "interleaved".
        result: the order of pairs of the result.
        dtype: the dtype of the result.
    """

    x: Any = tensor("*B D")
    cos: Any = tensor("*T D")
    sin: Any = tensor("*U D")
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def term(self, p, word: str, **extra: Any):
        """Build the term of the rotation as `word`; the captures `extra` add to, or replace, those of this group."""
        return getattr(p, word)(**vars(self) | extra)

    def rounded(self, y: Tensor, operator: str) -> Tensor:
        """Return the rotated lanes `y` in the dtype of the model.

        Raises:
            Refused: `operator` has rounded them to a narrower one.
        """
        require(
            torch.promote_types(y.dtype, self.dtype) == y.dtype,
            "the rotated lanes: the model holds them in {wide}; {operator} rounds them to {narrow}", operator=operator,
            wide=str(self.dtype).removeprefix("torch."), narrow=str(y.dtype).removeprefix("torch."),
        )  # fmt: skip
        return y.to(self.dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [.., D] as the operators read them."""
        return self.cos, self.sin

    def tables_by_batch(self, operator: str) -> tuple[Tensor, Tensor]:
        """Return tables expanded to every sequence [B, .., D], for chips where `operator` does not broadcast them."""
        batch = four_dims(self.x, operator).shape[0]
        spread = (four_dims(each, operator) for each in (self.cos, self.sin))
        cos, sin = (_for_batch(each, batch) for each in spread)
        cos, sin = (each.contiguous() for each in replace(self, cos=cos, sin=sin).tables())
        return cos, sin

    def by(self, order: str, matrix: Tensor | None = None) -> Tensor:
        """Emit the rotation by npu_rotary_mul in `order`, with `matrix` if given."""
        return self.rounded(rotary_mul(self.x, *self.tables(), order, matrix), "npu_rotary_mul")


@dataclass(frozen=True)
class Widened(Rotated):
    """Lanes that are rotated in float32 and rounded back to their own dtype, by tables of each lane or pair.

    Rounding float32 tables to that dtype changes a lane by no more than its own rounding.
    """

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")

    def term(self, p, word: str, **extra: Any):
        """Build the term of the rotation in float32, as `word`, rounded back; tables may be cast or repeated."""
        tables = {"cos": self.cos, "sin": self.sin}
        wide = {name: p.maybe_cast(p.maybe_repeated(table, 2), to=torch.float32) for name, table in tables.items()}
        captured = vars(self) | wide | extra
        captured["x"] = p.cast(captured["x"], to=torch.float32)
        return p.as_dtype(getattr(p, word)(**captured), self.x)

    def rounded(self, y: Tensor, operator: str) -> Tensor:
        """Return the rotated lanes `y`, which have the dtype of the model."""
        return y

    def tables(self) -> tuple[Tensor, Tensor]:
        """Return cosines and sines in the dtype of the lanes, expanded from pairs to lanes."""
        cos, sin = (self._written_out(each) for each in (self.cos, self.sin))
        return cos, sin

    def _written_out(self, table: Tensor) -> Tensor:
        # cosines and sines, at most times the factor of YaRN: float16 has them within 3e-8 or half an ulp
        with bounded():
            if table.shape[-1] == self.x.shape[-1]:
                return table.to(self.x.dtype)
            return table.unsqueeze(-1).expand(*table.shape, 2).to(self.x.dtype).flatten(-2)


def _for_batch(table: Tensor, batch: int) -> Tensor:
    require(
        table.shape[0] != batch,
        "cos, sin: they have a row of each sequence already; this call requires tables that all sequences share",
    )
    return table.expand(batch, -1, -1, -1)
