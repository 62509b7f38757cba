"""softmax(x) + eps with columns, then rows and columns in turns, divided by their sums + eps (Sinkhorn, 1967).

*Matches* the unrolled loop, as hyper-connections have it (Xie et al., mHC, 2026), of any length, with one eps.
*Replaces with* `npu_mhc_sinkhorn`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, scalar, tensor


@dataclass(frozen=True)
class Sinkhorn(Rule):
    """Doubly stochastic matrices of logits, by alternate normalisation of rows and columns."""

    aliases = ("doubly_stochastic",)

    def reference(self, x: Tensor, iterations: int, eps: float) -> Tensor:
        """Normalise the logits `x` [*B, N, N] by columns `iterations` times, and by rows between."""
        y = x.softmax(-1) + eps
        y = y / (y.sum(-2, keepdim=True) + eps)
        for _ in range(iterations - 1):
            y = y / (y.sum(-1, keepdim=True) + eps)
            y = y / (y.sum(-2, keepdim=True) + eps)
        return y

    @pattern
    def normalised(self, p, x=tensor("*B N N"), iterations=scalar(), eps=scalar()):
        """softmax(x) + eps, columns divided by their sums + eps, then rows and columns in turns"""
        return p.sinkhorn_matrix(x=x, iterations=iterations, eps=eps)

    def guard(self, eps: float):
        """Refuse a negative eps."""
        require(eps >= 0, "eps: it is {eps}; npu_mhc_sinkhorn requires a number that is not negative", eps=eps)

    @lowering
    def npu(self, x: Tensor, iterations: int, eps: float):
        """Emit npu_mhc_sinkhorn, on matrices of tokens where there are more leading dims than two."""
        rows = x if x.ndim in (3, 4) else x.reshape(-1, *x.shape[-2:])
        return torch.ops.npu.npu_mhc_sinkhorn(rows, eps=eps, num_iters=iterations)[0].reshape(x.shape)
