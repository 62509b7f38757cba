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
class Logits(Group):
    """What experts are chosen by, [*B, E]; softmax in float32, shares in its dtype."""

    values: Any = tensor("*B E")

    def wide(self, p):
        """As the softmax takes them."""
        return p.maybe_cast(self.values, to=f32)

    def shares(self, p, x):
        """Shares as the model holds them."""
        return p.as_dtype(x, like=self.values)

    def largest(self, p, count):
        """The largest, as a softmax over them takes them."""
        return p.maybe_cast(p.largest(self.wide(p), count), to=f32)

    def places(self, p, count):
        """Where they are."""
        return p.largest_index(self.wide(p), count)

    def read(self) -> Tensor:
        """In the dtype of the shares."""
        return self.values


@dataclass(frozen=True)
class WidenedLogits(Logits):
    """Logits in 16 bits whose largest are chosen as they are; shares stay in float32."""

    def wide(self, p):
        """Widened."""
        return p.cast(self.values, to=f32)

    def shares(self, p, x):
        """As they are."""
        return x

    def largest(self, p, count):
        """Chosen, then widened."""
        return p.cast(p.largest(self.values, count), to=f32)

    def places(self, p, count):
        """Where they are before they are widened."""
        return p.largest_index(self.values, count)

    def read(self) -> Tensor:
        """Widened first."""
        return self.values.to(f32)


@dataclass(frozen=True)
class Shares(Group):
    """What each of `count` chosen experts has of the softmax over all experts."""

    count: Any = attribute()
    are_divided: ClassVar[bool] = False

    def of(self, p, logits):
        """Softmax, then choose."""
        return self.divided(p, p.largest(p.softmax(logits.wide(p)), self.count))

    def divided(self, p, chosen):
        """As they are."""
        return chosen

    def guard(self) -> None:
        """Nothing speaks against them."""


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

    def of(self, p, logits):
        """Choose, then softmax."""
        return p.softmax(logits.largest(p, self.count))


@dataclass(frozen=True)
class ExpertRouting(Rule):
    """The experts that a router chooses, with their shares of a softmax."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning: logits [*B, E] → shares [*B, count], experts int64 [*B, count]."""
        return logits.softmax(-1).topk(count)

    @pattern
    @variants(logits=(Logits, WidenedLogits), shares=(SharesOfChosen, DividedShares, Shares))
    def chosen(self, p, logits, shares):
        """The largest, and what each of them counts."""
        return logits.shares(p, shares.of(p, logits)), logits.places(p, shares.count)

    @lookalike("of equal shares `max` names the first expert, the operator any, as `topk` may: choose by topk(1)")
    def first_of_equal(self, p, logits=tensor("*B E")):
        """One expert, by `max` (Switch Transformers)."""
        return p.op("first_greatest", p.softmax(p.maybe_cast(logits, to=f32)))

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
    def npu(self, logits: Logits, shares: Shares):
        """One operator."""
        routed = torch.ops.npu.npu_moe_gating_top_k_softmax_v2
        found, experts, _ = routed(logits.read(), k=shares.count, renorm=int(shares.are_divided))
        return found, experts.to(torch.int64)


def _largest_shares(p: Any, logits: Any, count: Any) -> Any:
    """Of a softmax over all, perhaps rounded again."""
    return p.maybe_cast(p.largest(p.softmax(p.maybe_cast(logits, to=f32)), count), to=logits)
