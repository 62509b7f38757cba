"""y = [rope(x), rest]: the first or the last lanes of a head are rotated, the others pass through.

*Matches* a rotation that is joined with the lanes beside it in one go; where the rotated part is a value of its own,
`rope` matches that. *Replaces with* the operators of `rope`, and the join.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor, variants
from patterns.rotary.rope import TURNED, Rope

WAYS = ("half", "pairs", "pairs_to_half", "pairs_to_half_by_batch", "rows_to_half", "through_half")
"""Lowerings of `rope`."""


@dataclass(frozen=True)
class PartialRope(Rule):
    """Rotation of the first or last lanes; the others pass through."""

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor) -> Tensor:
        """The meaning, rotated lanes first."""
        return torch.cat((Rope().reference(x, cos, sin), rest), dim=-1)

    @pattern
    @variants(turned=TURNED)
    def rotated(self, p, turned, rest=tensor("*B E"), rest_first=attribute()):
        """Some lanes are rotated."""
        return turned.term(p, "partial_rotation", rest=rest, rest_first=rest_first)

    @lowering
    @variants(way=WAYS)
    def joined(self, turned, rest, rest_first, way):
        """The rotation in one of the ways of `rope`, beside the other lanes."""
        y = getattr(Rope(), way)(turned)
        return torch.cat((rest, y) if rest_first else (y, rest), dim=-1)
