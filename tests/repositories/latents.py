"""In the manner of remote code on the Hub: DeepSeek-V2 (whose code Kimi K2 shares with V3) and MiniCPM3."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal, of_experts

DIM, ROOM = 512, 320


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype
        x = x.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * x.to(dtype)


def swapped(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def sorted_lanes(x: Tensor) -> Tensor:
    b, h, s, d = x.shape
    return x.view(b, h, s, d // 2, 2).transpose(4, 3).reshape(b, h, s, d)


def of_deepseek(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
    q, k = sorted_lanes(q), sorted_lanes(k)
    return q * cos + swapped(q) * sin, k * cos + swapped(k) * sin


def of_minicpm(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    dtype = k.dtype
    cos, sin = cos[ids].unsqueeze(1), sin[ids].unsqueeze(1)
    q, k = q.to(dtype=torch.float32), k.to(dtype=torch.float32)
    return (q * cos + swapped(q) * sin).to(dtype=dtype), (k * cos + swapped(k) * sin).to(dtype=dtype)


def causal(s: int, past: int, dtype: torch.dtype) -> Tensor:
    """As transformers' masks were made: `[1, 1, s, past + s]`, the least number of a dtype above the diagonal."""
    mask = torch.full((s, s), torch.finfo(dtype).min)
    there = torch.arange(mask.size(-1))
    mask.masked_fill_(there < (there + 1).view(mask.size(-1), 1), 0)
    mask = mask.to(dtype)
    if past > 0:
        mask = torch.cat([torch.zeros(s, past, dtype=dtype), mask], dim=-1)
    return mask[None, None, :, :].expand(1, 1, s, s + past)


class Latent(nn.Module):
    def __init__(self, heads: int, c: int, r: int, n: int, e: int, rope, room: int = ROOM) -> None:
        super().__init__()
        self.heads, self.c, self.r, self.n, self.e, self.rope = heads, c, r, n, e, rope
        self.q_a_proj, self.q_a_layernorm, self.q_b_proj = linear(DIM, 256), Norm(256), linear(256, heads * (n + r))
        self.kv_a_proj_with_mqa, self.kv_a_layernorm = linear(DIM, c + r), Norm(c)
        self.kv_b_proj, self.o_proj = linear(c, heads * (n + e)), linear(heads * e, DIM)
        turned = torch.cat((angles(room, r), angles(room, r)), dim=-1)
        self.register_buffer("cos_cached", turned.cos())
        self.register_buffer("sin_cached", turned.sin())

    def forward(self, x: Tensor, ids: Tensor, past: tuple[Tensor, Tensor] | None = None, masked: bool = True):
        b, s, _ = x.size()
        heads, n, r, e = self.heads, self.n, self.r, self.e
        q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).view(b, s, heads, n + r).transpose(1, 2)
        q_nope, q_pe = torch.split(q, [n, r], dim=-1)
        latent, k_pe = torch.split(self.kv_a_proj_with_mqa(x), [self.c, r], dim=-1)
        k_pe = k_pe.view(b, s, 1, r).transpose(1, 2)
        kv = self.kv_b_proj(self.kv_a_layernorm(latent)).view(b, s, heads, n + e).transpose(1, 2)
        k_nope, values = torch.split(kv, [n, e], dim=-1)
        t = s + (past[0].shape[-2] if past is not None else 0)
        cos, sin = self.cos_cached[:t].to(dtype=values.dtype), self.sin_cached[:t].to(dtype=values.dtype)
        q_pe, k_pe = self.rope(q_pe, k_pe, cos, sin, ids)
        queries = k_pe.new_empty(b, heads, s, n + r)
        queries[:, :, :, :n] = q_nope
        queries[:, :, :, n:] = q_pe
        keys = k_pe.new_empty(b, heads, s, n + r)
        keys[:, :, :, :n] = k_nope
        keys[:, :, :, n:] = k_pe
        if past is not None:
            keys, values = torch.cat([past[0], keys], dim=-2), torch.cat([past[1], values], dim=-2)
        weights = torch.matmul(queries, keys.transpose(2, 3)) * (n + r) ** -0.5
        if masked:
            weights = weights + causal(s, t - s, x.dtype)
        weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(queries.dtype)
        out = torch.matmul(weights, values).transpose(1, 2).contiguous().reshape(b, s, heads * e)
        return self.o_proj(out), (keys, values)


class Block(nn.Module):
    """A layer with MiniCPM's scale of what is added, 1 for DeepSeek."""

    def __init__(self, attention: nn.Module, scale: float) -> None:
        super().__init__()
        self.self_attn, self.before, self.after = attention, Norm(DIM), Norm(DIM)
        self.gate_proj, self.up_proj, self.down_proj = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)
        self.scale = scale

    def forward(self, x: Tensor, *how):
        y, kept = self.self_attn(self.before(x), *how)
        x = x + y * self.scale if self.scale != 1 else x + y
        y = self.after(x)
        y = self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))
        return (x + y * self.scale if self.scale != 1 else x + y), kept


def deepseek(dtype: torch.dtype, s: int, past: int = 0) -> Made:
    attention = Latent(16, 512, 64, 128, 128, of_deepseek)
    return made(dtype, attention, 1, s, past)


def minicpm(dtype: torch.dtype, s: int, past: int = 0) -> Made:
    return made(dtype, Latent(8, 256, 32, 64, 64, of_minicpm), 1.4 / 62**0.5, s, past)


def made(dtype: torch.dtype, of: Latent, scale: float, s: int, past: int) -> Made:
    ids = torch.arange(past, past + s).unsqueeze(0)
    kept = (normal(dtype, 2, of.heads, past, of.n + of.r), normal(dtype, 2, of.heads, past, of.e)) if past else None
    return Block(of, scale).to(dtype), (normal(dtype, 2, s, DIM), ids, kept, s > 1)


class Gate(nn.Module):
    """How experts are chosen: "greedy" and "group_limited_greedy" of V2, "noaux_tc" of V3 and Kimi K2."""

    def __init__(self, method: str, experts: int = 64, groups: int = 8) -> None:
        super().__init__()
        self.method, self.experts, self.groups = method, experts, groups
        self.weight = nn.Parameter(torch.randn(experts, DIM) * DIM**-0.5)
        self.e_score_correction_bias = nn.Parameter(torch.randn(experts) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.view(-1, x.shape[-1])
        logits = F.linear(x.type(torch.float32), self.weight.type(torch.float32), None)
        if self.method == "noaux_tc":
            return self.corrected(logits.sigmoid())
        scores = logits.softmax(dim=-1, dtype=torch.float32)
        choice = scores
        if self.method == "group_limited_greedy":
            of_group = scores.view(x.shape[0], self.groups, -1).max(dim=-1).values
            choice = scores.masked_fill(~self.kept(of_group, 3).bool(), 0.0)
        shares, chosen = torch.topk(choice, k=6, dim=-1, sorted=False)
        return of_experts(shares * 16.0, chosen, self.experts)

    def kept(self, of_group: Tensor, count: int) -> Tensor:
        best = torch.topk(of_group, k=count, dim=-1, sorted=False)[1]
        mask = torch.zeros_like(of_group)
        mask.scatter_(1, best, 1)
        size = self.experts // self.groups
        return mask.unsqueeze(-1).expand(-1, self.groups, size).reshape(-1, self.experts)

    def corrected(self, scores: Tensor) -> Tensor:
        choice = scores.view(-1, self.experts) + self.e_score_correction_bias.unsqueeze(0)
        of_group = choice.view(-1, self.groups, self.experts // self.groups).topk(2, dim=-1)[0].sum(dim=-1)
        chosen = torch.topk(
            choice.masked_fill(~self.kept(of_group, min(4, self.groups)).bool(), 0.0), k=8, dim=-1, sorted=False
        )[1]
        shares = scores.gather(1, chosen)
        shares = shares / (shares.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
        return of_experts(shares, chosen, self.experts)


def gate(dtype: torch.dtype, method: str, groups: int = 8) -> Made:
    return Gate(method, groups=groups), (normal(dtype, 16, DIM),)


PIECES = (
    Piece("deepseek-ai/DeepSeek-V2", "block, prefill", lambda dtype: deepseek(dtype, 24)),
    Piece("deepseek-ai/DeepSeek-V2", "block, a prompt behind another", lambda dtype: deepseek(dtype, 8, 40)),
    Piece("deepseek-ai/DeepSeek-V2", "block, decode", lambda dtype: deepseek(dtype, 1, 256)),
    Piece("deepseek-ai/DeepSeek-V2", "router, greedy", lambda dtype: gate(dtype, "greedy"), attentions=0),
    Piece("deepseek-ai/DeepSeek-V2", "router, groups", lambda dtype: gate(dtype, "group_limited_greedy"), attentions=0),
    Piece("moonshotai/Kimi-K2", "router", lambda dtype: gate(dtype, "noaux_tc", 1), attentions=0),
    Piece("deepseek-ai/DeepSeek-V3", "router, groups", lambda dtype: gate(dtype, "noaux_tc"), attentions=0),
    Piece("openbmb/MiniCPM3", "block, prefill", lambda dtype: minicpm(dtype, 24)),
    Piece("openbmb/MiniCPM3", "block, decode", lambda dtype: minicpm(dtype, 1, 256)),
)
