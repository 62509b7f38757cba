"""Rules that match nowhere, to see what one more rule costs: their root is everywhere, the rest is not."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, scalar, tensor


@dataclass(frozen=True)
class Never(Rule):
    """x · rsqrt(mean((x + number)²) + eps) · gamma, with a number that no model adds."""

    number: int

    @property
    def name(self) -> str:
        """One for each number."""
        return f"never_{self.number}"

    def reference(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """x [*B, D], gamma [D]."""
        return x * torch.rsqrt((x + self.number).square().mean(-1, keepdim=True) + eps) * gamma

    @pattern
    def moved(self, p, x=tensor("*B D"), gamma=tensor("D"), eps=scalar()):
        """As the reference says."""
        return x * p.rsqrt(p.mean(p.square(p.shift(x, float(self.number)))) + eps) * gamma

    @lowering
    def plain(self, x: Tensor, gamma: Tensor, eps: float) -> Tensor:
        """Return x."""
        return self.reference(x, gamma, eps)


def never_matching(count: int) -> tuple[Rule, ...]:
    """So many of them."""
    return tuple(Never(1_000_000 + number) for number in range(count))
