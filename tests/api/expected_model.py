"""A model of a layer or three, and versions of it, each of which lacks a fusion that the first has."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden))

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        h = h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * h.to(x.dtype)


class Attention(nn.Module):
    axis = -1

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))

    def projected(self, x: Tensor) -> list[Tensor]:
        batch, tokens, _ = x.shape
        return [each(x).view(batch, tokens, self.heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)]

    def masked(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, float("-inf"))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        scores = self.masked(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5)
        weights = scores.float().softmax(self.axis).to(x.dtype)
        return self.o((weights @ v).transpose(1, 2).reshape(x.shape))


class OverQueries(Attention):
    axis = -2


class MultipliedMask(Attention):
    def masked(self, scores: Tensor) -> Tensor:
        return scores * torch.ones(scores.shape[-2:], dtype=scores.dtype).tril()


class FiniteMask(Attention):
    def masked(self, scores: Tensor) -> Tensor:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        return scores + torch.where(hidden, -3.0, 0.0).to(scores.dtype)


class NoSoftmax(Attention):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.projected(x)
        weights = self.masked(q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).sigmoid()
        return self.o((weights @ v).transpose(1, 2).reshape(x.shape))


class TransposedWeight(Attention):
    def projected(self, x: Tensor) -> list[Tensor]:
        batch, tokens, _ = x.shape
        rows = F.linear(x, self.q.weight), x @ self.k.weight, F.linear(x, self.v.weight)
        return [each.view(batch, tokens, self.heads, -1).transpose(1, 2) for each in rows]


class Mlp(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (nn.Linear(hidden, hidden, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class NoGate(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    def __init__(self, hidden: int, heads: int, attention: type[Attention]) -> None:
        super().__init__()
        self.norm1, self.norm2 = Norm(hidden), Norm(hidden)
        self.attn, self.mlp = attention(hidden, heads), Mlp(hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Ungated(Layer):
    def __init__(self, hidden: int, heads: int, attention: type[Attention]) -> None:
        super().__init__(hidden, heads, attention)
        self.mlp = NoGate(hidden)


class Renamed(Layer):
    def __init__(self, hidden: int, heads: int, attention: type[Attention]) -> None:
        super().__init__(hidden, heads, attention)
        self.attention = self.attn
        del self.attn

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(
        self,
        hidden: int = 64,
        heads: int = 2,
        attention: type[Attention] = Attention,
        layer: type[Layer] = Layer,
        layers: int = 1,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer(hidden, heads, attention) for _ in range(layers))
        self.norm = Norm(hidden)

    def forward(self, x: Tensor) -> Tensor:
        for each in self.layers:
            x = each(x)
        return self.norm(x)


def call(hidden: int = 64, **changed: Any) -> tuple[Model, tuple[Tensor]]:
    model = Model(hidden, **changed).bfloat16().eval().requires_grad_(False)
    return model, (torch.randn(2, 16, hidden, generator=torch.Generator().manual_seed(0)).bfloat16(),)


def build() -> tuple[Model, tuple[Tensor]]:
    return call()


def three_layers() -> tuple[Model, tuple[Tensor]]:
    return call(layers=3)


def over_queries() -> tuple[Model, tuple[Tensor]]:
    return call(attention=OverQueries)


def multiplied_mask() -> tuple[Model, tuple[Tensor]]:
    return call(attention=MultipliedMask)


def transposed_weight() -> tuple[Model, tuple[Tensor]]:
    return call(attention=TransposedWeight)


def one_wide_head() -> tuple[Model, tuple[Tensor]]:
    return call(hidden=528, heads=1)


def finite_mask() -> tuple[Model, tuple[Tensor]]:
    return call(attention=FiniteMask)


def no_softmax() -> tuple[Model, tuple[Tensor]]:
    return call(attention=NoSoftmax)


def no_gate() -> tuple[Model, tuple[Tensor]]:
    return call(layer=Ungated)


def renamed() -> tuple[Model, tuple[Tensor]]:
    return call(layer=Renamed)
