"""In which order pairs of lanes lie: (j, j + D/2) "half", or (2j, 2j + 1) "interleaved".

Operators that rotate on the way read one order and give one. What a model reads otherwise is put in order by the rows
of the layer before, and what it gives otherwise behind the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patterns.rotary.rotated import to_halves, to_pairs

HALF, INTERLEAVED = "half", "interleaved"


def in_order(x: Tensor, source: str, result: str) -> Tensor:
    """Lanes of one order in the other."""
    if source == result:
        return x
    return to_pairs(x) if source == HALF else to_halves(x)


@dataclass(frozen=True)
class RowOrder:
    """In which order an operator reads rows of layers of which the last `rotated` of every head give rotated lanes."""

    rotated: int
    wanted: str

    def of(self, rows: Tensor, source: str, heads: int = 1) -> Tensor:
        """Rows [N · W, ..] that come in the order `source`."""
        if source == self.wanted:
            return rows
        each = rows.unflatten(0, (heads, -1))
        kept, turning = each[:, : -self.rotated], each[:, -self.rotated :]
        turned = in_order(turning.movedim(1, -1), source, self.wanted).movedim(-1, 1)
        return torch.cat((kept, turned), dim=1).flatten(0, 1)
