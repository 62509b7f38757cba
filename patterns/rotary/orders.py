"""The order of the pairs that a rotary embedding rotates in D lanes: (j, j + D/2) "half", (2j, 2j + 1) "interleaved".

An operator with a fused rotation supports one order. For a model in the other order, the rows of the weight of the
preceding linear layer are permuted before the call, and the rotated lanes of its result behind the call.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from patterns.rotary.rotated import to_halves, to_pairs

HALF, INTERLEAVED = "half", "interleaved"


def in_order(x: Tensor, source: str, result: str) -> Tensor:
    """Permute the last dim of `x` from the order `source` to the order `result`, each "half" or "interleaved"."""
    if source == result:
        return x
    return to_pairs(x) if source == HALF else to_halves(x)


@dataclass(frozen=True)
class RowOrder:
    """The order that an operator requires of the rows of a linear layer's weight [heads · W, ..].

    Attributes:
        rotated: number of the last rows of each head whose outputs are rotated.
        wanted: order of the pairs of rotated rows that the operator requires, "half" or "interleaved".
    """

    rotated: int
    wanted: str

    def of(self, rows: Tensor, source: str, heads: int = 1) -> Tensor:
        """Permute the rotated rows of each head of `rows` [heads · W, ..] from the order `source` to `wanted`."""
        if source == self.wanted:
            return rows
        each = rows.unflatten(0, (heads, -1))
        unrotated, rotated = each[:, : -self.rotated], each[:, -self.rotated :]
        permuted = in_order(rotated.movedim(1, -1), source, self.wanted).movedim(-1, 1)
        return torch.cat((unrotated, permuted), dim=1).flatten(0, 1)
