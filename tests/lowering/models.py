"""A block that holds every composite operator, a cache write and an operator of our own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

aten = torch.ops.aten

LIBRARY = torch.library.Library("lowering_test", "FRAGMENT")
LIBRARY.define("scaled_silu(Tensor x, float scale) -> Tensor")
LIBRARY.impl("scaled_silu", lambda x, scale: F.silu(x) * scale, "CPU")
LIBRARY.impl("scaled_silu", lambda x, scale: torch.empty_like(x), "Meta")

scaled_silu = torch.ops.lowering_test.scaled_silu.default
TABLE: dict[Any, Callable[..., Any]] = {scaled_silu: lambda x, scale: x * torch.sigmoid(x) * scale}


class Block(nn.Module):
    """hidden [B, S, H], cache [B, Nkv, T, D], position [S] → [B, S, H]; writes rows `position` of the cache."""

    def __init__(self, hidden: int = 32, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.dim = heads, kv_heads, hidden // heads
        self.query = nn.Linear(hidden, hidden)
        self.key_value = nn.Linear(hidden, kv_heads * self.dim, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.rms = nn.RMSNorm(hidden, eps=1e-6)
        self.layer_norm = nn.LayerNorm(hidden)

    def forward(self, hidden: Tensor, cache: Tensor, position: Tensor) -> Tensor:
        batch, length, _ = hidden.shape
        x = self.rms(hidden)
        query = self.query(x).view(batch, length, self.heads, self.dim).transpose(1, 2)
        cache.index_copy_(2, position, self.key_value(x).view(batch, length, self.kv_heads, self.dim).transpose(1, 2))
        visible = torch.arange(cache.shape[2], device=hidden.device) <= position[:, None]
        attended = F.scaled_dot_product_attention(query, cache, cache, attn_mask=visible, enable_gqa=True)
        keys = cache.repeat_interleave(self.heads // self.kv_heads, dim=1)
        scores = torch.matmul(query, keys.transpose(2, 3)) / math.sqrt(self.dim)
        scores = scores.masked_fill(~visible, torch.finfo(scores.dtype).min)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(hidden.dtype)
        attended = attended + torch.einsum("bnst,bntd->bnsd", weights, keys)
        hidden = hidden + self.out(attended.transpose(1, 2).reshape(batch, length, -1))
        return hidden + scaled_silu(self.layer_norm(hidden), 0.5)


def inputs(batch: int = 2, length: int = 3, room: int = 16, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(batch * 100 + length)
    return [
        torch.randn(batch, length, 32, generator=generator).to(dtype),
        torch.randn(batch, 2, room, 8, generator=generator).to(dtype),
        torch.arange(length) + 2,
    ]


def operators(gm: fx.GraphModule) -> Counter[Any]:
    return Counter(node.target for node in gm.graph.nodes if node.op == "call_function")
