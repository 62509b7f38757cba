"""Keys and values written to pages as serving code does, and what resembles that."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.inputs import Inputs, normal, under

BLOCKS, SIZE, HEADS, KEY, VALUE = 5, 4, 2, 8, 16


def _pages(*index: Tensor, tokens: int = 3) -> Inputs:
    """Two caches, keys and values for them, and where they go."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = [
            (BLOCKS, SIZE, HEADS, KEY),
            (BLOCKS, SIZE, HEADS, VALUE),
            (tokens, HEADS, KEY),
            (tokens, HEADS, VALUE),
        ]
        return *(normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes)), *(each.clone() for each in index)

    return make


SLOTS = torch.tensor([6, 0, 19])


def _viewed(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys.view(-1, HEADS, KEY)[slots] = key
    values.view(-1, HEADS, VALUE)[slots] = value
    return keys * 2, values * 2


def _copied(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys.flatten(0, 1).index_copy_(0, slots, key)
    values.flatten(0, 1).index_copy_(0, slots, value)
    return keys * 2, values * 2


def _by_block(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    block, place = slots // SIZE, slots % SIZE
    keys[block, place] = key
    values[block, place] = value
    return keys * 2, values * 2


def _by_table(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, table: Tensor, positions: Tensor
) -> tuple[Tensor, Tensor]:
    block, place = table[torch.arange(3), positions // SIZE], positions % SIZE
    keys[block, place] = key
    values[block, place] = value
    return keys * 2, values * 2


def _anywhere(
    keys: Tensor, values: Tensor, key: Tensor, value: Tensor, block: Tensor, place: Tensor
) -> tuple[Tensor, Tensor]:
    keys[block, place] = key
    values[block, place] = value
    return keys * 2, values * 2


TABLE = torch.tensor([[4, 1], [0, 2], [3, 1]])
EXAMPLES = (
    Example("through a view", _viewed, _pages(SLOTS)),
    Example("counted from the end", _viewed, _pages(torch.tensor([-1, 3, -20]))),
    Example("a token", _viewed, _pages(torch.tensor([7]), tokens=1)),
    Example("index_copy", _copied, _pages(SLOTS)),
    Example("slot // Size, slot % Size", _by_block, _pages(SLOTS)),
    Example("slot // Size, slot % Size, counted from the end", _by_block, _pages(torch.tensor([-1, 3, -20]))),
    Example("a block table", _by_table, _pages(TABLE, torch.tensor([5, 0, 7]))),
)


def _lines(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Caches whose pages hold a row in as many lines as rows."""
    caches, rows = (BLOCKS, SIZE, SIZE, 16), (3, SIZE, 16)
    return *(normal(seed, *shape).to(dtype) for seed, shape in enumerate((caches, caches, rows, rows))), SLOTS.clone()


def _in_lines(keys: Tensor, values: Tensor, key: Tensor, value: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    keys[slots // SIZE, :, slots % SIZE] = key
    values[slots // SIZE, :, slots % SIZE] = value
    return keys * 2, values * 2


def _turned(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Caches that lie in memory as [Size, Block, ..]."""
    keys, values, *rest = _pages(SLOTS)(dtype)
    return *(each.transpose(0, 1).contiguous().transpose(0, 1) for each in (keys, values)), *rest


REJECTS = (
    Example("pages that lie otherwise", _by_block, _turned, "the pages are not contiguous", "at_places"),
    Example("lines of NZ", _in_lines, _lines, "the pages hold rows in lines"),
    Example(
        "places of unknown range",
        _anywhere,
        _pages(SLOTS // SIZE, SLOTS % SIZE),
        "not proven to lie in its page",
        "at_places",
    ),
)

TRIED = {"cache_write": under("pages", (*EXAMPLES, *REJECTS))}
"""Rule -> its examples and rejects."""
