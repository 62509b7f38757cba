"""How rows go into caches, and come out of their pages: `write(cache, rows, at)` gives what the cache holds then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

BLOCKS, SIZE = 9, 4
TABLE, LENGTHS = torch.tensor([[3, 8, 1], [5, 2, 7]]), torch.tensor([6, 11])
Write = Callable[[Tensor, Tensor, Tensor], Any]
Read = Callable[[Tensor, Tensor], Tensor]


def run(count: int, at: Tensor) -> Tensor:
    """Consecutive positions, none of which counts from the end."""
    return torch.arange(count) + at.clamp(min=0)


def joined(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Rows behind those that are there."""
    return torch.cat((cache, rows), dim=1)


def copied(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Consecutive positions of [B, T, D]."""
    return cache.index_copy_(1, run(rows.shape[1], at), rows)


def single(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Consecutive positions of [B, 1, T, D]."""
    return cache.index_copy_(2, run(rows.shape[1], at), rows.unsqueeze(1)).squeeze(1)


def sliced(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Positions that are known before."""
    cache[:, 2 : 2 + rows.shape[1]] = rows
    return cache


def by_sequence(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """A token of each sequence at a position of its own."""
    every = torch.arange(rows.shape[0])
    cache[every, at + every] = rows[:, 0]
    return cache


def two_halves(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """One half of the tokens behind those of each half of [B, 2, T, D]."""
    return cache.index_copy_(2, run(rows.shape[1] // 2, at), rows.unflatten(1, (2, -1))).flatten(1, 2)


def half_sequences(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """One half of the tokens behind those of each half of [2 · B, T, D]."""
    halves = rows.reshape(2 * rows.shape[0], -1, rows.shape[-1])
    return cache.index_copy_(1, run(halves.shape[1], at), halves).reshape(rows.shape[0], -1, rows.shape[-1])


def of_one_sequence(cache: Tensor, rows: Tensor, at: Tensor) -> Tensor:
    """Packed rows [S, D] in [1, T, D]."""
    return copied(cache, rows.unsqueeze(0), at)


def viewed(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows [.., D] in those of all pages by their number."""
    pages.view(-1, *pages.shape[2:])[slots] = rows.view(-1, *pages.shape[2:])


def index_copied(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same by index_copy."""
    pages.view(-1, rows.shape[-1]).index_copy_(0, slots, rows.flatten(0, -2))


def by_block(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    size = pages.shape[1]
    pages[slots // size, slots % size] = rows.view(-1, *pages.shape[2:])


def anywhere(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A place that may lie in no page."""
    pages[slots // SIZE, slots - slots // SIZE * SIZE] = rows


def in_nz(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """NZ pages [Block, D / L, Size, L], or [Block, 1, D / L, Size, L] of one head."""
    size, every = pages.shape[-2], (slice(None),) * (pages.dim() - 3)
    pages[(slots // size, *every, slots % size)] = rows.view(-1, *pages.shape[1:-2], pages.shape[-1])


def two_in_a_row(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, Size, 2, D] that take two tokens of a sequence at one slot."""
    half = slots.shape[0] // 2
    pages.view(-1, *pages.shape[2:])[slots.view(half, 2)[:, 0]] = rows.view(half, 2, -1)


def of_pages(pages: Tensor, table: Tensor) -> Tensor:
    """The rows [B, T, D] of the pages of each sequence."""
    return pages[table].reshape(table.shape[0], -1, pages.shape[-1])


def of_nz(pages: Tensor, table: Tensor) -> Tensor:
    """The same of NZ pages."""
    rows = pages[table].flatten(2, -3).transpose(2, 3)
    return rows.reshape(table.shape[0], -1, pages.shape[-3] * pages.shape[-1])


def shapes(
    c: int, dr: int, *nz: int, heads: tuple[int, ...] = (), size: int = SIZE, blocks: int = BLOCKS
) -> tuple[tuple[int, ...], ...]:
    """Pages of both caches: whole rows, or NZ with so many lanes in the blocks of each."""
    if not nz:
        return (blocks, size, *heads, c), (blocks, size, *heads, dr)
    widths = zip((c, dr), nz * 2, strict=False)
    return tuple((blocks, *heads, width // lanes, size, lanes) for width, lanes in widths)


def turned(cache: Tensor, dims: tuple[int, ...] = (0, 1)) -> Tensor:
    """The same cache, two dims of which lie in memory in the other order."""
    return cache.transpose(*dims).contiguous().transpose(*dims)
