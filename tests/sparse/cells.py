"""Every cell of the facets of sparse attention, as plain code.

listing       indexer | paged indexer | NZ indexer | list
source        rows | pages | NZ pages | two tables | two sizes
visibility    none | causal | length
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Example
from tests.attention.facets import Sizes, rows_of
from tests.examples.attention_pages import TABLE
from tests.examples.inputs import normal, tensors
from tests.examples.masks import causal
from tests.examples.sparse_attention import B, D, E, N, by_matmul, chosen, index, keys_values

LISTINGS = ("indexer", "paged indexer", "NZ indexer", "list")
SOURCES = ("rows", "pages", "NZ pages", "two tables", "two sizes")
VISIBILITIES = ("none", "causal", "length")
OTHER = torch.tensor([[2, 0, 4], [1, -2, 3]])
LISTED = 4
SMALL = Sizes(queries=3, size=4, rope=16)
LARGE = Sizes(queries=3, size=16, width=512, rope=64, index=128)
"""Sizes that a chip takes."""


def by_hand(q: Tensor, k: Tensor, v: Tensor, listed: Tensor) -> Tensor:
    """By matmuls, over the keys at which booleans [B, S, T] are true; a query that sees none gives 0."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~listed.unsqueeze(1), -torch.inf)
    return scores.float().softmax(-1).nan_to_num().to(q.dtype) @ v


def stored(how: str, pages: Tensor, table: Tensor) -> Tensor:
    """The cache that holds pages [Block, Size, C] so, in memory of its own."""
    if how == "rows":
        return rows_of("pages", pages, table)
    return pages.unflatten(2, (-1, 16)).transpose(1, 2).contiguous() if how == "NZ pages" else pages


def cell(listing: str, source: str, visibility: str, s: Sizes = SMALL, cut: int = 0) -> Example:
    """One cell; the model may `cut` keys off behind once they are expanded."""
    latents = "pages" if source.startswith("two") else source
    by = {"paged indexer": "pages", "NZ indexer": "NZ pages"}.get(listing, "rows")
    queries, keys = 1 if visibility == "length" else s.queries, s.keys - cut

    def forward(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        table, other, of_keys, lengths, query, key, weights, places = more
        of_rope = other if source.startswith("two") else table
        k, v = keys_values(rows_of(latents, latent, table), rows_of(latents, rope, of_rope), up)
        seen = causal(queries, keys, keys - queries) if visibility == "causal" else None
        seen = torch.arange(keys) < lengths[:, None, None] if visibility == "length" else seen
        if listing == "list":
            listed = torch.zeros(B, queries, keys, dtype=torch.bool).scatter(-1, places, True)
        else:
            scores = by_matmul(query, rows_of(by, key, of_keys)[:, :keys], weights)
            listed = chosen(scores if seen is None else scores.masked_fill(~seen, -torch.inf), LISTED)
        listed = listed if seen is None else listed & seen
        return by_hand(q, k[:, :, :keys], v[:, :, :keys], listed)

    other = OTHER if source == "two tables" else TABLE
    pages, turned = (normal(n, s.blocks, s.size, width) for n, width in ((1, s.width), (2, s.rope)))
    if source == "two sizes":
        turned, other = turned.reshape(2 * s.blocks, s.size // 2, s.rope), torch.arange(4 * s.pages).view(B, -1)
    up = normal(3, N * (D + E), s.width) * s.width**-0.5
    query, slots, weights = scored(queries, s)
    order = torch.rand(B, queries, keys, generator=torch.Generator().manual_seed(7)).argsort(-1)
    inputs = tensors(
        (B, N, queries, D + s.rope), stored(latents, pages, TABLE), stored(latents, turned, other), up,
        TABLE, other, OTHER, torch.tensor([s.keys - 3, 2]), query, stored(by, slots, OTHER), weights,
        order[..., :LISTED],
    )  # fmt: skip
    return Example(", ".join((listing, source, visibility, *(["cut"] if cut else []))), forward, inputs)


def scored(queries: int, s: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, Di], pages [Block, Size, Di] and weights of an indexer, whose scores are different numbers."""
    count = s.blocks * s.size
    *both, weights = index(queries, count)
    query, slots = (pad(each, (0, s.index - count)) for each in both)
    return query, slots.view(s.blocks, s.size, s.index), weights


def cells(s: Sizes) -> Iterator[Example]:
    """The product."""
    for of in product(LISTINGS, SOURCES, VISIBILITIES):
        yield cell(*of, s)


TRIED = {
    "sparse_attention": (
        *(cell(each, "pages", "length") for each in LISTINGS),
        *(cell("paged indexer", each, "causal") for each in SOURCES),
        *(cell("list", each, "none") for each in ("pages", "two tables")),
        cell("paged indexer", "pages", "length", cut=1),
    )
}
"""Rule -> cells as which its forms are written; tests take all of them."""
