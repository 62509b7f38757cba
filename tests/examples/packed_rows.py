"""Attention over listed rows that are packed, int8 latents with a scale of each tile beside rotated keys, as models
unpack them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, normal, tensors
from tests.examples.listed_rows import (
    SIZE,
    TABLE,
    in_int8_pages,
    in_line_paged,
    in_line_paged_int8,
    in_pages,
    indexed,
    of_int8_pages,
    of_pages,
    paged,
    taken,
)
from tests.examples.masks import causal
from tests.examples.mla_prolog_int8 import packed
from tests.examples.sparse_attention import LISTED, B, N, S
from tests.examples.sparse_attention import by_einsum as scored

C, DR, TILE = 512, 64, 128
KEYS = TABLE.shape[1] * SIZE
"""Keys of a sequence, in pages and in rows alike."""
Read = Callable[[Tensor], Tensor]


def unpacked(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Latents, rounded once, and rotated keys."""
    latent, rope, scales = rows.split((C, 2 * DR, 4 * C // TILE), dim=-1)
    tiles = latent.unflatten(-1, (-1, TILE)).float() * scales.contiguous().view(torch.float32).unsqueeze(-1)
    return tiles.flatten(-2).to(torch.bfloat16), rope.contiguous().view(torch.bfloat16)


def attended(q: Tensor, rows: Tensor, seen: Tensor, lanes: str) -> Tensor:
    """q [B, S, N, C + Dr] over packed rows, of which entries [B, S, K] are seen, in the dtype of their keys."""
    latent, rope = unpacked(rows)
    parts = zip(q.to(rope.dtype).split((C, DR), dim=-1), (latent, rope), strict=True)
    scores = sum(torch.einsum(f"bsnd,{lanes}->bsnt", *each) for each in parts) * (C + DR) ** -0.5
    weights = scores.float().masked_fill(~seen.unsqueeze(2), -torch.inf).softmax(-1).to(rope.dtype)
    return torch.einsum(f"bsnt,{lanes}->bsnd", weights, latent).to(q.dtype)


def shown(find: Callable[..., Tensor], read: Read = torch.clone) -> Callable[..., Tensor]:
    """Over all rows, of which those that are found are shown by a mask."""
    return lambda q, cache, *more: attended(q, read(cache), find(*more), "btd")


def gathered(find: Callable[..., Tensor], read: Read = torch.clone) -> Callable[..., Tensor]:
    """Over the rows of a list, without entries of -1."""

    def form(q: Tensor, cache: Tensor, *more: Tensor) -> Tensor:
        places = find(*more)
        return attended(q, taken(read(cache), places), places >= 0, "bstd")

    return form


def at(scores: Tensor) -> Tensor:
    """Booleans [B, S, T], true at the largest scores."""
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, best(scores), True)


def best(scores: Tensor) -> Tensor:
    """Places of the largest scores."""
    return scores.topk(LISTED, dim=-1).indices


def found(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Booleans, true at the largest scores of keys that a query sees."""

    def find(*of: Tensor) -> Tensor:
        seen = causal(S, KEYS)
        return at(score(*of).masked_fill(~seen, -torch.inf)) & seen

    return find


def over(*more: Any, pages: bool = False) -> Inputs:
    """Queries, packed rows in which whole numbers stand, and further inputs."""
    rows = packed(normal(1, 5, SIZE, C), normal(2, 5, SIZE, DR))
    return tensors((B, S, N, C + DR), rows if pages else paged(rows), *more)


OWN = [normal(3, B, S, KEYS).argsort(-1).double()]
"""Scores of which no two are alike in any dtype."""


def both(name: str, attend: Any, find: Callable[..., Tensor], given: list[Any]) -> tuple[Example, Example]:
    """Rows, and pages that a table names."""
    return (
        Example(f"packed rows {name}", attend(find), over(*given)),
        Example(f"packed pages {name}", attend(find, paged), over(*given, pages=True)),
    )


TRIED = {
    "sparse_attention": (
        *both("of a list", shown, at, OWN),
        *both("of a list, gathered", gathered, best, OWN),
        *both("of an indexer", shown, found(scored), indexed(S, KEYS)),
        *both("of an indexer of pages", shown, found(of_pages), in_pages()),
        *both("of an int8 indexer", shown, found(of_int8_pages), in_int8_pages()),
        *both("of an indexer of pages, gathered", gathered, in_line_paged, in_pages()),
        *both("of an int8 indexer, gathered", gathered, in_line_paged_int8, in_int8_pages()),
    )
}
