"""Addresses of tokens in paged caches, and writes, cache[places] = rows, into the cache or into a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion._torch.tensors import known_true
from fusion.operators.attention.layouts import with_strides_of
from fusion.operators.encodings import encoding_of

Places = Sequence[Tensor | None]
"""Indices into the leading dims of a cache; None selects all of a dim."""


ATB_NZ = ("int8_nzcache", "nzcache")
"""Values of `cache_mode` for which the operators of atb have pages in NZ."""


def in_pages(rows: str, lines: str) -> str:
    """Return the declared dims of a cache of atb: `rows` for row-major pages, `lines` for pages in NZ, by
    `cache_mode`.
    """
    return " / ".join([f"cache_mode=krope_ctkv:{rows}", *(f"cache_mode={mode}:{lines}" for mode in ATB_NZ)])


def written(cache: Tensor, places: Places | None, rows: Tensor) -> Tensor:
    """Return a copy of `cache` with `rows` at `places`.

    If `places` is None, `rows` replace all of it, with the strides of such a copy.
    """
    if places is None:
        return with_strides_of(rows.to(cache.dtype), cache)
    return torch.ops.aten.index_put.default(cache, list(places), rows)


def write(cache: Tensor, places: Places | None, rows: Tensor) -> Tensor:
    """Write `rows` to `places` of `cache` in place, and return `cache`; if `places` is None, `rows` replace all of
    it.
    """
    if places is None:
        return torch.ops.aten.copy_.default(cache, rows)
    return torch.ops.aten.index_put_.default(cache, list(places), rows)


Put = Callable[[Tensor, "Places | None", Tensor], Tensor]
"""Function that writes rows at places of a cache: `write` in place, or `written` into a copy, which it returns."""


def negatives_out_of_bounds(positions: Tensor) -> Tensor:
    """Convert positions to int64, and negative ones, which would count from the end, to large ones, out of bounds."""
    return positions.long() & torch.iinfo(torch.int64).max


def page_places(cache: Tensor, slots: Tensor, rows: Tensor, mode: str | None) -> tuple[Places, Tensor]:
    """Return the indices into pages `cache` at which `rows` [T, N, D] are written by `slots` [T], and the rows to
    write.

    Pages are [Block, Size, N, D], or with `mode` "PA_NZ" [Block, N·D/L, Size, L], whose rows are reshaped to lines. A
    negative slot is out of bounds.
    """
    size, slots = _page_size(cache, mode), slots.long()
    block = negatives_out_of_bounds(slots.div(size, rounding_mode="floor"))
    return _in_pages(cache, block, slots % size, rows, mode)


def _page_size(cache: Tensor, mode: str | None) -> int:
    return cache.shape[2 if mode == "PA_NZ" else 1]


def _in_pages(cache: Tensor, block: Tensor, place: Tensor, rows: Tensor, mode: str | None) -> tuple[Places, Tensor]:
    """Return the indices into pages `cache` of tokens in row `place` of page `block`, and `rows` in the shape that
    these take.
    """
    if mode == "PA_NZ":
        return [block, None, place], rows.reshape(-1, cache.shape[1], cache.shape[3])
    return [block, place], rows


def by_lines(cache: Tensor) -> Tensor:
    """View pages [Blocks, Size, 1, D] in the NZ layout of their memory: [Blocks, D / L, Size, L], with L = 32 for int8,
    else 16."""
    blocks, size, _, width = cache.shape
    encoding = encoding_of(cache.dtype)
    line = 16 if encoding is None else encoding.line
    return cache.view(blocks, width // line, size, line)


def stored(cache: Tensor, rows: Tensor, slots: Tensor, mode: str | None = "Norm") -> tuple[Places, Tensor]:
    """Return the indices into `cache` at which `rows` [T, N, D] are written by `slots` [T], and the rows to write.

    No shape may depend on values, so a token with a negative slot, which is not written, repeats the first token that
    is; if there is none, it writes to the first row of the cache what is in it already.
    """
    used = slots >= 0
    if not known_true(slots.shape[0] == 1):
        tokens = torch.arange(slots.shape[0], device=slots.device)
        source = torch.where(used, tokens, pad(used, (0, 1)).long().argmax())  # padded: there may be no token at all
        slots, rows, used = slots[source], rows[source], used[source]
    slots, size = slots.long().clamp(min=0), _page_size(cache, mode)
    places, rows = _in_pages(cache, slots.div(size, rounding_mode="trunc"), slots.fmod(size), rows, mode)
    return places, torch.where(used[:, None, None], rows, torch.ops.aten.index.Tensor(cache, list(places)))


def pages_of(cache: Tensor, table: Tensor) -> Tensor:
    """Gather the pages that `table` [R, M] lists, in its order, from `cache` [Blocks, Size, 1, D]: [R, M · Size, D].

    Entries of the table are clamped, because those behind a sequence may be anything.
    """
    blocks = table.long().clamp(0, cache.shape[0] - 1)
    pages = cache.select(-2, 0).index_select(0, blocks.flatten())
    return pages.reshape(table.shape[0], table.shape[1] * cache.shape[1], cache.shape[-1])
