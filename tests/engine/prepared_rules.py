"""Rules that join two weights, and the models that they fit: a stand-in for every rule that prepares weights."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from fusion import Options, Rule, lowering, pattern, tensor
from fusion.frontend.backend import FusionBackend

from .graphs import numbers

X = numbers(2, 16, 3)
WIDE = (32, 16, 1)
"""The shape of a weight of `Gate`."""
RAN: Counter[str] = Counter()
LIBRARY = torch.library.Library("fusion_prepared_tests", "DEF")
LIBRARY.define("join(Tensor a, Tensor b) -> Tensor")


@pytest.fixture(autouse=True)
def fresh():
    """Forget what was compiled, and what ran."""
    torch.compiler.reset()
    RAN.clear()


def _join(a: Tensor, b: Tensor) -> Tensor:
    RAN["join"] += 1
    return torch.cat([a, b])


LIBRARY.impl("join", _join, "CPU")
LIBRARY.impl("join", lambda a, b: a.new_empty(a.shape[0] + b.shape[0], *a.shape[1:]), "Meta")


@dataclass(frozen=True)
class JoinedGate(Rule):
    """silu(gate * x) · (up * x) with one convolution for both."""

    @pattern
    def written(self, p, x=tensor("B K T"), gate=tensor("N K W"), up=tensor("N K W")):
        """Two convolutions of one input."""
        return p.silu(p.op("aten.convolution.default", x, gate)) * p.op("aten.convolution.default", x, up)

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Concatenated along dim 0."""
        left, right = conv1d(x, torch.cat([gate, up])).chunk(2, 1)
        return silu(left) * right


@dataclass(frozen=True)
class CountedGate(JoinedGate):
    """The same through an operator that counts how often it runs."""

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Joined by an operator of a third party."""
        left, right = conv1d(x, torch.ops.fusion_prepared_tests.join(gate, up)).chunk(2, 1)
        return silu(left) * right


@dataclass(frozen=True)
class TurnedGate(JoinedGate):
    """The same with views before and after the concatenation."""

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Turned there and back."""
        weight = torch.cat([gate.permute(1, 0, 2).permute(1, 0, 2), up]).permute(2, 1, 0).permute(2, 1, 0)
        left, right = conv1d(x, weight).chunk(2, 1)
        return silu(left) * right


@dataclass(frozen=True)
class FractalGate(JoinedGate):
    """The same with the joined weights in the format of the matrix unit."""

    @lowering
    def one(self, x: Tensor, gate: Tensor, up: Tensor):
        """Joined, and cast to NZ."""
        left, right = conv1d(x, torch.ops.npu.npu_format_cast(torch.cat([gate, up]), 29)).chunk(2, 1)
        return silu(left) * right


class Gate(nn.Module):
    def __init__(self, k: int = 16, n: int = 32, factor: float = 1.0):
        super().__init__()
        self.gate, self.up = nn.Conv1d(k, n, 1, bias=False), nn.Conv1d(k, n, 1, bias=False)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        gate = self.gate.weight if self.factor == 1 else self.gate.weight * self.factor
        return silu(conv1d(x, gate)) * self.up(x)


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


def agree(run, model, x=X):
    with torch.no_grad():
        close(run(x), model(x))
