"""The facet of attention for its results: the output alone, or with the log-sum-exp of the scores."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Group, Rule, attribute, require
from patterns.attention.calls import viewed

TermBuilder = Callable[..., Any]


@dataclass(frozen=True)
class SoftmaxAttention(Rule):
    """Base of the rules of softmax attention, with their reference."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Compute softmax(scale · q kᵀ) v and log Σ exp(scale · q kᵀ), [B, N, S, E] and [B, N, S, 1], without a mask.

        The arguments are `q` [B, N, S, D], `k` [B, N, T, D] and `v` [B, N, T, E].
        """
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1, keepdim=True)


@dataclass(frozen=True)
class Output(Group):
    """The output alone.

    Attributes:
        view: the reshapes, permutes and casts from [B, N, S, E] to the value of the model.
        lse: True if the log-sum-exp is a result as well.
    """

    view: Any = attribute()
    lse = False

    def terms(self, attended: TermBuilder, summed: TermBuilder) -> Any:
        """Return the terms of the results, built by `attended` (the output) and `summed` (the log-sum-exp)."""
        return attended(output_view=self.view)

    def refuse(self, seen: Any, sink: Any = None, bias: Any = None) -> None:
        """Refuse nothing: any mask `seen`, `sink` and `bias` are taken for the output alone."""

    def restored(self, y: Tensor, lse: Tensor, seen: Any) -> Any:
        """Return the output `y` [B, N, S, E] of the operator in the view of the model; `lse` and the mask `seen` are
        not read.
        """
        return viewed(y, self.view)


@dataclass(frozen=True)
class OutputAndLse(Output):
    """The output and log Σ exp of the scores [B, N, S, 1], which merges the output with attention over other keys.

    Attributes:
        lse_view: the reshape from [B, N, S] to the log-sum-exp of the model, () where dims of size 1 alone differ.
    """

    lse_view: Any = attribute()
    lse = True

    def terms(self, attended: TermBuilder, summed: TermBuilder) -> Any:
        """Return the terms of output and log-sum-exp, built by `attended` and `summed`."""
        return attended(output_view=self.view), summed(lse_view=self.lse_view)

    def refuse(self, seen: Any, sink: Any = None, bias: Any = None) -> None:
        """Refuse a `sink`, a `bias`, and a mask `seen` with which the operator's log-sum-exp is not that of the
        model.
        """
        require(
            sink is None,
            "log-sum-exp: it stands beside a sink; npu_fused_infer_attention_score requires attention without "
            "a sink where its log-sum-exp is returned, as it does not count the sink",
        )
        require(
            bias is None,
            "log-sum-exp: it stands beside a bias; npu_fused_infer_attention_score requires attention without "
            "a bias where its log-sum-exp is returned, as no page says that it counts one",
        )
        finite = seen.fully_masked_row == "mean" or seen.levels is not None
        require(
            not finite,
            "log-sum-exp: of a query without visible keys it is finite; npu_fused_infer_attention_score gives "
            "+inf and requires keys to be hidden for good; hide keys by -inf",
        )

    def restored(self, y: Tensor, lse: Tensor, seen: Any) -> Any:
        """Return the output `y` in the view of the model, and `lse` with -inf for queries that see no key by the mask
        `seen`.
        """
        return viewed(y, self.view), viewed(seen.restored_lse(lse), self.lse_view)


RESULTS: tuple[Any, ...] = (Output, OutputAndLse)
