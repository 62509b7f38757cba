"""y[b, s, n] = x[b, s, n] · W[n]: a projection of every head by its own matrix.

*Matches* a batched product of heads, as einsum, matmul or bmm, around which tokens and heads change places: how latent
attention absorbs the projection of keys and expands the values (DeepSeek-V2, 2024, §2.1.2), written by hand. *Replaces
with* `npu_transpose_batchmatmul`, which reads and gives heads behind tokens, so that nothing is copied around it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor
from patterns.attention.calls import viewed


@dataclass(frozen=True)
class HeadProjection(Rule):
    """Projection of every head by its own matrix."""

    aliases = ("transpose_batchmatmul",)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        """The meaning: x [B, N, S, K] and weight [N, K, M] → [B, N, S, M]."""
        return x @ weight

    @pattern
    def written(self, p, x=tensor("B N S K"), weight=tensor("N K M"), output_view=attribute()):
        """A product of heads, and how its result is arranged."""
        return p.head_product(x=x, weight=weight, output_view=output_view)

    @lowering
    def behind(self, x, weight, output_view):
        """Heads stand behind tokens in memory."""
        return viewed(turned(x.transpose(1, 2), weight).transpose(1, 2), output_view)

    @lowering
    def first(self, x, weight, output_view):
        """Heads stand first in memory."""
        require(x.shape[0] == 1, "the heads of each sequence stand apart")
        return viewed(turned(x.transpose(1, 2), weight, heads_first=True).transpose(1, 2), output_view)


def turned(x: Tensor, weight: Tensor, heads_first: bool = False) -> Tensor:
    """x [B, S, N, K] times weight [N, K, M], as [B, S, N, M]; x may lie in memory as [N, B, S, K]."""
    read = x.permute(2, 0, 1, 3).flatten(1, 2) if heads_first else x.flatten(0, 1)
    rows = torch.ops.npu.npu_transpose_batchmatmul(
        read, weight.contiguous(), perm_x1=[0, 1, 2] if heads_first else [1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return rows.unflatten(0, x.shape[:2])


def expanded(y: Tensor, up: Tensor | None, values: str) -> Tensor:
    """y [B, S, N, C] of every head times up [N, C, E], as [B, N, S, E].

    `values` is "transposed" for the operator that turns heads back, "heads first" for the same where heads lie first in
    memory, or "multiplied" for a batched product, which takes any sizes; that one gives y itself without `up`.
    """
    if values == "multiplied":
        if up is None:
            return y.transpose(1, 2)
        return torch.bmm(y.flatten(0, 1).transpose(0, 1), up.contiguous()).unflatten(1, y.shape[:2]).transpose(0, 1)
    require(up is not None, "the model itself expands the result")
    assert up is not None
    return turned(y, up, values == "heads first").transpose(1, 2)
