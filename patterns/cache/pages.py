"""Caches as pages: contiguous ones cut into pages, pages in blocks of NZ, and the slots of tokens.

BSND [Block, Size, 1, D]        NZ [Block, .., D / L, Size, L], L = 16 lanes of two bytes, 32 of one
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion import require

SIZES = (128, 64, 32, 16)
"""Sizes of pages as which a contiguous cache is read, the first that divides it."""
NZ, NZ_INT8 = 16, 32
"""How many lanes of two bytes, and of one, a block of NZ holds."""
BLOCKS = (4, 8, NZ, NZ_INT8, 64)
"""How many a model may put in a block: others than NZ are told."""


def sequences(cache: Any, start: Any, axis: int) -> Any:
    """How many sequences of a cache rows are written to along `axis`: those that have a start, or all."""
    if start.shape:
        return start.shape[0]
    return cache.shape[0] if axis else 1


def of_one_head(cache: Tensor, axis: int) -> Tensor:
    """A contiguous cache [B, .., T, .., D], T along `axis`, whose other dims have size 1."""
    others = [each for place, each in enumerate(cache.shape[:-1]) if place not in (0, axis)]
    require(
        all(each == 1 for each in others),
        "the cache holds several heads: as pages they would alias each other; the operator requires one head",
    )
    require(
        cache.is_contiguous(), "the cache is not contiguous, so that it cannot be read as pages; allocate it contiguous"
    )
    return cache


def cut(cache: Tensor, axis: int) -> Tensor:
    """A contiguous cache [B, .., T, .., D] of one head as pages [Block, Size, 1, D], T along `axis`."""
    cache = of_one_head(cache, axis)
    size: Any = cache.shape[axis]
    page = next((each for each in SIZES if isinstance(size, int) and size % each == 0), 0)
    require(
        page, "the cache holds {size} positions, which no size of a page divides; allocate a multiple of 16", size=size
    )
    return cache.reshape(-1, page, 1, cache.shape[-1])


def in_rows(pages: Tensor, block: Any) -> Tensor:
    """Pages of one head as [Block, Size, 1, D]: those in blocks of NZ are the same memory."""
    require(
        pages.is_contiguous(),
        "the pages are not contiguous; the operator writes and reads them in place; allocate the cache contiguous",
    )
    return pages.reshape(pages.shape[0], pages.shape[1 if block is None else -2], 1, -1)


def refuse_others(block: Any, lanes: int = NZ) -> None:
    """Refuse blocks that are not those of NZ; None stands for whole rows."""
    said = "the pages hold rows in lines of {line} numbers, not of {lanes}"
    require(block in (None, lanes), said, line=block, lanes=lanes)


def slots(start: Any, batch: Any, rows: Any, size: Any, device: torch.device) -> Tensor:
    """Where `rows` tokens of every sequence go among all places of the pages, [B, S]; -1 for what is beyond the end.

    `start` is one position or one for each sequence. The table of all places is a constant, made once.
    """
    places = torch.arange(batch * size, device=device).reshape(batch, size)
    table = torch.cat((places, torch.full((batch, rows), -1, device=device)), dim=1)
    if not isinstance(start, Tensor):
        return table[:, start : start + rows]
    first = start.clamp(max=size).reshape(-1, 1)
    index = first if rows == 1 else first + torch.arange(rows, device=device)
    return table.index_select(1, index.reshape(-1)) if index.shape[0] == 1 else table.gather(1, index)
