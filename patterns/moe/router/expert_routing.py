"""shares, experts = the k experts of a token and how much each counts  (Shazeer et al., Mixture-of-Experts, 2017).

*Matches* a softmax over the k largest logits, and the k largest of a softmax: as they are, or divided by their sum,
which is the softmax over the k largest logits again; of the chosen alone, or of all experts, 0 for others. *Replaces
with* `npu_moe_gating_top_k_softmax_v2`; of scores with a bias, of sigmoids or in groups of experts with
`npu_moe_gating_top_k` (`GatedScores`). Which of equal logits is chosen torch leaves open too; rounding keeps the order
of all others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants
from patterns.moe.router.expert_gating import GatedScores, Weights

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

    def largest(self, p, count, result):
        """The largest, as a softmax over them takes them."""
        return p.maybe_cast(result.largest(p, self.wide(p), count, -math.inf), to=f32)

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

    def largest(self, p, count, result):
        """Chosen, then widened."""
        return p.cast(result.largest(p, self.values, count, -math.inf), to=f32)

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

    def of(self, p, logits, result):
        """Softmax, then choose."""
        return self.divided(p, result.largest(p, p.softmax(logits.wide(p)), self.count, 0.0))

    def divided(self, p, chosen):
        """As they are."""
        return chosen

    def guard(self, among: Any) -> None:
        """Nothing speaks against them."""


@dataclass(frozen=True)
class DividedShares(Shares):
    """The same divided by their sum: the mean with a factor."""

    factor: Any = scalar()
    are_divided: ClassVar[bool] = True

    def divided(self, p, chosen):
        """By their sum."""
        return p.scale(p.power(p.mean(chosen), -1.0), self.factor) * chosen

    def guard(self, among: Any) -> None:
        """What the mean of so many is multiplied by to be the sum."""
        sums = isinstance(among, int) and abs(self.factor * among - 1) < 1e-9
        require(
            sums,
            "the chosen shares are divided by something else than their sum; "
            "npu_moe_gating_top_k_softmax requires the sum of the chosen ones",
        )


@dataclass(frozen=True)
class SharesOfChosen(Shares):
    """What each has of the softmax over the chosen."""

    are_divided: ClassVar[bool] = True

    def of(self, p, logits, result):
        """Choose, then softmax."""
        return p.softmax(logits.largest(p, self.count, result))


@dataclass(frozen=True)
class Listed(Group):
    """A share for each of the chosen experts."""

    def largest(self, p, x, count, fill):
        """As the list names them."""
        return p.largest(x, count)

    def among(self, shares: Shares, logits: Tensor) -> Any:
        """How many shares a token has."""
        return shares.count

    def put(self, shares: Tensor, experts: Tensor, logits: Tensor) -> Tensor:
        """The shares."""
        return shares


@dataclass(frozen=True)
class InPlace(Group):
    """A share for every expert, 0 for those that are not chosen."""

    def largest(self, p, x, count, fill):
        """Where they stand, and no share for others."""
        return p.kept(x=x, count=count, fill=fill)

    def among(self, shares: Shares, logits: Tensor) -> Any:
        """How many shares a token has."""
        return logits.shape[-1]

    def put(self, shares: Tensor, experts: Tensor, logits: Tensor) -> Tensor:
        """Each at its expert's place."""
        return shares.new_zeros(logits.shape).scatter(-1, experts, shares)


@dataclass(frozen=True)
class SoftmaxShares(Rule):
    """The experts that a router chooses, with their shares of a softmax."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning: logits [*B, E] → shares [*B, count], experts int64 [*B, count]."""
        return logits.softmax(-1).topk(count)

    @pattern
    @variants(logits=(Logits, WidenedLogits), shares=(SharesOfChosen, DividedShares, Shares), result=(Listed, InPlace))
    def chosen(self, p, logits, shares, result):
        """The largest, and what each of them counts."""
        return logits.shares(p, shares.of(p, logits, result)), logits.places(p, shares.count)

    @lookalike("of equal shares `max` names the first expert, the operator any, as `topk` may: choose by topk(1)")
    def first_of_equal(self, p, logits=tensor("*B E")):
        """One expert, by `max` (Switch Transformers)."""
        return p.op("first_greatest", p.softmax(p.maybe_cast(logits, to=f32)))

    @lookalike("what is not among the largest is {fill} where it must be -inf: a softmax may give it a share")
    def filled_otherwise(self, p, logits=tensor("*B E"), count=attribute(), fill=attribute()):
        """A softmax over the largest, and others."""
        kept = p.kept(x=p.maybe_cast(logits, to=f32), count=count, fill=fill)
        return p.softmax(p.maybe_cast(kept, to=f32))

    @lookalike("nothing reads which experts are chosen; npu_moe_gating_top_k gives weights and experts at once")
    def without_experts(self, p, logits=tensor("*B E"), count=attribute()):
        """The softmax over the largest alone."""
        return p.softmax(p.maybe_cast(p.largest(logits, count), to=f32))

    @lookalike("nothing reads which experts are chosen; npu_moe_gating_top_k gives weights and experts at once")
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

    @lookalike(
        "the chosen shares are divided by something else than their sum; "
        "npu_moe_gating_top_k_softmax requires the sum of the chosen ones"
    )
    def divided_otherwise(self, p, logits=tensor("*B E"), count=attribute(), by=tensor("*B 1"), exponent=attribute()):
        """Divided by any other number of each token."""
        return _largest_shares(p, logits, count) * p.power(by, exponent)

    def guard(self, logits: Logits, shares: Shares, result: Any):
        """What they are divided by."""
        shares.guard(result.among(shares, logits.values))

    @lowering
    @variants(result=(Listed, InPlace))
    def softmax(self, logits: Logits, shares: Shares, result: Any):
        """One operator; shares of all experts are put in their places then."""
        read, routed = logits.read(), torch.ops.npu.npu_moe_gating_top_k_softmax_v2
        found, experts, _ = routed(read, k=shares.count, renorm=int(shares.are_divided))
        listed = experts.to(torch.int64)
        return result.put(found, listed, read), listed


@dataclass(frozen=True)
class ExpertRouting(SoftmaxShares, GatedScores):
    """The experts that a router chooses, and what each of them counts: by a softmax, or by other scores."""

    aliases = ("router", "gating", "expert_gating", "moe_gating", "moe_gating_top_k", "moe_gating_top_k_softmax")

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """The meaning by a softmax; by other scores that of `GatedScores`."""
        return SoftmaxShares.reference(self, logits, count)

    def guard(self, result: Any, gate: Any, logits: Any, shares: Any, size: Any, inverse: Any, eps: Any):
        """What they are divided by."""
        if isinstance(result, Weights):
            GatedScores.guard(self, gate, size, inverse, eps)
        else:
            SoftmaxShares.guard(self, logits, shares, result)


def _largest_shares(p: Any, logits: Any, count: Any) -> Any:
    """Of a softmax over all, perhaps rounded again."""
    return p.maybe_cast(p.largest(p.softmax(p.maybe_cast(logits, to=f32)), count), to=logits)
