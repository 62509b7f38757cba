"""In the manner of pytorch-labs/gpt-fast: a row of a table of masks for each position, caches written by index."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 128


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(torch.mean(wide * wide, dim=-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


def rotated(x: Tensor, table: Tensor) -> Tensor:
    pairs = x.float().reshape(*x.shape[:-1], -1, 2)
    table = table.view(1, pairs.size(1), 1, pairs.size(3), 2)
    one, two, cos, sin = pairs[..., 0], pairs[..., 1], table[..., 0], table[..., 1]
    return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(3).type_as(x)


class Block(nn.Module):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.wqkv, self.wo = linear(DIM, (HEADS + 2 * GROUPS) * D), linear(DIM, DIM)
        self.w1, self.w3, self.w2 = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        self.attention_norm, self.ffn_norm = Norm(), Norm()
        self.register_buffer("k_cache", torch.randn(batch, GROUPS, ROOM, D))
        self.register_buffer("v_cache", torch.randn(batch, GROUPS, ROOM, D))
        turned = angles(ROOM, D)
        self.register_buffer("table", torch.stack([turned.cos(), turned.sin()], dim=-1))
        self.register_buffer("causal_mask", torch.tril(torch.ones(ROOM, ROOM, dtype=torch.bool)))

    def attention(self, x: Tensor, table: Tensor, mask: Tensor, positions: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = self.wqkv(x).split([HEADS * D, GROUPS * D, GROUPS * D], dim=-1)
        q, k, v = q.view(b, s, HEADS, D), k.view(b, s, GROUPS, D), v.view(b, s, GROUPS, D)
        q, k = rotated(q, table), rotated(k, table)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        keys, values = self.k_cache, self.v_cache
        keys[:, :, positions] = k
        values[:, :, positions] = v
        keys = keys.repeat_interleave(HEADS // GROUPS, dim=1)
        values = values.repeat_interleave(HEADS // GROUPS, dim=1)
        y = F.scaled_dot_product_attention(q, keys, values, attn_mask=mask, dropout_p=0.0)
        return self.wo(y.transpose(1, 2).contiguous().view(b, s, DIM))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        mask, table = self.causal_mask[None, None, positions], self.table[positions]
        h = x + self.attention(self.attention_norm(x), table, mask, positions)
        y = self.ffn_norm(h)
        return h + self.w2(F.silu(self.w1(y)) * self.w3(y))


def block(dtype: torch.dtype, s: int, start: int = 0, batch: int = 1) -> Made:
    return Block(batch).to(dtype), (normal(dtype, batch, s, DIM), torch.arange(start, start + s))


class Int8(nn.Module):
    """A projection with an int8 weight that is scaled afterwards."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randint(-127, 128, (512, DIM), dtype=torch.int8))
        self.register_buffer("scales", torch.rand(512) * 1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(dtype=x.dtype)) * self.scales


PIECES = (
    Piece("pytorch-labs/gpt-fast", "block, prefill", lambda dtype: block(dtype, 24)),
    Piece("pytorch-labs/gpt-fast", "block, decode", lambda dtype: block(dtype, 1, 40)),
    Piece("pytorch-labs/gpt-fast", "block, decode of a batch", lambda dtype: block(dtype, 1, 40, 4)),
    Piece(
        "pytorch-labs/gpt-fast",
        "int8 weights, projection",
        lambda dtype: (Int8().to(dtype), (normal(dtype, 16, DIM),)),
        attentions=0,
    ),
)
