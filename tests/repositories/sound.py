"""In the manner of openai/whisper, espnet/espnet, SWivid/F5-TTS and facebookresearch/audiocraft: sound and speech."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, D = 512, 8, 64


class Listener(nn.Module):
    """Queries and keys each take a part of the scale; the order is cut from a table that is passed in."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = linear(DIM, DIM, True), linear(DIM, DIM)
        self.value, self.out = linear(DIM, DIM, True), linear(DIM, DIM, True)

    def forward(self, x: Tensor, heard: Tensor, order: Tensor | None) -> Tensor:
        q, k, v = self.query(x), self.key(heard), self.value(heard)
        part = (DIM // HEADS) ** -0.25
        q, k, v = (each.view(*each.shape[:2], HEADS, -1).permute(0, 2, 1, 3) for each in (q, k, v))
        scores = (q * part) @ (k * part).transpose(-1, -2)
        if order is not None:
            scores = scores + order[: x.shape[1], : x.shape[1]]
        shares = F.softmax(scores.float(), dim=-1).to(q.dtype)
        return self.out((shares @ v).permute(0, 2, 1, 3).flatten(start_dim=2))


def of_itself(dtype: torch.dtype) -> Made:
    x = normal(dtype, 2, 24, DIM)
    return Listener().to(dtype), (x, x, torch.full((48, 48), -math.inf, dtype=dtype).triu(1))


def of_what_was_heard(dtype: torch.dtype) -> Made:
    return Listener().to(dtype), (normal(dtype, 2, 24, DIM), normal(dtype, 2, 40, DIM), None)


class Conformer(nn.Module):
    """Places before and behind are scored by the queries, each row moved by one; padding is made 0 once more."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(DIM, DIM, True) for _ in range(4))
        self.pos, self.to_keys, self.to_places = linear(DIM, DIM), *(nn.Parameter(torch.randn(HEADS, D)) for _ in "uv")

    def forward(self, x: Tensor, places: Tensor, seen: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (each(x).view(b, -1, HEADS, D) for each in (self.q, self.k, self.v))
        k, v, p = (each.transpose(1, 2) for each in (k, v, self.pos(places).view(1, -1, HEADS, D)))
        scores = (q + self.to_keys).transpose(1, 2) @ k.transpose(-2, -1)
        near = (q + self.to_places).transpose(1, 2) @ p.transpose(-2, -1)
        joined = torch.cat([near.new_zeros(*near.shape[:3], 1), near], dim=-1)
        near = joined.view(*near.shape[:2], near.shape[3] + 1, near.shape[2])[:, :, 1:].view_as(near)[..., :t]
        scores, gone = (scores + near) / math.sqrt(D), seen.unsqueeze(1).eq(0)
        scores = scores.masked_fill(gone, torch.finfo(scores.dtype).min)
        shares = torch.softmax(scores, dim=-1).masked_fill(gone, 0.0)
        return self.out((shares @ v).transpose(1, 2).contiguous().view(b, -1, DIM))


def conformer(dtype: torch.dtype) -> Made:
    seen = torch.arange(24) < torch.tensor([[[24]], [[20]]])
    return Conformer().to(dtype), (normal(dtype, 2, 24, DIM), normal(dtype, 1, 47, DIM), seen)


class Speaker(nn.Module):
    """Pairs of lanes are turned; one mask of padding for all, and results of padding made 0."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (linear(DIM, DIM, True) for _ in range(4))

    def turned(self, x: Tensor, freqs: Tensor) -> Tensor:
        first, second = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
        other = torch.stack((-second, first), dim=-1).reshape(x.shape)
        return (x * freqs.cos() * 1.0 + other * freqs.sin() * 1.0).to(x.dtype)

    def forward(self, x: Tensor, seen: Tensor, freqs: Tensor) -> Tensor:
        b, n, _ = x.shape
        q, k, v = (each(x).view(b, -1, HEADS, D).transpose(1, 2) for each in (self.q, self.k, self.v))
        mask = seen.unsqueeze(1).unsqueeze(1).expand(b, HEADS, n, n)
        y = F.scaled_dot_product_attention(self.turned(q, freqs), self.turned(k, freqs), v, attn_mask=mask)
        y = self.out(y.transpose(1, 2).reshape(b, -1, DIM).to(q.dtype))
        return y.masked_fill(~seen.unsqueeze(-1), 0.0)


def speaker(dtype: torch.dtype) -> Made:
    seen = torch.arange(24) < torch.tensor([[24], [20]])
    return Speaker().to(dtype), (normal(dtype, 2, 24, DIM), seen, angles(24, D).repeat_interleave(2, -1))


class Composer(nn.Module):
    """Positions before heads, and an order that looks back a little way only, of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = linear(DIM, 3 * DIM), linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, HEADS, D).unbind(2)
        apart = torch.arange(t).view(-1, 1) - torch.arange(t).view(1, -1)
        near = (apart >= 0) & (apart <= 10)
        order = torch.where(near, torch.zeros([]), torch.full([], -math.inf)).to(q.dtype)
        shares = torch.softmax(torch.einsum("bqhc,bkhc->bhqk", q / D**0.5, k) + order, -1)
        return self.out(torch.einsum("bhqk,bkhc->bqhc", shares, v).reshape(b, t, -1))


def composer(dtype: torch.dtype) -> Made:
    return Composer().to(dtype), (normal(dtype, 2, 24, DIM),)


WHISPER = "openai/whisper"
PIECES = (
    Piece(WHISPER, "attention, an order passed in", of_itself),
    Piece(WHISPER, "attention to what was heard", of_what_was_heard),
    Piece("espnet/espnet", "attention of a Conformer, relative places", conformer),
    Piece("SWivid/F5-TTS", "attention with padding", speaker),
    Piece("facebookresearch/audiocraft", "attention that looks back a little way", composer),
)
