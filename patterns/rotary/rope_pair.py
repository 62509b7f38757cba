"""q and k rotated by the same tables, together.

*Matches* two independent rotations in half order that share their tables. *Replaces with* `npu_apply_rotary_pos_emb`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor
from patterns.rotary.rope import Rope, dims_of, for_batch, four_dims


@dataclass(frozen=True)
class RopePair(Rule):
    """Rotary position embedding of queries and keys in one operator."""

    def reference(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """The meaning: q [*B, D] and k [*B, D], tables broadcast to both."""
        return Rope().reference(q, cos, sin), Rope().reference(k, cos, sin)

    @pattern
    def same_tables(
        self,
        p,
        q=tensor("*B D"),
        k=tensor("*C D"),
        cos=tensor("*T D"),
        sin=tensor("*U D"),
        order=attribute(),
        dtype=attribute(),
    ):
        """Two rotations, one pair of tables."""
        rotated = dict(cos=cos, sin=sin, source=order, result=order, dtype=dtype)
        return p.rotation(x=q, **rotated), p.rotation(x=k, **rotated)

    def guard(self, q, k, order):
        """What one call can take."""
        require(order == "half", "the lanes are interleaved; the operator rotates halves")
        require(q.rank == k.rank, "queries and keys have {q} and {k} dims: their axes differ", q=q.rank, k=k.rank)
        require(q.rank in (3, 4), "queries and keys have {q} dims, not three or four", q=q.rank)

    @lowering
    def heads_first(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype):
        """Q [B, N, S, D], k [B, K, S, D], tables [B|1, 1, S, D]: the operator reads [B, S, N, D]."""
        turned = self.positions_first(*(four_dims(each).transpose(1, 2) for each in (q, k, cos, sin)), dtype=dtype)
        return tuple(dims_of(y.transpose(1, 2), x) for y, x in zip(turned, (q, k), strict=True))

    @lowering
    def heads_first_by_batch(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype):
        """The same with tables for every sequence, where the chip does not broadcast them."""
        return self.heads_first(q, k, *_for_batch(q, cos, sin), dtype=dtype)

    @lowering
    def positions_first(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype):
        """Q [B, S, N, D], k [B, S, K, D], tables [B|1, S, 1, D]; or packed tokens [T, N, D] with tables [T, 1, D]."""
        ranked = (four_dims(each) for each in (q, k, cos, sin))
        turned = torch.ops.npu.npu_apply_rotary_pos_emb(*ranked, "BSND", "half")
        return tuple(dims_of(y, x).to(dtype) for y, x in zip(turned, (q, k), strict=True))

    @lowering
    def positions_first_by_batch(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, dtype: torch.dtype):
        """The same with tables for every sequence."""
        return self.positions_first(q, k, *_for_batch(q, cos, sin), dtype=dtype)


def _for_batch(q: Tensor, *tables: Tensor) -> tuple[Tensor, ...]:
    return tuple(for_batch(four_dims(each), four_dims(q).shape[0]) for each in tables)
