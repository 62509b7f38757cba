"""y[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j], of all lanes or of some  (Su et al., RoFormer, 2021).

*Matches* the rotation of pairs of lanes in every spelling, real or complex: the reader proves it lane by lane and gives
full-width tables. Pairs are (j, j + D/2), "half", or (2j, 2j + 1), "interleaved"; input and output may differ. Other
lanes pass through: in one concatenation with the rotated lanes, or next to a rotation that is a value of its own, where
the lanes of both are slices of one tensor. Queries and keys may share their tables. *Replaces with* `npu_rotary_mul` or
`npu_interleave_rope`, which compute in float32, and a concatenation; for interleaved pairs in one tensor with
`npu_rotary_mul` of all its lanes, rotating the others by angle 0; for queries and keys in half order with one
`npu_apply_rotary_pos_emb`. Lanes that are widened for the rotation and rounded again are rotated in their own dtype, by
tables of that dtype, where this is faster.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, variants
from patterns.rotary.queries_and_keys import Pair, SameTables, WidenedPair, heads_first, positions_first
from patterns.rotary.rotated import Rotated, Widened, four_dims, rotate_matrix, to_halves, to_pairs
from patterns.rotary.unrotated_lanes import Alone, BeforeRotated, BehindRotated, FullWidth, Rest, WidenedFullWidth

CONCATENATED = (Alone, Rest)
IN_ONE_TENSOR = (BehindRotated, BeforeRotated)
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
        """Compute the rotation of `x` [*B, D] in half order, by tables that broadcast to it."""
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat((-high, low), dim=-1) * sin

    @pattern
    @variants(rotated=(Rotated, Widened), others=CONCATENATED)
    def rotated(self, p, rotated, others):
        """y[j] = x[j]·cos[j] ∓ x[partner(j)]·sin[j], perhaps concatenated with lanes that are not rotated"""
        return others.term(p, rotated)

    @pattern
    @variants(rotated=(FullWidth, WidenedFullWidth), others=IN_ONE_TENSOR)
    def among(self, p, rotated, others):
        """x[.., lanes] rotated, concatenated with the other lanes of x"""
        return others.term(p, rotated)

    @pattern
    @variants(rotated=(Pair, WidenedPair), others=TOGETHER)
    def together(self, p, rotated, others):
        """rotations of queries and of keys by the same tables"""
        return others.term(p, rotated)

    def guard(self, rotated: Any, others: Any):
        """Refuse what `others` refuses of `rotated`.

        These are lanes beside the rotated ones that are on both sides or begin within a pair; and queries and keys that
        one call cannot rotate.
        """
        others.guard(rotated)

    def within(self, others: Any) -> frozenset[str]:
        """Name the form `together`, whose refusals tell why queries and keys get no joint call, for forms of one of
        both.
        """
        return frozenset() if isinstance(others, SameTables) else frozenset({"rope.together"})

    @lowering
    @variants(others=CONCATENATED)
    def half(self, rotated: Rotated, others: Alone):
        """Emit npu_rotary_mul for half order of input and output."""
        require(
            rotated.source == rotated.result == "half",
            "lanes: they are in interleaved order; this call of npu_rotary_mul requires half order",
        )
        return others.joined(rotated.by("half"))

    @lowering
    @variants(others=CONCATENATED)
    def pairs(self, rotated: Rotated, others: Alone):
        """Emit npu_rotary_mul for interleaved order of input and output."""
        require(
            rotated.source == rotated.result == "interleaved",
            "lanes: they are in half order; this call of npu_rotary_mul requires interleaved order",
        )
        return others.joined(rotated.by("interleave"))

    @lowering
    @variants(others=CONCATENATED)
    def pairs_by_matrix(self, rotated: Rotated, others: Alone):
        """Emit npu_rotary_mul in interleaved order with a constant matrix [D, D], for compilers without that mode."""
        require(
            rotated.source == rotated.result == "interleaved",
            "lanes: they are in half order; this call of npu_rotary_mul requires interleaved order",
        )
        return others.joined(rotated.by("interleave", rotate_matrix(rotated.x)))

    @lowering
    @variants(others=CONCATENATED)
    def pairs_to_half(self, rotated: Rotated, others: Alone):
        """Emit npu_interleave_rope from interleaved to half order: x [B, N, S, D], tables that do not depend on N."""
        return others.joined(_pairs_to_half(rotated))

    @lowering
    @variants(others=CONCATENATED)
    def pairs_to_half_by_batch(self, rotated: Rotated, others: Alone):
        """Emit npu_interleave_rope from interleaved to half order, with tables expanded to every sequence."""
        cos, sin = rotated.tables_by_batch("npu_interleave_rope")
        return others.joined(_pairs_to_half(replace(rotated, cos=cos, sin=sin)))

    @lowering
    @variants(others=CONCATENATED)
    def rows_to_half(self, rotated: Rotated, others: Alone):
        """Emit npu_interleave_rope from interleaved to half order, for x [B, S, N, D] or [T, N, D].

        Every position is one batch entry.
        """
        _refuse_other_orders(rotated)
        x, tables = rotated.x, rotated.tables()
        one = x.dim() in (3, 4) and all(each.dim() == x.dim() and each.shape[-2] == 1 for each in tables)
        require(
            one, "cos, sin: they differ among the heads; npu_interleave_rope requires the same for all heads of a token"
        )
        *positions, heads, width = x.shape
        cos, sin = (each.expand(*positions, 1, width).reshape(-1, 1, 1, width) for each in tables)
        rows = x.reshape(-1, heads, 1, width)
        return others.joined(_pairs_to_half(replace(rotated, x=rows, cos=cos, sin=sin)).reshape(x.shape))

    @lowering
    @variants(others=CONCATENATED)
    def through_half(self, rotated: Rotated, others: Alone):
        """Emit npu_rotary_mul in half order for any orders, permuting lanes around it."""
        require(
            "interleaved" in (rotated.source, rotated.result),
            "lanes: they are in half order; this call requires interleaved order",
        )
        x = to_halves(rotated.x) if rotated.source == "interleaved" else rotated.x
        if rotated.result == "half":
            return others.joined(replace(rotated, x=x).by("half"))
        cos, sin = map(to_halves, rotated.tables())
        return others.joined(to_pairs(replace(rotated, x=x, cos=cos, sin=sin).by("half")))

    @lowering
    @variants(others=IN_ONE_TENSOR)
    def by_no_angle(self, rotated: Rotated, others: BehindRotated):
        """Emit npu_rotary_mul on all lanes in interleaved order, with angle 0 for lanes that are not rotated."""
        return others.over_all(rotated).by("interleave")

    @lowering
    @variants(others=IN_ONE_TENSOR)
    def by_no_angle_by_matrix(self, rotated: Rotated, others: BehindRotated):
        """Emit npu_rotary_mul on all lanes with a constant matrix [D, D], with angle 0 for lanes not rotated."""
        return others.over_all(rotated).by("interleave", rotate_matrix(rotated.x))

    @lowering
    @variants(others=TOGETHER)
    def heads_first(self, rotated: Pair):
        """Emit npu_apply_rotary_pos_emb on transposed q [B, N, S, D], k [B, K, S, D], tables [B|1, 1, S, D]."""
        return heads_first(rotated)

    @lowering
    @variants(others=TOGETHER)
    def heads_first_by_batch(self, rotated: Pair):
        """Emit npu_apply_rotary_pos_emb on transposed q and k, with tables expanded to every sequence."""
        return heads_first(rotated, by_batch=True)

    @lowering
    @variants(others=TOGETHER)
    def positions_first(self, rotated: Pair):
        """Emit npu_apply_rotary_pos_emb on q [B, S, N, D], k [B, S, K, D] and tables [B|1, S, 1, D].

        Packed tokens are [T, N, D], with tables [T, 1, D].
        """
        return positions_first(rotated)

    @lowering
    @variants(others=TOGETHER)
    def positions_first_by_batch(self, rotated: Pair):
        """Emit npu_apply_rotary_pos_emb on q [B, S, N, D] and k, with tables expanded to every sequence."""
        return positions_first(rotated, by_batch=True)


def _refuse_other_orders(rotated: Rotated) -> None:
    """Refuse other orders than interleaved input and half output, before anything is computed."""
    orders = rotated.source, rotated.result
    require(
        orders == ("interleaved", "half"),
        "lanes: they do not go from interleaved to half order; npu_interleave_rope requires that",
    )


def _pairs_to_half(rotated: Rotated) -> Tensor:
    _refuse_other_orders(rotated)
    name = "npu_interleave_rope"
    x, cos, sin = (four_dims(each, name) for each in (rotated.x, *rotated.tables()))
    return rotated.rounded(torch.ops.npu.npu_interleave_rope(x, cos, sin).reshape(rotated.x.shape), name)
