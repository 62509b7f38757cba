"""y[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j], of all lanes or of some  (Su et al., RoFormer, 2021).

*Matches* the rotation of pairs of lanes in every spelling, real or complex: the canonicaliser proves it lane by lane
and gives full-width tables. Pairs are (j, j + D/2), "half", or (2j, 2j + 1), "interleaved"; input and output may
differ. Lanes beside them pass through: joined with the rotated ones in one go, or with a rotation that is a value of
its own, where both are lanes of one tensor. Queries and keys may share their tables. *Replaces with* `npu_rotary_mul`
or `npu_interleave_rope`, which compute in float32, and a join; of pairs of neighbours in one tensor with
`npu_rotary_mul` of all its lanes, of which the others are turned by no angle; of queries and keys in half order with
one `npu_apply_rotary_pos_emb`. What is widened for that and rounded again is rotated as it is, by tables of its dtype,
where that takes less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, variants
from patterns.rotary.queries_and_keys import Pair, SameTables, WidenedPair, heads_first, positions_first
from patterns.rotary.rotated import Rotated, Widened, four_dims, rotate_matrix, to_halves, to_pairs
from patterns.rotary.unrotated_lanes import Alone, BeforeRotated, BehindRotated, Rest, Whole, WidenedWhole

JOINED = (Alone, Rest)
BESIDE = (BehindRotated, BeforeRotated)
TOGETHER = (SameTables,)


@dataclass(frozen=True)
class Rope(Rule):
    """Rotary position embedding of all lanes of a tensor, of the first or the last of them, or of queries and keys."""

    aliases = (
        "rotary",
        "rotary_embedding",
        "rotary_mul",
        "apply_rotary_pos_emb",
        "interleave_rope",
        "rope_pair",
        "partial_rope",
    )

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """The meaning in half order: x [*B, D], tables broadcast to it."""
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    @pattern
    @variants(rotated=(Rotated, Widened), others=JOINED)
    def rotated(self, p, rotated, others):
        """All lanes are rotated, or some in one go with the others."""
        return others.term(p, rotated)

    @pattern
    @variants(rotated=(Whole, WidenedWhole), others=BESIDE)
    def among(self, p, rotated, others):
        """Some lanes of a tensor are rotated, which are a value of their own."""
        return others.term(p, rotated)

    @pattern
    @variants(rotated=(Pair, WidenedPair), others=TOGETHER)
    def together(self, p, rotated, others):
        """Queries and keys are rotated by the same tables."""
        return others.term(p, rotated)

    def guard(self, rotated: Any, others: Any):
        """Where the others are, or what one call takes."""
        others.guard(rotated)

    def within(self, others: Any) -> frozenset[str]:
        """Why queries and keys take no call together."""
        return frozenset() if isinstance(others, SameTables) else frozenset({"rope.together"})

    @lowering
    @variants(others=JOINED)
    def half(self, rotated: Rotated, others: Alone):
        """Half order on both sides."""
        require(rotated.source == rotated.result == "half", "the lanes are not in half order")
        return others.joined(rotated.by("half"))

    @lowering
    @variants(others=JOINED)
    def pairs(self, rotated: Rotated, others: Alone):
        """Interleaved order on both sides."""
        require(rotated.source == rotated.result == "interleaved", "the lanes are not in interleaved order")
        return others.joined(rotated.by("interleave"))

    @lowering
    @variants(others=JOINED)
    def pairs_by_matrix(self, rotated: Rotated, others: Alone):
        """The same by a constant matrix, for compilers that cannot say which lanes are turned."""
        require(rotated.source == rotated.result == "interleaved", "the lanes are not in interleaved order")
        return others.joined(rotated.by("interleave", rotate_matrix(rotated.x)))

    @lowering
    @variants(others=JOINED)
    def pairs_to_half(self, rotated: Rotated, others: Alone):
        """Interleaved in, half out: x [B, N, S, D] with tables that do not depend on N."""
        return others.joined(_pairs_to_half(rotated))

    @lowering
    @variants(others=JOINED)
    def pairs_to_half_by_batch(self, rotated: Rotated, others: Alone):
        """The same with tables for every sequence."""
        cos, sin = rotated.tables_by_batch()
        return others.joined(_pairs_to_half(replace(rotated, cos=cos, sin=sin)))

    @lowering
    @variants(others=JOINED)
    def rows_to_half(self, rotated: Rotated, others: Alone):
        """The same for x [B, S, N, D], or packed tokens [T, N, D]: every position is a batch entry of its own."""
        _refuse_other_orders(rotated)
        x, tables = rotated.x, rotated.tables()
        one = x.dim() in (3, 4) and all(each.dim() == x.dim() and each.shape[-2] == 1 for each in tables)
        require(one, "the tables depend on the heads")
        *positions, heads, width = x.shape
        cos, sin = (each.expand(*positions, 1, width).reshape(-1, 1, 1, width) for each in tables)
        rows = x.reshape(-1, heads, 1, width)
        return others.joined(_pairs_to_half(replace(rotated, x=rows, cos=cos, sin=sin)).reshape(x.shape))

    @lowering
    @variants(others=JOINED)
    def through_half(self, rotated: Rotated, others: Alone):
        """Any orders, by reordering lanes around the rotation in half order."""
        require("interleaved" in (rotated.source, rotated.result), "the lanes are in half order already")
        x = to_halves(rotated.x) if rotated.source == "interleaved" else rotated.x
        if rotated.result == "half":
            return others.joined(replace(rotated, x=x).by("half"))
        cos, sin = map(to_halves, rotated.tables())
        return others.joined(to_pairs(replace(rotated, x=x, cos=cos, sin=sin).by("half")))

    @lowering
    @variants(others=BESIDE)
    def by_no_angle(self, rotated: Rotated, others: BehindRotated):
        """All lanes in one call."""
        return others.over_all(rotated).by("interleave")

    @lowering
    @variants(others=BESIDE)
    def by_no_angle_by_matrix(self, rotated: Rotated, others: BehindRotated):
        """The same by a constant matrix."""
        return others.over_all(rotated).by("interleave", rotate_matrix(rotated.x))

    @lowering
    @variants(others=TOGETHER)
    def heads_first(self, rotated: Pair):
        """Queries [B, N, S, D], keys [B, K, S, D], tables [B|1, 1, S, D]: the operator reads [B, S, N, D]."""
        return heads_first(rotated)

    @lowering
    @variants(others=TOGETHER)
    def heads_first_by_batch(self, rotated: Pair):
        """The same with tables for every sequence, where the chip does not broadcast them."""
        return heads_first(rotated, by_batch=True)

    @lowering
    @variants(others=TOGETHER)
    def positions_first(self, rotated: Pair):
        """Queries [B, S, N, D], keys [B, S, K, D], tables [B|1, S, 1, D]; or packed tokens, with tables [T, 1, D]."""
        return positions_first(rotated)

    @lowering
    @variants(others=TOGETHER)
    def positions_first_by_batch(self, rotated: Pair):
        """The same with tables for every sequence."""
        return positions_first(rotated, by_batch=True)


def _refuse_other_orders(rotated: Rotated) -> None:
    """Refuse all but one pair of orders: before anything is computed for it."""
    orders = rotated.source, rotated.result
    require(orders == ("interleaved", "half"), "the lanes do not go from interleaved to half order")


def _pairs_to_half(rotated: Rotated) -> Tensor:
    _refuse_other_orders(rotated)
    x, cos, sin = (four_dims(each) for each in (rotated.x, *rotated.tables()))
    return rotated.rounded(torch.ops.npu.npu_interleave_rope(x, cos, sin).reshape(rotated.x.shape))
