"""y[b, s, n] = x[b, s, n] · W[n]: a projection of every head by its own matrix.

*Matches* a batched product of heads, as einsum, matmul or bmm, around which tokens and heads change places: how latent
attention absorbs the projection of keys and expands the values (DeepSeek-V2, 2024, §2.1.2), written by hand. *Replaces
with* `npu_transpose_batchmatmul`, which reads and gives heads behind tokens, so that nothing is copied around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor
from patterns.attention.calls import viewed
from patterns.latent.latent_calls import turned


@dataclass(frozen=True)
class HeadProjection(Rule):
    """Projection of every head by its own matrix."""

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        """The meaning: x [B, N, S, K] and weight [N, K, M] → [B, N, S, M]."""
        return x @ weight

    @pattern
    def written(self, p, x=tensor("B N S K"), weight=tensor("N K M"), finish=attribute()):
        """A product of heads, and how its result is arranged."""
        return p.head_product(x=x, weight=weight, finish=finish)

    @lowering
    def behind(self, x, weight, finish):
        """Heads stand behind tokens in memory."""
        return viewed(turned(x.transpose(1, 2), weight).transpose(1, 2), finish)

    @lowering
    def first(self, x, weight, finish):
        """Heads stand first in memory."""
        require(x.shape[0] == 1, "the heads of each sequence stand apart")
        return viewed(turned(x.transpose(1, 2), weight, heads_first=True).transpose(1, 2), finish)
