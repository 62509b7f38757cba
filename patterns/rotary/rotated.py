"""Lanes that are rotated: x, its tables and the orders of its pairs, and the rotation by an operator."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, bounded, require, tensor


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


def rotate_matrix(like: Tensor) -> Tensor:
    """The matrix [D, D] that turns pairs, x · matrix = (-x₁, x₀, -x₃, x₂, …), for lanes of a tensor [.., D]."""
    width: Any = like.shape[-1]
    first, second = torch.eye(width, dtype=like.dtype, device=like.device).reshape(-1, 2, width).unbind(1)
    return torch.stack((second, -first), dim=1).reshape(width, width)


@dataclass(frozen=True)
class Rotated(Group):
    """Lanes that are rotated, in which orders their pairs stand, and the dtype of the result."""

    x: Any = tensor("*B D")
    cos: Any = tensor("*T D")
    sin: Any = tensor("*U D")
    source: Any = attribute()
    result: Any = attribute()
    dtype: Any = attribute()

    def term(self, p, word: str, **beside: Any):
        """A rotation of them, by the word for it, and what that captures beside, or of other lanes in its place."""
        return getattr(p, word)(**vars(self) | beside)

    def rounded(self, y: Tensor) -> Tensor:
        """Return the rotated lanes `y` in the dtype of the model.

        Raises:
            Refused: the operator has rounded them to a narrower one.
        """
        require(
            torch.promote_types(y.dtype, self.dtype) == y.dtype,
            "the rotated lanes: the model holds them in {wide}; the operator rounds them to {narrow}",
            wide=str(self.dtype).removeprefix("torch."), narrow=str(y.dtype).removeprefix("torch."),
        )  # fmt: skip
        return y.to(self.dtype)

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both tables [.., D] as the operators read them."""
        return self.cos, self.sin

    def tables_by_batch(self) -> tuple[Tensor, Tensor]:
        """The same written out for every sequence, [B, .., D], for chips whose kernels do not broadcast the batch."""
        batch = four_dims(self.x).shape[0]
        spread = (four_dims(each) for each in (self.cos, self.sin))
        cos, sin = (_for_batch(each, batch) for each in spread)
        cos, sin = (each.contiguous() for each in replace(self, cos=cos, sin=sin).tables())
        return cos, sin

    def by(self, order: str, matrix: Tensor | None = None) -> Tensor:
        """The rotation by `rotary_mul`."""
        return self.rounded(rotary_mul(self.x, *self.tables(), order, matrix))


@dataclass(frozen=True)
class Widened(Rotated):
    """Lanes that are rotated in float32 and rounded back to their own dtype, by tables of every lane or of every pair.

    What a table in float32 loses in that dtype is no more than a rotated lane is rounded by.
    """

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")

    def term(self, p, word: str, **beside: Any):
        """The same of their cast, rounded back to their dtype; tables may be narrow themselves."""
        tables = {"cos": self.cos, "sin": self.sin}
        wide = {name: p.maybe_cast(p.maybe_repeated(of, 2), to=torch.float32) for name, of in tables.items()}
        captured = vars(self) | wide | beside
        captured["x"] = p.cast(captured["x"], to=torch.float32)
        return p.as_dtype(getattr(p, word)(**captured), self.x)

    def rounded(self, y: Tensor) -> Tensor:
        """As it is."""
        return y

    def tables(self) -> tuple[Tensor, Tensor]:
        """Both in the dtype of the lanes, those of pairs written out on the way."""
        cos, sin = (self._written_out(each) for each in (self.cos, self.sin))
        return cos, sin

    def _written_out(self, table: Tensor) -> Tensor:
        with (
            bounded()
        ):  # cosines and sines, at most times the factor of YaRN: float16 holds them within 3e-8 or a half ulp
            if table.shape[-1] == self.x.shape[-1]:
                return table.to(self.x.dtype)
            return table.unsqueeze(-1).expand(*table.shape, 2).to(self.x.dtype).flatten(-2)


def _for_batch(table: Tensor, batch: int) -> Tensor:
    require(table.shape[0] != batch, "the tables are there for every sequence")
    return table.expand(batch, -1, -1, -1)
