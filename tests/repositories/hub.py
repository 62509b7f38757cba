"""In the manner of models that came with code of their own, and of a few that are trained by what they come with.

baichuan-inc/Baichuan2, InternLM/InternLM, bigcode-project/starcoder, microsoft/phi-2, facebookresearch/lingua and
KellerJordan/modded-nanogpt.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

B, S, HEADS, GROUPS, D = 2, 24, 8, 2, 64
DIM = HEADS * D


def slopes(heads: int) -> Tensor:
    """By how much each head lowers a score for each position between query and key."""
    first = 2 ** (-(2 ** -(math.log2(heads) - 3)))
    return torch.tensor([first ** (n + 1) for n in range(heads)])


class Baichuan(nn.Module):
    """Positions as a slope over keys, summed with the order of positions once and kept."""

    def __init__(self) -> None:
        super().__init__()
        self.W_pack, self.o_proj = linear(DIM, 3 * DIM), linear(DIM, DIM)
        future = torch.triu(torch.full((S, S), float("-inf")), 1)
        self.register_buffer("future", future + slopes(HEADS)[:, None, None] * torch.arange(S), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.size()
        packed = self.W_pack(x).unflatten(-1, (3, DIM)).unsqueeze(0).transpose(0, -2).squeeze(-2)
        q, k, v = (each.view(b, s, HEADS, D).transpose(1, 2) for each in packed)
        scores = torch.matmul(q, k.transpose(2, 3)) / math.sqrt(D) + self.future[:, :s, :s].to(q.dtype)
        scores = torch.max(scores, torch.tensor(torch.finfo(scores.dtype).min))
        out = torch.matmul(F.softmax(scores, dim=-1), v)
        return self.o_proj(out.transpose(1, 2).reshape(b, s, DIM))


def baichuan(dtype: torch.dtype) -> Made:
    return Baichuan().to(dtype), (normal(dtype, B, S, DIM),)


def turned_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


class Intern(nn.Module):
    """One projection in which each group of queries stands before its key and its value; a cache that is joined to."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv, self.wo = linear(DIM, (HEADS + 2 * GROUPS) * D), linear(DIM, DIM)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor], mask: Tensor) -> tuple:
        b, s, _ = x.size()
        qkv = self.wqkv(x).view(b, s, GROUPS, 2 + HEADS // GROUPS, D)
        q = qkv[..., : HEADS // GROUPS, :].reshape(b, s, HEADS, D).transpose(1, 2)
        k, v = qkv[..., -2, :].transpose(1, 2), qkv[..., -1, :].transpose(1, 2)
        q, k = turned_halves(q, cos, sin), turned_halves(k, cos, sin)
        k, v = torch.cat([past[0], k], dim=2), torch.cat([past[1], v], dim=2)
        wide = (each[:, :, None].expand(-1, -1, HEADS // GROUPS, -1, -1) for each in (k, v))
        keys, values = (each.reshape(b, HEADS, -1, D) for each in wide)
        scores = torch.matmul(q, keys.transpose(2, 3)) / math.sqrt(D) + mask
        out = torch.matmul(F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype), values)
        return self.wo(out.transpose(1, 2).contiguous().reshape(b, s, DIM)), k, v


def intern(dtype: torch.dtype, tokens: int) -> Made:
    halves = angles(S + tokens, D)[S:]
    table = torch.cat((halves, halves), dim=-1)
    mask = torch.full((tokens, S + tokens), torch.finfo(dtype).min).triu(S + 1)
    past = normal(dtype, B, GROUPS, S, D), normal(dtype, B, GROUPS, S, D)
    tables = table.cos().to(dtype), table.sin().to(dtype)
    return Intern().to(dtype), (normal(dtype, B, tokens, DIM), *tables, past, mask.expand(B, 1, -1, -1).to(dtype))


class Star(nn.Module):
    """One key and one value for all heads, kept beside each other; queries of all heads in one product."""

    def __init__(self) -> None:
        super().__init__()
        self.c_attn, self.c_proj = linear(DIM, DIM + 2 * D, True), linear(DIM, DIM, True)

    def forward(self, x: Tensor, past: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        b, s, _ = x.shape
        query, new = self.c_attn(x).split((DIM, 2 * D), dim=2)
        kept = torch.cat((past, new), dim=-2)
        key, value = kept.split((D, D), dim=-1)
        t = key.size(1)
        query = query.reshape(b, s * HEADS, D)
        room = torch.empty((b, s * HEADS, t), device=query.device, dtype=query.dtype)
        scores = torch.baddbmm(room, query, key.transpose(-1, -2), beta=0, alpha=D**-0.5).view(b, s, HEADS, t)
        least = torch.full([], torch.finfo(torch.float32).min, device=scores.device)
        shares = F.softmax(torch.where(mask, scores.float(), least), dim=-1).to(value.dtype)
        return self.c_proj(torch.bmm(shares.view(b, s * HEADS, t), value).view(b, s, DIM)), kept


def star(dtype: torch.dtype, tokens: int) -> Made:
    mask = torch.ones(tokens, S + tokens, dtype=torch.bool).tril(S)[None, :, None].expand(B, -1, 1, -1)
    return Star().to(dtype), (normal(dtype, B, tokens, DIM), normal(dtype, B, S, 2 * D), mask)


class Phi(nn.Module):
    """Half of the lanes rotated in float32; scores of sums over named dims; padding and order as numbers that add."""

    def __init__(self) -> None:
        super().__init__()
        self.Wqkv, self.out_proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        lanes, rest = x[..., : D // 2], x[..., D // 2 :]
        one, two, cos, sin = (each.float() for each in (*lanes.chunk(2, dim=-1), cos[:, None], sin[:, None]))
        return torch.cat([torch.cat([one * cos - two * sin, one * sin + two * cos], -1).to(x.dtype), rest], dim=-1)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, seen: Tensor) -> Tensor:
        b, s, _ = x.shape
        qkv = self.Wqkv(x).view(b, s, 3, HEADS, D)
        both = [self.turned(qkv[:, :, n], cos, sin) for n in range(2)]
        q, k, v = torch.stack([*both, qkv[:, :, 2]], dim=2).unbind(dim=2)
        scores = torch.einsum("bthd,bshd->bhts", q.float(), k.float() * (1.0 / math.sqrt(D)))
        padding = torch.full((b, s), -10000.0, dtype=scores.dtype, device=scores.device)
        padding.masked_fill_(seen, 0.0)
        order = torch.triu(torch.full((s, s), -10000.0, device=scores.device), 1)
        scores = scores + padding[:, None, None] + order.to(scores.dtype)
        shares = torch.softmax(scores, dim=-1).to(v.dtype)
        return self.out_proj(torch.einsum("bhts,bshd->bthd", shares, v).reshape(b, s, DIM))


def phi(dtype: torch.dtype) -> Made:
    halves = angles(S, D // 2)
    seen = torch.arange(S)[None] < torch.tensor([[S], [S - 4]])
    return Phi().to(dtype), (normal(dtype, B, S, DIM), halves.cos().to(dtype), halves.sin().to(dtype), seen)


class Lingua(nn.Module):
    """Pairs of lanes times matrices, summed; the matrices made here, or passed in."""

    def __init__(self, made_here: bool) -> None:
        super().__init__()
        self.made_here = made_here
        self.wq, self.wk, self.wv, self.wo = (linear(DIM, each) for each in (DIM, GROUPS * D, GROUPS * D, DIM))

    def turned(self, x: Tensor, matrices: Tensor) -> Tensor:
        pairs = x.reshape(*x.shape[:-1], -1, 1, 2)
        return (pairs * matrices.view(1, -1, 1, D // 2, 2, 2).float()).sum(5).flatten(3).type_as(x)

    def forward(self, x: Tensor, turning: Tensor) -> Tensor:
        b, s, _ = x.shape
        if self.made_here:
            cos, sin = turning.cos(), turning.sin()
            turning = torch.stack((cos, -sin, sin, cos), dim=-1).view(*turning.shape, 2, 2)
        q = self.turned(self.wq(x).view(b, s, HEADS, D), turning[:s])
        k = self.turned(self.wk(x).view(b, s, GROUPS, D), turning[:s])
        wide = (each[:, :, :, None].expand(-1, -1, -1, HEADS // GROUPS, -1) for each in (k, self.wv(x).view(k.shape)))
        keys, values = (each.reshape(b, s, HEADS, D).transpose(1, 2) for each in wide)
        out = F.scaled_dot_product_attention(q.transpose(1, 2), keys, values, is_causal=True)
        return self.wo(out.transpose(1, 2).contiguous().reshape(b, s, DIM))


def lingua(dtype: torch.dtype, made_here: bool) -> Made:
    turned = angles(S, D)
    cos, sin = turned.cos(), turned.sin()
    matrices = torch.stack((cos, -sin, sin, cos), dim=-1).view(S, D // 2, 2, 2)
    return Lingua(made_here).to(dtype), (normal(dtype, B, S, DIM), turned if made_here else matrices)


class Modded(nn.Module):
    """Queries and keys normed without weights, a quarter of the pairs turned, values mixed with those of a table."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv_w, self.c_proj = nn.Parameter(torch.randn(3, DIM, DIM) * DIM**-0.5), linear(DIM, DIM)
        self.lambdas = nn.Parameter(torch.tensor([0.5, 0.5]))
        speed = torch.cat([(1 / 1024) ** torch.linspace(0, 1, D // 4), torch.zeros(D // 4)])
        turned = torch.einsum("i,j->ij", torch.arange(S).float(), speed)
        self.cos, self.sin = nn.Buffer(turned.cos(), persistent=False), nn.Buffer(turned.sin(), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        cos, sin = (each[None, : x.size(1), None] for each in (self.cos, self.sin))
        one, two = x.float().chunk(2, dim=-1)
        return torch.cat((one * cos + two * sin, one * (-sin) + two * cos), 3).type_as(x)

    def forward(self, x: Tensor, of_words: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = F.linear(x, self.qkv_w.flatten(end_dim=1).type_as(x)).view(b, s, 3 * HEADS, D).chunk(3, dim=-2)
        q, k = (self.turned(F.rms_norm(each, (D,))).transpose(1, 2) for each in (q, k))
        v = (self.lambdas[0] * v + self.lambdas[1] * of_words.view_as(v)).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.12)
        return self.c_proj(out.transpose(1, 2).contiguous().view(b, s, DIM))


def modded(dtype: torch.dtype) -> Made:
    return Modded().to(dtype), (normal(dtype, B, S, DIM), normal(dtype, B, S, DIM))


BAICHUAN, INTERN, STAR = "baichuan-inc/Baichuan2", "InternLM/InternLM", "bigcode-project/starcoder"
PIECES = (
    Piece(BAICHUAN, "attention with slopes, prefill", baichuan),
    Piece(INTERN, "attention, decode", lambda dtype: intern(dtype, tokens=1)),
    Piece(INTERN, "attention, a prompt behind another", lambda dtype: intern(dtype, tokens=5)),
    Piece(STAR, "attention of one key, decode", lambda dtype: star(dtype, tokens=1)),
    Piece(STAR, "attention of one key, a prompt behind another", lambda dtype: star(dtype, tokens=6)),
    Piece("microsoft/phi-2", "attention, padded", phi, why="a query that sees no key"),
    Piece("facebookresearch/lingua", "attention, matrices made in it", lambda dtype: lingua(dtype, made_here=True)),
    Piece("facebookresearch/lingua", "attention, matrices passed in", lambda dtype: lingua(dtype, made_here=False)),
    Piece("KellerJordan/modded-nanogpt", "attention", modded),
)
