"""Every cell of the facets of attention, over keys and values and over a latent, as plain code.

source        rows | pages | pages of heads | NZ pages
visibility    none | causal | count | dense
result        y | y and lse
encoding      plain | int8 with int8 queries, of a latent
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import normal, tensors
from tests.examples.masks import behind
from tests.examples.quantisation import grid, quantised, weights

SOURCES = ("rows", "pages", "pages of heads", "NZ pages")
VISIBILITIES = ("none", "causal", "count", "dense")
LOWERED = "count, lowered"
"""As "count", by the least number instead of -inf: a sequence without keys gives the mean of all values."""
RESULTS = ("y", "y and lse")
ENCODINGS = ("plain", "int8")


@dataclass(frozen=True)
class Sizes:
    """Sequences, query and key heads, queries, lanes D or C and Dr; pages and their rows; lanes of an indexer."""

    batch: int = 2
    heads: int = 4
    groups: int = 2
    queries: int = 2
    width: int = 32
    rope: int = 32
    blocks: int = 7
    pages: int = 3
    size: int = 8
    index: int = 32

    @property
    def keys(self) -> int:
        """Keys of a sequence."""
        return self.pages * self.size


SMALL = Sizes()
LARGE = Sizes(heads=8, groups=1, width=128, rope=64, size=128, pages=2)
"""Sizes that a chip takes; those of a latent have C = 512."""


def page(source: str, s: Sizes, width: int, line: int = 16) -> tuple[int, ...]:
    """The dims of the cache of one of both tensors."""
    return {
        "rows": (s.batch, s.groups, s.keys, width),
        "pages": (s.blocks, s.size, s.groups, width),
        "pages of heads": (s.blocks, s.groups, s.size, width),
        "NZ pages": (s.blocks, width // line, s.size, line),
    }[source]


def rows_of(source: str, cache: Tensor, table: Tensor) -> Tensor:
    """Rows [B, T, ..] of pages; a cache of rows as it is."""
    if source == "rows":
        return cache
    pages = cache[table]
    return (pages.transpose(2, 3).flatten(3) if source == "NZ pages" else pages).flatten(1, 2)


def read(source: str, cache: Tensor, table: Tensor) -> Tensor:
    """Rows [B, M, T, D]."""
    if source == "pages of heads":
        return cache[table].transpose(1, 2).flatten(2, 3)
    rows = rows_of(source, cache, table)
    if source == "pages":
        return rows.transpose(1, 2)
    return rows.unsqueeze(1) if source == "NZ pages" else rows


def hidden(visibility: str, q: Tensor, keys: int, lengths: Tensor, mask: Tensor) -> Tensor | None:
    """True where a key is not seen."""
    places, queries = torch.arange(keys), torch.arange(q.shape[2])
    if visibility == "causal":
        return places > queries[:, None] + keys - q.shape[2]
    if visibility in ("count", LOWERED):
        return behind(lengths, keys)
    return mask if visibility == "dense" else None


def given(s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """The block table, lengths of which one is 0, and a mask that shows every query a key."""
    table = (torch.arange(s.batch * s.pages) * 5 + 2).reshape(s.batch, s.pages) % s.blocks
    mask = normal(9, s.batch, 1, s.queries, s.keys) > 0.5
    return table, torch.tensor([s.keys - 5, 0]), mask & (torch.arange(s.keys) > 0)


def attention(source: str, visibility: str, result: str, s: Sizes) -> Example:
    """One cell of attention over keys and values."""
    s = replace(s, groups=1) if source == "NZ pages" else s

    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, mask: Tensor) -> Any:
        k, v = (read(source, each, table).repeat_interleave(s.heads // s.groups, 1) for each in (keys, values))
        scores = (q @ k.transpose(-2, -1)).float() * s.width**-0.5
        return _attended(scores, v, visibility, hidden(visibility, q, s.keys, lengths, mask), result)

    q = s.batch, s.heads, s.queries, s.width
    inputs = tensors(q, *2 * (page(source, s, s.width),), *given(s))
    return Example(f"{source}, {visibility}, {result}", forward, inputs)


def latent(encoding: str, source: str, visibility: str, result: str, s: Sizes) -> Example:
    """One cell of attention over a latent."""
    s = replace(s, groups=1, width=512 if s.rope == 64 else s.width)
    scores_of = _int8_scores if encoding == "int8" else _scores

    def forward(q: Tensor, turned: Tensor, latents: Tensor, ropes: Tensor, *more: Tensor) -> Any:
        table, lengths, mask, scale = more
        rows, rope = (read(source, each, table) for each in (latents, ropes))
        scores, values, by = scores_of(q, turned, rows, rope, scale)
        y = _attended(scores, values, visibility, hidden(visibility, q, s.keys, lengths, mask), result)
        out, *lse = y if isinstance(y, tuple) else (y,)
        return ((out * by).to(q.dtype), *lse)

    q, cache = (s.batch, s.heads, s.queries), page(source, s, s.width)
    if encoding == "int8":
        cache = weights(2, *page(source, s, s.width, 32 if s.width > 32 else 16))
    ropes = page(source, s, s.rope)
    inputs = tensors(grid(0, *q, s.width), (*q, s.rope), cache, ropes, *given(s), torch.tensor([1 / 64]))
    return Example(f"{encoding}, {source}, {visibility}, {result}", forward, inputs)


def _attended(scores: Tensor, v: Tensor, visibility: str, unseen: Tensor | None, result: str) -> Any:
    lowest = torch.finfo(scores.dtype).min if visibility == LOWERED else -math.inf
    scores = scores if unseen is None else scores.masked_fill(unseen, lowest)
    y = scores.softmax(-1).to(v.dtype) @ v
    return (y, scores.logsumexp(-1)) if result == "y and lse" else y


def _scores(q: Tensor, turned: Tensor, rows: Tensor, rope: Tensor, _: Tensor) -> tuple[Tensor, Tensor, Any]:
    scores = q @ rows.transpose(-2, -1) + turned @ rope.transpose(-2, -1)
    return scores.float() * 0.125, rows, 1


def _int8_scores(q: Tensor, turned: Tensor, rows: Tensor, rope: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    numbers, tokens = quantised(q)
    scores = (numbers.float() @ rows.float().transpose(-2, -1)) * tokens * scale
    return (scores + turned.float() @ rope.float().transpose(-2, -1)) * 0.125, rows.float(), scale


def cells(of: Callable[..., Example], *encodings: tuple[str, ...], s: Sizes = SMALL) -> Iterator[Example]:
    """The product."""
    sources = SOURCES if of is attention else tuple(each for each in SOURCES if each != "pages of heads")
    for cell in product(*encodings, sources, VISIBILITIES, RESULTS):
        yield of(*cell, s)


FORMS = (("rows", "count"), ("pages", "none"), ("pages of heads", "count"), ("NZ pages", "none"), ("NZ pages", "count"))
LATENT_FORMS = (FORMS[0], FORMS[1], ("pages", "count"), *FORMS[3:])
SUMMED = tuple(latent("plain", *cell, "y and lse", SMALL) for cell in LATENT_FORMS)
INT8 = tuple(latent("int8", *cell, "y", SMALL) for cell in LATENT_FORMS)

TRIED = {
    "attention": tuple(attention(*cell, result, SMALL) for cell in FORMS for result in RESULTS),
    "latent_attention": (*SUMMED, *INT8, latent("plain", "NZ pages", "none", "y", SMALL)),
}
"""Rule -> cells as which its forms are written; tests take all of them."""
