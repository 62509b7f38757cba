"""Layouts of query, key, value and output in attention operators, and of their paged key/value caches.

Decompositions compute in [B, N, S, D]; packed sequences (`TND`, `NTD`) are a batch of one: [1, N, T, D].
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import memory_order

LAYOUTS: Mapping[str, tuple[str, str]] = {
    "BSH": ("BSH", "BSH"),
    "BSH_NBSD": ("BSH", "NBSD"),
    "BSH_BNSD": ("BSH", "BNSD"),
    "BSND": ("BSND", "BSND"),
    "BSND_NBSD": ("BSND", "NBSD"),
    "BSND_BNSD": ("BSND", "BNSD"),
    "BNSD": ("BNSD", "BNSD"),
    "BNSD_NBSD": ("BNSD", "NBSD"),
    "BNSD_BSND": ("BNSD", "BSND"),
    "TND": ("TND", "TND"),
    "TND_NTD": ("TND", "NTD"),
    "NTD_TND": ("NTD", "TND"),
    "SBH": ("SBH", "SBH"),
}
"""`input_layout` -> layout of query, key and value, and layout of the output."""

_BATCHED = "BNSD"
_MERGED = {"BSH": "BSND", "SBH": "SBND"}
"""Layout whose last dim joins heads and head dim -> layout in which they are separate."""


def in_layouts(*layouts: str) -> str:
    """Return the limit that query, key and value are in one of `layouts`."""
    return f"input_layout in {tuple(name for name, (given, _) in LAYOUTS.items() if given in layouts)}"


def is_packed(layout: str) -> bool:
    """Return True if the sequences of a batch in `layout` are concatenated along one dim of tokens."""
    return LAYOUTS[layout][0] in ("TND", "NTD")


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """Permute `x` from the input layout to a view [B, N, S, D], or [1, N, T, D] if sequences are packed."""
    given = LAYOUTS[layout][0]
    if given in _MERGED:
        x, given = x.unflatten(-1, (heads, -1)), _MERGED[given]
    if is_packed(layout):
        x, given = x.unsqueeze(0), "B" + given.replace("T", "S")
    return x.permute([given.index(dim) for dim in _BATCHED])


def sizes_of(x: Tensor, layout: str, heads: int) -> tuple[Any, Any, Any, Any]:
    """Return the shape of `heads_first(x, layout, heads)`, without that view."""
    given = LAYOUTS[layout][0]
    named: dict[str, Any] = dict(zip(given, x.shape, strict=True))
    if given in _MERGED:
        named |= {"N": heads, "D": named["H"] // heads}
    if is_packed(layout):
        named |= {"B": 1, "S": named["T"]}
    b, n, s, d = (named[dim] for dim in _BATCHED)
    return b, n, s, d


def laid_out(x: Tensor, layout: str) -> Tensor:
    """Permute `x` [B, N, S, D], or [1, N, T, D] if sequences are packed, to the output layout, contiguous."""
    wanted = LAYOUTS[layout][1]
    order = "B" + wanted.replace("T", "S") if is_packed(layout) else _MERGED.get(wanted, wanted)
    x = x.permute([_BATCHED.index(dim) for dim in order])
    if is_packed(layout):
        x = x.squeeze(0)
    return (x.flatten(-2) if wanted in _MERGED else x).contiguous()


def output_shape(query: Tensor, layout: str, heads: int, width: int) -> list[int]:
    """Return the shape of the output for `query` in the input layout of `layout`, `heads` heads, and values of `width`
    lanes.
    """
    sizes = dict(zip(_BATCHED, heads_first(query, layout, heads).shape, strict=True)) | {"D": width}
    wanted = LAYOUTS[layout][1]
    sizes |= {"T": sizes["S"], "H": heads * width}
    return [sizes[dim] for dim in wanted]


def lse_shape(query: Tensor, layout: str, heads: int) -> list[int]:
    """Return the shape of the log-sum-exp for `query` in `layout`: [B, N, S, 1], or [T, N, 1] if sequences are
    packed.
    """
    b, n, s, _ = heads_first(query, layout, heads).shape
    return [s, n, 1] if is_packed(layout) else [b, n, s, 1]


def with_strides_of(x: Tensor, like: Tensor) -> Tensor:
    """Return `x` with the order of dims in memory that `like` has, contiguous; copied only if it has another.

    Meta kernels promise these strides, those of `empty_like(like)`.
    """
    order = memory_order(like)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def paged_heads(cache: Tensor, layout: str, heads: int, table: Tensor) -> Tensor:
    """Gather the pages that `table` [B, P] lists, in its order: [B, N, P · Size, D], or packed [1, N, B · P · Size, D].

    `cache` is [Block, Size, N · D], [Block, N, Size, D], or in fractal NZ [Block, N, D / L, Size, L].
    """
    # Contiguous, because a gathered tensor has the strides of its indices in eager, but not under fake tensors.
    blocks = table.long().contiguous()
    if cache.dim() == 3:
        pages = cache[blocks].unflatten(-1, (heads, -1))  # [B, M, block, N, D]
        flat = pages.flatten(0, 2).unsqueeze(0) if is_packed(layout) else pages.flatten(1, 2)
        return flat.transpose(1, 2)
    places = blocks.reshape(1, 1, -1) if is_packed(layout) else blocks.unsqueeze(1)
    head = torch.arange(cache.shape[1], device=cache.device).reshape(1, -1, 1)
    pages = cache[places, head]  # [B, N, M, block, D], already in the order of the result
    if cache.dim() == 5:
        pages = pages.transpose(-3, -2).flatten(-2)
    return pages.flatten(2, 3)


def value_width(value: Tensor, layout: str, heads: int, paged: bool) -> int:
    """Return the head dim of values, from the shape of `value` in the input layout, or of its pages if `paged`."""
    if value.dim() == 5:
        return value.shape[2] * value.shape[4]
    merged = LAYOUTS[layout][0] in _MERGED or (paged and value.dim() == 3)
    return value.shape[-1] // heads if merged else value.shape[-1]
