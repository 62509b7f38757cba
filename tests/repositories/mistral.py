"""In the manner of mistralai/mistral-inference: a cache that rotates, a mask that is the logarithm of 0 and 1."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal, rotations

DIM, HEADS, GROUPS, D, WINDOW = 512, 8, 2, 64, 64


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(q: Tensor, k: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
    one = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
    two = torch.view_as_complex(k.float().reshape(*k.shape[:-1], -1, 2))
    turns = turns[None, :, None, :]
    one = torch.view_as_real(one * turns).flatten(3)
    two = torch.view_as_real(two * turns).flatten(3)
    return one.type_as(q), two.type_as(k)


class Block(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.wq, self.wo = linear(DIM, HEADS * D), linear(HEADS * D, DIM)
        self.wk, self.wv = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)
        self.w1, self.w3, self.w2 = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.cache_k = torch.randn(batch, WINDOW, GROUPS, D)
        self.cache_v = torch.randn(batch, WINDOW, GROUPS, D)

    def attention(self, x: Tensor, turns: Tensor, positions: Tensor, end: int, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = q.view(b, s, HEADS, D), k.view(b, s, GROUPS, D), v.view(b, s, GROUPS, D)
        q, k = rotated(q, k, turns)
        rows = (positions[-WINDOW:] % WINDOW)[None, :, None, None].repeat(b, 1, GROUPS, D)
        self.cache_k[:b].scatter_(dim=1, index=rows, src=k[:, -WINDOW:])
        self.cache_v[:b].scatter_(dim=1, index=rows, src=v[:, -WINDOW:])
        if s == 1:
            k, v = self.cache_k[:b, :end, ...], self.cache_v[:b, :end, ...]
        k, v = (torch.repeat_interleave(each, HEADS // GROUPS, dim=2) for each in (k, v))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        scores = torch.matmul(q, k.transpose(2, 3)) * D**-0.5
        if mask is not None:
            scores += mask[None, None, ...]
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x: Tensor, turns: Tensor, positions: Tensor, end: int) -> Tensor:
        s, mask = x.shape[1], None
        if s > 1:
            seen = torch.tril(torch.full((s, s), dtype=x.dtype, fill_value=1, device=x.device), diagonal=0)
            mask = torch.log(torch.triu(seen, diagonal=-WINDOW))
        h = x + self.attention(self.attention_norm(x), turns[positions], positions, end, mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


def block(dtype: torch.dtype, s: int, start: int = 0) -> Made:
    made = Block(2).to(dtype)
    made.cache_k, made.cache_v = normal(dtype, 2, WINDOW, GROUPS, D), normal(dtype, 2, WINDOW, GROUPS, D)
    positions = torch.arange(start, start + s)
    return made, (normal(dtype, 2, s, DIM), rotations(4 * WINDOW, D), positions, min(start + s, WINDOW))


class Experts(nn.Module):
    """The router in front of experts: the best scores first, then their softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = linear(DIM, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scores, chosen = torch.topk(self.gate(x), 2)
        return F.softmax(scores, dim=1, dtype=torch.float).to(x.dtype), chosen


PIECES = (
    Piece("mistralai/mistral-inference", "block, prefill", lambda dtype: block(dtype, 24)),
    Piece("mistralai/mistral-inference", "block, prompt beyond the window", lambda dtype: block(dtype, 96)),
    Piece("mistralai/mistral-inference", "block, decode", lambda dtype: block(dtype, 1, 40)),
    Piece("mistralai/mistral-inference", "block, decode in a full cache", lambda dtype: block(dtype, 1, 100)),
    Piece(
        "mistralai/mistral-inference",
        "router",
        lambda dtype: (Experts().to(dtype), (normal(dtype, 16, DIM),)),
        attentions=0,
    ),
)
