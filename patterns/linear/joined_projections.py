"""y_i = x W_iᵀ (+ b_i): two to four linear layers of one input, as one with concatenated weights.

*Matches* linear layers of any spelling whose weights are Parameters. *Replaces with* one matmul of the concatenated
weights, prepared once; each y_i is a view of the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor

NOT_PARAMETERS = (
    "weights: they are no Parameters of the module, or computed from inputs; one matmul of all requires "
    "Parameters, as joining others costs a copy at every call; register them as Parameters"
)


@dataclass(frozen=True)
class Layers(Group):
    """Two to four linear layers of one input, in the order of the model.

    Attributes:
        first: the weight of the first layer.
        second: the weight of the second layer.
        third: the weight of the third layer.
        fourth: the weight of the fourth layer.
        first_bias: the bias of the first layer.
        second_bias: the bias of the second layer.
        third_bias: the bias of the third layer.
        fourth_bias: the bias of the fourth layer.
        is_parameter_only: true if weights and biases are computed from Parameters alone.
    """

    first: Any = tensor("N0 K")
    second: Any = tensor("N1 K")
    third: Any = tensor("N2 K")
    fourth: Any = tensor("N3 K")
    first_bias: Any = tensor("N0", optional=True)
    second_bias: Any = tensor("N1", optional=True)
    third_bias: Any = tensor("N2", optional=True)
    fourth_bias: Any = tensor("N3", optional=True)
    is_parameter_only: Any = attribute()

    def weights(self) -> list[Any]:
        """List the weights of the layers that exist."""
        return [each for each in (self.first, self.second, self.third, self.fourth) if each is not None]

    def biases(self) -> list[Any]:
        """List the biases of the layers that have one."""
        biases = (self.first_bias, self.second_bias, self.third_bias, self.fourth_bias)
        return [each for each in biases if each is not None]

    def refuse(self) -> None:
        """Refuse weights that are not from Parameters, as concatenating them would cost a copy at every call."""
        require(self.is_parameter_only, NOT_PARAMETERS)

    def joined(self, x: Tensor) -> Tensor:
        """Emit one matmul of all layers on `x` [*B, K]; the results are concatenated along the last dim."""
        biases = self.biases()
        return F.linear(x, torch.cat(self.weights()), torch.cat(biases) if biases else None)

    def terms(self, p, x, count: int):
        """Build the terms of the first `count` layers on `x`, each next to the following one."""
        *before, last = [
            dict(x=x, weight=weight, bias=bias, is_parameter_only=self.is_parameter_only)
            for weight, bias in list(zip(self.weights(), self.biases(), strict=True))[:count]
        ]
        results = [p.linear(**last)]
        for layer in reversed(before):
            results.insert(0, p.linear_before(**layer, beside=results[0]))
        return tuple(results)


@dataclass(frozen=True)
class JoinedProjections(Rule):
    """Projections of one input, such as queries, keys and values."""

    aliases = ("merged_projections", "qkv", "qkv_projection")

    def reference(self, x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
        """Compute [*B, N_i] of `x` [*B, K] for each of `weights` [N_i, K]."""
        return tuple(F.linear(x, weight) for weight in weights)

    @pattern
    def four(self, p, x=tensor("*B K"), layers: Any = Layers):
        """x W_iᵀ (+ b_i), four layers of one input"""
        return layers.terms(p, x, 4)

    @pattern
    def three(self, p, x=tensor("*B K"), layers: Any = Layers):
        """x W_iᵀ (+ b_i), three layers of one input"""
        return layers.terms(p, x, 3)

    @pattern
    def two(self, p, x=tensor("*B K"), layers: Any = Layers):
        """x W_iᵀ (+ b_i), two layers of one input"""
        return layers.terms(p, x, 2)

    def guard(self, layers: Layers):
        """Refuse weights that are not from Parameters, as concatenating them would cost a copy at every call."""
        layers.refuse()

    @lowering
    def run(self, x: Tensor, layers: Layers):
        """Emit one matmul, split into views."""
        return layers.joined(x).split([each.shape[0] for each in layers.weights()], dim=-1)
