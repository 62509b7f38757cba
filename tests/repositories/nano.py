"""In the manner of karpathy/nanoGPT and nanochat, and of jingyaogong/minimind: models that are read to learn."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, GROUPS, D, ROOM = 512, 8, 2, 64, 96


class Gpt(nn.Module):
    """nanoGPT's block; `flash` as where torch has `scaled_dot_product_attention`."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash
        self.ln_1, self.ln_2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.c_attn, self.c_proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)
        self.c_fc, self.mlp_proj = linear(DIM, 4 * DIM, True), linear(4 * DIM, DIM, True)
        self.register_buffer("bias", torch.tril(torch.ones(ROOM, ROOM)).view(1, 1, ROOM, ROOM))

    def attention(self, x: Tensor) -> Tensor:
        b, s, c = x.size()
        q, k, v = (each.view(b, s, HEADS, c // HEADS).transpose(1, 2) for each in self.c_attn(x).split(DIM, dim=2))
        if self.flash:
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (1.0 / math.sqrt(k.size(-1)))
            scores = scores.masked_fill(self.bias[:, :, :s, :s] == 0, float("-inf"))
            y = F.softmax(scores, dim=-1) @ v
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, c))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.ln_1(x))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


def gpt(dtype: torch.dtype, flash: bool) -> Made:
    return Gpt(flash).to(dtype), (normal(dtype, 2, 24, DIM),)


def normed(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def turned_back(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    d = x.shape[3] // 2
    one, two = x[..., :d], x[..., d:]
    return torch.cat([one * cos + two * sin, one * (-sin) + two * cos], 3).to(x.dtype)


class Chat(nn.Module):
    """nanochat's block, its cache one tensor [2, B, N, T, D]; norms without weights behind the rotation."""

    def __init__(self) -> None:
        super().__init__()
        self.c_q, self.c_proj = linear(DIM, HEADS * D), linear(DIM, DIM)
        self.c_k, self.c_v = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)
        self.c_fc, self.mlp_proj = linear(DIM, 4 * DIM), linear(4 * DIM, DIM)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor | None, start: int) -> Tensor:
        b, s, _ = x.size()
        q, k = self.c_q(x).view(b, s, HEADS, D), self.c_k(x).view(b, s, GROUPS, D)
        v = self.c_v(x).view(b, s, GROUPS, D)
        q, k = normed(turned_back(q, cos, sin)), normed(turned_back(k, cos, sin))
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if cache is not None:
            cache[0, :, :, start : start + s] = k
            cache[1, :, :, start : start + s] = v
            k, v = cache[0, :, :, : start + s], cache[1, :, :, : start + s]
        t = k.size(2)
        if cache is None or s == t:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        elif s == 1:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=False, enable_gqa=True)
        else:
            mask = torch.zeros((s, t), dtype=torch.bool, device=q.device)
            mask[:, : t - s] = True
            mask[:, t - s :] = torch.tril(torch.ones((s, s), dtype=torch.bool, device=q.device))
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).contiguous().view(b, s, -1))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: Tensor | None = None, start: int = 0) -> Tensor:
        x = x + self.attention(normed(x), cos, sin, cache, start)
        return x + self.mlp_proj(F.relu(self.c_fc(normed(x))).square())


def chat(dtype: torch.dtype, s: int, start: int | None = None) -> Made:
    turned = angles(ROOM, D)[start or 0 :][:s, None]
    tables = turned.cos()[None].to(dtype), turned.sin()[None].to(dtype)
    inputs = normal(dtype, 2, s, DIM), *tables
    cached = (normal(dtype, 2, 2, GROUPS, ROOM, D), start)
    return Chat().to(dtype), inputs if start is None else (*inputs, *cached)


class MindNorm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6))).type_as(x)


def halves_swapped(x: Tensor) -> Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


class Mind(nn.Module):
    """minimind's block: past keys are joined before heads are repeated; the mask is added to the last columns."""

    def __init__(self, flash: bool) -> None:
        super().__init__()
        self.flash = flash
        self.q_proj, self.o_proj = linear(DIM, HEADS * D), linear(HEADS * D, DIM)
        self.k_proj, self.v_proj = linear(DIM, GROUPS * D), linear(DIM, GROUPS * D)
        self.q_norm, self.k_norm, self.before, self.after = MindNorm(D), MindNorm(D), MindNorm(DIM), MindNorm(DIM)
        self.gate_proj, self.up_proj, self.down_proj = linear(DIM, 256), linear(DIM, 256), linear(256, DIM)

    def attention(self, x: Tensor, cos: Tensor, sin: Tensor, past: tuple[Tensor, Tensor] | None, valid: Tensor | None):
        b, s, _ = x.shape
        q, k = self.q_proj(x).view(b, s, HEADS, D), self.k_proj(x).view(b, s, GROUPS, D)
        v = self.v_proj(x).view(b, s, GROUPS, D)
        q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
        q = (q * cos + halves_swapped(q) * sin).to(q.dtype)
        k = (k * cos + halves_swapped(k) * sin).to(k.dtype)
        if past is not None:
            k, v = torch.cat([past[0], k], dim=1), torch.cat([past[1], v], dim=1)
        kept = k, v
        q = q.transpose(1, 2)
        k, v = (
            each[:, :, :, None, :].expand(b, -1, GROUPS, HEADS // GROUPS, D).reshape(b, -1, HEADS, D).transpose(1, 2)
            for each in (k, v)
        )
        if self.flash and s > 1 and past is None and valid is None:
            y = F.scaled_dot_product_attention(q, k, v, dropout_p=0.0, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) / math.sqrt(D)
            scores[:, :, :, -s:] += torch.full((s, s), float("-inf"), device=scores.device).triu(1)
            if valid is not None:
                scores += (1.0 - valid.unsqueeze(1).unsqueeze(2)) * -1e9
            y = F.softmax(scores.float(), dim=-1).type_as(q) @ v
        return self.o_proj(y.transpose(1, 2).reshape(b, s, -1)), kept

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, past=None, valid: Tensor | None = None):
        y, kept = self.attention(self.before(x), cos, sin, past, valid)
        y += x
        h = self.after(y)
        return y + self.down_proj(F.silu(self.gate_proj(h)) * self.up_proj(h)), kept


def mind(dtype: torch.dtype, s: int, flash: bool = False, past: int = 0, padded: bool = False) -> Made:
    turned = angles(ROOM, D)[past : past + s].repeat(1, 2)
    inputs = normal(dtype, 2, s, DIM), turned.cos().to(dtype), turned.sin().to(dtype)
    kept = tuple(normal(dtype, 2, past, GROUPS, D) for _ in range(2)) if past else None
    valid = torch.ones(2, past + s).to(dtype)
    valid[0, :5] = 0
    return Mind(flash).to(dtype), (*inputs, kept, *((valid,) if padded else ()))


PIECES = (
    Piece("karpathy/nanoGPT", "block, by the operator of torch", lambda dtype: gpt(dtype, True)),
    Piece("karpathy/nanoGPT", "block, by hand", lambda dtype: gpt(dtype, False)),
    Piece("karpathy/nanochat", "block, without a cache", lambda dtype: chat(dtype, 24)),
    Piece("karpathy/nanochat", "block, prefill", lambda dtype: chat(dtype, 24, 0)),
    Piece("karpathy/nanochat", "block, a prompt behind another", lambda dtype: chat(dtype, 8, 24)),
    Piece("karpathy/nanochat", "block, decode", lambda dtype: chat(dtype, 1, 40)),
    Piece("jingyaogong/minimind", "block, by the operator of torch", lambda dtype: mind(dtype, 24, True)),
    Piece("jingyaogong/minimind", "block, by hand", lambda dtype: mind(dtype, 24)),
    Piece("jingyaogong/minimind", "block, decode", lambda dtype: mind(dtype, 1, past=30)),
    Piece("jingyaogong/minimind", "block, a prompt behind another", lambda dtype: mind(dtype, 8, past=30)),
    Piece("jingyaogong/minimind", "block, padded prompt", lambda dtype: mind(dtype, 24, padded=True)),
)
