"""y = cat(cache[S:], rows): a cache of the last T positions takes S new ones.

*Matches* a roll by S whose last S positions are overwritten, in every spelling. *Replaces with* one `cat`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, tensor


@dataclass(frozen=True)
class SlidingWrite(Rule):
    """New rows of a cache that keeps the last positions only."""

    def reference(self, cache: Tensor, rows: Tensor, axis: int) -> Tensor:
        """The meaning: cache [*C], rows [*R] like it but for `axis`, where S of them take the place of the oldest."""
        length = rows.shape[axis]
        rolled = cache.roll(-length, axis)
        rolled.narrow(axis, cache.shape[axis] - length, length).copy_(rows)
        return rolled

    @pattern
    def slid(self, p, cache=tensor("*C"), rows=tensor("*R"), axis=attribute()):
        """The canonicaliser proves which positions stay."""
        return p.slide(cache=cache, rows=rows, axis=axis)

    @lowering
    def joined(self, cache: Tensor, rows: Tensor, axis: int):
        """One kernel."""
        length = rows.shape[axis]
        return torch.cat((cache.narrow(axis, length, cache.shape[axis] - length), rows), axis)
