"""In the manner of the remote code of QwenLM/Qwen: halves that are unbound, a row of numbers times the queries."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, D, TRAINED, ROOM = 512, 8, 64, 32, 128


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).type_as(x) * self.weight


def swapped(x: Tensor) -> Tensor:
    one, two = x.reshape(*x.shape[:-1], 2, -1).unbind(dim=-2)
    return torch.cat((-two, one), dim=-1)


def rotated(x: Tensor, table: list[Tensor]) -> Tensor:
    lanes = table[0].shape[-1]
    cos, sin = table
    some, rest = x[..., :lanes].float(), x[..., lanes:].float()
    return torch.cat((some * cos + swapped(some) * sin, rest), dim=-1).type_as(x)


class Block(nn.Module):
    """`by_torch` as where torch has `scaled_dot_product_attention`; past keys `[b, t, n, d]` are joined."""

    def __init__(self, by_torch: bool) -> None:
        super().__init__()
        self.by_torch = by_torch
        self.ln_1, self.ln_2 = Norm(), Norm()
        self.c_attn, self.c_proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM)
        self.w1, self.w2, self.mlp_proj = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        growth = [math.log(i, TRAINED) if i > TRAINED else 1 for i in range(1, ROOM)]
        self.register_buffer("logn_tensor", torch.tensor(growth)[None, :, None, None], persistent=False)

    def attention(self, x: Tensor, table: list[Tensor], past: tuple[Tensor, Tensor] | None):
        q, k, v = (each.view(*x.shape[:2], HEADS, D) for each in self.c_attn(x).split(DIM, dim=2))
        table = [each[:, -q.shape[1] :, :, :] for each in table]
        q, k = rotated(q, table), rotated(k, table)
        if past is not None:
            k, v = torch.cat((past[0], k), dim=1), torch.cat((past[1], v), dim=1)
        kept, t = (k, v), k.size(1)
        if t > TRAINED:
            q = q * self.logn_tensor[:, t - q.size(1) : t, :, :].type_as(q).expand_as(q)
        mask = None
        if q.size(1) == t:
            mask = torch.tril(torch.ones((t, t), dtype=torch.bool, device=q.device)).view(1, 1, t, t)
        q, k, v = q.permute(0, 2, 1, 3), k.permute(0, 2, 1, 3), v.permute(0, 2, 1, 3)
        if self.by_torch:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2)
        else:
            scores = torch.matmul(q, k.transpose(-1, -2)) / (v.size(-1) ** 0.5)
            if mask is not None:
                scores = torch.where(mask, scores, torch.finfo(scores.dtype).min)
            y = torch.matmul(F.softmax(scores.float(), dim=-1).type(q.dtype), v).transpose(1, 2)
        y = y.contiguous()
        return self.c_proj(y.view(*y.size()[:-2], DIM)), kept

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None = None):
        y, kept = self.attention(self.ln_1(x), [cos, sin], past)
        x = y + x
        h = self.ln_2(x)
        return x + self.mlp_proj(self.w1(h) * F.silu(self.w2(h))), kept


def block(dtype: torch.dtype, by_torch: bool, s: int, past: int = 0) -> Made:
    turned = angles(past + s, D).repeat(1, 2)[None, :, None]
    kept = (normal(dtype, 2, past, HEADS, D), normal(dtype, 2, past, HEADS, D)) if past else None
    return Block(by_torch).to(dtype), (normal(dtype, 2, s, DIM), turned.cos(), turned.sin(), kept)


PIECES = (
    Piece("QwenLM/Qwen", "block, by the operator of torch, prefill", lambda dtype: block(dtype, True, 24)),
    Piece("QwenLM/Qwen", "block, by hand, prefill", lambda dtype: block(dtype, False, 24)),
    Piece("QwenLM/Qwen", "block, by hand, longer than it was trained", lambda dtype: block(dtype, False, 48)),
    Piece("QwenLM/Qwen", "block, by hand, decode", lambda dtype: block(dtype, False, 1, 24)),
    Piece("QwenLM/Qwen", "block, by the operator of torch, decode", lambda dtype: block(dtype, True, 1, 40)),
)
