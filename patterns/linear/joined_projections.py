"""y_i = x W_iᵀ (+ b_i): two to four linear layers of one input as one, with the weights joined along their rows.

*Matches* linear layers of any spelling whose weights are Parameters. *Replaces with* one matmul of the joined weights,
prepared once; each result is a view of what it gives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, tensor


@dataclass(frozen=True)
class JoinedProjections(Rule):
    """Projections of one input, such as queries, keys and values."""

    def reference(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """The meaning: x [*B, K], weights [N_i, K]; returns [*B, N_i] for each."""
        return tuple(F.linear(x, weight) for weight in weights)

    @pattern
    def four(
        self,
        p,
        x=tensor("*B K"),
        first=tensor("N0 K"),
        second=tensor("N1 K"),
        third=tensor("N2 K"),
        fourth=tensor("N3 K"),
        first_bias=tensor("N0", optional=True),
        second_bias=tensor("N1", optional=True),
        third_bias=tensor("N2", optional=True),
        fourth_bias=tensor("N3", optional=True),
        rest=tensor("*R", optional=True),
        fixed=attribute(),
    ):
        """Four of one input."""
        y3 = p.linear(x=x, weight=fourth, bias=fourth_bias, beside=rest, fixed=fixed)
        y2 = p.linear(x=x, weight=third, bias=third_bias, beside=y3, fixed=fixed)
        y1 = p.linear(x=x, weight=second, bias=second_bias, beside=y2, fixed=fixed)
        return p.linear(x=x, weight=first, bias=first_bias, beside=y1, fixed=fixed), y1, y2, y3

    @pattern
    def three(
        self,
        p,
        x=tensor("*B K"),
        first=tensor("N0 K"),
        second=tensor("N1 K"),
        third=tensor("N2 K"),
        first_bias=tensor("N0", optional=True),
        second_bias=tensor("N1", optional=True),
        third_bias=tensor("N2", optional=True),
        rest=tensor("*R", optional=True),
        fixed=attribute(),
    ):
        """Three of one input."""
        y2 = p.linear(x=x, weight=third, bias=third_bias, beside=rest, fixed=fixed)
        y1 = p.linear(x=x, weight=second, bias=second_bias, beside=y2, fixed=fixed)
        return p.linear(x=x, weight=first, bias=first_bias, beside=y1, fixed=fixed), y1, y2

    @pattern
    def two(
        self,
        p,
        x=tensor("*B K"),
        first=tensor("N0 K"),
        second=tensor("N1 K"),
        first_bias=tensor("N0", optional=True),
        second_bias=tensor("N1", optional=True),
        rest=tensor("*R", optional=True),
        fixed=attribute(),
    ):
        """Two of one input."""
        y1 = p.linear(x=x, weight=second, bias=second_bias, beside=rest, fixed=fixed)
        return p.linear(x=x, weight=first, bias=first_bias, beside=y1, fixed=fixed), y1

    def guard(self, fixed: bool):
        """Joining is free only where it is done once."""
        require(fixed, "the weights do not come from Parameters alone: joining them would cost a copy at every call")

    @lowering
    def run(self, x, first, second, third, fourth, first_bias, second_bias, third_bias, fourth_bias):
        """One matmul, cut into views."""
        weights = [each for each in (first, second, third, fourth) if each is not None]
        biases = [each for each in (first_bias, second_bias, third_bias, fourth_bias) if each is not None]
        y = F.linear(x, torch.cat(weights), torch.cat(biases) if biases else None)
        return y.split([each.shape[0] for each in weights], dim=-1)
