"""y[b, s, n] = x[b, s, n] · W[n]: a projection of every head by its own matrix.

*Matches* a batched product with one matrix per head, as einsum, matmul or bmm, before or after which tokens and heads
are transposed: the absorption of W_UK and the expansion by W_UV in latent attention (DeepSeek-V2, 2024, §2.1.2).
*Replaces with* `npu_transpose_batchmatmul`, which reads and writes [tokens, N, ..], so that no transpose is copied.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor
from patterns.attention.calls import viewed


@dataclass(frozen=True)
class HeadProjection(Rule):
    """Product of each head with its own matrix."""

    aliases = ("transpose_batchmatmul",)

    def reference(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute x [B, N, S, K] @ weight [N, K, M], [B, N, S, M]."""
        return x @ weight

    @pattern
    def written(self, p, x=tensor("B N S K"), weight=tensor("N K M"), output_view=attribute()):
        """x[b, n] @ weight[n], rearranged by the steps of `output_view`."""
        return p.head_product(x=x, weight=weight, output_view=output_view)

    @lowering
    def behind(self, x, weight, output_view):
        """Emit npu_transpose_batchmatmul on x as [B · S, N, K], a view if heads are behind tokens in memory."""
        return viewed(project_heads(x.transpose(1, 2), weight).transpose(1, 2), output_view)

    @lowering
    def first(self, x, weight, output_view):
        """Emit npu_transpose_batchmatmul on x of one sequence as [N, S, K], a view if heads are first in memory."""
        require(x.shape[0] == 1, "x: there are several sequences; a view [N, S, K] requires one")
        return viewed(project_heads(x.transpose(1, 2), weight, heads_first=True).transpose(1, 2), output_view)


def project_heads(x: Tensor, weight: Tensor, heads_first: bool = False) -> Tensor:
    """Multiply `x` [B, S, N, K] by `weight` [N, K, M] with npu_transpose_batchmatmul: [B, S, N, M].

    `heads_first` passes `x` as [N, B · S, K], else as [B · S, N, K]: the one that is a view of `x` saves a copy.
    """
    rows = x.permute(2, 0, 1, 3).flatten(1, 2) if heads_first else x.flatten(0, 1)
    result = torch.ops.npu.npu_transpose_batchmatmul(
        rows, weight.contiguous(), perm_x1=[0, 1, 2] if heads_first else [1, 0, 2], perm_x2=[0, 1, 2], perm_y=[1, 0, 2]
    )
    return result.unflatten(0, x.shape[:2])


def expanded(y: Tensor, up: Tensor | None, values: str) -> Tensor:
    """Multiply `y` [B, S, N, C] by `up` [N, C, E] for each head: [B, N, S, E].

    `values` chooses the operator: "transposed" is npu_transpose_batchmatmul, "heads first" the operator on `y` as
    [N, B · S, C], "multiplied" torch.bmm, which takes any sizes. Without `up`, "multiplied" returns [B, N, S, C], and
    the others refuse.
    """
    if values == "multiplied":
        if up is None:
            return y.transpose(1, 2)
        return torch.bmm(y.flatten(0, 1).transpose(0, 1), up.contiguous()).unflatten(1, y.shape[:2]).transpose(0, 1)
    require(up is not None, "result: the model multiplies it by W_UV itself; this call requires W_UV in the same match")
    assert up is not None
    return project_heads(y, up, values == "heads first").transpose(1, 2)
