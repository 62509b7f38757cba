"""weights, experts = the k largest of scores + bias, in the best groups of experts  (DeepSeek-V3, 2024, eq. 16).

*Matches* what `patterns.moe.router.read` reads of a router, with its scores as they are or divided by their sum, times
a factor. *Replaces with* `npu_moe_gating_top_k`, in float32: where the model rounds its scores to less before it
chooses, experts may change places whose scores are equal but for that rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants

_SCORE = {"max": 0, "sum": 1}
_NORM = {"softmax": 0, "sigmoid": 1}


@dataclass(frozen=True)
class Gate(Group):
    """What a router chooses by.

    Attributes:
        logits: [*T, E], of whose `norm` the scores are.
        bias: added to what experts are chosen by.
        groups, kept: groups of experts, and in how many of them experts are chosen.
        group_score: what groups are chosen by, "max" or "sum" of the two largest.
        count: how many experts are chosen.
    """

    logits: Any = tensor("*T E")
    bias: Any = tensor("E", optional=True)
    norm: Any = attribute()
    groups: Any = attribute()
    kept: Any = attribute()
    group_score: Any = attribute()
    count: Any = attribute()

    def routed(self, factor: float = 1.0, eps: float = 0.0, scores: bool = False) -> tuple[Tensor, Tensor, Tensor]:
        """Weights and experts [*T, K] in float32 and int32, and the scores [*T, E] if they are asked for."""
        lead = self.logits.shape[:-1]
        wide = torch.promote_types(self.logits.dtype, torch.float32)
        flat = self.logits.reshape(-1, self.logits.shape[-1]).to(wide)
        several = torch.ops.npu.npu_moe_gating_top_k(
            flat,
            self.count,
            bias=None if self.bias is None else self.bias.to(wide),
            k_group=self.kept,
            group_count=self.groups,
            group_select_mode=_SCORE[self.group_score],
            norm_type=_NORM[self.norm],
            out_flag=scores,
            routed_scaling_factor=factor,
            eps=eps,
        )
        weights, experts, all_scores = (each.reshape(*lead, each.shape[-1]) for each in several)
        return weights, experts, all_scores


@dataclass(frozen=True)
class SigmoidGate(Gate):
    """One of sigmoids, which the operator divides by their sum."""

    norm: Any = attribute("sigmoid")


@dataclass(frozen=True)
class SoftmaxGate(Gate):
    """One of a softmax, whose scores it leaves as they are."""

    norm: Any = attribute("softmax")


@dataclass(frozen=True)
class Weights(Group):
    """What becomes of the result: dtypes of the scores and of the list, and factors, before and after a division."""

    dtype: Any = attribute()
    listed: Any = attribute()
    before: Any = scalar()
    after: Any = scalar()

    def factor(self) -> float:
        """By which the weights are multiplied."""
        return (1.0 if self.before is None else self.before) * self.after


@dataclass(frozen=True)
class GatedScores(Rule):
    """The experts that a router chooses with a bias, by groups or by sigmoids, and what each of them counts."""

    def reference(self, logits: Tensor, bias: Tensor, count: int, factor: float) -> tuple[Tensor, Tensor]:
        """The meaning without groups: logits [*T, E], bias [E] → weights [*T, K], experts int64 [*T, K]."""
        scores = logits.sigmoid()
        experts = (scores + bias).topk(count)[1]
        weights = scores.gather(-1, experts)
        return weights / weights.sum(-1, keepdim=True) * factor, experts

    @pattern
    @variants(result=(Weights,))
    def divided(self, p, result, gate: Any = SigmoidGate, size=scalar(), eps=scalar()):
        """Scores by their sum and eps."""
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype)
        total = p.shift(p.scale(p.mean(scores), size), eps)
        weights = p.maybe_scaled(p.maybe_scaled(scores, result.before) * p.power(total, -1.0), result.after)
        return weights, p.expert_choice(**vars(gate), dtype=result.listed)

    @pattern
    @variants(result=(Weights,))
    def divided_plainly(self, p, result, gate: Any = SigmoidGate, inverse=scalar()):
        """Scores by their sum."""
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype)
        total = p.scale(p.power(p.mean(scores), -1.0), inverse)
        weights = p.maybe_scaled(p.maybe_scaled(scores, result.before) * total, result.after)
        return weights, p.expert_choice(**vars(gate), dtype=result.listed)

    @pattern
    @variants(result=(Weights,))
    def undivided(self, p, result, gate: Any = Gate):
        """The scores as they are."""
        scores = p.chosen_scores(**vars(gate), dtype=result.dtype)
        return p.maybe_scaled(scores, result.after), p.expert_choice(**vars(gate), dtype=result.listed)

    @lookalike("the chosen shares of a softmax are divided: the operator divides scores of sigmoids alone")
    def divided_softmax(
        self, p, gate: Any = SoftmaxGate, dtype=attribute(), by=tensor("*T 1"), factor=scalar(), times=scalar()
    ):
        """Shares by a number of each token."""
        shares = p.maybe_scaled(p.chosen_scores(**vars(gate), dtype=dtype), times)
        return shares * p.maybe_scaled(p.power(by, -1.0), factor)

    @lookalike("the sum of the chosen scores is clamped between {low} and {high}: the operator adds a number to it")
    def scores_clamped(self, p, gate: Any = SigmoidGate, dtype=attribute(), size=scalar(), low=scalar(), high=scalar()):
        """Scores by their sum, if it is neither small nor large."""
        scores = p.chosen_scores(**vars(gate), dtype=dtype)
        return scores * p.power(p.clip(p.scale(p.mean(scores), size), low, high), -1.0)

    @lookalike(
        "experts are chosen by logits: the operator chooses by sigmoids of them, of which more "
        "are equal; choose by the sigmoids"
    )
    def sigmoid_of_chosen(self, p, logits=tensor("*T E"), count=attribute()):
        """Choose, then sigmoid."""
        return p.sigmoid(p.maybe_cast(p.largest(logits, count), to=torch.float32))

    def guard(self, gate: Gate, size: float | None, inverse: float | None, eps: float | None):
        """What the mean is multiplied by to be the sum."""
        sums = [
            size is None or abs(size / gate.count - 1) < 1e-9,
            inverse is None or abs(inverse * gate.count - 1) < 1e-9,
        ]
        require(
            all(sums),
            "the chosen scores are divided by something else than their sum; npu_moe_gating_top_k "
            "requires the sum of the chosen ones",
        )
        require(eps is None or eps >= 0, "eps={eps} makes the sum smaller", eps=eps)

    @lowering
    @variants(result=(Weights,))
    def gated(self, gate: Gate, result: Weights, size: float | None, inverse: float | None, eps: float | None):
        """One operator; sigmoids that are not divided by their sum are read from its third result."""
        if gate.norm == "softmax" or size is not None or inverse is not None:
            weights, experts, _ = gate.routed(result.factor(), eps or 0.0)
            return weights.to(result.dtype), experts.to(result.listed)
        _, experts, scores = gate.routed(scores=True)
        weights = scores.gather(-1, experts.to(torch.int64)) * result.factor()
        return weights.to(result.dtype), experts.to(result.listed)
