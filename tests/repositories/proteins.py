"""In the manner of facebookresearch/esm and aqlaboratory/openfold."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, D = 512, 8, 64


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return (x * cos[:, : x.shape[-2], :]) + (torch.cat((-two, one), dim=-1) * sin[:, : x.shape[-2], :])


class Residues(nn.Module):
    """ESM-2: positions before sequences, heads of all sequences in one dim, padding filled in."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (linear(DIM, DIM, True) for _ in range(4))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, padding: Tensor) -> Tensor:
        s, b, _ = x.size()
        q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        q *= D**-0.5
        q, k, v = (each.contiguous().view(s, b * HEADS, D).transpose(0, 1) for each in (q, k, v))
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        scores = torch.bmm(q, k.transpose(1, 2)).view(b, HEADS, s, s)
        scores = scores.masked_fill(padding.unsqueeze(1).unsqueeze(2).to(torch.bool), float("-inf"))
        shares = F.softmax(scores.view(b * HEADS, s, s), dim=-1, dtype=torch.float32).type_as(x)
        y = torch.bmm(F.dropout(shares, p=0.0, training=False), v)
        return self.out_proj(y.transpose(0, 1).contiguous().view(s, b, DIM))


def residues(dtype: torch.dtype) -> Made:
    halves = angles(24, D)
    table = torch.cat((halves, halves), dim=-1)[None]
    padding = torch.arange(24) >= torch.tensor([[19], [24]])
    return Residues().to(dtype), (normal(dtype, 24, 2, DIM), table.cos().to(dtype), table.sin().to(dtype), padding)


class Rows(nn.Module):
    """OpenFold: rows of an alignment, a mask and a bias of pairs added one after the other, a gate behind."""

    def __init__(self, wide: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.width = heads, wide // heads
        self.linear_q, self.linear_k, self.linear_v = (linear(wide, wide) for _ in range(3))
        self.linear_g, self.linear_o, self.linear_z = (
            linear(wide, wide, True),
            linear(wide, wide, True),
            linear(64, heads),
        )
        self.norm_m, self.norm_z = nn.LayerNorm(wide), nn.LayerNorm(64)

    def split(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], self.heads, -1)

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        m = self.norm_m(m)
        lowered = (1e9 * (mask - 1))[..., :, None, None, :]
        pairs = self.linear_z(self.norm_z(z)).permute(2, 0, 1).unsqueeze(-4)
        q, k, v = (self.split(each(m)) for each in (self.linear_q, self.linear_k, self.linear_v))
        scores = torch.matmul(q.permute(0, 2, 1, 3), k.permute(0, 2, 3, 1)) * (1 / math.sqrt(self.width))
        for bias in (lowered, pairs):
            scores = scores + bias
        y = torch.matmul(torch.softmax(scores, dim=-1), v.permute(0, 2, 1, 3)).transpose(-2, -3)
        y = y * self.split(torch.sigmoid(self.linear_g(m)))
        return self.linear_o(y.reshape(*y.shape[:-2], -1))


def rows(dtype: torch.dtype) -> Made:
    mask = (torch.arange(24) < torch.tensor([[19], [24], [24]])).to(dtype)
    return Rows().to(dtype), (normal(dtype, 3, 24, 256), normal(dtype, 24, 24, 64), mask)


PIECES = (
    Piece("facebookresearch/esm", "attention of residues, padded", residues),
    Piece("aqlaboratory/openfold", "attention of rows with a bias of pairs", rows, why="assume"),
)
