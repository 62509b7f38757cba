"""Attention over a latent in whole numbers of 8 bits as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.quantisation import grid, quantised, weights

B, N, C, R, BLOCKS, SIZE, LINE = 2, 4, 32, 16, 7, 4, 8
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])
KEYS = TABLE.shape[1] * SIZE
LENGTHS, EMPTY = torch.tensor([6, 11]), torch.tensor([0, 12])
SCALE = 0.125
STORED = 1 / 64
"""The scale of the latent, where the model holds it as a number."""
Attend = Callable[..., Tensor]


def inputs(queries: int, pages: tuple[int, ...], lengths: Tensor, *more: Tensor, table: Tensor = TABLE) -> Inputs:
    """Absorbed and rotated queries, both caches whose last dim is filled up, the block table, lengths, the scale."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        latents, ropes = (
            (*pages[:1], width // LINE, *pages[2:]) if len(pages) == 4 else (*pages, width) for width in (C, R)
        )
        floats = grid(0, B, N, queries, C), normal(1, B, N, queries, R), normal(3, *ropes)
        q, rope, k_rope = (each.to(dtype) for each in floats)
        scale = torch.nn.Parameter(torch.tensor([STORED]), requires_grad=False)
        return q, rope, weights(2, *latents), k_rope, table.clone(), lengths.clone(), scale, *more

    return make


def explicit(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor | float) -> Tensor:
    """Products of whole numbers, scales behind them."""
    whole, tokens = quantised(q)
    scores = torch.einsum("bnsc,btc->bnst", whole.float(), latent.float()) * tokens * scale
    scores = (scores + torch.einsum("bnsr,btr->bnst", rope.float(), k_rope.float())) * SCALE
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (torch.einsum("bnst,btc->bnsc", shares, latent.float()) * scale).to(q.dtype)


def restored(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Queries and latent times their scales before the products, all lanes joined."""
    whole, tokens = quantised(q)
    latent = (latent.float() * scale).unsqueeze(1)
    query = torch.cat((whole.float() * tokens, rope.float()), -1)
    keys = torch.cat((latent, k_rope.float().unsqueeze(1)), -1)
    scores = (query @ keys.transpose(-2, -1) * SCALE).masked_fill(~seen, torch.finfo(torch.float32).min)
    return (scores.softmax(-1) @ latent).to(q.dtype)


def by_sdpa(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """By sdpa, the scale a number."""
    whole, tokens = quantised(q)
    latent = (latent.float() * STORED).unsqueeze(1).expand(-1, N, -1, -1)
    query = torch.cat((whole.float() * tokens, rope.float()), -1)
    keys = torch.cat((latent, k_rope.float().unsqueeze(1).expand(-1, N, -1, -1)), -1)
    return scaled_dot_product_attention(query, keys, latent, seen, scale=SCALE).to(q.dtype)


def in_the_dtype(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Computed in the dtype of the model."""
    whole, tokens = quantised(q)
    latent = latent.to(q.dtype) * scale.to(q.dtype)
    query = whole.to(q.dtype) * tokens.to(q.dtype)
    scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rope, k_rope)
    shares = (scores.float() * SCALE).masked_fill(~seen, -math.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bnst,btc->bnsc", shares, latent)


def single(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Up to a length, [B, 1, 1, T]."""
    return (torch.arange(keys) < lengths[:, None])[:, None, None]


def in_line(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """The last query sees the last key, [B, 1, S, T]."""
    at = lengths[:, None, None, None] - queries + torch.arange(queries)[:, None]
    return torch.arange(keys) <= at


def first_ones(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Queries stand in line from the first key on, [S, T]."""
    return torch.arange(keys) <= torch.arange(queries)[:, None]


def in_pages(attend: Attend, seen: Callable[..., Tensor] = single) -> Attend:
    """Over rows that a block table gathers from pages [Block, Size, ..]."""

    def forward(q, rope, latents, ropes, table, lengths, scale):
        latent, k_rope = (pages[table].reshape(B, KEYS, -1) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, seen(lengths, q.shape[2], KEYS), scale)

    return forward


def in_lines(attend: Attend, seen: Callable[..., Tensor] = single) -> Attend:
    """Over pages [Block, Lanes / L, Size, L] that hold every row in lines of L lanes."""

    def forward(q, rope, latents, ropes, table, lengths, scale):
        latent, k_rope = (pages[table].permute(0, 1, 3, 2, 4).reshape(B, KEYS, -1) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, seen(lengths, q.shape[2], KEYS), scale)

    return forward


def in_rows(attend: Attend, seen: Callable[..., Tensor] = single) -> Attend:
    """Over a cache [B, T, ..]."""

    def forward(q, rope, latents, ropes, table, lengths, scale):
        return attend(q, rope, latents, ropes, seen(lengths, q.shape[2], latents.shape[1]), scale)

    return forward


PAGES, LINES, ROWS = (BLOCKS, SIZE), (BLOCKS, 0, SIZE, LINE), (B, KEYS)
EXAMPLES = (
    Example("pages", in_pages(explicit), inputs(1, PAGES, LENGTHS)),
    Example("pages, a sequence without keys", in_pages(restored), inputs(1, PAGES, EMPTY)),
    Example("pages, several queries", in_pages(by_sdpa, in_line), inputs(3, PAGES, torch.tensor([6, 12]))),
    Example("lines", in_lines(restored), inputs(1, LINES, EMPTY)),
    Example("lines, in the model's dtype", in_lines(in_the_dtype), inputs(1, LINES, LENGTHS)),
    Example("lines, several queries", in_lines(explicit, in_line), inputs(2, LINES, torch.tensor([6, 12]))),
    Example("rows", in_rows(by_sdpa), inputs(1, ROWS, LENGTHS)),
    Example("rows, several queries", in_rows(explicit, first_ones), inputs(2, ROWS, LENGTHS)),
)


def floats_alone(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Queries that are not quantised."""
    latent = latent.float() * scale
    scores = torch.einsum("bnsc,btc->bnst", q.float(), latent)
    scores = (scores + torch.einsum("bnsr,btr->bnst", rope.float(), k_rope.float())) * SCALE
    return torch.einsum("bnst,btc->bnsc", scores.masked_fill(~seen, -math.inf).softmax(-1), latent).to(q.dtype)


def by_token(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """A scale for each token of the latent."""
    return restored(q, rope, latent, k_rope, seen, scale * torch.arange(1, latent.shape[1] + 1)[:, None])


def shared(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """One scale for all queries."""
    whole = (q.float() * 32).round().clamp(-128, 127).to(torch.int8)
    scores = torch.einsum("bnsc,btc->bnst", whole.float(), latent.float()) * scale
    scores = (scores + torch.einsum("bnsr,btr->bnst", rope.float(), k_rope.float())) * SCALE
    shares = scores.masked_fill(~seen, -math.inf).softmax(-1)
    return (torch.einsum("bnst,btc->bnsc", shares, latent.float()) * scale).to(q.dtype)


def strange(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Every second key."""
    return single(lengths, queries, keys) & (torch.arange(keys) * lengths.sum() % 2 == 0)


def apart(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    q, rope, latents, *rest = inputs(1, PAGES, LENGTHS)(dtype)
    return q, rope, latents.transpose(0, 1).contiguous().transpose(0, 1), *rest


REJECTS = (
    Example("queries in floats", in_pages(floats_alone), inputs(1, PAGES, LENGTHS), "no operator multiplies both"),
    Example("a scale of each key", in_pages(by_token), inputs(1, PAGES, LENGTHS), "one for all"),
    Example("one scale of all queries", in_pages(shared), inputs(1, PAGES, LENGTHS), "for each token and head"),
    Example("any mask", in_rows(explicit, strange), inputs(1, ROWS, LENGTHS), "not proven to be causal"),
)
GATHERED = ((Example("pages that lie otherwise", in_pages(explicit), apart), "the pages do not lie together"),)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""

TRIED = {"latent_attention": (*EXAMPLES, *(each for each, _ in GATHERED), *REJECTS)}
"""Rule -> its examples and rejects."""
