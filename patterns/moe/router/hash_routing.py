"""weights = scores at table[tokens], divided by their sum  (DeepSeek-V4, 2026, hash routing).

*Matches* the weights of experts that a table lists for each token of the vocabulary. *Replaces with*
`moe_gating_top_k_hash` of vllm_ascend, which computes in float32; the experts stay the model's own lookup.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import softplus

from fusion import Group, Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.moe.router.expert_gating import NORM_TYPES, TINY


@dataclass(frozen=True)
class TableGate(Group):
    """Scores of a router at the experts of a table.

    Attributes:
        logits: [*T, E].
        norm: function of the logits that gives the scores, "sigmoid" or "sqrt_softplus".
        table: [V, K], indices of the experts of each token of the vocabulary.
        tokens: [*T], rows of the table.
        dtype: dtype of the weights.
    """

    logits: Any = tensor("*T E")
    norm: Any = attribute()
    table: Any = tensor("V K")
    tokens: Any = tensor("*T")
    dtype: Any = attribute()

    def routed(self, factor: float, eps: float) -> Tensor:
        """Emit moe_gating_top_k_hash: the weights [*T, K], scores / (their sum + `eps`) · `factor`."""
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        rows: Any = self.table.shape[0]
        # an index below 0 counts from the end of the table in torch, and is not defined for the operator
        tokens = self.tokens.reshape(-1).remainder(rows)
        weights, _, _ = torch.ops._C_ascend.moe_gating_top_k_hash(
            self.logits.reshape(-1, self.logits.shape[-1]).to(wide), self.table.shape[-1], input_ids=tokens,
            tid2eid=self.table, norm_type=NORM_TYPES[self.norm], routed_scaling_factor=factor, eps=eps,
        )  # fmt: skip
        return weights.reshape(*self.logits.shape[:-1], -1).to(self.dtype)


@dataclass(frozen=True)
class HashRouting(Rule):
    """Weights of experts that a table lists for each token."""

    aliases = ("hash_router", "tid2eid", "moe_gating_top_k_hash")

    def reference(self, logits: Tensor, table: Tensor, tokens: Tensor, factor: float) -> Tensor:
        """Compute weights [T, K] of logits [T, E], a table [V, K] of experts, and tokens [T]."""
        weights = softplus(logits).sqrt().gather(-1, table[tokens])
        return weights / weights.sum(-1, keepdim=True) * factor

    @pattern
    def divided(self, p, gate: Any = TableGate, before=scalar(), after=scalar(), size=scalar(), eps=scalar()):
        """w = (s · before) / (Σ s + eps) · after, of the scores s; Σ s is written as mean(s) · size"""
        scores = p.listed_scores(**vars(gate))
        total = p.shift(p.scale(p.mean(scores), size), eps)
        return p.maybe_scaled(p.maybe_scaled(scores, before) * p.power(total, -1.0), after)

    @pattern
    def divided_plainly(self, p, gate: Any = TableGate, before=scalar(), after=scalar(), inverse=scalar()):
        """w = (s · before) / Σ s · after, of the scores s"""
        scores = p.listed_scores(**vars(gate))
        total = p.scale(p.power(p.mean(scores), -1.0), inverse)
        return p.maybe_scaled(p.maybe_scaled(scores, before) * total, after)

    def guard(self, gate: TableGate, size: float | None, inverse: float | None, eps: float | None):
        """Refuse a division by anything but the sum of the scores, `size` and `inverse` being K and 1 / K for a sum,
        and an `eps` below 0."""
        count: Any = gate.table.shape[-1]
        sums = (size is None or abs(size / count - 1) < 1e-9, inverse is None or abs(inverse * count - 1) < 1e-9)
        require(
            all(sums),
            "weights: the listed scores are divided by something else than their sum; moe_gating_top_k_hash "
            "requires their sum; write w / w.sum(-1, keepdim=True)",
        )
        require(
            eps is None or eps >= 0,
            "eps: it is {eps} and makes the sum smaller; moe_gating_top_k_hash requires a positive eps; pass 1e-20",
            eps=eps,
        )

    @lowering
    def gated(self, gate: TableGate, before: float | None, after: float | None, eps: float | None):
        """Emit moe_gating_top_k_hash with the table and the tokens."""
        factor = (1.0 if before is None else before) * (1.0 if after is None else after)
        return gate.routed(factor, eps or TINY)
