"""Lanes of a head that are not rotated, before or behind the rotated ones, in their own tensor or in one with these."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.rotary.orders import INTERLEAVED
from patterns.rotary.rotated import Rotated, Widened


@dataclass(frozen=True)
class Alone(Group):
    """No lanes but the rotated ones."""

    def term(self, p, rotated: Rotated):
        """Build the term of the rotation."""
        return rotated.term(p, "rotation")

    def guard(self, rotated: Rotated) -> None:
        """Accept any rotation."""

    def joined(self, y: Tensor) -> Tensor:
        """Return the rotated lanes `y`."""
        return y


@dataclass(frozen=True)
class Rest(Alone):
    """Other lanes in a tensor of their own.

    Attributes:
        rest: the lanes.
        rest_first: true if they are before the rotated lanes.
    """

    rest: Any = tensor("*B E")
    rest_first: Any = attribute()

    def term(self, p, rotated: Rotated):
        """Build the term of the concatenation of the rotation and the other lanes."""
        return rotated.term(p, "partial_rotation", **vars(self))

    def joined(self, y: Tensor) -> Tensor:
        """Concatenate the rotated lanes `y` and the other lanes."""
        return torch.cat((self.rest, y) if self.rest_first else (y, self.rest), dim=-1)


@dataclass(frozen=True)
class BehindRotated(Group):
    """Other lanes behind the rotated lanes of one tensor.

    Attributes:
        split: the first lane that is not rotated.
        end: the end of the other lanes.
    """

    split: Any = attribute()
    end: Any = attribute()

    def term(self, p, rotated: Rotated):
        """Build the term of the rotated lanes, concatenated with the others."""
        return p.joined(rotated.term(p, "rotation", x=self.first(p, rotated)), self.last(p, rotated))

    def first(self, p, rotated: Rotated):
        """Build the term of the lanes of `rotated` before `split`."""
        return p.lanes(rotated.x, 0, self.split)

    def last(self, p, rotated: Rotated):
        """Build the term of the lanes of `rotated` from `split` on."""
        return p.lanes(rotated.x, self.split, self.end)

    def guard(self, rotated: Rotated) -> None:
        """Refuse a tensor with more lanes, and a `split` in the middle of a pair."""
        width = rotated.x.shape[-1]
        require(
            self.end == width,
            "lanes: {end} of {whole} are rotated or passed on; npu_rotary_mul requires all of them here; "
            "rotate a slice of the tensor, or pass on all its lanes",
            end=self.end,
            whole=width,
        )
        require(
            self.split % 2 == 0,
            "lanes: {split} of them come before the rotated ones; npu_rotary_mul in pairs requires an even "
            "number; move the unrotated lanes to the end",
            split=self.split,
        )

    def margins(self, width: Any) -> tuple[Any, Any]:
        """Return the number of lanes before the rotated ones and behind them, of `width` lanes."""
        return 0, width - self.split

    def over_all(self, rotated: Rotated) -> Rotated:
        """Return the rotation of all lanes, with tables cos = 1 and sin = 0 at the other lanes."""
        cos, sin = _padded_tables(rotated, *self.margins(rotated.x.shape[-1]))
        return replace(rotated, cos=cos, sin=sin)


@dataclass(frozen=True)
class BeforeRotated(BehindRotated):
    """Other lanes, up to `split`, before the rotated lanes of one tensor."""

    def term(self, p, rotated: Rotated):
        """Build the term of the other lanes, concatenated with the rotated lanes."""
        return p.joined(self.first(p, rotated), rotated.term(p, "rotation", x=self.last(p, rotated)))

    def margins(self, width: Any) -> tuple[Any, Any]:
        """Return the number of lanes before the rotated ones and behind them, of `width` lanes."""
        return self.split, 0


@dataclass(frozen=True)
class FullWidth(Rotated):
    """A tensor of which some lanes are rotated, in interleaved pairs, by tables of these lanes."""

    cos: Any = tensor("*T Angles")
    sin: Any = tensor("*U Angles")
    source: Any = attribute(INTERLEAVED)
    result: Any = attribute(INTERLEAVED)


@dataclass(frozen=True)
class WidenedFullWidth(Widened):
    """A tensor of which some lanes are rotated in float32, in interleaved pairs, and rounded back."""

    source: Any = attribute(INTERLEAVED)
    result: Any = attribute(INTERLEAVED)


def _padded_tables(rotated: Rotated, before: Any, behind: Any) -> tuple[Tensor, ...]:
    """Pad cosines with 1 and sines with 0, for `before` and `behind` lanes around the rotated lanes of x [.., E].

    Both tables are built by one concatenation, and are slices of it.
    """
    tables = torch.broadcast_tensors(rotated.cos, rotated.sin)
    lanes = (rotated.x.shape[-1] - before - behind) // tables[0].shape[-1]  # per table entry: 1, or 2 of a pair
    parts: list[Tensor] = []
    for table, value in zip(tables, (1.0, 0.0), strict=True):
        still = torch.full((1,), value, dtype=table.dtype, device=table.device)
        run = (still.expand(before // lanes), table, still.expand(behind // lanes))
        wide = (each.unsqueeze(-1).expand(*table.shape[:-1], each.shape[-1], lanes) for each in run)
        parts.extend(each for each in wide if each.shape[-2])
    cos, sin = torch.cat(parts, dim=-2).to(rotated.x.dtype).flatten(-2).chunk(2, dim=-1)
    return cos, sin
