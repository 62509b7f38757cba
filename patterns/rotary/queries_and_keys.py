"""Queries and keys that are rotated by the same tables, by one call of npu_apply_rotary_pos_emb."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, bounded, require, tensor
from fusion.graph import dim_of
from patterns.rotary.rotated import Rotated, Widened, dims_of, four_dims

_PAIRS = (
    "lanes: they are in interleaved order (2j, 2j + 1); npu_apply_rotary_pos_emb requires half order on A2 "
    "and A3, so that queries and keys have a call each; permute the rows of both projections to half order "
    "for one call"
)


@dataclass(frozen=True)
class Pair(Group):
    """Queries and keys with shared tables.

    Attributes:
        q: queries.
        k: keys.
        cos: the cosines of both.
        sin: the sines of both.
        order: the order of pairs of lanes, "half" or "interleaved".
        dtype: the dtype of the results.
        kind: the facet for the rotation of one of them.
    """

    q: Any = tensor("*B D")
    k: Any = tensor("*C D")
    cos: Any = tensor("*T D")
    sin: Any = tensor("*U D")
    order: Any = attribute()
    dtype: Any = attribute()
    kind: ClassVar[type[Rotated]] = Rotated

    def each(self) -> list[Rotated]:
        """Return the rotation of queries and the rotation of keys."""
        return [self.kind(x, self.cos, self.sin, self.order, self.order, self.dtype) for x in (self.q, self.k)]

    def guard(self) -> None:
        """Refuse what one call cannot rotate: interleaved lanes, differing ranks, other than three or four dims."""
        q, k = self.q.rank, self.k.rank
        require(self.order == "half", _PAIRS)
        require(
            q == k,
            "queries, keys: they have {q} and {k} dims; npu_apply_rotary_pos_emb requires the same number; "
            "reshape one of them",
            q=q,
            k=k,
        )
        require(
            q in (3, 4),
            "queries, keys: they have {q} dims; npu_apply_rotary_pos_emb requires three or four; flatten the "
            "leading dims before the rotation",
            q=q,
        )

    def read(self, by_batch: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys, cosines and sines with four dims; `by_batch` expands the tables to every sequence."""
        rotated_q = self.each()[0]
        tables = rotated_q.tables_by_batch("npu_apply_rotary_pos_emb") if by_batch else rotated_q.tables()
        q, k, cos, sin = (four_dims(each, "npu_apply_rotary_pos_emb") for each in (self.q, self.k, *tables))
        return q, k, cos, sin

    def results(self, *rotated: Tensor) -> tuple[Tensor, ...]:
        """Return the `rotated` queries and keys with the dims and in the dtype of the model."""
        pairs = zip(rotated, self.each(), strict=True)
        return tuple(each.rounded(dims_of(y, each.x), "npu_apply_rotary_pos_emb") for y, each in pairs)


@dataclass(frozen=True)
class WidenedPair(Pair):
    """Queries and keys that the model widens to float32 for the rotation, and rounds back."""

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")
    kind: ClassVar[type[Rotated]] = Widened

    def guard(self) -> None:
        """Refuse what `Pair` refuses, and float16."""
        super().guard()
        reason = (
            "queries, keys: the model rotates float16 in float32; npu_apply_rotary_pos_emb requires float16 "
            "throughout; run the model in bfloat16"
        )
        require(self.q.dtype != torch.float16, reason)


@dataclass(frozen=True)
class SameTables(Group):
    """Marker of rotations of queries and keys by the same tables."""

    def term(self, p, rotated: Pair):
        """Build the terms of the two rotations of `rotated`, of queries and of keys."""
        return tuple(each.term(p, "rotation") for each in rotated.each())

    def guard(self, rotated: Pair) -> None:
        """Refuse queries and keys that one call cannot rotate."""
        rotated.guard()


def positions_first(pair: Pair, by_batch: bool = False) -> tuple[Tensor, ...]:
    """Emit npu_apply_rotary_pos_emb on q [B, S, N, D], k [B, S, K, D] and tables [B|1, S, 1, D] of `pair`.

    Packed tokens are [T, N, D], with tables [T, 1, D]. `by_batch` expands the tables to every sequence.
    """
    given = pair.read(by_batch)
    _refuse_other_axes(1, *given)
    return pair.results(*_rotated_pair(*given))


def heads_first(pair: Pair, by_batch: bool = False) -> tuple[Tensor, ...]:
    """Emit npu_apply_rotary_pos_emb on transposed q [B, N, S, D], k [B, K, S, D] and tables [B|1, 1, S, D] of `pair`.

    `by_batch` expands the tables to every sequence.
    """
    given = pair.read(by_batch)
    _refuse_other_axes(2, *given)
    return pair.results(*(each.transpose(1, 2) for each in _rotated_pair(*(each.transpose(1, 2) for each in given))))


def _rotated_pair(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Emit npu_apply_rotary_pos_emb on q [B, S, N, D] and k [B, S, K, D] with tables [B|1, S, 1, D]."""
    with bounded():  # float16 is rotated in float16 by the model, too: `WidenedPair` refuses float32
        return torch.ops.npu.npu_apply_rotary_pos_emb(q, k, cos, sin, "BSND", "half")


def _refuse_other_axes(axis: int, q: Tensor, k: Tensor, *tables: Tensor) -> None:
    """Refuse queries, keys and tables whose positions are not all along `axis`, with heads along the other.

    Left to the limits of the operator, such calls would get an untrue reason.
    """
    sizes = {dim_of(each.shape[axis]) for each in (q, k, *tables)}
    alike = len(sizes) == 1 and {dim_of(each.shape[3 - axis]) for each in tables} == {1}
    reason = (
        "positions: queries {q}, keys {k} and tables {table} do not have them along one axis; "
        "npu_apply_rotary_pos_emb requires that; transpose queries and keys alike before the rotation"
    )
    require(alike, reason, q=list(q.shape), k=list(k.shape), table=list(tables[0].shape))
