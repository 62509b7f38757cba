"""Calls of atb's attention of one row of each sequence over pages: small ones, and both sides of the limits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion.operators import CHIPS, HOST
from tests.operators.attention_limits_cases import HALF, t

NAMES = ("atb::_npu_paged_attention", "atb::_npu_paged_attention.functional")
A2, A3, _ = CHIPS


def pages(
    tokens: int = 3, n: int = 4, m: int = 2, d: int = 32, size: int = 16, lengths: tuple[int, ...] = (5, 32, 17)
) -> Callable[[torch.dtype], dict[str, Any]]:
    """Arguments of a call over two pages of each sequence, whose result is written over other numbers."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(3)
        query, out = (torch.randn(tokens, n, d, generator=generator).to(dtype) for _ in range(2))
        keys, values = (torch.randn(2 * tokens + 1, size, m, d, generator=generator).to(dtype) for _ in range(2))
        table = torch.randperm(2 * tokens, generator=generator).view(tokens, 2).int()
        return dict(
            query=query, key_cache=keys, value_cache=values, num_kv_heads=m, num_heads=n, scale_value=0.2,
            block_table=table, context_lens=torch.tensor(lengths, dtype=torch.int32), out=out,
        )  # fmt: skip

    return make


CALLS = [
    ("groups of heads", pages()),
    ("one key head, one row", pages(tokens=1, m=1, lengths=(9,))),
    ("a row without keys", pages(lengths=(0, 16, 1))),
]


def reference(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, num_kv_heads: int, num_heads: int, scale_value: float,
    block_table: Tensor, context_lens: Tensor, out: Tensor,
) -> Tensor:  # fmt: skip
    """Row by row and head by head."""
    size = key_cache.shape[1]
    out = out.clone()
    for row, length in enumerate(context_lens.tolist()):
        places = [(int(block_table[row, key // size]), key % size) for key in range(length)]
        for head in range(num_heads if length else 0):
            shared = head // (num_heads // num_kv_heads)
            keys, values = (torch.stack([c[at][shared] for at in places]) for c in (key_cache, value_cache))
            out[row, head] = (scale_value * keys @ query[row, head]).softmax(0) @ values
    return out


def _call(n: int = 8, m: int = 8, d: int = 128, size: int = 128, **more: Any) -> dict[str, Any]:
    cache, rows = t(9, size, m, d), t(2, n, d)
    whole = dict(block_table=t(2, 3, dtype=torch.int32), context_lens=torch.tensor([7, 9], dtype=torch.int32))
    heads = dict(num_heads=n, num_kv_heads=m, scale_value=0.1)
    return dict(query=rows, key_cache=cache, value_cache=cache, out=rows, **whole, **heads) | more


EDGES = [
    (name, chips, legal, illegal, text)
    for name in NAMES
    for chips, legal, illegal, text in (
        ((HOST, A2, A3), _call(), _call(num_heads=4), "N == num_heads"),
        ((HOST, A2, A3), _call(), _call(num_kv_heads=4), "M == num_kv_heads"),
        ((HOST, A2, A3), _call(m=4), _call(m=3), "N % M == 0"),
        ((HOST, A2, A3), _call(), _call(workspace=t(2)), "not given(workspace)"),
        ((A2, A3), _call(), _call(key_cache=t(9, 128, 8, 128, dtype=HALF)), "dtype(key_cache) == dtype(query)"),
        ((A2, A3), _call(), _call(value_cache=t(9, 128, 8, 128, dtype=HALF)), "dtype(value_cache) == dtype(query)"),
        ((A2, A3), _call(), _call(out=t(2, 8, 128, dtype=HALF)), "dtype(out) == dtype(query)"),
        ((A2, A3), _call(d=64, size=16), _call(d=64, size=24), "Size % 16 == 0 and Size <= 128"),
        ((A2, A3), _call(d=64, size=128), _call(d=64, size=144), "Size % 16 == 0 and Size <= 128"),
        ((A2, A3), _call(d=128), _call(d=144), "D < 256 and Size * D <= 16384"),
        ((A2, A3), _call(d=240, size=64), _call(d=256, size=64), "D < 256 and Size * D <= 16384"),
    )
]
