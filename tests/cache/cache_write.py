"""cache[positions] = rows, with the cache's own layout, order and dtype, as people write it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.corpus.base import PAGED_WRITE, SCATTER_ND, SCATTER_RUN, Form, Spelling, activations

HEADS, ROOM, DIM, FIRST = 2, 16, 8, 3
BLOCKS, SIZE = 8, 4
LONG = 256  # a cache that is worth a write of its own where every position is compared


def written(cache: Tensor, rows: Tensor, start: int = FIRST) -> Tensor:
    """Float64 [B, N, T, D], with [B, N, S, D] from `start` on, twice."""
    keep = torch.ones(cache.shape[2], dtype=torch.bool)
    keep[start : start + rows.shape[2]] = False
    spread = torch.zeros_like(cache)
    for number in range(rows.shape[2]):
        spread[:, :, start + number] = rows[:, :, number]
    return 2 * (cache * keep[:, None] + spread)


# positions that the graph computes ---------------------------------------------------------------------------------


def index_copy(cache, rows, start):
    cache.index_copy_(2, torch.arange(rows.shape[2]) + start, rows)
    return cache * 2


def index_copy_and_copy(cache, rows, start):
    cache.copy_(cache.index_copy(2, start + torch.arange(rows.shape[2]), rows))
    return cache * 2


def index_put(cache, rows, start):
    cache[:, :, start + torch.arange(rows.shape[2])] = rows
    return cache * 2


def index_put_modulo(cache, rows, start):
    cache[:, :, torch.arange(rows.shape[2]) + start % cache.shape[2]] = rows
    return cache * 2


def from_the_end(cache, rows, start):
    cache[:, :, start - cache.shape[2] + torch.arange(rows.shape[2])] = rows
    return cache * 2


def scatter(cache, rows, start):
    places = (start + torch.arange(rows.shape[2])).view(1, 1, -1, 1)
    cache.scatter_(2, places.expand_as(rows), rows)
    return cache * 2


def transposed(cache, rows, start):
    cache.transpose(1, 2).index_copy_(1, start + torch.arange(rows.shape[2]), rows.transpose(1, 2))
    return cache * 2


def lengths(cache, rows, start):
    places = start.expand(rows.shape[0])[:, None] + torch.arange(rows.shape[2])
    cache.scatter_(2, places[:, None, :, None].expand_as(rows), rows)
    return cache * 2


def one_length_each(cache, rows, start):
    cache[torch.arange(cache.shape[0]), :, start.expand(cache.shape[0])] = rows[:, :, 0]
    return cache * 2


def where_inside(cache, rows, start):
    here = torch.arange(cache.shape[2])[:, None] == start.clamp(0, cache.shape[2] - 1)
    cache.copy_(torch.where(here, rows, cache))
    return cache * 2


def where_anywhere(cache, rows, start):
    cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] == start, rows, cache))
    return cache * 2


def one_hot(cache, rows, start):
    here = F.one_hot(start, cache.shape[2]).bool()[:, None]
    cache.copy_(cache.where(~here, rows))
    return cache * 2


# positions that are known ------------------------------------------------------------------------------------------


def sliced(cache, rows, start):
    cache[:, :, FIRST : FIRST + rows.shape[2]] = rows
    return cache * 2


def cast(cache, rows, start):
    cache[:, :, FIRST : FIRST + rows.shape[2]] = rows.float()
    return cache * 2


def first_sequences(cache, rows, start):
    cache[: rows.shape[0], :, FIRST : FIRST + rows.shape[2]] = rows
    return cache * 2


def narrowed(cache, rows, start):
    cache.narrow(2, FIRST, rows.shape[2]).copy_(rows)
    return cache * 2


def slice_scatter(cache, rows, start):
    cache.copy_(torch.slice_scatter(cache, rows, 2, FIRST, FIRST + rows.shape[2]))
    return cache * 2


def selected(cache, rows, start):
    cache[:, :, FIRST] = rows[:, :, 0]
    return cache * 2


def at_the_end(cache, rows, start):
    cache[:, :, -rows.shape[2] :] = rows
    return cache * 2


# pages -------------------------------------------------------------------------------------------------------------


def flat_pages(cache, rows, slots):
    cache.view(-1, HEADS, DIM)[slots] = rows
    return cache * 2


def flat_pages_copied(cache, rows, slots):
    cache.flatten(0, 1).index_copy_(0, slots, rows)
    return cache * 2


def blocks(cache, rows, slots):
    cache[slots // SIZE, slots % SIZE] = rows
    return cache * 2


def block_pairs(cache, rows, slots):
    block, place = torch.div(slots, SIZE, rounding_mode="floor"), slots.remainder(SIZE)
    cache.index_put_((block, place), rows)
    return cache * 2


def page_pair(keys, values, key, value, slots):
    keys.view(-1, HEADS, DIM)[slots] = key
    values.view(-1, HEADS, DIM)[slots] = value
    return keys * 2, values * 2


def page_pair_by_block(keys, values, key, value, slots):
    block, place = slots // SIZE, slots % SIZE
    keys[block, place] = key
    values[block, place] = value
    return keys * 2, values * 2


# caches that grow or slide -----------------------------------------------------------------------------------------


def grown(past, rows):
    first = torch.cat([torch.tensor([], dtype=past.dtype), past], dim=-2)
    return torch.cat([first, rows], dim=-2) * 2


def rolled(cache, rows):
    new = cache.roll(-rows.shape[2], dims=2)
    new[:, :, -rows.shape[2] :] = rows
    cache.copy_(new)
    return cache * 2


def shifted(cache, rows):
    cache.copy_(torch.cat([cache[:, :, rows.shape[2] :], rows], dim=2))
    return cache * 2


# entries -----------------------------------------------------------------------------------------------------------

Meaning = Callable[..., tuple[Tensor, ...]]
Inputs = Callable[[int, int], tuple[Tensor, ...]]


def step(B: int, S: int, room: int = ROOM, dim: int = DIM) -> tuple[Tensor, ...]:
    """A cache [B, N, T, D], rows [B, N, S, D] and where they begin []."""
    return activations(61, B, HEADS, room, dim), activations(62, B, HEADS, S, dim), torch.tensor(FIRST)


def token(B: int, S: int) -> tuple[Tensor, ...]:
    return step(B, 1)


def long(B: int, S: int) -> tuple[Tensor, ...]:
    return step(max(B, 2), 1, LONG, 64)


def wide(B: int, S: int) -> tuple[Tensor, ...]:
    """A cache with room for another sequence."""
    return activations(61, B + 1, HEADS, ROOM, DIM), *step(B, S)[1:]


def pages(B: int, S: int) -> tuple[Tensor, ...]:
    """Pages [Block, Size, N, D], rows [T, N, D], slots [T]."""
    count = B * S
    slots = torch.randperm(BLOCKS * SIZE, generator=torch.Generator().manual_seed(count))[:count]
    return activations(63, BLOCKS, SIZE, HEADS, DIM), activations(64, count, HEADS, DIM), slots


def page_pairs(B: int, S: int) -> tuple[Tensor, ...]:
    keys, key, slots = pages(B, S)
    return keys, activations(65, *keys.shape), key, activations(66, *key.shape), slots


def window(B: int, S: int) -> tuple[Tensor, ...]:
    return step(B, S)[:2]


def _step(cache: Tensor, rows: Tensor, start: Tensor) -> tuple[Tensor, ...]:
    return (written(cache, rows),)


def _first(cache: Tensor, rows: Tensor, start: Tensor) -> tuple[Tensor, ...]:
    return (torch.cat([written(cache[: len(rows)], rows), 2 * cache[len(rows) :]]),)


def _last(cache: Tensor, rows: Tensor, start: Tensor) -> tuple[Tensor, ...]:
    return (2 * torch.cat([cache[:, :, : cache.shape[2] - rows.shape[2]], rows], 2),)


def _slid(cache: Tensor, rows: Tensor) -> tuple[Tensor, ...]:
    return (2 * torch.cat([cache[:, :, rows.shape[2] :], rows], 2),)


def _paged(cache: Tensor, rows: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    flat = list(cache.flatten(0, 1))
    for row, slot in zip(rows, slots.tolist(), strict=True):
        flat[slot] = row
    return (2 * torch.stack(flat).view(cache.shape),)


def _page_pair(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, ...]:
    return (*_paged(keys, key, slots), *_paged(values, value, slots))


def _spelling(
    form: Form, note: str, expect: Mapping[str, int], inputs: Inputs = step, meaning: Meaning = _step,
    as_good: Mapping[str, int] | None = None,
) -> Spelling:  # fmt: skip
    def make(dtype: torch.dtype, B: int, S: int):
        return form, tuple(t.to(dtype) if t.is_floating_point() else t for t in inputs(B, S))

    def expected(dtype: torch.dtype, B: int, S: int) -> tuple[Tensor, ...]:
        return meaning(*inputs(B, S))

    name = f"cache_write/{form.__name__}"
    return Spelling(name, "cache_write", make, expect, expected, note, as_good=as_good, writes=True)


_RUN, _ROWS, _PAIR = {SCATTER_RUN: 1}, {SCATTER_ND: 1}, {PAGED_WRITE: 1}
SPELLINGS = (
    _spelling(index_copy, "transformers: StaticCache; core aten makes it an index_put", _RUN, as_good=_ROWS),
    _spelling(index_copy_and_copy, "a new cache, copied back", _RUN, as_good=_ROWS),
    _spelling(index_put, "transformers: StaticCache where index_copy_ is missing", _ROWS, as_good=_RUN),
    _spelling(index_put_modulo, "a start that is proven not to be negative", _RUN),
    _spelling(from_the_end, "positions that count from the end", _ROWS, as_good=_RUN),
    _spelling(scatter, "scatter_ with positions repeated", _RUN),
    _spelling(transposed, "through a transpose, of which core aten makes a copy", _RUN, as_good={}),
    _spelling(lengths, "a position for every sequence, prompt", _RUN),
    _spelling(one_length_each, "a position for every sequence, token", _RUN, token),
    _spelling(where_inside, "a comparison, the position proven to lie inside", _RUN, token),
    _spelling(where_anywhere, "a comparison, the position unknown: what was there is kept", _RUN, long),
    _spelling(one_hot, "one_hot as a mask", _RUN, long),
    _spelling(sliced, "a slice that is assigned", _RUN),
    _spelling(first_sequences, "Llama: a cache for more sequences than there are", _RUN, wide, _first),
    _spelling(cast, "rows of another dtype: the assignment casts", _RUN),
    _spelling(narrowed, "narrow and copy_", _RUN),
    _spelling(slice_scatter, "slice_scatter, copied back", _RUN),
    _spelling(selected, "one position, selected", _RUN, token),
    _spelling(at_the_end, "the last positions", _RUN, meaning=_last),
    _spelling(flat_pages, "serving code: slots of all pages", _ROWS, pages, _paged),
    _spelling(flat_pages_copied, "serving code: index_copy_ of slots", _ROWS, pages, _paged),
    _spelling(blocks, "slot // Size, slot % Size", _ROWS, pages, _paged),
    _spelling(block_pairs, "div and remainder", _ROWS, pages, _paged),
    _spelling(page_pair, "keys and values at the same slots", _PAIR, page_pairs, _page_pair),
    _spelling(page_pair_by_block, "the same by blocks", _PAIR, page_pairs, _page_pair),
    _spelling(
        grown,
        "transformers: DynamicCache, at first empty; nothing is written to",
        {},
        window,
        lambda past, rows: (2 * torch.cat([past, rows], 2),),
    ),
    _spelling(rolled, "a window: roll, then the last positions", {}, window, _slid),
    _spelling(shifted, "a window: cat", {}, window, _slid),
)
