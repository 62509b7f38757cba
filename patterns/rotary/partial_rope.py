"""y = [rope(x), rest]: the first or the last lanes of a head are rotated, the others pass through.

*Matches* a rotation that is joined with the lanes beside it in one go; where the rotated part is a value of its own,
`rope` matches that. *Replaces with* the operators of `rope`, and the join.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor
from patterns.rotary.rope import Rope


@dataclass(frozen=True)
class PartialRope(Rule):
    """Rotation of the first or last lanes; the others pass through."""

    def reference(self, x: Tensor, cos: Tensor, sin: Tensor, rest: Tensor) -> Tensor:
        """The meaning, rotated lanes first."""
        return torch.cat((Rope().reference(x, cos, sin), rest), dim=-1)

    @pattern
    def rotated(
        self,
        p,
        x=tensor("*B D"),
        cos=tensor("*T D"),
        sin=tensor("*U D"),
        rest=tensor("*B E"),
        source=attribute(),
        result=attribute(),
        dtype=attribute(),
        rest_first=attribute(),
    ):
        """Some lanes are rotated."""
        return p.partial_rotation(
            x=x, cos=cos, sin=sin, rest=rest, source=source, result=result, dtype=dtype, rest_first=rest_first
        )

    def _joined(self, rotated: Tensor, rest: Tensor, rest_first: bool, dtype: torch.dtype) -> Tensor:
        rotated = rotated.to(dtype)
        return torch.cat((rest, rotated) if rest_first else (rotated, rest), dim=-1)

    @lowering
    def half(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """Half order on both sides."""
        return self._joined(Rope().half(x, cos, sin, source, result, dtype), rest, rest_first, dtype)

    @lowering
    def pairs(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """Interleaved order on both sides."""
        return self._joined(Rope().pairs(x, cos, sin, source, result, dtype), rest, rest_first, dtype)

    @lowering
    def pairs_to_half(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """Interleaved in, half out, [B, N, S, D]."""
        return self._joined(Rope().pairs_to_half(x, cos, sin, source, result, dtype), rest, rest_first, dtype)

    @lowering
    def pairs_to_half_by_batch(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """The same with tables for every sequence."""
        return self._joined(Rope().pairs_to_half_by_batch(x, cos, sin, source, result, dtype), rest, rest_first, dtype)

    @lowering
    def rows_to_half(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """Interleaved in, half out, [B, S, N, D]."""
        return self._joined(Rope().rows_to_half(x, cos, sin, source, result, dtype), rest, rest_first, dtype)

    @lowering
    def through_half(self, x, cos, sin, rest, source, result, dtype, rest_first):
        """Any orders."""
        return self._joined(Rope().through_half(x, cos, sin, source, result, dtype), rest, rest_first, dtype)
