"""In the manner of meta-llama/llama and llama3: pairs rotated as complex numbers, caches written by slices."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal, rotations

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 256


class Norm(nn.Module):
    def __init__(self, dim: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).type_as(x) * self.weight


def rotated(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    turns = turns.view(1, x.shape[1], 1, x.shape[-1] // 2)
    return torch.view_as_real(pairs * turns).flatten(3).type_as(x)


def repeated(x: Tensor, times: int) -> Tensor:
    b, t, m, d = x.shape
    return x if times == 1 else x[:, :, :, None, :].expand(b, t, m, times, d).reshape(b, t, m * times, d)


class Block(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.wq, self.wo = linear(DIM, HEADS * D), linear(HEADS * D, DIM)
        self.wk, self.wv = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)
        self.w1, self.w3, self.w2 = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        self.attention_norm, self.ffn_norm = Norm(DIM), Norm(DIM)
        self.cache_k = torch.zeros(batch, ROOM, GROUPS, D)
        self.cache_v = torch.zeros(batch, ROOM, GROUPS, D)

    def attention(self, x: Tensor, start: int, turns: Tensor, mask: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wq(x), self.wk(x), self.wv(x)
        q, k, v = q.view(b, s, HEADS, D), k.view(b, s, GROUPS, D), v.view(b, s, GROUPS, D)
        q, k = rotated(q, turns), rotated(k, turns)
        self.cache_k, self.cache_v = self.cache_k.to(q), self.cache_v.to(q)
        self.cache_k[:b, start : start + s] = k
        self.cache_v[:b, start : start + s] = v
        keys = repeated(self.cache_k[:b, : start + s], HEADS // GROUPS).transpose(1, 2)
        values = repeated(self.cache_v[:b, : start + s], HEADS // GROUPS).transpose(1, 2)
        scores = torch.matmul(q.transpose(1, 2), keys.transpose(2, 3)) / math.sqrt(D)
        if mask is not None:
            scores = scores + mask
        weights = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo(torch.matmul(weights, values).transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x: Tensor, start: int, turns: Tensor) -> Tensor:
        s, mask = x.shape[1], None
        if s > 1:
            mask = torch.full((s, s), float("-inf"), device=x.device)
            mask = torch.triu(mask, diagonal=1)
            mask = torch.hstack([torch.zeros((s, start), device=x.device), mask]).type_as(x)
        h = x + self.attention(self.attention_norm(x), start, turns[start : start + s], mask)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


def block(dtype: torch.dtype, s: int, start: int, batch: int = 2) -> Made:
    made = Block(batch).to(dtype)
    made.cache_k = normal(dtype, batch, ROOM, GROUPS, D)
    made.cache_v = normal(dtype, batch, ROOM, GROUPS, D)
    return made, (normal(dtype, batch, s, DIM), start, rotations(ROOM, D))


def prefill(dtype: torch.dtype) -> Made:
    return block(dtype, 32, 0)


def chunk(dtype: torch.dtype) -> Made:
    return block(dtype, 16, 48)


def decode(dtype: torch.dtype) -> Made:
    return block(dtype, 1, 100)


def one_sequence(dtype: torch.dtype) -> Made:
    return block(dtype, 1, 100, 1)


class Whole(Block):
    """As Llama 2 does it for one head of keys per head of queries: `-inf` above the diagonal that `start` moves."""

    def forward(self, x: Tensor, start: int, turns: Tensor) -> Any:
        s, mask = x.shape[1], None
        if s > 1:
            mask = torch.full((1, 1, s, s), float("-inf"), device=x.device)
            mask = torch.triu(mask, diagonal=start + 1).type_as(x)
        return x + self.attention(self.attention_norm(x), start, turns[start : start + s], mask)


def older_prefill(dtype: torch.dtype) -> Made:
    made = Whole(2).to(dtype)
    made.cache_k, made.cache_v = normal(dtype, 2, ROOM, GROUPS, D), normal(dtype, 2, ROOM, GROUPS, D)
    return made, (normal(dtype, 2, 32, DIM), 0, rotations(ROOM, D))


PIECES = (
    Piece("meta-llama/llama3", "block, prefill", prefill),
    Piece("meta-llama/llama3", "block, a prompt behind another", chunk),
    Piece("meta-llama/llama3", "block, decode", decode),
    Piece("meta-llama/llama3", "block, decode of one sequence", one_sequence),
    Piece("meta-llama/llama", "attention, prefill", older_prefill),
)
