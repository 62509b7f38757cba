"""In the manner of google/gemma_pytorch: halves rotated as complex numbers, rows copied into caches by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal, rotations

DIM, HEADS, GROUPS, D, ROOM, WINDOW = 512, 8, 2, 64, 64, 16
HIDDEN = -2.3819763e38


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(dim) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (wide * (1 + self.weight.float())).type_as(x)


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    halves = torch.chunk(x.transpose(1, 2).float(), 2, dim=-1)
    turned = torch.view_as_real(torch.view_as_complex(torch.stack(halves, dim=-1)) * turns).type_as(x)
    turned = torch.cat(torch.chunk(turned, 2, dim=-1), dim=-2)
    return turned.reshape(*turned.shape[:3], -1).transpose(1, 2)


def masks(window: int | None) -> Tensor:
    mask = torch.triu(torch.full((1, 1, ROOM, ROOM), HIDDEN).float(), diagonal=1)
    if window is None:
        return mask
    return mask + torch.tril(torch.full((1, 1, ROOM, ROOM), HIDDEN), diagonal=-window)


class Attention(nn.Module):
    def __init__(self, normed: bool, cap: float | None) -> None:
        super().__init__()
        self.qkv_proj = linear(DIM, (HEADS + 2 * GROUPS) * D)
        self.o_proj = linear(HEADS * D, DIM)
        self.query_norm, self.key_norm = (Norm(D), Norm(D)) if normed else (None, None)
        self.cap = cap

    def forward(self, x: Tensor, turns: Tensor, rows: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.qkv_proj(x).split([HEADS * D, GROUPS * D, GROUPS * D], dim=-1)
        q, k, v = q.view(b, -1, HEADS, D), k.view(b, -1, GROUPS, D), v.view(b, -1, GROUPS, D)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = self.query_norm(q), self.key_norm(k)
        q, k = rotated(q, turns), rotated(k, turns)
        keys, values = cache
        keys.index_copy_(1, rows, k)
        values.index_copy_(1, rows, v)
        keys = torch.repeat_interleave(keys, HEADS // GROUPS, dim=2)
        values = torch.repeat_interleave(values, HEADS // GROUPS, dim=2)
        q, keys, values = q.transpose(1, 2), keys.transpose(1, 2), values.transpose(1, 2)
        q.mul_(D**-0.5)
        scores = torch.matmul(q, keys.transpose(2, 3))
        if self.cap is not None:
            scores = torch.tanh(scores / self.cap) * self.cap
        weights = F.softmax((scores + mask).float(), dim=-1).type_as(q)
        return self.o_proj(torch.matmul(weights, values).transpose(1, 2).contiguous().view(b, s, -1))


class Block(nn.Module):
    """One layer: of Gemma 1, or with the further norms of Gemma 2 and 3; `generate` makes the mask."""

    def __init__(self, version: int) -> None:
        super().__init__()
        self.attention = Attention(version == 3, 50.0 if version == 2 else None)
        self.before, self.after = Norm(DIM), Norm(DIM)
        self.gate, self.up, self.down = linear(DIM, 1024), linear(DIM, 1024), linear(1024, DIM)
        self.further = nn.ModuleList([Norm(DIM), Norm(DIM)] if version > 1 else [])

    def forward(
        self, x: Tensor, turns: Tensor, positions: Tensor, cache: tuple[Tensor, Tensor], mask: Tensor
    ) -> Tensor:
        turns = turns.index_select(0, positions)
        h = self.attention(self.before(x), turns, positions, cache, mask)
        h = x + (self.after(h) if self.further else h)
        y = self.further[0](h) if self.further else self.after(h)
        y = self.down(F.gelu(self.gate(y), approximate="tanh") * self.up(y))
        return h + (self.further[1](y) if self.further else y)


def block(dtype: torch.dtype, version: int, s: int, start: int = 0, window: int | None = None) -> Made:
    cache = normal(dtype, 2, ROOM, GROUPS, D), normal(dtype, 2, ROOM, GROUPS, D)
    positions = torch.arange(start, start + s)
    inputs = normal(dtype, 2, s, DIM), rotations(2 * ROOM, D), positions, cache
    return Block(version).to(dtype), (*inputs, masks(window).index_select(2, positions))


class Quantised(nn.Module):
    """A projection whose weight is int8 and scaled row by row when it is used."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randint(-127, 128, (512, DIM), dtype=torch.int8), requires_grad=False)
        self.weight_scaler = nn.Parameter(torch.rand(512) * 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.weight_scaler.unsqueeze(-1))


NAME = "google/gemma_pytorch"
CAUSAL, LOCAL = ((4, "causal"),), ((4, f"window:{WINDOW}"),)
PIECES = (
    Piece(NAME, "Gemma 1 block, prefill", lambda dtype: block(dtype, 1, 24), assume=CAUSAL),
    Piece(NAME, "Gemma 1 block, decode", lambda dtype: block(dtype, 1, 1, 30), assume=CAUSAL),
    Piece(NAME, "Gemma 1 block, decode, nothing assumed", lambda dtype: block(dtype, 1, 1, 30), why="assume"),
    Piece(NAME, "Gemma 2 block, prefill", lambda dtype: block(dtype, 2, 24), assume=CAUSAL, why="tanh"),
    Piece(NAME, "Gemma 2 block, decode", lambda dtype: block(dtype, 2, 1, 30), assume=CAUSAL, why="tanh"),
    Piece(NAME, "Gemma 3 local block, prefill", lambda dtype: block(dtype, 3, 24, window=WINDOW), assume=LOCAL),
    Piece(NAME, "Gemma 3 local block, decode", lambda dtype: block(dtype, 3, 1, 30, WINDOW), assume=LOCAL),
    Piece(NAME, "Gemma 3 global block, decode", lambda dtype: block(dtype, 3, 1, 30), assume=CAUSAL),
    Piece(NAME, "int8 weights, projection", lambda dtype: (Quantised().to(dtype), (normal(dtype, 16, DIM),)), 0),
)
