"""How attention operators lay out query, key and value, and how their key/value caches are paged.

Inside, everything is [B, N, S, D], and packed sequences (`TND`, `NTD`) are one batch: [1, N, T, D].
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
"""Layouts in which heads and head dim are one."""


def lying(*layouts: str) -> str:
    """The limit that query, key and value lie in one of these layouts."""
    return f"input_layout in {tuple(name for name, (given, _) in LAYOUTS.items() if given in layouts)}"


def is_packed(layout: str) -> bool:
    """Whether the sequences of a batch stand one after the other in one dim of tokens."""
    return LAYOUTS[layout][0] in ("TND", "NTD")


def heads_first(x: Tensor, layout: str, heads: int) -> Tensor:
    """A tensor in the input layout as a view [B, N, S, D], or [1, N, T, D] if its sequences are packed."""
    given = LAYOUTS[layout][0]
    if given in _MERGED:
        x, given = x.unflatten(-1, (heads, -1)), _MERGED[given]
    if is_packed(layout):
        x, given = x.unsqueeze(0), "B" + given.replace("T", "S")
    return x.permute([given.index(dim) for dim in _BATCHED])


def sizes_of(x: Tensor, layout: str, heads: int) -> tuple[Any, Any, Any, Any]:
    """The sizes of `heads_first`."""
    given = LAYOUTS[layout][0]
    named: dict[str, Any] = dict(zip(given, x.shape, strict=True))
    if given in _MERGED:
        named |= {"N": heads, "D": named["H"] // heads}
    if is_packed(layout):
        named |= {"B": 1, "S": named["T"]}
    b, n, s, d = (named[dim] for dim in _BATCHED)
    return b, n, s, d


def laid_out(x: Tensor, layout: str) -> Tensor:
    """[B, N, S, D], or [1, N, T, D], in the output layout, contiguous."""
    wanted = LAYOUTS[layout][1]
    order = "B" + wanted.replace("T", "S") if is_packed(layout) else _MERGED.get(wanted, wanted)
    x = x.permute([_BATCHED.index(dim) for dim in order])
    if is_packed(layout):
        x = x.squeeze(0)
    return (x.flatten(-2) if wanted in _MERGED else x).contiguous()


def output_shape(query: Tensor, layout: str, heads: int, width: int) -> list[int]:
    """Sizes of the output for values of `width` per head."""
    sizes = dict(zip(_BATCHED, heads_first(query, layout, heads).shape, strict=True)) | {"D": width}
    wanted = LAYOUTS[layout][1]
    sizes |= {"T": sizes["S"], "H": heads * width}
    return [sizes[dim] for dim in wanted]


def lse_shape(query: Tensor, layout: str, heads: int) -> list[int]:
    """Sizes of the log-sum-exp: [B, N, S, 1], or [T, N, 1] if the sequences are packed."""
    b, n, s, _ = heads_first(query, layout, heads).shape
    return [s, n, 1] if is_packed(layout) else [b, n, s, 1]


def lying_as(x: Tensor, like: Tensor) -> Tensor:
    """`x` with the strides of `empty_like(like)`, as Meta kernels promise them; itself where it lies so."""
    order = memory_order(like)
    return x.permute(order).contiguous().permute([order.index(dim) for dim in range(x.ndim)])


def paged_heads(cache: Tensor, layout: str, heads: int, table: Tensor) -> Tensor:
    """The pages that `table` [B, M] names, in its order: [B, N, M · block, D], or [1, N, B · M · block, D] if packed.

    cache is [blocks, block, N · D], or [blocks, N, block, D], or [blocks, N, D / c, block, c] (fractal NZ).
    """
    blocks = table.long().contiguous()  # what is indexed lies as its indices do, and otherwise in torch's fakes
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
    """Values per head, from the sizes of `value` alone."""
    if value.dim() == 5:
        return value.shape[2] * value.shape[4]
    merged = LAYOUTS[layout][0] in _MERGED or (paged and value.dim() == 3)
    return value.shape[-1] // heads if merged else value.shape[-1]
