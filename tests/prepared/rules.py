"""Rules that join two weights, and the models that they fit: a stand-in for every rule that prepares weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from fusion import Options, Rule, lowering, pattern, tensor
from fusion.backend import FusionBackend

RAN: Counter[str] = Counter()
LIBRARY = torch.library.Library("fusion_prepared_tests", "DEF")
LIBRARY.define("join(Tensor a, Tensor b) -> Tensor")


def _join(a: Tensor, b: Tensor) -> Tensor:
    RAN["join"] += 1
    return torch.cat([a, b])


LIBRARY.impl("join", _join, "CPU")
LIBRARY.impl("join", lambda a, b: a.new_empty(a.shape[0] + b.shape[0], a.shape[1]), "Meta")


@dataclass(frozen=True)
class JoinedGate(Rule):
    """silu(x·gateᵀ) · (x·upᵀ) with one product of a matrix for both."""

    @pattern
    def written(self, p, x=tensor("*B K"), gate=tensor("N K"), up=tensor("N K")):
        """Two linears of one input."""
        return p.silu(p.op("aten.linear.default", x, gate)) * p.op("aten.linear.default", x, up)

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Concatenated along dim 0."""
        left, right = linear(x, torch.cat([gate, up])).chunk(2, -1)
        return silu(left) * right


@dataclass(frozen=True)
class CountedGate(JoinedGate):
    """The same through an operator that counts how often it runs."""

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Joined by an operator of a third party."""
        left, right = linear(x, torch.ops.fusion_prepared_tests.join(gate, up)).chunk(2, -1)
        return silu(left) * right


class Gate(nn.Module):
    def __init__(self, k: int = 16, n: int = 32, factor: float = 1.0):
        super().__init__()
        self.gate, self.up = nn.Linear(k, n, bias=False), nn.Linear(k, n, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate.weight if self.factor == 1 else self.gate.weight * self.factor
        return silu(linear(x, gate)) * self.up(x)


class Layers(nn.Module):
    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([layer(x) for layer in self.layers], -1)


def backend(rule: Rule = CountedGate(), **options) -> FusionBackend:
    return FusionBackend(Options.of({"target": "host", "lower": "eager", **options}), (rule,))


def close(have: Tensor, want: Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(have, want, rtol=tolerance, atol=tolerance)
