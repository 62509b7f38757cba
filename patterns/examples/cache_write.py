"""Caches written to as models do, and what resembles that."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, tensors


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
LENGTHS = _caches((2, 4, 8), cache=(2, 4, 9, 8), index=torch.tensor([3, 7]))
PLACES = _caches((2, 4, 3, 8), cache=(2, 4, 9, 8), index=torch.tensor([6, 0, 3]))
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
)
SLIDING_EXAMPLES = (
    Example("a token", _rolled_constant, tensors((2, 4, 9, 8), (2, 4, 1, 8))),
    Example("several, by a slice", _rolled_slice, tensors((2, 4, 9, 8), (2, 4, 3, 8))),
)
