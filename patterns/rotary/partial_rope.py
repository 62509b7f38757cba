"""y = [rope(x), rest]: the first or the last lanes of a head are rotated, the others pass through.

*Matches* a rotation that is joined with the lanes beside it: in one go, or as a value of its own, which `rope` matches
as well, where both are lanes of one tensor. *Replaces with* the operators of `rope` and a join; or, of pairs of
neighbours in one tensor, with `npu_rotary_mul` of all its lanes, of which the others are turned by no angle: cos = 1,
sin = 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor, variants
from patterns.rotary.orders import INTERLEAVED
from patterns.rotary.rope import TURNED, Rope, Turned, Widened, turning

WAYS = ("half", "pairs", "pairs_to_half", "pairs_to_half_by_batch", "rows_to_half", "through_half")
"""Lowerings of `rope`."""


@dataclass(frozen=True)
class Rest(Group):
    """The other lanes, as a tensor of their own."""

    rest: Any = tensor("*B E")
    rest_first: Any = attribute()

    def term(self, p, turned: Turned):
        """Both in one go."""
        return turned.term(p, "partial_rotation", **vars(self))

    def guard(self, turned: Turned) -> None:
        """Nothing speaks against them."""


@dataclass(frozen=True)
class BehindTurned(Group):
    """The other lanes, from `split` to `end` of the tensor whose first lanes are rotated."""

    split: Any = attribute()
    end: Any = attribute()

    def term(self, p, turned: Turned):
        """The rotated lanes joined with them."""
        return p.joined(turned.term(p, "rotation", x=self.first(p, turned)), self.last(p, turned))

    def first(self, p, turned: Turned):
        """The lanes before `split`."""
        return p.lanes(turned.x, 0, self.split)

    def last(self, p, turned: Turned):
        """The lanes behind them."""
        return p.lanes(turned.x, self.split, self.end)

    def guard(self, turned: Turned) -> None:
        """Refuse a tensor of which lanes are left out, and pairs that would be others."""
        whole = turned.x.shape[-1]
        require(self.end == whole, "{end} of {whole} lanes are left, rotated or not", end=self.end, whole=whole)
        require(self.split % 2 == 0, "{split} lanes stand before the others: pairs would be broken", split=self.split)

    def margins(self, width: Any) -> tuple[Any, Any]:
        """How many lanes of all stand before the rotated ones, and behind them."""
        return 0, width - self.split


@dataclass(frozen=True)
class BeforeTurned(BehindTurned):
    """The other lanes, up to `split` of the tensor whose last lanes are rotated."""

    def term(self, p, turned: Turned):
        """They, joined with the rotated lanes."""
        return p.joined(self.first(p, turned), turned.term(p, "rotation", x=self.last(p, turned)))

    def margins(self, width: Any) -> tuple[Any, Any]:
        """As above."""
        return self.split, 0


@dataclass(frozen=True)
class Whole(Turned):
    """A tensor of which some lanes are rotated, pairs of neighbours that stay such, by tables of these."""

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")
    source: Any = attribute(INTERLEAVED)
    result: Any = attribute(INTERLEAVED)


@dataclass(frozen=True)
class WidenedWhole(Widened):
    """The same of lanes that are rotated in float32 and rounded back."""

    source: Any = attribute(INTERLEAVED)
    result: Any = attribute(INTERLEAVED)


BESIDE = (BehindTurned, BeforeTurned)


@dataclass(frozen=True)
class PartialRope(Rule):
    """Rotation of the first or last lanes; the others pass through."""

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor) -> Tensor:
        """The meaning, rotated lanes first."""
        return torch.cat((Rope().reference(x, cos, sin), rest), dim=-1)

    @pattern
    @variants(turned=TURNED, others=(Rest,))
    def rotated(self, p, turned, others):
        """Some lanes are rotated."""
        return others.term(p, turned)

    @pattern
    @variants(turned=(Whole, WidenedWhole), others=BESIDE)
    def among(self, p, turned, others):
        """Some lanes of a tensor are rotated, which are a value of their own."""
        return others.term(p, turned)

    def guard(self, turned: Turned, others: Any):
        """Where the others are."""
        others.guard(turned)

    @lowering
    @variants(others=(Rest,), way=WAYS)
    def joined(self, turned: Turned, others: Rest, way: str):
        """The rotation in one of the ways of `rope`, beside the other lanes."""
        y = getattr(Rope(), way)(turned)
        return torch.cat((others.rest, y) if others.rest_first else (y, others.rest), dim=-1)

    @lowering
    @variants(others=BESIDE)
    def by_no_angle(self, turned: Turned, others: BehindTurned):
        """All lanes in one call."""
        return _of_all_lanes(turned, others).by("interleave")

    @lowering
    @variants(others=BESIDE)
    def by_matrix(self, turned: Turned, others: BehindTurned):
        """The same by a constant matrix, for compilers that cannot say which lanes are turned."""
        return _of_all_lanes(turned, others).by("interleave", turning(turned.x))


def _of_all_lanes(turned: Turned, others: BehindTurned) -> Turned:
    cos, sin = _no_angle_beside(turned, *others.margins(turned.x.shape[-1]))
    return replace(turned, cos=cos, sin=sin)


def _no_angle_beside(turned: Turned, before: Any, behind: Any) -> tuple[Tensor, ...]:
    """Tables of all lanes of x [.., E], of which so many before and behind those that are rotated keep what they are.

    Both are made at once, so that their rows lie beside each other.
    """
    tables = torch.broadcast_tensors(turned.cos, turned.sin)
    lanes = (turned.x.shape[-1] - before - behind) // tables[0].shape[-1]  # of an angle: one, or both of a pair
    parts: list[Tensor] = []
    for table, value in zip(tables, (1.0, 0.0), strict=True):
        still = torch.full((1,), value, dtype=table.dtype, device=table.device)
        run = (still.expand(before // lanes), table, still.expand(behind // lanes))
        wide = (each.unsqueeze(-1).expand(*table.shape[:-1], each.shape[-1], lanes) for each in run)
        parts.extend(each for each in wide if each.shape[-2])
    cos, sin = torch.cat(parts, dim=-2).to(turned.x.dtype).flatten(-2).chunk(2, dim=-1)
    return cos, sin
