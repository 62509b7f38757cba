"""weights, experts = the k largest of scores + bias, in the best groups of experts  (DeepSeek-V3, 2024, eq. 16).

*Matches* the routers that `patterns.moe.router.read` reads, whose chosen scores are used directly or divided by their
sum, times a factor. *Replaces with* `npu_moe_gating_top_k`, which computes in float32: where the model rounds its
scores to 16 bits before the choice, experts whose scores are equal only after the rounding may be chosen otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants

_SCORE = {"max": 0, "sum": 1}
NORM_TYPES = {"softmax": 0, "sigmoid": 1, "sqrt_softplus": 2}
TINY = torch.finfo(torch.float32).tiny
"""An eps that rounding loses in any sum of roots of a softplus, where moe_gating_top_k_hash requires one above 0."""


@dataclass(frozen=True)
class Gate(Group):
    """The choice of a router: the `count` largest of norm(logits) + bias in the best groups of experts.

    Attributes:
        logits: [*T, E].
        bias: [E], added for the choice only, not to the weights.
        norm: function of the logits that gives the scores, "sigmoid", "softmax" or "sqrt_softplus".
        groups: number of groups that the E experts are divided into, 1 without groups.
        kept: number of the best groups from which experts are chosen.
        group_score: score of a group, "max" of its scores + bias or "sum" of the two largest.
        count: K, number of chosen experts.
    """

    logits: Any = tensor("*T E")
    bias: Any = tensor("E", optional=True)
    norm: Any = attribute()
    groups: Any = attribute()
    kept: Any = attribute()
    group_score: Any = attribute()
    count: Any = attribute()

    def routed(self, factor: float = 1.0, eps: float = 0.0, scores: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Emit npu_moe_gating_top_k: weights are scores · `factor`, other than of a softmax divided by (their sum +
        `eps`); moe_gating_top_k_hash of vllm_ascend for square roots of a softplus.

        Returns:
            weights float32 [*T, K], experts int32 [*T, K], and float32 scores [*T, E], which are computed only if
            `scores` is set.
        """
        lead = self.logits.shape[:-1]
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        flat = self.logits.reshape(-1, self.logits.shape[-1]).to(wide)
        options = dict(
            bias=None if self.bias is None else self.bias.to(wide),
            k_group=self.kept,
            group_count=self.groups,
            group_select_mode=_SCORE[self.group_score],
            norm_type=NORM_TYPES[self.norm],
            out_flag=scores,
            routed_scaling_factor=factor,
            eps=eps,
        )
        if self.norm == "sqrt_softplus":  # which torch_npu's operator does not document
            options |= dict(eps=eps or TINY)
            several = torch.ops._C_ascend.moe_gating_top_k_hash(flat, self.count, **options)
        else:
            several = torch.ops.npu.npu_moe_gating_top_k(flat, self.count, **options)
        weights, experts, all_scores = (each.reshape(*lead, each.shape[-1]) for each in several)
        return weights, experts, all_scores


@dataclass(frozen=True)
class SigmoidGate(Gate):
    """A choice by sigmoids or roots of a softplus, whose chosen scores the operator divides by their sum."""

    norm: Any = attribute("sigmoid", "sqrt_softplus")


@dataclass(frozen=True)
class SoftmaxGate(Gate):
    """A choice by a softmax over all experts; the operator does not divide the chosen scores by their sum."""

    norm: Any = attribute("softmax")


@dataclass(frozen=True)
class Weights(Group):
    """The weights and experts that the model makes of the chosen scores.

    Attributes:
        dtype: dtype of the weights.
        listed: dtype of the expert indices.
        squeezed, unlisted: True if the weights, and the indices, have the dims [*T], without K = 1.
        before: factor of the scores before the division by their sum, None for 1.
        after: factor behind the division.
    """

    dtype: Any = attribute()
    listed: Any = attribute()
    squeezed: Any = attribute()
    unlisted: Any = attribute()
    before: Any = scalar()
    after: Any = scalar()

    def factor(self) -> float:
        """Return `before` · `after`, the number by which the weights are multiplied in all."""
        return (1.0 if self.before is None else self.before) * self.after

    def as_written(self, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor]:
        """Return `weights` and `experts` [*T, K] of the operator in the dtypes and dims that the model gives them."""
        weights, experts = weights.to(self.dtype), experts.to(self.listed)
        return weights.squeeze(-1) if self.squeezed else weights, experts.squeeze(-1) if self.unlisted else experts


@dataclass(frozen=True)
class GatedScores(Rule):
    """Choice of experts by sigmoids, with a bias or in groups of experts, and the weights of the chosen experts."""

    def reference(self, logits: Tensor, bias: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
        """Compute weights [*T, K] and experts int64 [*T, K] of logits [*T, E] and bias [E], without groups."""
        scores = logits.sigmoid()
        experts = (scores + bias).topk(count)[1]
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True) * factor, experts

    @pattern
    @variants(result=(Weights,))
    def divided(self, p, result, gate: Any = SigmoidGate, size=scalar(), eps=scalar()):
        """w = (s · before) / (Σ s + eps) · after, of the scores s of the chosen experts

        Σ s is written as mean(s) · size. The choice is a result as well.
        """
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype, squeezed=False)
        total = p.shift(p.scale(p.mean(scores), size), eps)
        weights = p.maybe_scaled(p.maybe_scaled(scores, result.before) * p.power(total, -1.0), result.after)
        return weights, p.expert_choice(**vars(gate), dtype=result.listed, squeezed=False)

    @pattern
    @variants(result=(Weights,))
    def divided_plainly(self, p, result, gate: Any = SigmoidGate, inverse=scalar()):
        """w = (s · before) / Σ s · after, of the chosen sigmoids s."""
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype, squeezed=False)
        total = p.scale(p.power(p.mean(scores), -1.0), inverse)
        weights = p.maybe_scaled(p.maybe_scaled(scores, result.before) * total, result.after)
        return weights, p.expert_choice(**vars(gate), dtype=result.listed, squeezed=False)

    @pattern
    @variants(result=(Weights,))
    def undivided(self, p, result, gate: Any = Gate):
        """w = s · after, of the chosen scores s."""
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype, squeezed=result.squeezed)
        experts = p.expert_choice(**vars(gate), dtype=result.listed, squeezed=result.unlisted)
        return p.maybe_scaled(scores, result.after), experts

    @lookalike(
        "weights: the chosen scores of a softmax are divided by their sum; npu_moe_gating_top_k requires "
        "sigmoid scores there, and npu_moe_gating_top_k_softmax a softmax without a bias; leave the bias, or "
        "the division, out"
    )
    def divided_softmax(
        self, p, gate: Any = SoftmaxGate, dtype=attribute(), by=tensor("*T 1"), factor=scalar(), times=scalar()
    ):
        """w = s / by, of the chosen scores s of a softmax."""
        shares = p.maybe_scaled(p.chosen_scores(**vars(gate), dtype=dtype, squeezed=False), times)
        return shares * p.maybe_scaled(p.power(by, -1.0), factor)

    @lookalike(
        "weights: the sum of the chosen scores is clamped between {low} and {high}; npu_moe_gating_top_k "
        "requires an added eps; write sum + 1e-20"
    )
    def scores_clamped(self, p, gate: Any = SigmoidGate, dtype=attribute(), size=scalar(), low=scalar(), high=scalar()):
        """w = s / clamp(Σ s, low, high), of the chosen sigmoids s."""
        scores = p.chosen_scores(**vars(gate), dtype=dtype, squeezed=False)
        return scores * p.power(p.clip(p.scale(p.mean(scores), size), low, high), -1.0)

    @lookalike(
        "experts: they are chosen by logits; npu_moe_gating_top_k chooses by the sigmoids, of which more "
        "are equal, and requires that; write topk of logits.sigmoid()"
    )
    def sigmoid_of_chosen(self, p, logits=tensor("*T E"), count=attribute()):
        """w = sigmoid(topk(logits))."""
        return p.sigmoid(p.maybe_cast(p.largest(logits, count), to=torch.float32))

    def guard(self, gate: Gate, size: float | None, inverse: float | None, eps: float | None):
        """Refuse a division by anything but the sum of the chosen scores, and a negative `eps`.

        `size` is the factor of the mean in the sum, `inverse` the factor of its reciprocal: K and 1 / K for a sum.
        """
        sums = [
            size is None or abs(size / gate.count - 1) < 1e-9,
            inverse is None or abs(inverse * gate.count - 1) < 1e-9,
        ]
        require(
            all(sums),
            "weights: the chosen scores are divided by something else than their sum; npu_moe_gating_top_k "
            "requires the sum of the chosen ones; write w / w.sum(-1, keepdim=True)",
        )
        require(
            eps is None or eps >= 0,
            "eps: it is {eps} and makes the sum smaller; npu_moe_gating_top_k requires a positive eps; pass 1e-20",
            eps=eps,
        )

    @lowering
    @variants(result=(Weights,))
    def gated(self, gate: Gate, result: Weights, size: float | None, inverse: float | None, eps: float | None):
        """Emit npu_moe_gating_top_k; gather undivided sigmoids from its third result, the scores of all experts."""
        if gate.norm == "softmax" or size is not None or inverse is not None:
            weights, experts, _ = gate.routed(result.factor(), eps or 0.0)
            return result.as_written(weights, experts)
        _, experts, scores = gate.routed(scores=True)
        weights = scores.gather(-1, experts.to(torch.int64)) * result.factor()
        return result.as_written(weights, experts)
