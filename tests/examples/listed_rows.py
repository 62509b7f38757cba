"""Attention over rows that models gather by lists, the lists of indexers, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

from fusion import Example
from tests.examples.inputs import Inputs, tensors
from tests.examples.masks import causal
from tests.examples.sparse_attention import DR, LISTED, B, C, N, S, T, by_einsum, by_matmul, index

SCALE = (C + DR) ** -0.5
TABLE, OTHERS, SIZE = torch.tensor([[3, 1], [0, 4]]), torch.tensor([[3, 1], [0, 2]]), 4
"""Pages of each sequence, those of something else, and rows of a page."""
Form = Callable[..., Any]


def attended(rows: Tensor, q: Tensor, seen: Tensor | None = None) -> Tensor:
    """q [B, S, N, C + Dr] over rows [B, S, K, C + Dr], of which entries [B, S, K] are seen; NaN without any."""
    scores = torch.einsum("bsnd,bskd->bsnk", q, rows).float() * SCALE
    scores = scores if seen is None else scores.masked_fill(~seen.unsqueeze(2), -torch.inf)
    return torch.einsum("bsnk,bskc->bsnc", scores.softmax(-1).to(q.dtype), rows[..., :C])


def taken(kv: Tensor, places: Tensor) -> Tensor:
    """Rows of each sequence."""
    return kv[torch.arange(B)[:, None, None], places.clamp(min=0)]


def by_own_list(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
    """Entries of -1 anywhere."""
    return attended(taken(kv, places), q, places >= 0)


def gathered(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
    """By torch.gather, and nothing is hidden."""
    every = places.clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, kv.shape[-1])
    return attended(kv.unsqueeze(1).expand(-1, places.shape[1], -1, -1).gather(2, every), q)


def of_others(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
    """Values of other rows than the keys."""
    keys, values = taken(kv, places), taken(kv, places.roll(1, -1))
    return attended(torch.cat((values[..., :C], keys[..., C:]), -1), q, places >= 0)


def lowered(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
    """A bias that is no mask."""
    rows = taken(kv, places)
    scores = torch.einsum("bsnd,bskd->bsnk", q, rows) * SCALE + places.unsqueeze(2).to(q.dtype)
    return torch.einsum("bsnk,bskc->bsnc", scores.softmax(-1), rows[..., :C])


def of_few_lanes(q: Tensor, kv: Tensor, places: Tensor) -> Tensor:
    """Values in the middle of a row."""
    rows = taken(kv, places)
    scores = torch.einsum("bsnd,bskd->bsnk", q, rows) * SCALE
    return torch.einsum("bsnk,bskc->bsnc", scores.softmax(-1), rows[..., 4 : 4 + C])


def masked(scores: Tensor, seen: Tensor) -> Tensor:
    """Places of the best keys that are seen, then -1."""
    best, places = scores.masked_fill(~seen, -torch.inf).topk(LISTED, -1)
    return places.masked_fill(best == -torch.inf, -1)


def paged(pages: Tensor) -> Tensor:
    """Rows of each sequence, of pages that a table names."""
    return pages[TABLE].flatten(1, 2)


def in_line(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """The list of a prompt."""
    return masked(by_einsum(query, key, weights), causal(S, S))


def of_pages(query: Tensor, pages: Tensor, weights: Tensor) -> Tensor:
    """Scores of keys in pages."""
    return by_einsum(query, paged(pages), weights)


def of_int8_pages(
    query: Tensor, of_queries: Tensor, pages: Tensor, of_keys: Tensor, weights: Tensor, table: Tensor = TABLE
) -> Tensor:
    """The same of int8 queries and keys, with scales of their rows in the pages of a table."""
    products = torch.einsum("bshd,btd->bsht", query.float(), paged(pages).float())
    scores = torch.einsum("bsht,bsh->bst", relu(products), weights.float() * of_queries)
    return scores * of_keys[table].flatten(1, 2).float().unsqueeze(1)


def in_line_paged(query: Tensor, pages: Tensor, weights: Tensor) -> Tensor:
    """The list of a prompt, of keys in pages."""
    return masked(of_pages(query, pages, weights), causal(S, TABLE.shape[1] * pages.shape[1]))


def in_line_paged_int8(query: Tensor, of_queries: Tensor, pages: Tensor, *more: Tensor) -> Tensor:
    """The same in int8."""
    return masked(of_int8_pages(query, of_queries, pages, *more), causal(S, TABLE.shape[1] * pages.shape[1]))


def by_two_tables(query: Tensor, of_queries: Tensor, pages: Tensor, *more: Tensor) -> Tensor:
    """Scales of keys in other pages than the keys."""
    scores = of_int8_pages(query, of_queries, pages, *more, table=OTHERS)
    return masked(scores, causal(S, TABLE.shape[1] * pages.shape[1]))


def unmarked(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Hidden keys stay in the list."""
    return by_matmul(query, key, weights).masked_fill(~causal(S, S), -torch.inf).topk(LISTED, -1).indices


def wrongly_marked(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """-1 is written over the place of the query itself as well."""
    places = unmarked(query, key, weights)
    return torch.where(places < torch.arange(S)[:, None], places, -1)


def enough(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """One query, of which all keys can be seen."""
    return by_matmul(query, key, weights).topk(LISTED, -1).indices.to(torch.int32)


def with_list(find: Form) -> Form:
    """Over rows of the list that is found by further inputs."""

    def attend(q: Tensor, kv: Tensor, *more: Tensor) -> Tensor:
        places = find(*more)
        return attended(taken(kv, places), q, places >= 0)

    return attend


def with_pages(find: Form) -> Form:
    """Over pages of latents and of rotated lanes."""

    def attend(q: Tensor, latent: Tensor, rope: Tensor, *more: Tensor) -> Tensor:
        return with_list(find)(q, torch.cat((paged(latent), paged(rope)), -1), *more)

    return attend


def listed() -> Inputs:
    """q [B, S, N, C + Dr], kv [B, T, C + Dr] and places [B, S, K], -1 among them."""
    places = torch.randint(0, T, (B, S, LISTED), generator=torch.Generator().manual_seed(7))
    places[0, 0], places[1, 2, 1] = -1, -1
    return tensors((B, S, N, C + DR), (B, T, C + DR), places)


def few() -> Tensor:
    """A list of the rows that pages hold."""
    return torch.randint(-1, TABLE.shape[1] * SIZE, (B, S, LISTED), generator=torch.Generator().manual_seed(7))


def indexed(queries: int = S, keys: int = S) -> list[Tensor]:
    """Queries, keys and weights of an indexer."""
    query, key, weights = index(queries, keys)
    return [query, key.expand(B, -1, -1).clone(), weights]


def in_pages() -> list[Tensor]:
    """The same with keys in pages."""
    query, key, weights = index(S, TABLE.shape[1] * SIZE)
    pages = torch.zeros(5, SIZE, key.shape[-1], dtype=torch.float64)
    pages[TABLE] = key.unflatten(0, (-1, SIZE))
    return [query, pages, weights]


def in_int8_pages() -> list[Tensor]:
    """The same in int8, with scales [B, S, H] of queries in float32, and [Block, Size] of keys in float16."""
    query, pages, weights = in_pages()
    scales = torch.ones(pages.shape[:2], dtype=torch.float16)
    return [query.to(torch.int8), torch.ones(query.shape[:3]) / 2, pages.to(torch.int8), scales, weights]


Q, KV, PAGES = (B, S, N, C + DR), (B, TABLE.shape[1] * SIZE, C + DR), ((5, SIZE, C), (5, SIZE, DR))
TRIED = {
    "sparse_attention": (
        Example("rows of an own list", by_own_list, listed()),
        Example("rows of a list without gaps", gathered, listed()),
        Example("rows in pages by an own list", with_pages(lambda places: places), tensors(Q, *PAGES, few())),
        Example("rows of an indexer", with_list(in_line), tensors(Q, (B, S, C + DR), *indexed())),
        Example("rows in pages of an indexer", with_pages(in_line), tensors(Q, *PAGES, *indexed())),
        Example("rows of an indexer of pages", with_list(in_line_paged), tensors(Q, KV, *in_pages())),
        Example("all in pages", with_pages(in_line_paged), tensors(Q, *PAGES, *in_pages())),
        Example("all in pages, by int8 keys", with_pages(in_line_paged_int8), tensors(Q, *PAGES, *in_int8_pages())),
        Example("rows and a bias", lowered, listed(), "what is added to the scores is not proven"),
        Example("rows without a latent", of_few_lanes, listed(), "are no latent with rotated lanes"),
    ),
    "indexer_topk": (
        Example("a prompt whose list is returned", in_line, tensors(*indexed())),
        Example("a prompt over pages", in_line_paged, tensors(*in_pages())),
        Example("a prompt over int8 pages", in_line_paged_int8, tensors(*in_int8_pages())),
        Example("a prompt over int8 pages, scales by a table of their own", by_two_tables, tensors(*in_int8_pages())),
        Example("a step over enough keys", enough, tensors(*indexed(1, T))),
        Example("hidden keys are listed", unmarked, tensors(*indexed()), "a query may see fewer keys than topk lists"),
        Example("another key is left out", wrongly_marked, tensors(*indexed()), "-1 is written over other entries"),
    ),
}  # fmt: skip
