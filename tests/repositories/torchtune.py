"""In the manner of pytorch/torchtune: heads expanded in front of the cache, which holds one of each for every query."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 96


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x)
        return normed * self.scale


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        turned = angles(ROOM, D)
        self.register_buffer("cache", torch.stack([turned.cos(), turned.sin()], dim=-1), persistent=False)

    def forward(self, x: Tensor, *, input_pos: Tensor | None = None) -> Tensor:
        s = x.size(1)
        table = self.cache[:s] if input_pos is None else self.cache[input_pos]
        pairs = x.float().reshape(*x.shape[:-1], -1, 2)
        table = table.view(-1, s, 1, pairs.size(3), 2)
        one, two, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
        return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(3).type_as(x)


class Cache(nn.Module):
    """Its position is a tensor that it counts on."""

    def __init__(self, start: int) -> None:
        super().__init__()
        self.register_buffer("k_cache", torch.randn(2, HEADS, ROOM, D), persistent=False)
        self.register_buffer("v_cache", torch.randn(2, HEADS, ROOM, D), persistent=False)
        self.register_buffer("cache_pos", torch.arange(start, start + ROOM), persistent=False)

    def update(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        s = k.shape[2]
        self.k_cache[:, :, self.cache_pos[:s]] = k
        self.v_cache[:, :, self.cache_pos[:s]] = v
        self.cache_pos.add_(s)
        return self.k_cache, self.v_cache


class Layer(nn.Module):
    def __init__(self, start: int | None, normed: bool = False) -> None:
        super().__init__()
        self.q_proj, self.output_proj = linear(DIM, HEADS * D), linear(HEADS * D, DIM)
        self.k_proj, self.v_proj = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)
        self.w1, self.w3, self.w2 = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        self.q_norm, self.k_norm = (Norm(D), Norm(D)) if normed else (None, None)
        self.sa_norm, self.mlp_norm, self.rotary = Norm(DIM), Norm(DIM), Rotary()
        self.kv_cache = None if start is None else Cache(start)

    def attention(self, x: Tensor, mask: Tensor | None, positions: Tensor | None) -> Tensor:
        b, s, _ = x.shape
        q = self.rotary(self.q_proj(x).view(b, s, HEADS, D), input_pos=positions).transpose(1, 2)
        k = self.rotary(self.k_proj(x).view(b, s, -1, D), input_pos=positions)
        k, v = k.view(b, s, GROUPS, 1, D), self.v_proj(x).view(b, s, GROUPS, 1, D)
        k = k.expand(b, s, GROUPS, HEADS // GROUPS, D).reshape(b, s, -1, D).transpose(1, 2)
        v = v.expand(b, s, GROUPS, HEADS // GROUPS, D).reshape(b, s, -1, D).transpose(1, 2)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if self.kv_cache is not None:
            k, v = self.kv_cache.update(k, v)
        if mask is not None:
            mask = mask[:, None, :, :]
        causal = self.kv_cache is None and mask is None
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=causal)
        return self.output_proj(y.transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x: Tensor, mask: Tensor | None = None, positions: Tensor | None = None) -> Tensor:
        h = self.attention(self.sa_norm(x), mask, positions) + x
        y = self.mlp_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


def layer(dtype: torch.dtype, s: int, start: int | None = None, **how) -> Made:
    x = normal(dtype, 2, s, DIM)
    if start is None:
        return Layer(None, **how).to(dtype), (x,)
    positions = torch.arange(start, start + s)[None].expand(2, s)
    mask = torch.tril(torch.ones(ROOM, ROOM, dtype=torch.bool))[None].expand(2, -1, -1)[:, start : start + s]
    return Layer(start, **how).to(dtype), (x, mask, positions)


class Packed(nn.Module):
    """Samples packed in one row: keys of another sample are hidden by a mask of blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer(None)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        lengths = (8, 16)
        mask = torch.block_diag(*(torch.tril(torch.ones(n, n, dtype=torch.bool)) for n in lengths))
        return self.layer(x, mask.unsqueeze(0).expand(x.shape[0], -1, -1), positions)


def packed(dtype: torch.dtype) -> Made:
    positions = torch.cat([torch.arange(8), torch.arange(16)])[None].expand(2, -1)
    return Packed().to(dtype), (normal(dtype, 2, 24, DIM), positions)


PIECES = (
    Piece("pytorch/torchtune", "layer, without a cache", lambda dtype: layer(dtype, 24)),
    Piece("pytorch/torchtune", "layer with norms of heads", lambda dtype: layer(dtype, 24, normed=True)),
    Piece("pytorch/torchtune", "layer, prefill", lambda dtype: layer(dtype, 24, 0)),
    Piece("pytorch/torchtune", "layer, decode", lambda dtype: layer(dtype, 1, 40)),
    Piece("pytorch/torchtune", "layer over packed samples", packed),
)
