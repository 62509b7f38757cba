"""In the manner of open models that multiply, norm or factorise otherwise than Llama does.

swiss-ai/Apertus, tiiuae/Falcon-H1, stepfun-ai/Step3 and unslothai/unsloth, which decodes into memory of its own.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

B, S, T, HEADS, GROUPS, D, WIDE = 2, 24, 64, 8, 2, 64, 256
DIM = HEADS * D


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def tables(dtype: torch.dtype, start: int, stop: int, lanes: int = D) -> tuple[Tensor, Tensor]:
    halves = angles(stop, lanes)[start:]
    table = torch.cat((halves, halves), dim=-1)
    return table.cos().to(dtype), table.sin().to(dtype)


class Heads(nn.Module):
    """Projections to heads, heads first."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.o_proj = linear(DIM, DIM), linear(DIM, DIM)
        self.k_proj, self.v_proj = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)

    def heads(self, x: Tensor) -> list[Tensor]:
        layers = self.q_proj, self.k_proj, self.v_proj
        return [layer(x).view(*x.shape[:2], -1, D).transpose(1, 2) for layer in layers]

    def joined(self, y: Tensor) -> Tensor:
        return self.o_proj(y.transpose(1, 2).reshape(y.shape[0], -1, DIM))


class Apertus(Heads):
    """Norms of heads that stand before positions, by the operator of torch; a gate of two branches learnt apart."""

    def __init__(self) -> None:
        super().__init__()
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-5), nn.RMSNorm(D, eps=1e-5)
        self.attention_layernorm, self.feedforward_layernorm = nn.RMSNorm(DIM, eps=1e-5), nn.RMSNorm(DIM, eps=1e-5)
        self.up_proj, self.down_proj = linear(DIM, 2 * DIM), linear(2 * DIM, DIM)
        self.alpha_p, self.alpha_n = nn.Parameter(torch.tensor([0.8])), nn.Parameter(torch.tensor([0.8]))

    def activated(self, x: Tensor) -> Tensor:
        above, below = F.softplus(self.alpha_p), 0.5 + F.softplus(self.alpha_n)
        least = torch.min(x, torch.tensor(-1e-6, dtype=x.dtype))
        return torch.where(x > 0, above * x * x + 0.5 * x, (torch.expm1(least) - x) * below + 0.5 * x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.heads(self.attention_layernorm(x))
        q, k = turned(self.q_norm(q), cos, sin), turned(self.k_norm(k), cos, sin)
        x = x + self.joined(F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True))
        return x + self.down_proj(self.activated(self.up_proj(self.feedforward_layernorm(x))))


def apertus(dtype: torch.dtype) -> Made:
    return Apertus().to(dtype), (normal(dtype, B, S, DIM), *tables(dtype, 0, S))


class Falcon(Heads):
    """Numbers on what is attended to, on keys before their rotation, and on the result."""

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        q, k, v = self.heads(x * 0.9)
        q, k = turned(q, cos, sin), turned(k * 0.35, cos, sin)
        keys, values = keys.index_copy_(2, at, k), values.index_copy_(2, at, v)
        seen = torch.arange(keys.shape[2])[None] <= at[:, None]
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen[None, None], enable_gqa=True)
        return self.joined(y) * 1.1


def falcon(dtype: torch.dtype, tokens: int) -> Made:
    cached = (normal(dtype, B, GROUPS, T, D) for _ in range(2))
    at = torch.arange(T // 2 - tokens, T // 2)
    return Falcon().to(dtype), (normal(dtype, B, tokens, DIM), *tables(dtype, T // 2 - tokens, T // 2), *cached, at)


class Step(nn.Module):
    """Queries of wide heads from a normed latent, over one key and one value."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_proj, self.inter_norm = linear(DIM, 3 * WIDE), nn.Parameter(torch.ones(WIDE))
        self.wq, self.o_proj = linear(WIDE, HEADS * WIDE), linear(HEADS * WIDE, DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        latent, k, v = self.qkv_proj(x).split([WIDE, WIDE, WIDE], dim=-1)
        wide = latent.float()
        latent = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * self.inter_norm
        q = turned(self.wq(latent).view(b, s, HEADS, WIDE).transpose(1, 2), cos, sin)
        k = turned(k.view(b, s, 1, WIDE).transpose(1, 2), cos, sin)
        k, v = (each.expand(-1, HEADS, -1, -1) for each in (k, v.view(b, s, 1, WIDE).transpose(1, 2)))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1))


def step(dtype: torch.dtype) -> Made:
    return Step().to(dtype), (normal(dtype, B, S, DIM), *tables(dtype, 0, S, WIDE))


class Unsloth(Heads):
    """One token, turned in memory that is filled by halves, written to rows of keys and values that lie together."""

    def turned(self, x: Tensor, other: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = D // 2
        other[..., :half] = x[..., half:]
        other[..., half:] = x[..., :half]
        other[..., :half].neg_()
        return (x * cos).addcmul_(other, sin)

    def forward(self, x: Tensor, rows: Tensor, cos: Tensor, sin: Tensor, count: int) -> Tensor:
        b = x.shape[0]
        q, k, v = self.heads(x)
        room = torch.empty_like(q)
        q, k = self.turned(q, room, cos, sin), self.turned(k, room[:, :GROUPS], cos, sin)
        rows[count - 1, 0], rows[count - 1, 1] = k.permute(2, 0, 1, 3)[0], v.permute(2, 0, 1, 3)[0]
        both = (rows[:count, place].permute(1, 2, 0, 3) for place in range(2))
        wide = (each[:, :, None].expand(b, GROUPS, HEADS // GROUPS, count, D) for each in both)
        k, v = (each.reshape(b, HEADS, count, D) for each in wide)
        weights = torch.matmul(q * (1 / math.sqrt(D)), k.transpose(2, 3))
        weights[:] = F.softmax(weights, dim=-1, dtype=torch.float32)
        return self.joined(torch.matmul(weights, v))


def unsloth(dtype: torch.dtype) -> Made:
    cos, sin = (each[0] for each in tables(dtype, S, S + 1))
    return Unsloth().to(dtype), (normal(dtype, B, 1, DIM), normal(dtype, T, 2, B, GROUPS, D), cos, sin, S + 1)


FALCON = "tiiuae/Falcon-H1"
PIECES = (
    Piece("swiss-ai/Apertus", "block, prefill", apertus),
    Piece(FALCON, "attention, decode", lambda dtype: falcon(dtype, tokens=1)),
    Piece(FALCON, "attention, a prompt behind another", lambda dtype: falcon(dtype, tokens=8)),
    Piece("stepfun-ai/Step3", "attention of factors, prefill", step),
    Piece("unslothai/unsloth", "attention, decode", unsloth),
)
