"""In the manner of openai/gpt-oss: tokens of one sequence, sinks joined to the scores, experts gathered by token."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from .base import Made, Piece, normal

DIM, HEADS, GROUPS, D, WINDOW = 512, 16, 4, 64, 8


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        wide, dtype = x.float(), x.dtype
        wide = wide * torch.rsqrt(torch.mean(wide**2, dim=-1, keepdim=True) + 1e-5)
        return (wide * self.scale).to(dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(-2).to(x.dtype), sin.unsqueeze(-2).to(x.dtype)
    one, two = torch.chunk(x, 2, dim=-1)
    return torch.cat((one * cos - two * sin, two * cos + one * sin), dim=-1)


def tables(tokens: int) -> tuple[Tensor, Tensor]:
    """Frequencies stretched by parts (YaRN), made anew in each call."""
    steps = 150000.0 ** (torch.arange(0, D, 2, dtype=torch.float) / D)
    half, factor = D / 2, 32.0
    low, high = (half * math.log(4096 / (turns * 2 * math.pi)) / math.log(150000.0) for turns in (32.0, 1.0))
    kept = 1 - ((torch.arange(half, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = 1.0 / (factor * steps) * (1 - kept) + 1.0 / steps * kept
    turned = torch.einsum("i,j->ij", torch.arange(tokens, dtype=torch.float32), frequencies)
    concentration = 0.1 * math.log(factor) + 1.0
    return turned.cos() * concentration, turned.sin() * concentration


def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, scale: float, window: int = 0) -> Tensor:
    """q [n, m, g, d], k and v [n, m, d], a sink for each head."""
    n, m, g, _ = q.shape
    k, v = k[:, :, None, :].expand(-1, -1, g, -1), v[:, :, None, :].expand(-1, -1, g, -1)
    sinks = sinks.reshape(m, g, 1, 1).expand(-1, -1, n, -1)
    mask = torch.triu(q.new_full((n, n), -float("inf")), diagonal=1)
    if window > 0:
        mask += torch.tril(mask.new_full((n, n), -float("inf")), diagonal=-window)
    scores = torch.einsum("qhmd,khmd->hmqk", q, k)
    scores *= scale
    scores += mask[None, None, :, :]
    weights = torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]
    return torch.einsum("hmqk,khmd->qhmd", weights, v).reshape(n, -1)


class Attention(nn.Module):
    def __init__(self, window: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.window, self.norm = window, Norm()
        self.sinks = nn.Parameter(torch.randn(HEADS).to(dtype))
        self.qkv = nn.Linear(DIM, D * (HEADS + 2 * GROUPS), dtype=dtype)
        self.out = nn.Linear(D * HEADS, DIM, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        qkv, end = self.qkv(self.norm(x)), HEADS * D
        q = qkv[:, :end].contiguous().view(-1, GROUPS, HEADS // GROUPS, D)
        k = qkv[:, end : end + GROUPS * D].contiguous().view(-1, GROUPS, D)
        v = qkv[:, end + GROUPS * D : end + 2 * GROUPS * D].contiguous().view(-1, GROUPS, D)
        tokens = q.shape[0]
        cos, sin = tables(tokens)
        q = rotated(q.view(tokens, -1, D), cos, sin).reshape(q.shape)
        k = rotated(k.view(tokens, -1, D), cos, sin).reshape(k.shape)
        return x + self.out(attend(q, k, v, self.sinks, 1 / math.sqrt(D), self.window))


def gated(x: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    gate, up = x[..., ::2], x[..., 1::2]
    gate, up = gate.clamp(min=None, max=limit), up.clamp(min=-limit, max=limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


class Experts(nn.Module):
    def __init__(self, dtype: torch.dtype, experts: int = 8, inner: int = 64) -> None:
        super().__init__()
        self.norm, self.gate = Norm(), nn.Linear(DIM, experts, dtype=dtype)
        self.one = nn.Parameter((torch.randn(experts, 2 * inner, DIM) * DIM**-0.5).to(dtype))
        self.one_bias = nn.Parameter(torch.randn(experts, 2 * inner).to(dtype))
        self.two = nn.Parameter((torch.randn(experts, DIM, inner) * inner**-0.5).to(dtype))
        self.two_bias = nn.Parameter(torch.randn(experts, DIM).to(dtype))

    def forward(self, x: Tensor) -> Tensor:
        t = self.norm(x)
        best = torch.topk(self.gate(t), k=4, dim=-1, sorted=True)
        shares, chosen = torch.softmax(best.values, dim=1), best.indices
        t = torch.einsum("beck,bk->bec", self.one[chosen, ...], t) + self.one_bias[chosen, ...]
        t = torch.einsum("beck,bek->bec", self.two[chosen, ...], gated(t))
        t += self.two_bias[chosen, ...]
        return x + torch.einsum("bec,be->bc", t, shares)


def attention(dtype: torch.dtype, tokens: int, window: int = 0) -> Made:
    return Attention(window, dtype), (normal(dtype, tokens, DIM),)


PIECES = (
    Piece("openai/gpt-oss", "attention, prefill", lambda dtype: attention(dtype, 24)),
    Piece("openai/gpt-oss", "attention within a window, prefill", lambda dtype: attention(dtype, 24, WINDOW)),
    Piece("openai/gpt-oss", "experts", lambda dtype: (Experts(dtype), (normal(dtype, 6, DIM),)), attentions=0),
)
