"""Queries and keys that are rotated by the same tables: what one call for both takes, reads and gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, bounded, require, tensor
from fusion.graph import dim_of
from patterns.rotary.rotated import Rotated, Widened, dims_of, four_dims

_PAIRS = (
    "the lanes are interleaved; the operator rotates halves: on A2 and A3 its rotary_mode is 'half', and no other one "
    "takes queries and keys at once, so that each has a call of its own"
)


@dataclass(frozen=True)
class Pair(Group):
    """Queries and keys, the tables of both, in which order their lanes stand, and the dtype of the results."""

    q: Any = tensor("*B D")
    k: Any = tensor("*C D")
    cos: Any = tensor("*T D")
    sin: Any = tensor("*U D")
    order: Any = attribute()
    dtype: Any = attribute()
    kind: ClassVar[type[Rotated]] = Rotated

    def each(self) -> list[Rotated]:
        """The rotation of either."""
        return [self.kind(x, self.cos, self.sin, self.order, self.order, self.dtype) for x in (self.q, self.k)]

    def guard(self) -> None:
        """What one call can take."""
        q, k = self.q.rank, self.k.rank
        require(self.order == "half", _PAIRS)
        require(
            q == k,
            "queries and keys have {q} and {k} dims: their axes differ; the operator requires the "
            "same for both; reshape one of them",
            q=q,
            k=k,
        )
        require(q in (3, 4), "queries and keys have {q} dims, not three or four", q=q)

    def read(self, by_batch: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Lanes and tables as the operator reads them, of four dims; these for every sequence if it asks for that."""
        of_q = self.each()[0]
        tables = of_q.tables_by_batch() if by_batch else of_q.tables()
        q, k, cos, sin = (four_dims(each) for each in (self.q, self.k, *tables))
        return q, k, cos, sin

    def results(self, *rotated: Tensor) -> tuple[Tensor, ...]:
        """Both, of four dims, as the model has them."""
        return tuple(each.rounded(dims_of(y, each.x)) for y, each in zip(rotated, self.each(), strict=True))


@dataclass(frozen=True)
class WidenedPair(Pair):
    """Both in a dtype that is widened to float32 for the rotation, which is rounded back."""

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")
    kind: ClassVar[type[Rotated]] = Widened

    def guard(self) -> None:
        """Refuse float16 as well."""
        super().guard()
        said = "the model rotates float16 in float32, the operator in float16"
        require(self.q.dtype != torch.float16, said)


@dataclass(frozen=True)
class SameTables(Group):
    """No other lanes, but another tensor that is rotated alike."""

    def term(self, p, rotated: Pair):
        """Two rotations, one pair of tables."""
        return tuple(each.term(p, "rotation") for each in rotated.each())

    def guard(self, rotated: Pair) -> None:
        """What one call can take."""
        rotated.guard()


def positions_first(pair: Pair, by_batch: bool = False) -> tuple[Tensor, ...]:
    """Q [B, S, N, D], k [B, S, K, D], tables [B|1, S, 1, D]; or packed tokens [T, N, D] with tables [T, 1, D]."""
    given = pair.read(by_batch)
    _refuse_unlike(1, *given)
    return pair.results(*_turned(*given))


def heads_first(pair: Pair, by_batch: bool = False) -> tuple[Tensor, ...]:
    """Q [B, N, S, D], k [B, K, S, D], tables [B|1, 1, S, D]: the operator reads [B, S, N, D]."""
    given = pair.read(by_batch)
    _refuse_unlike(2, *given)
    return pair.results(*(each.transpose(1, 2) for each in _turned(*(each.transpose(1, 2) for each in given))))


def _turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Q [B, S, N, D], k [B, S, K, D], by tables [B|1, S, 1, D]."""
    with bounded():  # float16 is rotated in float16 by the model, too: `WidenedPair` refuses float32
        return torch.ops.npu.npu_apply_rotary_pos_emb(q, k, cos, sin, "BSND", "half")


def _refuse_unlike(axis: int, q: Tensor, k: Tensor, *tables: Tensor) -> None:
    """Positions stand along one axis, heads along the other: of others a limit would say what is not so."""
    sizes = {dim_of(each.shape[axis]) for each in (q, k, *tables)}
    alike = len(sizes) == 1 and {dim_of(each.shape[3 - axis]) for each in tables} == {1}
    said = "queries {q}, keys {k} and tables {table} do not have their positions along one axis"
    require(alike, said, q=list(q.shape), k=list(k.shape), table=list(tables[0].shape))
