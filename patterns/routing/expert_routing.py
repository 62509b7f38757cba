"""shares, experts = the k experts of a token and how much each counts  (Shazeer et al., Mixture-of-Experts, 2017).

*Matches* a softmax over the k largest logits, and the k largest of a softmax: as they are, or divided by their sum,
which is the softmax over the k largest logits again. *Replaces with* `npu_moe_gating_top_k_softmax_v2`. Which of equal
logits is chosen torch leaves open too; rounding keeps the order of all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants

f32 = torch.float32


@dataclass(frozen=True)
class Shares(Group):
    """What each chosen expert has of the softmax over all experts.

    Attributes:
        logits: [*B, E].
        count: how many experts are chosen.
    """

    logits: Any = tensor("*B E")
    count: Any = attribute()
    are_divided: ClassVar[bool] = False

    def terms(self, p):
        """Softmax, then choose."""
        scores = p.softmax(p.maybe_cast(self.logits, to=f32))
        chosen = self.divided(p, p.largest(scores, self.count))
        return p.as_dtype(chosen, like=self.logits), p.largest_index(scores, self.count)

    def divided(self, p, chosen):
        """As they are."""
        return chosen

    def guard(self) -> None:
        """Nothing speaks against them."""

    def routed(self) -> tuple[Tensor, Tensor]:
        """Shares and experts [*B, count], by the operator."""
        return self.routed_of(self.logits)

    def routed_of(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The same of logits that were cast: shares have their dtype."""
        routed = torch.ops.npu.npu_moe_gating_top_k_softmax_v2
        shares, experts, _ = routed(logits, k=self.count, renorm=int(self.are_divided))
        return shares, experts.to(torch.int64)


@dataclass(frozen=True)
class DividedShares(Shares):
    """The same divided by their sum: the mean with a factor."""

    factor: Any = scalar()
    are_divided: ClassVar[bool] = True

    def divided(self, p, chosen):
        """By their sum."""
        return chosen * p.scale(p.power(p.mean(chosen), -1.0), self.factor)

    def guard(self) -> None:
        """What the mean is multiplied by to be the sum."""
        sums = abs(self.factor * self.count - 1) < 1e-9
        require(sums, "the chosen shares are divided by something else than their sum")


@dataclass(frozen=True)
class SharesOfChosen(Shares):
    """What each has of the softmax over the chosen."""

    are_divided: ClassVar[bool] = True

    def terms(self, p):
        """Choose, then softmax."""
        wide = p.maybe_cast(self.logits, to=f32)
        shares = p.softmax(p.maybe_cast(p.largest(wide, self.count), to=f32))
        return p.as_dtype(shares, like=self.logits), p.largest_index(wide, self.count)


@dataclass(frozen=True)
class WideSharesOfChosen(SharesOfChosen):
    """The same in float32, of logits in 16 bits."""

    def terms(self, p):
        """Choose, widen, then softmax."""
        shares = p.softmax(p.cast(p.largest(self.logits, self.count), to=f32))
        return shares, p.largest_index(self.logits, self.count)

    def routed(self) -> tuple[Tensor, Tensor]:
        """Of logits that are widened first."""
        return self.routed_of(self.logits.to(f32))


@dataclass(frozen=True)
class ExpertRouting(Rule):
    """The experts that a router chooses, with their shares of a softmax."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning: logits [*B, E] → shares [*B, count], experts int64 [*B, count]."""
        return logits.softmax(-1).topk(count)

    @pattern
    @variants(shares=(SharesOfChosen, WideSharesOfChosen, DividedShares, Shares))
    def chosen(self, p, shares):
        """The largest, and what each of them counts."""
        return shares.terms(p)

    @lookalike("nothing reads which experts are chosen")
    def without_experts(self, p, logits=tensor("*B E"), count=attribute()):
        """The softmax over the largest alone."""
        return p.softmax(p.maybe_cast(p.largest(logits, count), to=f32))

    @lookalike("nothing reads which experts are chosen")
    def shares_without_experts(self, p, logits=tensor("*B E"), count=attribute()):
        """The largest of the softmax alone."""
        return _largest_shares(p, logits, count)

    @lookalike("the softmax over what is chosen runs along another dim")
    def softmax_of_chosen(self, p, logits=tensor("*B E"), count=attribute()):
        """Any other softmax over the largest."""
        return p.op("softmax", p.maybe_cast(p.largest(logits, count), to=f32))

    @lookalike("the softmax runs along another dim than the choice")
    def chosen_of_softmax(self, p, logits=tensor("*B E"), count=attribute()):
        """The largest of any other softmax."""
        return p.largest(p.op("softmax", logits), count)

    @lookalike("{eps} is added to the sum of the chosen shares, which is more than is lost beside their sum")
    def divided_with_eps(self, p, logits=tensor("*B E"), count=attribute(), factor=scalar(), eps=scalar()):
        """Divided by the sum and a number."""
        chosen = _largest_shares(p, logits, count)
        return chosen * p.power(p.shift(p.scale(p.mean(chosen), factor), eps), -1.0)

    @lookalike("the sum of the chosen shares is clamped between {low} and {high}, and may lie outside")
    def divided_clamped(
        self, p, logits=tensor("*B E"), count=attribute(), factor=scalar(), low=scalar(), high=scalar()
    ):
        """Divided by the sum, if it is neither small nor large."""
        chosen = _largest_shares(p, logits, count)
        return chosen * p.power(p.clip(p.scale(p.mean(chosen), factor), low, high), -1.0)

    @lookalike("the chosen shares are divided by something else than their sum")
    def divided_otherwise(self, p, logits=tensor("*B E"), count=attribute(), by=tensor("*B 1"), exponent=attribute()):
        """Divided by any other number of each token."""
        return _largest_shares(p, logits, count) * p.power(by, exponent)

    def guard(self, shares: Shares):
        """What they are divided by."""
        shares.guard()

    @lowering
    def npu(self, shares: Shares):
        """One operator."""
        return shares.routed()


def _largest_shares(p: Any, logits: Any, count: Any) -> Any:
    """Of a softmax over all, perhaps rounded again."""
    return p.maybe_cast(p.largest(p.softmax(p.maybe_cast(logits, to=f32)), count), to=logits)
