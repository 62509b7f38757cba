"""In the manner of lucidrains' x-transformers and rotary-embedding-torch: einsums of named dims, patterns of einops."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, einsum, nn

from .base import Made, Piece, linear, normal

DIM, HEADS, D = 512, 8, 64


class Norm(nn.Module):
    """`normalize` times the root of the width, and a gain that is one more than it is kept."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.g = DIM**0.5, nn.Parameter(torch.zeros(DIM))

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x, dim=-1) * self.scale * (self.g + 1)


def swapped(x: Tensor) -> Tensor:
    one, two = x.reshape(*x.shape[:-1], -1, 2).unbind(dim=-1)
    return torch.stack((-two, one), dim=-1).flatten(-2)


def rotated(x: Tensor, freqs: Tensor, start: int = 0) -> Tensor:
    s, end = x.shape[-2], start + freqs.shape[-1]
    freqs = freqs[-s:].to(x)
    left, some, right = x[..., :start], x[..., start:end], x[..., end:]
    some = (some * freqs.cos()) + (swapped(some) * freqs.sin())
    return torch.cat((left, some, right), dim=-1)


class Rotary(nn.Module):
    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.freqs = nn.Parameter(1.0 / (10000 ** (torch.arange(0, lanes, 2).float() / lanes)))

    def forward(self, s: int) -> Tensor:
        freqs = einsum("..., f -> ... f", torch.arange(s).type(self.freqs.dtype), self.freqs)
        return freqs[..., None].expand(-1, -1, 2).reshape(s, -1)


class Attention(nn.Module):
    """`groups` heads of keys, tiled, not repeated one by one; what is hidden has the least number of the dtype."""

    def __init__(self, groups: int, causal: bool, flash: bool = False, cap: float | None = None, zero: bool = False):
        super().__init__()
        self.groups, self.causal, self.flash, self.cap, self.zero = groups, causal, flash, cap, zero
        self.norm, self.rotary = Norm(), Rotary(32)
        self.to_q, self.to_out = linear(DIM, HEADS * D), linear(HEADS * D, DIM)
        self.to_k, self.to_v = linear(DIM, groups * D), linear(DIM, groups * D)

    def split(self, x: Tensor, heads: int) -> Tensor:
        return x.view(*x.shape[:2], heads, D).permute(0, 2, 1, 3)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        if mask is not None:
            mask = mask[:, None, None, :]
        if self.groups == 1:
            k, v = k[:, 0], v[:, 0]
        elif self.groups < HEADS:
            k, v = (each.repeat(1, HEADS // self.groups, 1, 1) for each in (k, v))
        if self.zero:
            k, v = (F.pad(each, (0, 0, 1, 0), value=0.0) for each in (k, v))
        if self.flash:
            k, v = (each[:, None].expand(-1, HEADS, -1, -1) if each.ndim == 3 else each for each in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=self.causal)
        of_keys = "b j d" if k.ndim == 3 else "b h j d"
        scores = einsum(f"b h i d, {of_keys} -> b h i j", q, k) * D**-0.5
        if self.cap is not None:
            scores = (scores / self.cap).tanh() * self.cap
        s, t, least = *scores.shape[-2:], -torch.finfo(scores.dtype).max
        if mask is not None:
            scores = scores.masked_fill(~mask, least)
        if self.causal:
            hidden = torch.ones((s, t), device=q.device, dtype=torch.bool).triu(t - s + 1)
            scores = scores.masked_fill(hidden, least)
        weights = F.softmax(scores, dim=-1, dtype=torch.float32).type(scores.dtype)
        return einsum(f"b h i j, {of_keys} -> b h i d", weights, v)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.norm(x)
        q, k, v = self.split(self.to_q(h), HEADS), self.to_k(h), self.to_v(h)
        k, v = self.split(k, self.groups), self.split(v, self.groups)
        freqs = self.rotary(x.shape[1])
        q, k = rotated(q, freqs), rotated(k, freqs)
        y = self.attend(q, k, v, mask)
        return x + self.to_out(y.permute(0, 2, 1, 3).flatten(2))


def attention(dtype: torch.dtype, groups: int = HEADS, causal: bool = True, padded: bool = False, **how) -> Made:
    valid = (torch.arange(24) < torch.tensor([[19], [24]])) if padded else None
    return Attention(groups, causal, **how).to(dtype), (normal(dtype, 2, 24, DIM), valid)


def of_heads(dtype: torch.dtype) -> Made:
    rotary = Rotary(D)

    def turned(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        freqs = rotary(q.shape[-2])
        return rotated(q, freqs), rotated(k, freqs)

    return turned, (normal(dtype, 2, HEADS, 24, D), normal(dtype, 2, HEADS, 24, D))


NAME = "lucidrains/x-transformers"
PIECES = (
    Piece(NAME, "attention", lambda dtype: attention(dtype)),
    Piece(NAME, "attention with padding", lambda dtype: attention(dtype, causal=False, padded=True)),
    Piece(NAME, "attention with one head of keys", lambda dtype: attention(dtype, 1)),
    Piece(NAME, "attention with one head of keys, flash", lambda dtype: attention(dtype, 1, flash=True)),
    Piece(NAME, "attention with tiled heads", lambda dtype: attention(dtype, 2)),
    Piece(NAME, "attention with soft caps", lambda dtype: attention(dtype, cap=50.0), why="tanh"),
    Piece(NAME, "attention with a key of zeros", lambda dtype: attention(dtype, causal=False, zero=True)),
    Piece("lucidrains/rotary-embedding-torch", "queries and keys", of_heads, attentions=0),
)
