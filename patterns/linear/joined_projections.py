"""y_i = x W_iᵀ (+ b_i): two to four linear layers of one input as one, with the weights joined along their rows.

*Matches* linear layers of any spelling whose weights are Parameters. *Replaces with* one matmul of the joined weights,
prepared once; each result is a view of what it gives.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor


@dataclass(frozen=True)
class Layers(Group):
    """Layers that stand beside each other in the order of the model."""

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
        """Those that there are."""
        return [each for each in (self.first, self.second, self.third, self.fourth) if each is not None]

    def biases(self) -> list[Any]:
        """Those that there are: of all layers, or of none."""
        biases = (self.first_bias, self.second_bias, self.third_bias, self.fourth_bias)
        return [each for each in biases if each is not None]

    def refuse(self) -> None:
        """Joining is free only where it is done once."""
        said = (
            "the weights do not come from Parameters alone: joining them would cost a copy at "
            "every call; pass them as Parameters of the module"
        )
        require(self.is_parameter_only, said)

    def joined(self, x: Tensor) -> Tensor:
        """What all of them give of x [*B, K], side by side, by one matmul."""
        biases = self.biases()
        return F.linear(x, torch.cat(self.weights()), torch.cat(biases) if biases else None)

    def terms(self, p, x, count: int):
        """The results of the first `count`."""
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
        """The meaning: x [*B, K], weights [N_i, K]; returns [*B, N_i] for each."""
        return tuple(F.linear(x, weight) for weight in weights)

    @pattern
    def four(self, p, x=tensor("*B K"), layers: Any = Layers):
        """Four of one input."""
        return layers.terms(p, x, 4)

    @pattern
    def three(self, p, x=tensor("*B K"), layers: Any = Layers):
        """Three of one input."""
        return layers.terms(p, x, 3)

    @pattern
    def two(self, p, x=tensor("*B K"), layers: Any = Layers):
        """Two of one input."""
        return layers.terms(p, x, 2)

    def guard(self, layers: Layers):
        """Joining is free only where it is done once."""
        layers.refuse()

    @lowering
    def run(self, x: Tensor, layers: Layers):
        """One matmul, cut into views."""
        return layers.joined(x).split([each.shape[0] for each in layers.weights()], dim=-1)
