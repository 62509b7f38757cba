"""Caches written to as models do, and what resembles that."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, tensors, under


def _caches(*rows: tuple[int, ...], cache: tuple[int, ...], index: Tensor) -> Inputs:
    """A cache, rows for it, and positions."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        return (
            normal(0, *cache).to(dtype),
            *(normal(seed + 1, *shape).to(dtype) for seed, shape in enumerate(rows)),
            index.clone(),
        )

    return make


START = torch.tensor(3)
STEP = _caches((2, 4, 1, 8), cache=(2, 4, 9, 8), index=START)
PROMPT = _caches((2, 4, 5, 8), cache=(2, 4, 9, 8), index=START)
TOKENS = _caches((2, 5, 4, 8), cache=(2, 9, 4, 8), index=START)
LAST = torch.tensor([3, 7])
LENGTHS = _caches((2, 4, 8), cache=(2, 4, 9, 8), index=LAST)
PLACES = _caches((2, 4, 3, 8), cache=(2, 4, 9, 8), index=torch.tensor([6, 0, 3]))
LONG = _caches((2, 4, 1, 64), cache=(2, 4, 256, 64), index=START)
BEYOND = _caches((2, 4, 1, 64), cache=(2, 4, 256, 64), index=torch.tensor([256, -1]))
SLOTS = _caches((3, 4, 8), cache=(5, 2, 4, 8), index=torch.tensor([6, 0, 9]))


def _index_copy(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.index_copy_(2, torch.arange(rows.shape[2]) + start, rows)
    return cache * 2


def _index_put(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache[:, :, start[None]] = rows
    return cache * 2


def _tokens_first(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.index_copy_(1, start + torch.arange(rows.shape[1]), rows)
    return cache * 2


def _by_length(cache: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    cache[torch.arange(cache.shape[0]), :, lengths] = rows
    return cache * 2


def _sliced(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache[:, :, 2:7] = rows
    return cache * start


def _first_rows(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.flatten(0, 1).index_copy_(0, torch.arange(rows.shape[0]) + start, rows)
    return cache * 2


def _any_places(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    cache.index_copy_(2, places, rows)
    return cache * 2


def _from_the_end(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    cache[:, :, places - 4] = rows
    return cache * 2


def _slots(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache.view(-1, 4, 8)[slots] = rows
    return cache * 2


def _pages(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache[slots // 2, slots % 2] = rows
    return cache * 2


def _first_sequences(cache: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    cache[torch.arange(rows.shape[0]), :, lengths] = rows
    return cache * 2


def _chosen(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    positions = torch.arange(cache.shape[2])[:, None]
    cache.copy_(torch.where(positions == start, rows, cache))
    return cache * 2


def _by_sequence(cache: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    here = torch.arange(cache.shape[2]) == lengths[:, None]
    cache.copy_(torch.where(here[:, None, :, None], rows, cache))
    return cache * 2


def _chosen_inside(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    positions = torch.arange(cache.shape[2])[:, None]
    cache.copy_(torch.where(positions != start % cache.shape[2], cache, rows))
    return cache * 2


def _one_hot(cache: Tensor, rows: Tensor, lengths: Tensor) -> Tensor:
    here = torch.nn.functional.one_hot(lengths, cache.shape[2]).bool()
    cache.copy_(torch.where(here[:, None, :, None], rows, cache))
    return cache * 2


def _every_second(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache[:, :, :5:2] = rows
    return cache * 2


def _blended(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    here = (torch.arange(cache.shape[2]) == start).to(cache.dtype)[:, None]
    cache.copy_(cache * (1 - here) + rows * here)
    return cache * 2


def _from_there_on(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.copy_(torch.where(torch.arange(cache.shape[2])[:, None] >= start, rows, cache))
    return cache * 2


def _accumulated(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return cache.transpose(0, 2).index_put((places,), rows.transpose(0, 2), accumulate=True)


def _masked(cache: Tensor, rows: Tensor, places: Tensor) -> Tensor:
    return cache.index_put((cache > 0,), rows[0, 0, 0, 0])


def _rolled_slice(cache: Tensor, rows: Tensor) -> Tensor:
    new = cache.roll(-3, dims=2)
    new[:, :, -3:] = rows
    return new


def _rolled_constant(cache: Tensor, rows: Tensor) -> Tensor:
    new = cache.roll(-1, dims=-2)
    new[:, :, torch.tensor([-1])] = rows
    cache.copy_(new)
    return cache * 2


EXAMPLES = (
    Example("index_copy of a prompt", _index_copy, PROMPT),
    Example("index_copy of a token", _index_copy, STEP),
    Example("index_put of a token", _index_put, STEP),
    Example("tokens first", _tokens_first, TOKENS),
    Example("a length for every sequence", _by_length, LENGTHS),
    Example("a length for the first sequences", _first_sequences, _caches((2, 4, 8), cache=(3, 4, 9, 8), index=LAST)),
    Example("chosen by comparison", _chosen, LONG),
    Example("chosen, the position being outside", _by_sequence, BEYOND),
    Example("chosen inside", _chosen_inside, STEP),
    Example("chosen by one_hot", _one_hot, _caches((2, 4, 1, 64), cache=(2, 4, 256, 64), index=LAST)),
    Example("a slice", _sliced, PROMPT),
    Example("rows of the first dim", _first_rows, _caches((3, 4, 8), cache=(5, 2, 4, 8), index=START)),
    Example("any places", _any_places, PLACES),
    Example("counted from the end", _from_the_end, PLACES),
    Example("slots of pages", _slots, SLOTS),
    Example("pages and places", _pages, SLOTS),
)
REJECTS = (
    Example("accumulated", _accumulated, PLACES, "added to what the cache holds"),
    Example("a mask", _masked, PLACES, "chosen by a mask"),
    Example("every second position", _every_second, PLACES, "replaces neighbours"),
    Example("blended", _blended, STEP, "multiplied by 0"),
    Example("from a position on", _from_there_on, STEP, "something other than one position"),
)
SLIDING_EXAMPLES = (
    Example("a token", _rolled_constant, tensors((2, 4, 9, 8), (2, 4, 1, 8))),
    Example("several, by a slice", _rolled_slice, tensors((2, 4, 9, 8), (2, 4, 3, 8))),
)

TRIED = {"cache_write": (*EXAMPLES, *REJECTS, *under("sliding", SLIDING_EXAMPLES))}
"""Rule -> its examples and rejects."""
