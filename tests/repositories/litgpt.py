"""In the manner of Lightning-AI/litgpt: tables and masks looked up by position, caches written by `index_copy_`."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal, of_experts

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 96


class Norm(nn.Module):
    def __init__(self, dim: int, offset: bool = False) -> None:
        super().__init__()
        self.weight, self.offset = nn.Parameter(torch.ones(dim)), offset

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.float()
        normed = x * torch.rsqrt(torch.mean(x * x, dim=-1, keepdim=True) + 1e-6)
        weight = (1 + self.weight) if self.offset else self.weight
        return (normed * weight.float()).to(dtype=dtype)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    if cos.dim() == 3:
        cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    half = x.size(-1) // 2
    swapped = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return (x * cos + swapped * sin).to(dtype=x.dtype)


def rotated_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return rotated(x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d), cos, sin)


class Cache(nn.Module):
    def __init__(self, heads: int, keys: int, values: int) -> None:
        super().__init__()
        self.register_buffer("k", torch.randn(2, heads, ROOM, keys))
        self.register_buffer("v", torch.randn(2, heads, ROOM, values))

    def forward(self, positions: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        n = k.size(0)
        return self.k[:n, ...].index_copy_(-2, positions, k), self.v[:n, ...].index_copy_(-2, positions, v)


class Gpt(nn.Module):
    """What is around the blocks: tables of angles and a table of masks."""

    def __init__(self, block: nn.Module, lanes: int) -> None:
        super().__init__()
        self.block = block
        turned = angles(ROOM, lanes).repeat(1, 2)
        self.register_buffer("cos", turned.cos())
        self.register_buffer("sin", turned.sin())
        seen = torch.ones((ROOM, ROOM), dtype=torch.bool)
        self.register_buffer("mask_cache", torch.tril(seen).unsqueeze(0).unsqueeze(0))

    def forward(self, x: Tensor, positions: Tensor | None = None, end: int | None = None) -> Tensor:
        if positions is None:
            s = x.size(1)
            return self.block(x, self.cos[:s].unsqueeze(0), self.sin[:s].unsqueeze(0))
        cos, sin = self.cos.index_select(0, positions), self.sin.index_select(0, positions)
        mask = self.mask_cache.index_select(2, positions)[..., :end]
        return self.block(x, cos.unsqueeze(0), sin.unsqueeze(0), mask, positions, end)


def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, cap: float | None) -> Tensor:
    scale = 1.0 / math.sqrt(q.size(-1))
    if cap is None:
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.0, scale=scale, is_causal=mask is None)
        return y.transpose(1, 2)
    scores = torch.tanh(q @ k.mT * scale / cap) * cap
    if mask is None:
        mask = torch.ones(q.size(2), q.size(2), dtype=q.dtype, device=q.device).triu(diagonal=1)
        mask.masked_fill_(mask.bool(), torch.finfo(q.dtype).min)
    return (F.softmax(scores + mask, dim=-1, dtype=torch.float).to(dtype=q.dtype) @ v).transpose(1, 2)


class Attention(nn.Module):
    def __init__(self, normed: bool = False, window: int = 0, cap: float | None = None, lanes: int = D) -> None:
        super().__init__()
        self.qkv, self.proj = linear(DIM, (HEADS + 2 * GROUPS) * D), linear(HEADS * D, DIM)
        self.norm_q, self.norm_k = (Norm(D), Norm(D)) if normed else (None, None)
        self.window, self.cap, self.lanes = window, cap, lanes
        self.kv_cache = Cache(GROUPS, D, D)

    def forward(self, x: Tensor, cos, sin, mask=None, positions: Tensor | None = None, end: int | None = None):
        b, s, _ = x.size()
        q, k, v = self.qkv(x).split((HEADS * D, GROUPS * D, GROUPS * D), dim=-1)
        q, k, v = q.view(b, s, HEADS, D), k.view(b, s, GROUPS, D), v.view(b, s, GROUPS, D)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if self.norm_q is not None and self.norm_k is not None:
            q, k = self.norm_q(q), self.norm_k(k)
        n = self.lanes
        q = torch.cat((rotated(q[..., :n], cos, sin), q[..., n:]), dim=-1)
        k = torch.cat((rotated(k[..., :n], cos, sin), k[..., n:]), dim=-1)
        if positions is not None:
            k, v = self.kv_cache(positions, k, v)
            k, v = k[..., :end, :], v[..., :end, :]
        k, v = (each.repeat_interleave(HEADS // GROUPS, dim=1) for each in (k, v))
        if self.window and positions is None:
            mask = torch.full((s, s), float("-inf"), dtype=q.dtype, device=q.device)
            mask = (mask.triu(diagonal=1) + mask.tril(diagonal=-self.window)).view(1, 1, s, s)
        return self.proj(attend(q, k, v, mask, self.cap).reshape(b, s, HEADS * D))


class Latent(nn.Module):
    """Latent attention that keeps the keys and values of every head."""

    C, Dr, Dn, N = 512, 64, 128, 16

    def __init__(self) -> None:
        super().__init__()
        self.q_a_proj, self.q_a_norm = linear(DIM, 256), Norm(256)
        self.q_b_proj = linear(256, self.N * (self.Dn + self.Dr))
        self.kv_a_proj, self.kv_a_norm = linear(DIM, self.C + self.Dr), Norm(self.C)
        self.kv_b_proj = linear(self.C, self.N * 2 * self.Dn)
        self.proj = linear(self.N * self.Dn, DIM)
        self.kv_cache = Cache(self.N, self.Dn + self.Dr, self.Dn)

    def forward(self, x: Tensor, cos, sin, mask=None, positions: Tensor | None = None, end: int | None = None):
        b, s, _ = x.size()
        q = self.q_b_proj(self.q_a_norm(self.q_a_proj(x))).view(b, s, -1, self.Dn + self.Dr).transpose(1, 2)
        q_pass, q_rot = torch.split(q, [self.Dn, self.Dr], dim=-1)
        k_pass, k_rot = torch.split(self.kv_a_proj(x), [self.C, self.Dr], dim=-1)
        k_pass = self.kv_b_proj(self.kv_a_norm(k_pass)).view(b, s, self.N, -1).transpose(1, 2)
        k_pass, v = torch.split(k_pass, [self.Dn, self.Dn], dim=-1)
        k_rot = rotated_pairs(k_rot.view(b, 1, s, self.Dr), cos, sin).expand(*k_pass.shape[:-1], -1)
        q = torch.cat((q_pass, rotated_pairs(q_rot, cos, sin)), dim=-1)
        k = torch.cat((k_pass, k_rot), dim=-1)
        if positions is not None:
            k, v = self.kv_cache(positions, k, v)
            k, v = k[..., :end, :], v[..., :end, :]
        return self.proj(attend(q, k, v, mask, None).reshape(b, s, self.N * self.Dn))


class Block(nn.Module):
    """Norms before and behind, as of Gemma; without `further` as of Llama."""

    def __init__(self, attention: nn.Module, further: bool) -> None:
        super().__init__()
        self.norm_1, self.attn, self.norm_2 = Norm(DIM, further), attention, Norm(DIM, further)
        self.post_attention_norm = Norm(DIM, further) if further else nn.Identity()
        self.post_mlp_norm = Norm(DIM, further) if further else nn.Identity()
        self.fc_1, self.fc_2, self.proj = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)

    def forward(self, x: Tensor, cos, sin, mask=None, positions=None, end=None) -> Tensor:
        y = self.post_attention_norm(self.attn(self.norm_1(x), cos, sin, mask, positions, end)) + x
        h = self.norm_2(y)
        return self.post_mlp_norm(self.proj(F.silu(self.fc_1(h)) * self.fc_2(h))) + y


def block(dtype: torch.dtype, s: int, start: int | None = None, further: bool = False, **how) -> Made:
    model = Gpt(Block(Attention(**how), further), how.get("lanes", D)).to(dtype)
    x = normal(dtype, 2, s, DIM)
    return model, (x,) if start is None else (x, torch.arange(start, start + s), start + s)


def latent(dtype: torch.dtype, s: int, start: int | None = None) -> Made:
    model = Gpt(Block(Latent(), False), Latent.Dr).to(dtype)
    x = normal(dtype, 2, s, DIM)
    return model, (x,) if start is None else (x, torch.arange(start, start + s), start + s)


class Router(nn.Module):
    """Groups of experts, chosen by sigmoid scores and a bias."""

    def __init__(self, experts: int = 32, groups: int = 8) -> None:
        super().__init__()
        self.experts, self.groups = experts, groups
        self.weight = nn.Parameter(torch.randn(experts, DIM) * DIM**-0.5)
        self.register_buffer("bias", torch.randn(experts))

    def forward(self, x: Tensor) -> Tensor:
        scores = F.linear(x.type(torch.float32), self.weight.type(torch.float32)).sigmoid()
        choice = scores.view(-1, self.experts) + self.bias.unsqueeze(0)
        size = self.experts // self.groups
        of_group = choice.view(-1, self.groups, size).topk(2, dim=-1)[0].sum(dim=-1)
        best = torch.topk(of_group, k=4, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(of_group)
        mask.scatter_(1, best, 1)
        kept = mask.unsqueeze(-1).expand(-1, self.groups, size).reshape(-1, self.experts)
        chosen = torch.topk(choice.masked_fill(~kept.bool(), 0.0), k=6, dim=-1, sorted=False)[1]
        shares = scores.gather(1, chosen)
        shares /= shares.sum(dim=-1, keepdim=True) + 1e-20
        return of_experts(shares, chosen, self.experts)


NAME = "Lightning-AI/litgpt"
PIECES = (
    Piece(NAME, "block, prompt without a cache", lambda dtype: block(dtype, 24)),
    Piece(NAME, "block, prefill", lambda dtype: block(dtype, 24, 0)),
    Piece(NAME, "block, decode", lambda dtype: block(dtype, 1, 40)),
    Piece(NAME, "block with norms of heads and a window", lambda dtype: block(dtype, 24, normed=True, window=8)),
    Piece(NAME, "block with a quarter of rotated lanes, decode", lambda dtype: block(dtype, 1, 40, lanes=16)),
    Piece(
        NAME,
        "block with soft caps",
        lambda dtype: block(dtype, 24, further=True, cap=50.0),
        why="tanh",
    ),
    Piece(NAME, "latent block, prompt without a cache", lambda dtype: latent(dtype, 24)),
    Piece(NAME, "latent block, decode", lambda dtype: latent(dtype, 1, 40)),
    Piece(NAME, "router", lambda dtype: (Router(), (normal(dtype, 16, DIM),)), attentions=0),
)
