"""The facet of attention that says what is used of it: its result, or the log-sum-exp of its scores as well."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Group, Rule, attribute, require
from patterns.attention.calls import viewed

Term = Callable[..., Any]


@dataclass(frozen=True)
class SoftmaxAttention(Rule):
    """What the rules of attention have in common."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E], [B, N, S, 1]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class Output(Group):
    """The result [B, N, S, E], in the arrangement of the model."""

    view: Any = attribute()
    lse = False

    def terms(self, attended: Term, summed: Term) -> Any:
        """The results of a form, of the terms of attention and of its log-sum-exp."""
        return attended(output_view=self.view)

    def refuse(self, seen: Any, sink: Any = None, bias: Any = None) -> None:
        """Any mask, any sink and any bias will do."""

    def restored(self, y: Tensor, lse: Tensor, seen: Any) -> Any:
        """What the rule gives of what the operator gives."""
        return viewed(y, self.view)


@dataclass(frozen=True)
class OutputAndLse(Output):
    """The same and log Σ exp of the scores, [B, N, S, 1], to merge it with attention over other keys."""

    lse = True

    def terms(self, attended: Term, summed: Term) -> Any:
        """Both."""
        return attended(output_view=self.view), summed()

    def refuse(self, seen: Any, sink: Any = None, bias: Any = None) -> None:
        """What the log-sum-exp of the operator is not of."""
        require(sink is None, "the log-sum-exp of the operator does not count the sink")
        require(bias is None, "whether the log-sum-exp of the operator counts the bias is not documented")
        finite = seen.fully_masked_row == "mean" or seen.levels is not None
        require(not finite, "a query without keys has a finite log-sum-exp, of which the operator says +inf")

    def restored(self, y: Tensor, lse: Tensor, seen: Any) -> Any:
        """Both."""
        return viewed(y, self.view), seen.restored_lse(lse)


RESULTS: tuple[Any, ...] = (Output, OutputAndLse)
