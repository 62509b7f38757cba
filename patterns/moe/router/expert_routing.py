"""shares, experts = the k experts of a token and how much each counts  (Shazeer et al., Mixture-of-Experts, 2017).

*Matches* a softmax over the k largest logits, and the k largest shares of a softmax over all logits, undivided or
divided by their sum, which again gives the softmax over the k largest logits. The result is k shares, or a share for
each of all experts, 0 for those that are not chosen. *Replaces with* `npu_moe_gating_top_k_softmax_v2`; routers with a
bias, sigmoids or groups of experts with `npu_moe_gating_top_k` (`GatedScores`). Among equal logits topk of torch may
choose any, as the operator may; rounding the logits never reverses an order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Captures, Group, Rule, attribute, lookalike, lowering, pattern, require, scalar, tensor, variants
from patterns.moe.router.expert_gating import GatedScores, Weights

f32 = torch.float32


@dataclass(frozen=True)
class Logits(Group):
    """Logits `values` [*B, E] that are cast to float32 before the choice; the shares have the dtype of the logits."""

    values: Any = tensor("*B E")

    def wide(self, p):
        """Build the term of the logits in float32."""
        return p.maybe_cast(self.values, to=f32)

    def shares(self, p, x):
        """Build the term of the shares `x` in the dtype of the logits."""
        return p.as_dtype(x, like=self.values)

    def largest(self, p, count, result):
        """Build the term of the `count` largest logits in float32, in the layout of `result`."""
        return p.maybe_cast(result.largest(p, self.wide(p), count, -math.inf), to=f32)

    def places(self, p, count):
        """Build the term of the indices of the `count` largest logits."""
        return p.largest_index(self.wide(p), count)

    def read(self) -> Tensor:
        """Return the logits as the operator reads them, in the dtype that the shares have."""
        return self.values


@dataclass(frozen=True)
class WidenedLogits(Logits):
    """Logits in 16 bits that are cast to float32 behind the choice; the shares stay in float32."""

    def wide(self, p):
        """Build the term of the logits cast to float32."""
        return p.cast(self.values, to=f32)

    def shares(self, p, x):
        """Return the term of the shares `x`, which stay in float32."""
        return x

    def largest(self, p, count, result):
        """Build the term of the `count` largest logits, cast to float32 after the top-k in the dtype of the logits."""
        return p.cast(result.largest(p, self.values, count, -math.inf), to=f32)

    def places(self, p, count):
        """Build the term of the indices of the `count` largest logits, in the dtype of the logits."""
        return p.largest_index(self.values, count)

    def read(self) -> Tensor:
        """Cast the logits to float32, so that the operator returns shares in float32."""
        return self.values.to(f32)


@dataclass(frozen=True)
class Shares(Group):
    """Weights of the `count` chosen experts: their shares of a softmax over all experts."""

    count: Any = attribute()
    are_divided: ClassVar[bool] = False

    def term(self, p, logits, result):
        """Build the term of the largest shares of a softmax over all `logits`, in the layout of `result`."""
        return self.divided(p, result.largest(p, p.softmax(logits.wide(p)), self.count, 0.0))

    def divided(self, p, chosen):
        """Return the term `chosen` as it is: the shares of the chosen experts are not divided by their sum."""
        return chosen

    def guard(self, among: Any) -> None:
        """Refuse nothing, for any number `among` of shares of a token."""


@dataclass(frozen=True)
class DividedShares(Shares):
    """Weights of the `count` chosen experts: their shares of a softmax over all, divided by their sum, mean /
    `factor`.
    """

    factor: Any = scalar()
    are_divided: ClassVar[bool] = True

    def divided(self, p, chosen):
        """Build the term of the shares `chosen` divided by their sum."""
        return p.scale(p.power(p.mean(chosen), -1.0), self.factor) * chosen

    def guard(self, among: Any) -> None:
        """Refuse a `factor` other than 1 / `among`, with which mean / `factor` is the sum of the `among` shares of a
        token.
        """
        sums = isinstance(among, int) and abs(self.factor * among - 1) < 1e-9
        require(
            sums,
            "weights: the chosen shares are divided by something else than their sum; "
            "npu_moe_gating_top_k_softmax requires the sum of the chosen ones; write w / w.sum(-1, "
            "keepdim=True)",
        )


@dataclass(frozen=True)
class SharesOfChosen(Shares):
    """Weights of the `count` chosen experts: their shares of a softmax over the chosen logits alone."""

    are_divided: ClassVar[bool] = True

    def term(self, p, logits, result):
        """Build the term of the softmax over the largest `logits`, in the layout of `result`."""
        return p.softmax(logits.largest(p, self.count, result))


@dataclass(frozen=True)
class Listed(Group):
    """The result [*B, k]: a share for each chosen expert."""

    def largest(self, p, x, count, fill):
        """Build the term of the `count` largest of `x` [*B, count], in descending order; `fill` is unused."""
        return p.largest(x, count)

    def among(self, shares: Shares, logits: Tensor) -> Any:
        """Return the number of shares of a token, `shares.count`."""
        return shares.count

    def put(self, shares: Tensor, experts: Tensor, logits: Tensor) -> Tensor:
        """Return `shares` [*B, k] of the operator unchanged."""
        return shares


@dataclass(frozen=True)
class InPlace(Group):
    """The result [*B, E]: a share for every expert, 0 for those that are not chosen."""

    def largest(self, p, x, count, fill):
        """Build the term of `x` [*B, E] with all but the `count` largest replaced by `fill`."""
        return p.kept(x=x, count=count, fill=fill)

    def among(self, shares: Shares, logits: Tensor) -> Any:
        """Return the number of shares of a token, E."""
        return logits.shape[-1]

    def put(self, shares: Tensor, experts: Tensor, logits: Tensor) -> Tensor:
        """Scatter `shares` [*B, k] of the operator to the places `experts` in zeros [*B, E]."""
        return shares.new_zeros(logits.shape).scatter(-1, experts, shares)


@dataclass(frozen=True)
class SoftmaxShares(Rule):
    """Choice of the experts with the largest logits, and their shares of a softmax."""

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Compute shares [*B, count] and experts int64 [*B, count] of logits [*B, E]."""
        return logits.softmax(-1).topk(count)

    @pattern
    @variants(logits=(Logits, WidenedLogits), shares=(SharesOfChosen, DividedShares, Shares), result=(Listed, InPlace))
    def chosen(self, p, logits, shares, result):
        """softmax(topk(logits)), or topk(softmax(logits)), or the latter divided by its sum; and the topk indices."""
        return logits.shares(p, shares.term(p, logits, result)), logits.places(p, shares.count)

    @lookalike(
        "logits: those outside of the top-k are {fill}, of which a softmax may give a share; "
        "npu_moe_gating_top_k_softmax requires -inf; fill with -inf"
    )
    def filled_otherwise(self, p, logits=tensor("*B E"), count=attribute(), fill=attribute()):
        """softmax(logits where they are among the largest, `fill` elsewhere), with a finite `fill`."""
        masked = p.kept(x=p.maybe_cast(logits, to=f32), count=count, fill=fill)
        return p.softmax(p.maybe_cast(masked, to=f32))

    @lookalike(
        "logits: they are multiplied by {factor} behind the top-k; npu_moe_gating_top_k_softmax requires a softmax of "
        "the chosen logits themselves; multiply the logits before the top-k"
    )
    def scaled_behind(self, p, logits=tensor("*B E"), count=attribute(), factor=scalar()):
        """softmax(topk(logits) · factor)."""
        return p.softmax(p.maybe_cast(p.scale(p.maybe_cast(p.largest(logits, count), to=f32), factor), to=f32))

    @lookalike(
        "experts: nothing reads which are chosen; npu_moe_gating_top_k gives weights and experts at once and "
        "requires a reader of both"
    )
    def without_experts(self, p, logits=tensor("*B E"), count=attribute()):
        """softmax(topk(logits)), without the topk indices."""
        return p.softmax(p.maybe_cast(p.largest(logits, count), to=f32))

    @lookalike(
        "experts: nothing reads which are chosen; npu_moe_gating_top_k gives weights and experts at once and "
        "requires a reader of both"
    )
    def shares_without_experts(self, p, logits=tensor("*B E"), count=attribute()):
        """topk(softmax(logits)), without the topk indices."""
        return _largest_shares(p, logits, count)

    @lookalike(
        "softmax: over the chosen logits it runs along another dim than the experts; "
        "npu_moe_gating_top_k_softmax requires the last dim; write softmax(-1)"
    )
    def softmax_of_chosen(self, p, logits=tensor("*B E"), count=attribute()):
        """softmax(topk(logits)) over another dim than the last."""
        return p.op("softmax", p.maybe_cast(p.largest(logits, count), to=f32))

    @lookalike(
        "softmax: it runs along another dim than the top-k; npu_moe_gating_top_k_softmax requires the last dim "
        "for both; write logits.softmax(-1).topk(k, -1)"
    )
    def chosen_of_softmax(self, p, logits=tensor("*B E"), count=attribute()):
        """topk(softmax(logits)), the softmax over another dim than the last."""
        return p.largest(p.op("softmax", logits), count)

    @lookalike(
        "eps: {eps} is added to the sum of the chosen shares, which changes them; npu_moe_gating_top_k_softmax "
        "requires one that rounding loses; write 1e-20, or leave it out"
    )
    def divided_with_eps(self, p, logits=tensor("*B E"), count=attribute(), factor=scalar(), eps=scalar()):
        """s / (Σ s + eps), of s = topk(softmax(logits))."""
        chosen = _largest_shares(p, logits, count)
        return chosen * p.power(p.shift(p.scale(p.mean(chosen), factor), eps), -1.0)

    @lookalike(
        "weights: the sum of the chosen shares is clamped between {low} and {high}, and may be outside; "
        "npu_moe_gating_top_k_softmax requires the sum itself; leave the clamp out, or clamp at 1e-20"
    )
    def divided_clamped(
        self, p, logits=tensor("*B E"), count=attribute(), factor=scalar(), low=scalar(), high=scalar()
    ):
        """s / clamp(Σ s, low, high), of s = topk(softmax(logits))."""
        chosen = _largest_shares(p, logits, count)
        return chosen * p.power(p.clip(p.scale(p.mean(chosen), factor), low, high), -1.0)

    @lookalike(
        "weights: the chosen shares are divided by something else than their sum; "
        "npu_moe_gating_top_k_softmax requires the sum of the chosen ones; write w / w.sum(-1, "
        "keepdim=True)"
    )
    def divided_otherwise(self, p, logits=tensor("*B E"), count=attribute(), by=tensor("*B 1"), exponent=attribute()):
        """s · by^exponent, of s = topk(softmax(logits)) and any `by` [*B, 1]."""
        return _largest_shares(p, logits, count) * p.power(by, exponent)

    def guard(self, logits: Logits, shares: Shares, result: Any):
        """Refuse shares that are divided by anything but their sum."""
        shares.guard(result.among(shares, logits.values))

    @lowering
    @variants(result=(Listed, InPlace))
    def softmax(self, logits: Logits, shares: Shares, result: Any):
        """Emit npu_moe_gating_top_k_softmax_v2; a result for all experts is scattered from its shares."""
        read, routed = logits.read(), torch.ops.npu.npu_moe_gating_top_k_softmax_v2
        largest, experts, _ = routed(read, k=shares.count, renorm=int(shares.are_divided))
        listed = experts.to(torch.int64)
        return result.put(largest, listed, read), listed


@dataclass(frozen=True)
class RoutingMatch(Captures):
    """Captures of a router that its guard reads: `GatedScores` for a `result` of weights, else `SoftmaxShares`."""

    result: Any
    gate: Any
    logits: Any
    shares: Any
    size: Any
    inverse: Any
    eps: Any


@dataclass(frozen=True)
class ExpertRouting(SoftmaxShares, GatedScores):
    """Choice of experts by a router, and the weights of the chosen experts, by a softmax or by other scores."""

    aliases = ("router", "gating", "expert_gating", "moe_gating", "moe_gating_top_k", "moe_gating_top_k_softmax")

    def reference(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Compute shares and experts by a softmax; `GatedScores` has the reference for other scores."""
        return SoftmaxShares.reference(self, logits, count)

    def guard(self, match: RoutingMatch):
        """Refuse weights that are divided by anything but their sum."""
        if isinstance(match.result, Weights):
            GatedScores.guard(self, match.gate, match.size, match.inverse, match.eps)
        else:
            SoftmaxShares.guard(self, match.logits, match.shares, match.result)


def _largest_shares(p: Any, logits: Any, count: Any) -> Any:
    """Build the term of topk(softmax(`logits`), `count`) in float32, perhaps cast to the dtype of `logits`."""
    return p.maybe_cast(p.largest(p.softmax(p.maybe_cast(logits, to=f32)), count), to=logits)
