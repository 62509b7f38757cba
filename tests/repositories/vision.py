"""In the manner of microsoft/Swin-Transformer, QwenLM/Qwen2.5-VL and openai/CLIP: windows, packed pictures, and words.

And of XiaomiMiMo/MiMo-V2, whose keys are wider than its values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .base import Made, Piece, angles, linear, normal

DIM, HEADS, D = 512, 8, 64
SIDE, WINDOWS = 4, 4
PLACES = SIDE * SIDE


class Window(nn.Module):
    """Attention within windows: a bias of each pair of places, and where windows were shifted what they may see."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        self.qkv, self.proj = linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)
        self.table = nn.Parameter(torch.randn((2 * SIDE - 1) ** 2, HEADS) / 8)
        both = torch.stack(torch.meshgrid(torch.arange(SIDE), torch.arange(SIDE), indexing="ij")).flatten(1)
        apart = both[:, :, None] - both[:, None, :] + SIDE - 1
        self.register_buffer("index", apart[0] * (2 * SIDE - 1) + apart[1])
        parts = torch.randint(0, 3, (WINDOWS, PLACES))
        unlike = parts[:, :, None] != parts[:, None, :]
        self.register_buffer("mask", torch.where(unlike, -100.0, 0.0) if shifted else None)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        scores = (q * D**-0.5) @ k.transpose(-2, -1)
        bias = self.table[self.index.view(-1)].view(n, n, -1).permute(2, 0, 1).contiguous()
        scores = scores + bias.unsqueeze(0)
        if self.mask is not None:
            scores = scores.view(b // WINDOWS, WINDOWS, HEADS, n, n) + self.mask.unsqueeze(1).unsqueeze(0)
            scores = scores.view(-1, HEADS, n, n)
        return self.proj((scores.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


def window(dtype: torch.dtype, shifted: bool) -> Made:
    return Window(shifted).to(dtype), (normal(dtype, 2 * WINDOWS, PLACES, DIM),)


class Pictures(nn.Module):
    """Patches of several pictures one after the other, each attended to by itself in a loop."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        super().__init__()
        self.lengths, self.qkv, self.proj = lengths, linear(DIM, 3 * DIM, True), linear(DIM, DIM, True)

    def turned(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        wide, half = x.float(), x.shape[-1] // 2
        other = torch.cat((-wide[..., half:], wide[..., :half]), dim=-1)
        return (wide * cos.unsqueeze(-2).float() + other * sin.unsqueeze(-2).float()).to(x.dtype)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        s = x.shape[0]
        q, k, v = self.qkv(x).reshape(s, 3, HEADS, -1).permute(1, 0, 2, 3).unbind(0)
        q, k = self.turned(q, cos, sin), self.turned(k, cos, sin)
        parts = (torch.split(each.transpose(0, 1).unsqueeze(0), self.lengths, dim=2) for each in (q, k, v))
        outs = [F.scaled_dot_product_attention(*each).transpose(1, 2) for each in zip(*parts, strict=True)]
        return self.proj(torch.cat(outs, dim=1).reshape(s, -1).contiguous())


def pictures(dtype: torch.dtype) -> Made:
    halves = angles(24, D)
    table = torch.cat((halves, halves), dim=-1)
    return Pictures((10, 6, 8)).to(dtype), (normal(dtype, 24, DIM), table.cos(), table.sin())


class Words(nn.Module):
    """torch's own module, positions before sequences, its order of positions kept beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.ln_1 = nn.MultiheadAttention(DIM, HEADS), nn.LayerNorm(DIM)
        self.order = torch.full((24, 24), float("-inf")).triu_(1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        mask = self.order.to(dtype=x.dtype, device=x.device)
        return x + self.attn(y, y, y, need_weights=False, attn_mask=mask)[0]


def words(dtype: torch.dtype) -> Made:
    return Words().to(dtype), (normal(dtype, 24, 2, DIM),)


class Narrow(nn.Module):
    """Keys of 192 lanes, values of 128, and with or without a sink that is joined to the scores."""

    def __init__(self, sunk: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = linear(DIM, 8 * 192), linear(DIM, 2 * 192), linear(DIM, 2 * 128)
        self.o_proj, self.sinks = linear(8 * 128, DIM), nn.Parameter(torch.randn(8)) if sunk else None

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q = self.q_proj(x).view(b, s, 8, 192).transpose(1, 2)
        k, v = self.k_proj(x).view(b, s, 2, 192).transpose(1, 2), self.v_proj(x).view(b, s, 2, 128).transpose(1, 2)
        k, v = (each[:, :, None].expand(-1, -1, 4, -1, -1).reshape(b, 8, s, -1) for each in (k, v))
        scores = torch.matmul(q, k.transpose(2, 3)) * 192**-0.5
        scores = scores + torch.full((s, s), float("-inf"), device=x.device, dtype=scores.dtype).triu(1)
        if self.sinks is None:
            shares = F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype)
        else:
            sinks = self.sinks.reshape(1, -1, 1, 1).expand(b, -1, s, -1).to(scores.dtype)
            both = torch.cat([scores, sinks], dim=-1)
            both = both - both.max(dim=-1, keepdim=True).values
            shares = F.softmax(both, dim=-1, dtype=both.dtype)[..., :-1]
        return self.o_proj(torch.matmul(shares, v).transpose(1, 2).reshape(b, s, -1))


def narrow(dtype: torch.dtype, sunk: bool) -> Made:
    return Narrow(sunk).to(dtype), (normal(dtype, 2, 24, DIM),)


SWIN, MIMO = "microsoft/Swin-Transformer", "XiaomiMiMo/MiMo-V2"
PIECES = (
    Piece(SWIN, "attention within windows", lambda dtype: window(dtype, shifted=False)),
    Piece(SWIN, "attention within shifted windows", lambda dtype: window(dtype, shifted=True)),
    Piece("QwenLM/Qwen2.5-VL", "attention of packed pictures", pictures),
    Piece("openai/CLIP", "attention of words", words, why="assume"),
    Piece(MIMO, "attention, values narrower than keys", lambda dtype: narrow(dtype, sunk=False)),
    Piece(MIMO, "attention with sinks, values narrower than keys", lambda dtype: narrow(dtype, sunk=True)),
)
