"""shares, experts = the k experts of a token and how much each counts  (Shazeer et al., Mixture-of-Experts, 2017).

*Matches* a softmax over the k largest logits, and the k largest of a softmax: as they are, or divided by their sum,
which is the softmax over the k largest logits again. *Replaces with* `npu_moe_gating_top_k_softmax_v2`. Which of equal
logits is chosen torch leaves open too; rounding keeps the order of all others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion import Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor

f32 = torch.float32


@dataclass(frozen=True)
class ExpertRouting(Rule):
    """The experts that a router chooses, with shares that add up to one."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning: logits [*B, E] → shares [*B, count], experts int64 [*B, count]."""
        chosen, experts = logits.topk(count)
        return chosen.softmax(-1), experts

    @pattern
    def softmax_of_chosen(self, p, logits=tensor("*B E"), count=attribute()):
        """Choose, then softmax."""
        wide = p.maybe_cast(logits, to=f32)
        shares = p.softmax(p.maybe_cast(p.largest(wide, count), to=f32))
        return p.as_dtype(shares, like=logits), p.largest_index(wide, count)

    @pattern
    def chosen_of_softmax(self, p, logits=tensor("*B E"), count=attribute(), factor=scalar()):
        """Softmax, choose, divide by the sum (the mean with a factor)."""
        scores = p.softmax(p.maybe_cast(logits, to=f32))
        chosen = p.largest(scores, count)
        shares = chosen * p.scale(p.power(p.mean(chosen), -1.0), factor)
        return p.as_dtype(shares, like=logits), p.largest_index(scores, count)

    @lookalike("the softmax over what is chosen runs along another dim, or nothing reads which experts are chosen")
    def other_softmax(self, p, logits=tensor("*B E"), count=attribute()):
        """Any other softmax over the largest."""
        return p.op("softmax", p.maybe_cast(p.largest(logits, count), to=f32))

    def guard(self, count: int, factor: float | None):
        """What the mean is multiplied by to be the sum."""
        sums = factor is None or abs(factor * count - 1) < 1e-9
        require(sums, "the chosen shares are divided by something else than their sum")

    @lowering
    def npu(self, logits: Tensor, count: int):
        """The operator that chooses first."""
        return _routed(logits, count, renorm=1)


@dataclass(frozen=True)
class ExpertShares(Rule):
    """The experts that a router chooses, with their shares of the softmax over all experts."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning: logits [*B, E] → shares [*B, count], experts int64 [*B, count]."""
        return logits.softmax(-1).topk(count)

    @pattern
    def chosen_of_softmax(self, p, logits=tensor("*B E"), count=attribute()):
        """Softmax, then choose."""
        scores = p.softmax(p.maybe_cast(logits, to=f32))
        return p.as_dtype(p.largest(scores, count), like=logits), p.largest_index(scores, count)

    @lookalike("the softmax runs along another dim than the choice")
    def other_softmax(self, p, logits=tensor("*B E"), count=attribute()):
        """Any other softmax."""
        return p.largest(p.op("softmax", logits), count)

    @lowering
    def npu(self, logits: Tensor, count: int):
        """The operator that takes the softmax first."""
        return _routed(logits, count, renorm=0)


def _routed(logits: Tensor, count: int, renorm: int) -> tuple[Tensor, Tensor]:
    shares, experts, _ = torch.ops.npu.npu_moe_gating_top_k_softmax_v2(logits, k=count, renorm=renorm)
    return shares, experts.to(torch.int64)
