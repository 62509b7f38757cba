"""Where tokens stand in caches of pages, and writes there: cache[place] = rows, as a new tensor or in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion._torch.tensors import known_true
from fusion.operators.attention.layouts import lying_as

Places = Sequence[Tensor | None]
"""Indices of the leading dims of a cache; None takes a whole dim."""


ATB_NZ = ("int8_nzcache", "nzcache")
"""Modes in which the operators of atb keep pages in lines of NZ."""


def in_pages(rows: str, lines: str) -> str:
    """Dims of a cache of atb: pages of rows, or in lines of NZ."""
    return " / ".join([f"cache_mode=krope_ctkv:{rows}", *(f"cache_mode={mode}:{lines}" for mode in ATB_NZ)])


def written(cache: Tensor, places: Places | None, rows: Tensor) -> Tensor:
    """A copy of `cache` with `rows` at `places`; without places, `rows` lying as a copy of the cache would."""
    if places is None:
        return lying_as(rows.to(cache.dtype), cache)
    return torch.ops.aten.index_put.default(cache, list(places), rows)


def write(cache: Tensor, places: Places | None, rows: Tensor) -> Tensor:
    """`cache` itself, with `rows` at `places`, or everywhere."""
    if places is None:
        return torch.ops.aten.copy_.default(cache, rows)
    return torch.ops.aten.index_put_.default(cache, list(places), rows)


Put = Callable[[Tensor, "Places | None", Tensor], Tensor]
"""`write` or `written`."""


def inside(positions: Tensor, size: int) -> Tensor:
    """Positions as int64; a negative one lies beyond the end instead of counting from it."""
    positions = positions.long()
    return positions.masked_fill(positions < 0, size)


def paged(cache: Tensor, slots: Tensor, rows: Tensor, mode: str | None) -> tuple[Places, Tensor]:
    """Where tokens [T, N, D] go in pages [Block, Size, N, D], or as "PA_NZ" in [Block, N·D/L, Size, L]."""
    size, slots = _size(cache, mode), slots.long()
    return _in_pages(cache, inside(slots.div(size, rounding_mode="floor"), cache.shape[0]), slots % size, rows, mode)


def _size(cache: Tensor, mode: str | None) -> int:
    """Tokens of a page."""
    return cache.shape[2 if mode == "PA_NZ" else 1]


def _in_pages(cache: Tensor, block: Tensor, place: Tensor, rows: Tensor, mode: str | None) -> tuple[Places, Tensor]:
    """The same where pages, and places in them, are known."""
    if mode == "PA_NZ":
        return [block, None, place], rows.reshape(-1, cache.shape[1], cache.shape[3])
    return [block, place], rows


def by_lines(cache: Tensor) -> Tensor:
    """Pages [Blocks, Size, 1, D] as the NZ that they hold: [Blocks, D / L, Size, L], lines of 32 or 16 elements."""
    blocks, size, _, width = cache.shape
    line = 32 if cache.dtype == torch.int8 else 16
    return cache.view(blocks, width // line, size, line)


def stored(cache: Tensor, rows: Tensor, slots: Tensor, mode: str | None = "Norm") -> tuple[Places, Tensor]:
    """Where rows [T, N, D] go, and what is written there; every slot has an entry: nothing depends on their values.

    A negative slot is skipped: its token repeats the first one that is stored, or what the first row holds.
    """
    used = slots >= 0
    if not known_true(slots.shape[0] == 1):
        tokens = torch.arange(slots.shape[0], device=slots.device)
        source = torch.where(used, tokens, pad(used, (0, 1)).long().argmax())  # padded: there may be no token at all
        slots, rows, used = slots[source], rows[source], used[source]
    slots, size = slots.long().clamp(min=0), _size(cache, mode)
    places, rows = _in_pages(cache, slots.div(size, rounding_mode="trunc"), slots.fmod(size), rows, mode)
    return places, torch.where(used[:, None, None], rows, torch.ops.aten.index.Tensor(cache, list(places)))


def pages_of(cache: Tensor, table: Tensor) -> Tensor:
    """The pages [R, M · Size, D] that `table` [R, M] names, of a cache [Blocks, Size, 1, D], in the order of the table.

    What the table holds for pages that no sequence reaches may be anything.
    """
    blocks = table.long().clamp(0, cache.shape[0] - 1)
    pages = cache.select(-2, 0).index_select(0, blocks.flatten())
    return pages.reshape(table.shape[0], table.shape[1] * cache.shape[1], cache.shape[-1])
