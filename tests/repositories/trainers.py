"""In the manner of pytorch/torchtitan, EleutherAI/gpt-neox, google-deepmind/recurrentgemma and karpathy/llama2.c."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal, rotations

DIM, HEADS, D = 512, 8, 64
C, R, NOPE, V = 512, 64, 128, 128


class Latents(nn.Module):
    """Keys and values of a latent as they are projected, lanes turned as complex numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.wq_a, self.wq_b = linear(DIM, 256), linear(256, HEADS * (NOPE + R))
        self.wkv_a, self.wkv_b = linear(DIM, C + R), linear(C, HEADS * (NOPE + V))
        self.q_norm, self.kv_norm, self.wo = nn.RMSNorm(256, eps=1e-6), nn.RMSNorm(C, eps=1e-6), linear(HEADS * V, DIM)

    def turned(self, x: Tensor, turns: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.float().view(*x.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * turns.view(1, pairs.size(1), 1, -1)).flatten(3).to(x.dtype)

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = self.wq_b(self.q_norm(self.wq_a(x))).view(b, t, -1, NOPE + R)
        nope, rope = torch.split(q, [NOPE, R], dim=-1)
        q = torch.cat([nope, self.turned(rope, turns)], dim=-1)
        kv, rope = torch.split(self.wkv_a(x), [C, R], dim=-1)
        rope = self.turned(rope.unsqueeze(2), turns)
        nope, v = torch.split(self.wkv_b(self.kv_norm(kv)).view(b, t, -1, NOPE + V), [NOPE, V], dim=-1)
        k = torch.cat([nope, rope.expand(-1, -1, HEADS, -1)], dim=-1)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, scale=(NOPE + R) ** -0.5, is_causal=True)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


def latents(dtype: torch.dtype) -> Made:
    return Latents().to(dtype), (normal(dtype, 2, 24, DIM), rotations(24, R))


class Grouped(nn.Module):
    """Heads are normed; cosines and sines are halves of one table."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (linear(DIM, DIM // n) for n in (1, 2, 2, 1))
        self.q_norm, self.k_norm = nn.RMSNorm(D, eps=1e-6), nn.RMSNorm(D, eps=1e-6)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, D) for each in (self.wq, self.wk, self.wv))
        q, k, table = self.q_norm(q), self.k_norm(k), cache[0:t].view(1, t, 1, 2 * D).to(q.dtype)
        cos, sin = table[..., :D], table[..., D:]
        q, k = (each * cos + torch.cat((-each[..., D // 2 :], each[..., : D // 2]), -1) * sin for each in (q, k))
        k, v = (torch.unsqueeze(each, 3).expand(b, t, HEADS // 2, 2, D).reshape(b, t, HEADS, D) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=D**-0.5)
        return self.wo(y.transpose(1, 2).contiguous().view(b, t, -1))


def grouped(dtype: torch.dtype) -> Made:
    table = torch.cat((angles(48, D), angles(48, D)), dim=-1)
    return Grouped().to(dtype), (normal(dtype, 2, 24, DIM), torch.cat((table.cos(), table.sin()), dim=-1))


class OntoNothing(nn.Module):
    """Positions before sequences; scores are written onto memory that does not count, by a batched product."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)

    def forward(self, x: Tensor, gone: Tensor) -> Tensor:
        s, b, _ = x.shape
        q, k, v = (each.reshape(s, b * HEADS, -1) for each in self.qkv(x).view(s, b, HEADS, 3 * D).split(D, dim=-1))
        nothing = torch.empty(b * HEADS, s, s, dtype=q.dtype)
        scores = torch.baddbmm(nothing, q.transpose(0, 1), k.permute(1, 2, 0), beta=0.0, alpha=1.0 / math.sqrt(D))
        scores = scores.view(b, HEADS, s, s).masked_fill(gone, -10000.0)
        shares = torch.softmax(scores.float(), dim=-1).to(x.dtype)
        y = torch.bmm(shares.view(b * HEADS, s, -1), v.transpose(0, 1)).view(b, HEADS, s, D)
        return self.out(y.permute(2, 0, 1, 3).contiguous().view(s, b, DIM))


def onto_nothing(dtype: torch.dtype) -> Made:
    return OntoNothing().to(dtype), (normal(dtype, 24, 2, DIM), torch.ones(1, 1, 24, 24, dtype=torch.bool).triu(1))


class OneHeadOfKeys(nn.Module):
    """Half of the lanes are turned; all heads share one head of keys, over which a sum goes; a window."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = linear(DIM, DIM), linear(DIM, D), linear(DIM, D), linear(DIM, DIM, True)

    def turned(self, x: Tensor, positions: Tensor) -> Tensor:
        lanes, rest = x.chunk(2, dim=-1)
        half = lanes.shape[-1] // 2
        turns = (positions[..., None].float() * 10000.0 ** (-torch.arange(half).float() / half))[:, :, None, :]
        cos, sin = turns.cos().type_as(x), turns.sin().type_as(x)
        low, high = lanes.chunk(2, dim=-1)
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, D) for each in (self.q, self.k, self.v))
        q, k, place = self.turned(q, positions), self.turned(k, positions), torch.arange(t)
        near = (place[None, :] <= place[:, None]) & (place[None, :] > place[:, None] - 8)
        scores = torch.einsum("btnh,bskh->bnts", q, k) * D**-0.5
        scores = torch.where(near[None, None], scores, -2.3819763e38)
        shares = torch.softmax(scores.float(), dim=-1).type_as(x)
        return self.out(torch.einsum("bnts,bskh->btnh", shares, v).reshape(b, t, -1))


def one_head_of_keys(dtype: torch.dtype) -> Made:
    return OneHeadOfKeys().to(dtype), (normal(dtype, 2, 24, DIM), torch.arange(24).repeat(2, 1))


class Stories(nn.Module):
    """Real and imaginary lanes apart; an order that is kept beside the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (linear(DIM, DIM // n) for n in (1, 2, 2, 1))
        self.register_buffer("mask", torch.full((1, 1, 48, 48), -math.inf).triu(1))

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        cos, sin = (each.view(1, x.shape[1], 1, -1) for each in (cos, sin))
        both = torch.stack([real * cos - imaginary * sin, real * sin + imaginary * cos], dim=-1)
        return both.flatten(3).type_as(x)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, t, -1, D) for each in (self.wq, self.wk, self.wv))
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        k, v = (each[:, :, :, None, :].expand(b, t, -1, 2, D).reshape(b, t, HEADS, D) for each in (k, v))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        scores = q @ k.transpose(2, 3) / math.sqrt(D) + self.mask[:, :, :t, :t]
        shares = F.softmax(scores.float(), dim=-1).type_as(q)
        return self.wo((shares @ v).transpose(1, 2).contiguous().view(b, t, -1))


def stories(dtype: torch.dtype) -> Made:
    turns = angles(24, D)
    return Stories().to(dtype), (normal(dtype, 2, 24, DIM), turns.cos(), turns.sin())


TITAN = "pytorch/torchtitan"
PIECES = (
    Piece(TITAN, "latent attention, as it is trained", latents),
    Piece(TITAN, "attention, one table of turns", grouped),
    Piece("EleutherAI/gpt-neox", "attention, positions first", onto_nothing),
    Piece("google-deepmind/recurrentgemma", "attention in a window", one_head_of_keys),
    Piece("karpathy/llama2.c", "attention, an order kept beside the weights", stories),
)
