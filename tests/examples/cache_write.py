"""Caches written to as models and serving code do, and what resembles that."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.caches import turned, viewed
from tests.examples.inputs import Inputs, tensors, under

ALL = slice(None)
BLOCKS, SIZE, HEADS, KEY, VALUE = 5, 4, 2, 8, 16
SLOTS, TABLE = torch.tensor([6, 0, 19]), torch.tensor([[4, 1], [0, 2], [3, 1]])


def one(rows: tuple[int, ...], cache: tuple[int, ...] = (2, 4, 9, 8), index: Any = 3) -> Inputs:
    """One cache, rows for it, and positions."""
    return tensors(cache, rows, torch.tensor(index))


def two(*index: Tensor, tokens: int = 3) -> Inputs:
    """Pages of keys and values."""
    widths = (HEADS, KEY), (HEADS, VALUE)
    return tensors(*((BLOCKS, SIZE, *each) for each in widths), *((tokens, *each) for each in widths), *index)


def of_caches(
    write: Callable[[Tensor, Tensor, Any], Any], count: int = 1, places: Callable[..., Any] = lambda at: at
) -> Callable[..., Any]:
    """Writes rows to one cache or to two, at places that both share, and what they hold then."""

    def forward(*given: Tensor) -> Any:
        at = places(*given[2 * count :])
        for cache, rows in zip(given[:count], given[count : 2 * count], strict=True):
            write(cache, rows, at)
        held = tuple(cache * 2 for cache in given[:count])
        return held if count > 1 else held[0]

    return forward


def _assign(cache: Tensor, rows: Tensor, places: Any) -> None:
    cache[places] = rows


def _into_values(cache: Tensor, rows: Tensor, slots: Any) -> None:
    cache[1].view(-1, *rows.shape[1:])[slots] = rows


def _into_a_layer(cache: Tensor, rows: Tensor, places: Any) -> None:
    cache[1, 0].index_copy_(2, places, rows)


def put(index: Callable[..., Any], count: int = 1) -> Callable[..., Any]:
    """By `cache[index] = rows`."""
    return of_caches(_assign, count, index)


def copy(dim: int, places: Callable[[Tensor, Tensor], Tensor], first: int = 0, count: int = 1) -> Callable[..., Any]:
    """By `index_copy_`, the first dims of the cache flattened."""
    return of_caches(lambda cache, rows, at: cache.flatten(0, first).index_copy_(dim, places(rows, at), rows), count)


def choose(here: Callable[[Tensor, Tensor], Tensor]) -> Callable[..., Any]:
    """By `where`, of whose positions [T] some are to be written."""
    return of_caches(
        lambda cache, rows, at: cache.copy_(torch.where(here(torch.arange(cache.shape[2]), at), rows, cache))
    )


def _chosen_inside(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    positions = torch.arange(cache.shape[2])[:, None]
    return cache.copy_(torch.where(positions != start % cache.shape[2], cache, rows)) * 2


def _one_hot(cache: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    here = torch.nn.functional.one_hot(lengths, cache.shape[2]).bool()
    return cache.copy_(torch.where(here[:, None, :, None], rows, cache)) * 2


def _blended(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    here = (torch.arange(cache.shape[2]) == start).to(cache.dtype)[:, None]
    return cache.copy_(cache * (1 - here) + rows * here) * 2


def _accumulated(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return cache.transpose(0, 2).index_put((places,), rows.transpose(0, 2), accumulate=True)


def _rolled_slice(cache: Tensor, rows: Tensor) -> Tensor:
    new = cache.roll(-3, dims=2)
    new[:, :, -3:] = rows
    return new


def _rolled_constant(cache: Tensor, rows: Tensor) -> Tensor:
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([-1])] = rows
    return cache.copy_(new) * 2


STEP, PROMPT = one((2, 4, 1, 8)), one((2, 4, 5, 8))
PLACES = one((2, 4, 3, 8), index=[6, 0, 3])
PAGES = one((3, 4, 8), (5, 2, 4, 8), [6, 0, 9])
LAST, LONG = [3, 7], (2, 4, 256, 64)
RUN = copy(2, lambda rows, at: torch.arange(rows.shape[2]) + at)
TOKENS = copy(1, lambda rows, at: at + torch.arange(rows.shape[1]))
FIRST = copy(0, lambda rows, at: torch.arange(rows.shape[0]) + at, 1)
BY_LENGTH = put(lambda lengths: (torch.arange(2), ALL, lengths))
BY_SEQUENCE = choose(lambda positions, lengths: (positions == lengths[:, None])[:, None, :, None])
FROM_ON = choose(lambda positions, at: positions[:, None] >= at)
EXAMPLES = (
    Example("index_copy of a prompt", RUN, PROMPT),
    Example("index_copy of a token", RUN, STEP),
    Example("index_put of a token", put(lambda at: (ALL, ALL, at[None])), STEP),
    Example("tokens first", TOKENS, one((2, 5, 4, 8), (2, 9, 4, 8))),
    Example("a length for every sequence", BY_LENGTH, one((2, 4, 8), index=LAST)),
    Example("a length for the first sequences", BY_LENGTH, one((2, 4, 8), (3, 4, 9, 8), LAST)),
    Example("chosen by comparison", choose(lambda positions, at: positions[:, None] == at), one((2, 4, 1, 64), LONG)),
    Example("chosen, the position being outside", BY_SEQUENCE, one((2, 4, 1, 64), LONG, [256, -1])),
    Example("chosen inside", _chosen_inside, STEP),
    Example("chosen by one_hot", _one_hot, one((2, 4, 1, 64), LONG, LAST)),
    Example("a slice", put(lambda at: (ALL, ALL, slice(2, 7))), PROMPT),
    Example("rows of the first dim", FIRST, one((3, 4, 8), (5, 2, 4, 8))),
    Example("any places", copy(2, lambda rows, at: at), PLACES),
    Example("counted from the end", put(lambda at: (ALL, ALL, at - 4)), PLACES),
    Example("slots of pages", of_caches(viewed), PAGES),
    Example("pages and places", put(lambda slots: (slots // 2, slots % 2)), PAGES),
    Example("slots of one part of a cache", of_caches(_into_values), one((3, 2, 8), (2, 5, 4, 2, 8), [7, 0, 19])),
    Example("a layer of a cache of all", of_caches(_into_a_layer), one((2, 4, 3, 8), (3, 2, 2, 4, 9, 8), [7, 0, 2])),
    Example("accumulated", _accumulated, PLACES, "they are added to the cache, or chosen by a"),
    Example(
        "a mask",
        lambda cache, rows, at: cache.index_put((cache > 0,), rows[0, 0, 0, 0]),
        PLACES,
        "they are added to the cache, or chosen by a",
    ),
    Example("every second position", put(lambda at: (ALL, ALL, slice(0, 5, 2))), PLACES, "requires consecutive ones"),
    Example("blended", _blended, STEP, "multiplied by 0"),
    Example("from a position on", FROM_ON, STEP, "scatter_update requires torch.arange(T) =="),
)
SLIDING_EXAMPLES = (
    Example("a token", _rolled_constant, tensors((2, 4, 9, 8), (2, 4, 1, 8))),
    Example("several, by a slice", _rolled_slice, tensors((2, 4, 9, 8), (2, 4, 3, 8))),
)


def _turned(dtype: torch.dtype) -> tuple[Tensor, ...]:
    keys, values, *rest = two(SLOTS)(dtype)
    return turned(keys), turned(values), *rest


FROM_THE_END = two(torch.tensor([-1, 3, -20]))
NZ = tensors(*2 * ((BLOCKS, SIZE, SIZE, 16),), *2 * ((3, SIZE, 16),), SLOTS)
SHORT = tensors(*2 * ((BLOCKS, SIZE, SIZE, 8),), *2 * ((3, SIZE, 8),), SLOTS)
VIEWED = of_caches(viewed, 2)
BY_BLOCK = put(lambda slots: (slots // SIZE, slots % SIZE), 2)
BY_TABLE = put(lambda table, at: (table[torch.arange(3), at // SIZE], at % SIZE), 2)
IN_NZ = put(lambda slots: (slots // SIZE, ALL, slots % SIZE), 2)
ANYWHERE = put(lambda block, place: (block, place), 2)
UNKNOWN = two(SLOTS // SIZE, SLOTS % SIZE)
PAGED = (
    Example("through a view", VIEWED, two(SLOTS)),
    Example("counted from the end", VIEWED, FROM_THE_END),
    Example("a token", VIEWED, two(torch.tensor([7]), tokens=1)),
    Example("index_copy", copy(0, lambda rows, at: at, 1, 2), two(SLOTS)),
    Example("slot // Size, slot % Size", BY_BLOCK, two(SLOTS)),
    Example("slot // Size, slot % Size, counted from the end", BY_BLOCK, FROM_THE_END),
    Example("a block table", BY_TABLE, two(TABLE, torch.tensor([5, 0, 7]))),
    Example("pages that lie otherwise", BY_BLOCK, _turned, "its pages are not contiguous", "written[Cache]"),
    Example("lines of NZ", IN_NZ, NZ),
    Example("shorter lines", IN_NZ, SHORT, "lines of 8 lanes; npu_scatter_pa_kv_cache requires lines of 16"),
    Example(
        "places of unknown range", ANYWHERE, UNKNOWN, "a place in a page is not proven to be below", "written[Cache]"
    ),
)

TRIED = {"cache_write": (*EXAMPLES, *under("sliding", SLIDING_EXAMPLES), *under("pages", PAGED))}
