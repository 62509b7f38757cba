"""The lanes of a head that are not rotated, before or behind those that are: a tensor of their own, or of the same."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.kit.orders import INTERLEAVED
from patterns.rotary.rotated import Rotated, Widened


@dataclass(frozen=True)
class Alone(Group):
    """There are none."""

    def term(self, p, rotated: Rotated):
        """The rotation."""
        return rotated.term(p, "rotation")

    def guard(self, rotated: Rotated) -> None:
        """Nothing speaks against it."""

    def joined(self, y: Tensor) -> Tensor:
        """The rotated lanes."""
        return y


@dataclass(frozen=True)
class Rest(Alone):
    """A tensor of their own."""

    rest: Any = tensor("*B E")
    rest_first: Any = attribute()

    def term(self, p, rotated: Rotated):
        """Both in one go."""
        return rotated.term(p, "partial_rotation", **vars(self))

    def joined(self, y: Tensor) -> Tensor:
        """The rotated lanes and they."""
        return torch.cat((self.rest, y) if self.rest_first else (y, self.rest), dim=-1)


@dataclass(frozen=True)
class BehindRotated(Group):
    """The other lanes, from `split` to `end` of the tensor whose first lanes are rotated."""

    split: Any = attribute()
    end: Any = attribute()

    def term(self, p, rotated: Rotated):
        """The rotated lanes joined with them."""
        return p.joined(rotated.term(p, "rotation", x=self.first(p, rotated)), self.last(p, rotated))

    def first(self, p, rotated: Rotated):
        """The lanes before `split`."""
        return p.lanes(rotated.x, 0, self.split)

    def last(self, p, rotated: Rotated):
        """The lanes behind them."""
        return p.lanes(rotated.x, self.split, self.end)

    def guard(self, rotated: Rotated) -> None:
        """Refuse a tensor of which lanes are left out, and pairs that would be others."""
        whole = rotated.x.shape[-1]
        require(self.end == whole, "{end} of {whole} lanes are left, rotated or not", end=self.end, whole=whole)
        require(self.split % 2 == 0, "{split} lanes stand before the others: pairs would be broken", split=self.split)

    def margins(self, width: Any) -> tuple[Any, Any]:
        """How many lanes of all stand before the rotated ones, and behind them."""
        return 0, width - self.split

    def over_all(self, rotated: Rotated) -> Rotated:
        """The rotation of all lanes, of which these are turned by no angle: cos = 1, sin = 0."""
        cos, sin = _no_angle_beside(rotated, *self.margins(rotated.x.shape[-1]))
        return replace(rotated, cos=cos, sin=sin)


@dataclass(frozen=True)
class BeforeRotated(BehindRotated):
    """The other lanes, up to `split` of the tensor whose last lanes are rotated."""

    def term(self, p, rotated: Rotated):
        """They, joined with the rotated lanes."""
        return p.joined(self.first(p, rotated), rotated.term(p, "rotation", x=self.last(p, rotated)))

    def margins(self, width: Any) -> tuple[Any, Any]:
        """As above."""
        return self.split, 0


@dataclass(frozen=True)
class Whole(Rotated):
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


def _no_angle_beside(rotated: Rotated, before: Any, behind: Any) -> tuple[Tensor, ...]:
    """Tables of all lanes of x [.., E], of which so many before and behind those that are rotated keep what they are.

    Both are made at once, so that their rows lie beside each other.
    """
    tables = torch.broadcast_tensors(rotated.cos, rotated.sin)
    lanes = (rotated.x.shape[-1] - before - behind) // tables[0].shape[-1]  # of an angle: one, or both of a pair
    parts: list[Tensor] = []
    for table, value in zip(tables, (1.0, 0.0), strict=True):
        still = torch.full((1,), value, dtype=table.dtype, device=table.device)
        run = (still.expand(before // lanes), table, still.expand(behind // lanes))
        wide = (each.unsqueeze(-1).expand(*table.shape[:-1], each.shape[-1], lanes) for each in run)
        parts.extend(each for each in wide if each.shape[-2])
    cos, sin = torch.cat(parts, dim=-2).to(rotated.x.dtype).flatten(-2).chunk(2, dim=-1)
    return cos, sin
