"""Models whose reports are known, and their reports, each made once."""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

DIM = 64
NPU = {"target": "ascend910_93"}


def added(x: Tensor, y: Tensor) -> Tensor:
    return x + y


class Norm(nn.Module):
    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(DIM)), eps

    def forward(self, x: Tensor) -> Tensor:
        y = x.float()
        variance = y.pow(2).mean(-1, keepdim=True)
        y = y * torch.rsqrt(variance + self.eps)
        return self.weight * y.to(x.dtype)


class Layer(nn.Module):
    """A residual add, a norm, and an MLP with a gate that no rule fuses."""

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm = Norm(eps)
        self.up, self.down = nn.Linear(DIM, 96, bias=False), nn.Linear(96, DIM, bias=False)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        residual = added(x, residual)
        y = self.norm(residual)
        return self.down(self.up(y).sin()), residual


class Model(nn.Module):
    """`depth` layers; those whose numbers are in `damped` have an epsilon that is none."""

    def __init__(self, depth: int = 4, damped: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(0.5 if number in damped else 1e-6) for number in range(depth))

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        for layer in self.layers:
            x, residual = layer(x, residual)
        return x


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = 30 * torch.tanh(q @ k.transpose(-1, -2) / 30)
    return F.softmax(scores, -1) @ v


def inputs(*shape: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(*(shape or (2, 16)), DIM, dtype=torch.bfloat16)
    return x, x + 1


@cache
def layered(depth: int, *damped: int) -> fusion.Report:
    """The report of a model of `depth` layers."""
    torch.compiler.reset()
    return fusion.explain(Model(depth, damped).bfloat16(), *inputs(), options=NPU)
