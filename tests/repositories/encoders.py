"""In the manner of openai/whisper, and of what is written to explain BERT, ViT and T5."""

from __future__ import annotations

import math

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, linear, normal

DIM, HEADS, D, TEXT = 512, 8, 64, 64


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.float()).type(x.dtype)


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


class Heads(nn.Module):
    """Whisper's attention: queries and keys scaled by the fourth root each, weights kept in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = Linear(DIM, DIM), Linear(DIM, DIM, bias=False)
        self.value, self.out = Linear(DIM, DIM), Linear(DIM, DIM)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, past=None, kept=None) -> Tensor:
        q = self.query(x)
        if kept is not None:
            k, v = kept
        else:
            k, v = self.key(x if xa is None else xa), self.value(x if xa is None else xa)
            if past is not None:
                k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        _, s, width = q.shape
        scale = (width // HEADS) ** -0.25
        q = q.view(*q.shape[:2], HEADS, -1).permute(0, 2, 1, 3) * scale
        k = k.view(*k.shape[:2], HEADS, -1).permute(0, 2, 3, 1) * scale
        v = v.view(*v.shape[:2], HEADS, -1).permute(0, 2, 1, 3)
        scores = q @ k
        if mask is not None:
            scores = scores + mask[:s, :s]
        weights = F.softmax(scores.float(), dim=-1).to(q.dtype)
        return self.out((weights @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


class Speech(nn.Module):
    """Its weights stay in float32 and are cast when they are used."""

    def __init__(self, cross: bool) -> None:
        super().__init__()
        self.attn, self.attn_ln = Heads(), Norm(DIM)
        self.cross_attn, self.cross_attn_ln = (Heads(), Norm(DIM)) if cross else (None, None)
        self.mlp, self.mlp_ln = nn.Sequential(Linear(DIM, 4 * DIM), nn.GELU(), Linear(4 * DIM, DIM)), Norm(DIM)

    def forward(self, x: Tensor, xa: Tensor | None = None, mask: Tensor | None = None, past=None, kept=None) -> Tensor:
        x = x + self.attn(self.attn_ln(x), mask=mask, past=past)
        if self.cross_attn is not None and self.cross_attn_ln is not None:
            x = x + self.cross_attn(self.cross_attn_ln(x), xa, kept=kept)
        return x + self.mlp(self.mlp_ln(x))


def speech(dtype: torch.dtype) -> Made:
    return Speech(False), (normal(dtype, 2, 48, DIM),)


def text(dtype: torch.dtype, s: int, past: int = 0) -> Made:
    kept = tuple(normal(dtype, 2, past, DIM) for _ in range(2)) if past else None
    seen = tuple(normal(dtype, 2, 48, DIM) for _ in range(2)) if past else None
    mask = torch.empty(TEXT, TEXT).fill_(-np.inf).triu_(1)
    return Speech(True), (normal(dtype, 2, s, DIM), normal(dtype, 2, 48, DIM), mask, kept, seen)


class Bert(nn.Module):
    """A layer whose norms follow what is added; padding is -10000 on the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value = linear(DIM, DIM, True), linear(DIM, DIM, True), linear(DIM, DIM, True)
        self.dense, self.inner, self.outer = linear(DIM, DIM, True), linear(DIM, 4 * DIM, True), linear(4 * DIM, DIM)
        self.one, self.two, self.drop = nn.LayerNorm(DIM, 1e-12), nn.LayerNorm(DIM, 1e-12), nn.Dropout(0.1)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.size()[:-1], HEADS, D).permute(0, 2, 1, 3)

    def forward(self, x: Tensor, valid: Tensor) -> Tensor:
        mask = (1.0 - valid[:, None, None, :].to(dtype=x.dtype)) * -10000.0
        q, k, v = self.split(self.query(x)), self.split(self.key(x)), self.split(self.value(x))
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(D)
        weights = self.drop(nn.Softmax(dim=-1)(scores + mask))
        y = torch.matmul(weights, v).permute(0, 2, 1, 3).contiguous().view(*x.size()[:2], DIM)
        x = self.one(self.drop(self.dense(y)) + x)
        return self.two(self.drop(self.outer(F.gelu(self.inner(x)))) + x)


def bert(dtype: torch.dtype) -> Made:
    valid = (torch.arange(24) < torch.tensor([[19], [24]])).long()
    return Bert().to(dtype), (normal(dtype, 2, 24, DIM), valid)


class Vision(nn.Module):
    """ViT's layer: one projection, split along a dim of three."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM, eps=1e-6), nn.LayerNorm(DIM, eps=1e-6)
        self.qkv, self.proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)
        self.mlp = nn.Sequential(linear(DIM, 4 * DIM, True), nn.GELU(), linear(4 * DIM, DIM, True))

    def forward(self, x: Tensor) -> Tensor:
        b, s, c = x.shape
        qkv = self.qkv(self.norm1(x)).reshape(b, s, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        q = q * D**-0.5
        weights = (q @ k.transpose(-2, -1)).softmax(dim=-1)
        x = x + self.proj((weights @ v).transpose(1, 2).reshape(b, s, c))
        return x + self.mlp(self.norm2(x))


class Relative(nn.Module):
    """T5's attention: a learned bias by distance, no scale."""

    def __init__(self, decoder: bool) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(DIM, DIM) for _ in range(4))
        self.bias, self.decoder = nn.Embedding(32, HEADS), decoder
        self.weight = nn.Parameter(torch.ones(DIM))

    def buckets(self, distance: Tensor) -> Tensor:
        count, found = 32, torch.zeros_like(distance)
        if not self.decoder:
            count //= 2
            found += (distance > 0).to(torch.long) * count
            distance = torch.abs(distance)
        else:
            distance = -torch.min(distance, torch.zeros_like(distance))
        exact = count // 2
        far = exact + (torch.log(distance.float() / exact) / math.log(128 / exact) * (count - exact)).to(torch.long)
        far = torch.min(far, torch.full_like(far, count - 1))
        return found + torch.where(distance < exact, distance, far)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        variance = x.to(torch.float32).pow(2).mean(-1, keepdim=True)
        y = self.weight * (x * torch.rsqrt(variance + 1e-6)).to(self.weight.dtype)
        q, k, v = (each(y).view(b, -1, HEADS, D).transpose(1, 2) for each in (self.q, self.k, self.v))
        scores = torch.matmul(q, k.transpose(3, 2))
        here = torch.arange(s, dtype=torch.long)
        bias = self.bias(self.buckets(here[None, :] - here[:, None])).permute([2, 0, 1]).unsqueeze(0)
        if self.decoder:
            bias = bias + torch.full((s, s), torch.finfo(x.dtype).min, dtype=x.dtype).triu(1)
        scores += bias
        weights = F.softmax(scores.float(), dim=-1).type_as(scores)
        return x + self.o(torch.matmul(weights, v).transpose(1, 2).contiguous().view(b, -1, DIM))


PIECES = (
    Piece("openai/whisper", "encoder block", speech),
    Piece("openai/whisper", "decoder block, prefill", lambda dtype: text(dtype, 24), 2, ((2, "causal"),)),
    Piece("openai/whisper", "decoder block, decode", lambda dtype: text(dtype, 1, 20), 2, ((2, "causal"),)),
    Piece("google-research/bert", "block, padded", bert),
    Piece(
        "google-research/vision_transformer", "block", lambda dtype: (Vision().to(dtype), (normal(dtype, 2, 49, DIM),))
    ),
    Piece(
        "google-research/text-to-text-transfer-transformer",
        "encoder attention",
        lambda dtype: (Relative(False).to(dtype), (normal(dtype, 2, 24, DIM),)),
        why="bias",
    ),
    Piece(
        "google-research/text-to-text-transfer-transformer",
        "decoder attention",
        lambda dtype: (Relative(True).to(dtype), (normal(dtype, 2, 24, DIM),)),
        why="bias",
    ),
)
