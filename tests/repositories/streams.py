"""In the manner of Wan-Video, Stability-AI/sd3.5, facebookresearch/sam2, baaivision/EVA and kyutai-labs/moshi."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal, rotations

DIM, HEADS, D = 512, 8, 64


class Norm(nn.Module):
    """Weighted behind the cast."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(dim=-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


class Film(nn.Module):
    """Wan: norms over all heads, rotations of three axes as complex numbers of float64, words attended to behind."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (linear(DIM, DIM, True) for _ in range(4))
        self.norm_q, self.norm_k = Norm(DIM), Norm(DIM)

    def turned(self, x: Tensor, turns: Tensor, grid: tuple[int, int, int]) -> Tensor:
        b, s, n, c = x.shape
        f, h, w = grid
        third = c // 2 // 3
        frames, lines, columns = turns.split([c // 2 - 2 * third, third, third], dim=1)
        whole = torch.cat(
            [
                frames[:f].view(f, 1, 1, -1).expand(f, h, w, -1),
                lines[:h].view(1, h, 1, -1).expand(f, h, w, -1),
                columns[:w].view(1, 1, w, -1).expand(f, h, w, -1),
            ],
            dim=-1,
        ).reshape(s, 1, -1)
        each = [torch.view_as_complex(x[i].to(torch.float64).reshape(s, n, -1, 2)) * whole for i in range(b)]
        return torch.stack([torch.view_as_real(one).flatten(2) for one in each]).float()

    def forward(self, x: Tensor, turns: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k = self.norm_q(self.q(x)).view(b, s, HEADS, D), self.norm_k(self.k(x)).view(b, s, HEADS, D)
        v, grid = self.v(x).view(b, s, HEADS, D), (2, 3, 4)
        q, k = (self.turned(each, turns, grid).to(v.dtype) for each in (q, k))
        y = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.o(y.transpose(1, 2).contiguous().flatten(2))


def film(dtype: torch.dtype) -> Made:
    return Film().to(dtype), (normal(dtype, 2, 24, DIM), rotations(64, D).to(torch.complex128))


class Joint(nn.Module):
    """Stable Diffusion 3: words and pictures have projections and norms of heads of their own, and attend together."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.ModuleList(linear(DIM, 3 * DIM, True) for _ in range(2))
        self.proj = nn.ModuleList(linear(DIM, DIM, True) for _ in range(2))
        self.ln_q, self.ln_k = (nn.ModuleList(Norm(D) for _ in range(2)) for _ in range(2))
        self.mod, self.norm = linear(DIM, 3 * DIM, True), nn.LayerNorm(DIM, elementwise_affine=False, eps=1e-6)

    def before(self, number: int, x: Tensor, shift: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.norm(x) * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)
        b, s, _ = x.shape
        q, k, v = self.qkv[number](x).reshape(b, s, 3, HEADS, D).movedim(2, 0)
        q, k = self.ln_q[number](q).reshape(b, s, -1), self.ln_k[number](k).reshape(b, s, -1)
        return q, k, v.reshape(b, s, -1)

    def forward(self, words: Tensor, x: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        shift, scale, gate = self.mod(F.silu(c)).chunk(3, dim=1)
        pairs = zip(self.before(0, words, shift, scale), self.before(1, x, shift, scale), strict=True)
        b, s = x.shape[0], words.shape[1]
        q, k, v = (torch.cat(pair, dim=1).view(b, -1, HEADS, D).transpose(1, 2) for pair in pairs)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, -1, DIM)
        words = words + gate.unsqueeze(1) * self.proj[0](y[:, :s])
        return words, x + gate.unsqueeze(1) * self.proj[1](y[:, s:])


def joint(dtype: torch.dtype) -> Made:
    return Joint().to(dtype), (normal(dtype, 2, 10, DIM), normal(dtype, 2, 24, DIM), normal(dtype, 2, DIM))


class Memory(nn.Module):
    """SAM 2: memories of a narrower width, of which all but pointers are turned like the picture, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linear(256, 256, True), linear(64, 256, True), linear(64, 256, True)
        self.out_proj = linear(256, 256, True)

    def forward(self, x: Tensor, memory: Tensor, place: Tensor, turns: Tensor, pointers: int = 4) -> Tensor:
        q, k, v = self.q_proj(x), self.k_proj(memory + place), self.v_proj(memory)
        q, k, v = (each.reshape(*each.shape[:2], 1, 256).transpose(1, 2) for each in (q, k, v))
        end = k.size(-2) - pointers
        wide = torch.view_as_complex(q.float().reshape(*q.shape[:-1], -1, 2))
        kept = torch.view_as_complex(k[:, :, :end].float().reshape(*k.shape[:2], end, -1, 2))
        turns = turns.view(1, 1, *turns.shape)
        q = torch.view_as_real(wide * turns).flatten(3).type_as(q)
        again = turns.repeat(1, 1, kept.shape[-2] // wide.shape[-2], 1)
        k[:, :, :end] = torch.view_as_real(kept * again).flatten(3).type_as(k)
        y = F.scaled_dot_product_attention(q, k, v).transpose(1, 2)
        return self.out_proj(y.reshape(*y.shape[:2], 256))


def memories(dtype: torch.dtype) -> Made:
    given = (normal(dtype, 2, 16, 256), normal(dtype, 2, 36, 64), normal(dtype, 2, 36, 64), rotations(16, 256))
    return Memory().to(dtype), given


class Patches(nn.Module):
    """EVA-02: a token of the class is not turned, scores are of float32, and a norm stands before the projection."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (linear(DIM, DIM) for _ in range(3))
        self.q_bias, self.v_bias = (nn.Parameter(torch.zeros(DIM)) for _ in range(2))
        self.inner_attn_ln, self.proj = nn.LayerNorm(DIM), linear(DIM, DIM, True)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        one, two = x.view(*x.shape[:-1], -1, 2).unbind(-1)
        return x * cos + torch.stack((-two, one), dim=-1).flatten(-2) * sin

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = F.linear(input=x, weight=self.q_proj.weight, bias=self.q_bias)
        k = F.linear(input=x, weight=self.k_proj.weight, bias=None)
        v = F.linear(input=x, weight=self.v_proj.weight, bias=self.v_bias)
        q, k, v = (each.reshape(b, s, HEADS, -1).permute(0, 2, 1, 3) for each in (q, k, v))
        q, k = (torch.cat((e[:, :, :1], self.turned(e[:, :, 1:], cos, sin)), -2).type_as(v) for e in (q, k))
        scores = (q * D**-0.5).float() @ k.float().transpose(-2, -1)
        y = (scores.softmax(dim=-1).type_as(x) @ v).transpose(1, 2).reshape(b, s, -1)
        return self.proj(self.inner_attn_ln(y))


def patches(dtype: torch.dtype) -> Made:
    table = angles(24, D).repeat_interleave(2, dim=-1)
    return Patches().to(dtype), (normal(dtype, 2, 25, DIM), table.cos(), table.sin())


class Ring(nn.Module):
    """Moshi: a cache that is written in a circle, the position of each of its rows, and a context that ends before."""

    def __init__(self, context: int = 20) -> None:
        super().__init__()
        self.in_proj, self.out_proj, self.context = linear(DIM, 3 * DIM), linear(DIM, DIM), context

    def turned(self, x: Tensor, offset: Tensor) -> Tensor:
        b, _, t, d = x.shape
        turns = torch.exp(torch.arange(d // 2, dtype=torch.float32) * (-math.log(10000) * 2 / d))
        times = (offset.float().view(-1, 1) + torch.arange(t, dtype=torch.float32)).view(b, 1, -1, 1)
        cos, sin = torch.cos(turns * times), torch.sin(turns * times)
        pairs = x.view(*x.shape[:-1], d // 2, 2)
        one, two = pairs[..., 0].float(), pairs[..., 1].float()
        both = [(one * cos - two * sin).to(x.dtype), (one * sin + two * cos).to(x.dtype)]
        return torch.stack(both, dim=-1).view(*x.shape)

    def positions(self, offset: Tensor, t: int, capacity: int) -> Tensor:
        places, last = torch.arange(capacity, dtype=torch.long), offset.view(-1, 1) + t - 1
        ahead = places - last % capacity
        held = torch.where(ahead <= 0, last + ahead, last + ahead - capacity)
        return torch.where(places >= (offset + t).view(-1, 1), torch.full_like(held, -1), held)

    def forward(self, x: Tensor, cache: Tensor, offset: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = self.in_proj(x).view(b, t, 3, HEADS, D).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.turned(q, offset), self.turned(k, offset)
        capacity = cache.shape[3]
        at = ((torch.arange(t) + offset.view(-1, 1)) % capacity).view(b, 1, t, 1).expand(-1, HEADS, t, D)
        cache[0].scatter_(2, at, k)
        cache[1].scatter_(2, at, v)
        held = self.positions(offset, t, capacity)[:, None]
        since = offset.view(-1, 1, 1) + torch.arange(t).view(-1, 1) - held
        seen = ((held >= 0) & (since >= 0) & (since < self.context))[:, None]
        y = F.scaled_dot_product_attention(q, cache[0], cache[1], seen, dropout_p=0.0)
        return self.out_proj(y.transpose(1, 2).reshape(b, t, DIM))


def ring(dtype: torch.dtype) -> Made:
    return Ring().to(dtype), (normal(dtype, 2, 1, DIM), normal(dtype, 2, 2, HEADS, 32, D), torch.tensor([9, 40]))


class Padded(nn.Module):
    """torch's own module with padding alone."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(DIM, HEADS, batch_first=True)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        return self.attn(x, x, x, key_padding_mask=padding, need_weights=False)[0]


def padded(dtype: torch.dtype) -> Made:
    return Padded().to(dtype), (normal(dtype, 2, 24, DIM), torch.arange(24) >= torch.tensor([[19], [24]]))


PIECES = (
    Piece("Wan-Video/Wan2.1", "attention of a film", film),
    Piece("Stability-AI/sd3.5", "attention of words and pictures together", joint),
    Piece("facebookresearch/sam2", "attention to memories", memories, why="D"),
    Piece("baaivision/EVA", "attention of patches", patches),
    Piece("kyutai-labs/moshi", "attention to a ring of rows, decode", ring),
    Piece("pytorch/pytorch", "nn.MultiheadAttention, padded", padded),
)
