"""In the manner of facebookresearch/segment-anything, facebookresearch/dinov3, Tencent/HunyuanVideo and
openai/guided-diffusion: pictures."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, D = 512, 8, 64
HIGH, WIDE = 4, 6


class RowsAndColumns(nn.Module):
    """Queries score how far keys are in rows and in columns, while the keys of a score stand in both."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)
        self.rows, self.columns = (nn.Parameter(torch.randn(2 * size - 1, D) / 8) for size in (HIGH, WIDE))

    def forward(self, x: Tensor) -> Tensor:
        b, h, w, _ = x.shape
        qkv = self.qkv(x).reshape(b, h * w, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.reshape(3, b * HEADS, h * w, -1).unbind(0)
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        apart = [torch.arange(size)[:, None] - torch.arange(size)[None, :] + size - 1 for size in (h, w)]
        places = q.reshape(b * HEADS, h, w, D)
        of_rows = torch.einsum("bhwc,hkc->bhwk", places, self.rows[apart[0]])
        of_columns = torch.einsum("bhwc,wkc->bhwk", places, self.columns[apart[1]])
        scores = scores.view(-1, h, w, h, w) + of_rows[:, :, :, :, None] + of_columns[:, :, :, None, :]
        y = scores.view(-1, h * w, h * w).softmax(dim=-1) @ v
        return self.proj(y.view(b, HEADS, h, w, -1).permute(0, 2, 3, 1, 4).reshape(b, h, w, -1))


def rows_and_columns(dtype: torch.dtype) -> Made:
    return RowsAndColumns().to(dtype), (normal(dtype, 2, HIGH, WIDE, DIM),)


class Patches(nn.Module):
    """Only patches are turned: what stands before them has no place. The branch has a gain of each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.LayerNorm(DIM), linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)
        self.gain = nn.Parameter(torch.randn(DIM))

    def turned(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        before = x.shape[-2] - sin.shape[-2]
        rest = x[:, :, before:].to(sin.dtype)
        first, second = rest.chunk(2, dim=-1)
        rest = rest * cos + torch.cat((-second, first), dim=-1) * sin
        return torch.cat((x[:, :, :before].to(sin.dtype), rest), dim=-2).to(x.dtype)

    def forward(self, x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = (each.transpose(1, 2) for each in self.qkv(self.norm(x)).reshape(b, n, 3, HEADS, -1).unbind(2))
        y = F.scaled_dot_product_attention(self.turned(q, sin, cos), self.turned(k, sin, cos), v)
        return x + self.gain * self.proj(y.transpose(1, 2).reshape(b, n, c))


def patches(dtype: torch.dtype) -> Made:
    table = torch.cat((angles(20, D), angles(20, D)), dim=-1).to(dtype)
    return Patches().to(dtype), (normal(dtype, 2, 25, DIM), table.sin(), table.cos())


class HeadNorm(nn.Module):
    """RMS norm of the lanes of a head."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Both(nn.Module):
    """A film and its words, each with its own projections and norms, attend to both; only the film is turned."""

    def __init__(self, padded: bool) -> None:
        super().__init__()
        self.film, self.words = (
            nn.ModuleList([linear(DIM, 3 * DIM, True), HeadNorm(), HeadNorm(), linear(DIM, DIM, True)]) for _ in "fw"
        )
        self.padded = padded

    def projected(self, part: nn.ModuleList, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = part[0](x).view(*x.shape[:2], 3, HEADS, D).permute(2, 0, 1, 3, 4)
        return part[1](q).to(v), part[2](k).to(v), v

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        cos, sin = (each.view(1, x.shape[1], 1, -1) for each in (cos, sin))
        real, imaginary = x.float().reshape(*x.shape[:-1], -1, 2).unbind(-1)
        other = torch.stack([-imaginary, real], dim=-1).flatten(3)
        return (x.float() * cos + other * sin).type_as(x)

    def forward(self, film: Tensor, words: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
        b, n, _ = film.shape
        (q, k, v), others = self.projected(self.film, film), self.projected(self.words, words)
        own = self.turned(q, cos, sin), self.turned(k, cos, sin), v
        q, k, v = (torch.cat(each, dim=1).transpose(1, 2) for each in zip(own, others, strict=True))
        mask = (seen[:, None, :] & seen[:, :, None])[:, None] if self.padded else None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).reshape(b, -1, DIM)
        return film + self.film[3](y[:, :n]), words + self.words[3](y[:, n:])


def both(dtype: torch.dtype, padded: bool) -> Made:
    turns, seen = angles(20, D).repeat_interleave(2, -1), torch.arange(28) < torch.tensor([[28], [25]])
    inputs = normal(dtype, 2, 20, DIM), normal(dtype, 2, 8, DIM), turns.cos(), turns.sin(), seen
    return Both(padded).to(dtype), inputs


class ChannelsFirst(nn.Module):
    """Channels stand before places; heads are rows, each with its own queries, keys and values one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.proj = nn.GroupNorm(32, DIM), nn.Conv1d(DIM, 3 * DIM, 1), nn.Conv1d(DIM, DIM, 1)

    def forward(self, x: Tensor) -> Tensor:
        b, c, *places = x.shape
        x = x.reshape(b, c, -1)
        q, k, v = self.qkv(self.norm(x)).reshape(b * HEADS, 3 * D, -1).split(D, dim=1)
        part = 1 / math.sqrt(math.sqrt(D))
        scores = torch.einsum("bct,bcs->bts", q * part, k * part)
        shares = torch.softmax(scores.float(), dim=-1).type(scores.dtype)
        y = torch.einsum("bts,bcs->bct", shares, v).reshape(b, -1, x.shape[-1])
        return (x + self.proj(y)).reshape(b, c, *places)


def channels_first(dtype: torch.dtype) -> Made:
    return ChannelsFirst().to(dtype), (normal(dtype, 2, DIM, HIGH, WIDE),)


PIECES = (
    Piece("facebookresearch/segment-anything", "attention with rows and columns", rows_and_columns),
    Piece("facebookresearch/dinov3", "attention of patches", patches),
    Piece("Tencent/HunyuanVideo", "attention of a film and words", lambda dtype: both(dtype, padded=False)),
    Piece("Tencent/HunyuanVideo", "attention of a film and padded words", lambda dtype: both(dtype, padded=True)),
    Piece("openai/guided-diffusion", "attention, channels first", channels_first),
)
