"""y = silu(n), n = (x - mean) / sqrt(var + eps) · gamma + beta, by groups of channels  (Wu and He, 2018).

*Matches* a call of `F.group_norm`, whose result goes to silu alone, as in the residual blocks of diffusion models and
their autoencoders. *Replaces with* `npu_group_norm_silu`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, scalar, tensor

f32 = torch.float32


@dataclass(frozen=True)
class GroupNormSilu(Rule):
    """Normalisation of groups of channels to zero mean and unit variance, and silu of the result."""

    aliases = ("group_norm",)

    def reference(self, x: Tensor, gamma: Tensor, beta: Tensor, groups: int, eps: float) -> Tensor:
        """Compute silu of the group norm of `x` [B, C, *S] with `gamma` and `beta` [C]."""
        return F.silu(F.group_norm(x, groups, gamma, beta, eps))

    @pattern
    def affine(self, p, x=tensor("*B"), gamma=tensor("C"), beta=tensor("C"), groups=attribute(), eps=scalar()):
        """silu((x - mean) / sqrt(var + eps) · gamma + beta)"""
        return self._activated(p, p.group_norm(x, gamma, beta, groups=groups, eps=eps), x)

    @pattern
    def scaled(self, p, x=tensor("*B"), gamma=tensor("C"), groups=attribute(), eps=scalar()):
        """silu((x - mean) / sqrt(var + eps) · gamma)"""
        return self._activated(p, p.group_norm(x, gamma, groups=groups, eps=eps), x)

    @pattern
    def plain(self, p, x=tensor("*B"), groups=attribute(), eps=scalar()):
        """silu((x - mean) / sqrt(var + eps))"""
        return self._activated(p, p.group_norm(x, groups=groups, eps=eps), x)

    def _activated(self, p, normalised, x):
        return p.as_dtype(p.silu(p.maybe_cast(normalised, to=f32)), like=x)

    @lowering
    def npu(self, x: Tensor, gamma: Tensor | None, beta: Tensor | None, groups: int, eps: float):
        """Emit npu_group_norm_silu, with zeros for a beta that is missing beside gamma."""
        if beta is None and gamma is not None:
            beta = torch.zeros(gamma.shape, dtype=gamma.dtype, device=gamma.device)  # a constant: made once
        return torch.ops.npu.npu_group_norm_silu(x, gamma, beta, groups, eps)[0]
