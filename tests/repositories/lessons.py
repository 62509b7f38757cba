"""In the manner of lessons on DeepSeek's latents, FoundationVision/VAR, wenet-e2e/wenet, state-spaces/mamba and others.

And of bytedance/Protenix and THUDM/ChatGLM-6B.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, GROUPS, D = 512, 8, 2, 64


class ByHeads(nn.Module):
    """Scores of each head are written into memory that stands ready; lanes are multiplied by a matrix of the head."""

    C = 256

    def __init__(self, written: bool = True) -> None:
        super().__init__()
        self.W_q, self.W_dkv = linear(DIM, DIM), linear(DIM, self.C)
        self.W_uk, self.W_uv, self.W_o = linear(self.C, DIM), linear(self.C, DIM), linear(DIM, DIM)
        self.ln, self.written = nn.LayerNorm(self.C), written

    def forward(self, x: Tensor, past: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        latent = self.ln(self.W_dkv(x))
        latent = latent if past is None else torch.cat([past, latent], dim=1)
        t = latent.shape[1]
        v = self.W_uv(latent).view(b, t, HEADS, D).transpose(1, 2)
        absorbed = torch.matmul(self.W_q.weight, self.W_uk.weight).view(HEADS, D, self.C)
        q = x.view(b, s, HEADS, D)
        each = [torch.bmm(torch.matmul(q[:, :, h], absorbed[h]), latent.transpose(1, 2)) for h in range(HEADS)]
        scores = torch.zeros(b, HEADS, s, t, dtype=x.dtype) if self.written else torch.stack(each, dim=1)
        for h in range(HEADS if self.written else 0):
            scores[:, h] = each[h]
        seen = torch.tril(torch.ones(s, t), diagonal=t - s)
        scores = (scores / D**0.5).masked_fill(seen.view(1, 1, s, t) == 0, float("-inf"))
        weights = F.softmax(scores, dim=-1)
        heads = [torch.matmul(weights[:, h], v[:, h]) for h in range(HEADS)]
        return self.W_o(torch.cat(heads, dim=-1)), latent


def by_heads(dtype: torch.dtype, queries: int, kept: int, written: bool = True) -> Made:
    past = (normal(dtype, 2, kept, ByHeads.C),) if kept else ()
    return ByHeads(written).to(dtype), (normal(dtype, 2, queries, DIM), *past)


class Scales(nn.Module):
    """Pictures of growing size, each of which sees itself and those before; lengths of 1, multiplied by head."""

    def __init__(self, sides: tuple[int, ...]) -> None:
        super().__init__()
        self.qkv, self.proj = linear(DIM, 3 * DIM), linear(DIM, DIM, True)
        self.q_bias, self.v_bias = nn.Parameter(torch.randn(DIM)), nn.Parameter(torch.randn(DIM))
        self.register_buffer("k_bias", torch.zeros(DIM))
        self.logs = nn.Parameter(torch.full((1, HEADS, 1, 1), 4.0).log())
        self.register_buffer("level", torch.cat([torch.full((n * n,), n) for n in sides])[None], persistent=False)

    def attend(self, x: Tensor, order: Tensor | None, past: tuple[Tensor, ...] = ()) -> Tensor:
        b, n, _ = x.shape
        qkv = F.linear(x, self.qkv.weight, torch.cat((self.q_bias, self.k_bias, self.v_bias)))
        q, k, v = qkv.view(b, n, 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)
        q = F.normalize(q, dim=-1).mul(self.logs.clamp_max(math.log(100)).exp())
        k = F.normalize(k, dim=-1)
        if past:
            k, v = (torch.cat(each, dim=2) for each in zip(past, (k, v), strict=True))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=order, scale=1)
        return self.proj(y.transpose(1, 2).reshape(b, n, DIM))

    def forward(self, x: Tensor, *past: Tensor) -> Tensor:
        if past:
            return self.attend(x, None, past)
        rows = self.level.unsqueeze(2)
        order = torch.where(rows >= rows.transpose(1, 2), 0.0, -torch.inf).reshape(1, 1, x.shape[1], x.shape[1])
        return self.attend(x, order.to(x.dtype))


def scales(dtype: torch.dtype) -> Made:
    made = Scales((1, 2, 3))
    level = made.level
    made = made.to(dtype)
    made.level = level
    return made, (normal(dtype, 2, 14, DIM),)


def last_scale(dtype: torch.dtype) -> Made:
    return Scales((1,)).to(dtype), (normal(dtype, 2, 9, DIM), *(normal(dtype, 2, HEADS, 5, D) for _ in range(2)))


class Chunks(nn.Module):
    """A piece of sound behind others; keys and values are kept side by side."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(DIM, DIM, True) for _ in range(4))

    def forward(self, x: Tensor, past: Tensor) -> tuple[Tensor, Tensor]:
        b = x.shape[0]
        q, k, v = (each(x).view(b, -1, HEADS, D).transpose(1, 2) for each in (self.q, self.k, self.v))
        k, v = (torch.cat(each, dim=2) for each in zip(past.split(D, dim=-1), (k, v), strict=True))
        weights = torch.softmax(torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(D), dim=-1)
        y = torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, DIM)
        return self.out(y), torch.cat((k, v), dim=-1)


def chunks(dtype: torch.dtype) -> Made:
    return Chunks().to(dtype), (normal(dtype, 2, 8, DIM), normal(dtype, 2, HEADS, 16, 2 * D))


class Hybrid(nn.Module):
    """Keys and values are written into one cache together, and repeated behind it."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.start = start
        self.in_proj, self.out_proj = linear(DIM, D * (HEADS + 2 * GROUPS), True), linear(DIM, DIM, True)

    def forward(self, x: Tensor, cache: Tensor) -> Tensor:
        q, kv = self.in_proj(x).split([HEADS * D, 2 * GROUPS * D], dim=-1)
        q, kv = q.unflatten(-1, (HEADS, D)), kv.unflatten(-1, (2, GROUPS, D))
        end = self.start + x.shape[1]
        cache[: x.shape[0], self.start : end] = kv
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=2) for each in cache[: x.shape[0], :end].unbind(-3))
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.start == 0).transpose(1, 2)
        return self.out_proj(y.flatten(2))


def hybrid(dtype: torch.dtype, queries: int, start: int) -> Made:
    return Hybrid(start).to(dtype), (normal(dtype, 2, queries, DIM), normal(dtype, 4, 64, 2, GROUPS, D))


class Pairs(nn.Module):
    """Tokens of a structure, with a bias of pairs, in float32; results are gated."""

    def __init__(self) -> None:
        super().__init__()
        self.q = linear(DIM, DIM, True)
        self.k, self.v, self.gate, self.out = (linear(DIM, DIM) for _ in range(4))
        self.norm, self.of_pairs = nn.LayerNorm(32), linear(32, HEADS)

    def forward(self, x: Tensor, pairs: Tensor) -> Tensor:
        q, k, v = (each(x).unflatten(-1, (HEADS, D)).transpose(-2, -3) for each in (self.q, self.k, self.v))
        bias = self.of_pairs(self.norm(pairs)).permute(2, 0, 1)
        scores = (q / math.sqrt(D)).float() @ k.float().transpose(-1, -2) + bias.float()
        y = (F.softmax(scores, dim=-1).to(x.dtype) @ v).transpose(-2, -3)
        gate = torch.sigmoid(self.gate(x)).unflatten(-1, (HEADS, D))
        return self.out((y * gate).flatten(-2))


def pairs(dtype: torch.dtype) -> Made:
    return Pairs().to(dtype), (normal(dtype, 3, 24, DIM), normal(dtype, 24, 24, 32))


class TwoPlaces(nn.Module):
    """Half of the lanes turned by one place, half by another; scores made small before they are masked."""

    def __init__(self, layer: int = 3) -> None:
        super().__init__()
        self.qkv, self.dense, self.times = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True), float(layer + 1)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        done: list[Tensor] = []
        for part, place in zip(x.chunk(2, dim=-1), places, strict=True):
            c, s = (F.embedding(place, table).unsqueeze(2) for table in (cos, sin))
            first, second = part.chunk(2, dim=-1)
            done.append(part * c + torch.cat((-second, first), dim=-1) * s)
        return torch.cat(done, dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, one: Tensor, other: Tensor) -> Tensor:
        t, b, _ = x.shape
        q, k, v = self.qkv(x).view(t, b, HEADS, 3 * D).chunk(3, dim=-1)
        q, k = (self.turned(each, cos, sin, (one, other)) for each in (q, k))
        q = (q / (math.sqrt(D) * self.times)).view(t, b * HEADS, D).transpose(0, 1)
        scores = torch.bmm(q, k.reshape(t, b * HEADS, D).permute(1, 2, 0)).view(b, HEADS, t, t)
        seen = torch.ones(1, t, t).tril()
        seen[..., : t - 2] = 1
        scores = scores.masked_fill((seen.unsqueeze(1) < 0.5), -10000.0)
        weights = F.softmax(scores.float() * self.times, dim=-1).type(scores.dtype)
        y = torch.bmm(weights.view(b * HEADS, t, t), v.reshape(t, b * HEADS, D).transpose(0, 1))
        return self.dense(y.view(b, HEADS, t, D).permute(2, 0, 1, 3).reshape(t, b, DIM))


def two_places(dtype: torch.dtype) -> Made:
    turns = torch.cat([angles(64, D // 2)] * 2, dim=-1)
    one = torch.arange(20).clamp(max=18)[:, None].expand(20, 2)
    other = (torch.arange(20) - 18).clamp(min=0)[:, None].expand(20, 2)
    return TwoPlaces().to(dtype), (normal(dtype, 20, 2, DIM), turns.cos().to(dtype), turns.sin().to(dtype), one, other)


LATENTS = "Abhishekkk2004/Deepseek-from-Scratch"
PIECES = (
    Piece(LATENTS, "latent without rotation, head by head, prefill", lambda dtype: by_heads(dtype, 24, 0)),
    Piece(LATENTS, "latent without rotation, head by head, decode", lambda dtype: by_heads(dtype, 1, 40)),
    Piece(LATENTS, "the same with heads that are stacked", lambda dtype: by_heads(dtype, 3, 40, False)),
    Piece("FoundationVision/VAR", "attention of several sizes", scales),
    Piece("FoundationVision/VAR", "attention of the last size, behind others", last_scale),
    Piece("wenet-e2e/wenet", "attention of a chunk behind others", chunks),
    Piece("state-spaces/mamba", "attention of a hybrid, prefill", lambda dtype: hybrid(dtype, 24, 0)),
    Piece("state-spaces/mamba", "attention of a hybrid, decode", lambda dtype: hybrid(dtype, 1, 40)),
    Piece("bytedance/Protenix", "attention with a bias of pairs", pairs),
    Piece("THUDM/ChatGLM-6B", "attention with two places", two_places),
)
