"""Attention over an int8 latent as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Example
from tests.examples.attention_pages import BLOCKS, EMPTY, LENGTHS, ROOM, SIZE, TABLE
from tests.examples.caches import Read, of_nz, of_pages, shapes
from tests.examples.inputs import Inputs, fixed, tensors
from tests.examples.masks import below, last
from tests.examples.quantisation import grid, int8, quantised, weights

B, N, C, R, LANES = 2, 4, 32, 16, 8
SCALE = 0.125
STORED = 1 / 64
"""The scale of the latent, where the model holds it as a number."""
Attend = Callable[..., Tensor]


def inputs(queries: int, caches: tuple[tuple[int, ...], ...], lengths: Tensor) -> Inputs:
    """Absorbed and rotated queries, both caches of these dims, the block table, lengths, the scale."""
    latents, ropes = caches
    q, scale = grid(0, B, N, queries, C), fixed(torch.tensor([STORED]))
    return tensors(q, (B, N, queries, R), weights(2, *latents), ropes, TABLE, lengths, scale)


def scored(numbers: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, *by: Tensor) -> Tensor:
    """Products of int8, the scales behind them, and those of rotated lanes."""
    scores = torch.einsum("bnsc,btc->bnst", numbers.float(), latent.float())
    for each in by:
        scores = scores * each
    return (scores + torch.einsum("bnsr,btr->bnst", rope.float(), k_rope.float())) * SCALE


def read(scores: Tensor, latent: Tensor, seen: Tensor) -> Tensor:
    """The mean of the latents that are seen."""
    return torch.einsum("bnst,btc->bnsc", scores.masked_fill(~seen, -math.inf).softmax(-1), latent.float())


def explicit(
    q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor,
    quantise: Callable[[Tensor], tuple[Tensor, ...]] = quantised,
) -> Tensor:  # fmt: skip
    """Products of int8, scales behind them."""
    numbers, *tokens = quantise(q)
    return (read(scored(numbers, rope, latent, k_rope, *tokens, scale), latent, seen) * scale).to(q.dtype)


shared = partial(explicit, quantise=lambda q: (int8(q.float() * 32),))
"""One scale for all queries."""


def joined(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, scale: Tensor | float) -> tuple[Tensor, ...]:
    """Queries and keys of all lanes in float32, and the latent, [B, .., T, ..], times its scale."""
    numbers, tokens = quantised(q)
    latent = (latent.float() * scale).unsqueeze(1)
    query = torch.cat((numbers.float() * tokens, rope.float()), -1)
    return query, latent, k_rope.float().unsqueeze(1)


def restored(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Queries and latent times their scales before the products, all lanes joined."""
    query, latent, k_rope = joined(q, rope, latent, k_rope, scale)
    keys = torch.cat((latent, k_rope), -1)
    scores = (query @ keys.transpose(-2, -1) * SCALE).masked_fill(~seen, torch.finfo(torch.float32).min)
    return (scores.softmax(-1) @ latent).to(q.dtype)


def by_sdpa(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """By sdpa, the scale a number."""
    query, *keys = joined(q, rope, latent, k_rope, STORED)
    latent, k_rope = (each.expand(-1, N, -1, -1) for each in keys)
    keys = torch.cat((latent, k_rope), -1)
    return scaled_dot_product_attention(query, keys, latent, seen, scale=SCALE).to(q.dtype)


def in_the_dtype(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Computed in the dtype of the model."""
    numbers, tokens = quantised(q)
    latent = latent.to(q.dtype) * scale.to(q.dtype)
    query = numbers.to(q.dtype) * tokens.to(q.dtype)
    scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rope, k_rope)
    shares = (scores.float() * SCALE).masked_fill(~seen, -math.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bnst,btc->bnsc", shares, latent)


def up_to(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Up to a length, [B, 1, 1, T]."""
    return below(lengths, keys)


def first_ones(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Queries stand in line from the first key on, [S, T]."""
    return torch.arange(keys) <= torch.arange(queries)[:, None]


def over(read: Read, attend: Attend, seen: Callable[[Tensor, int, int], Tensor] = up_to) -> Attend:
    """Over the rows of both caches."""

    def forward(q, rope, latents, ropes, table, lengths, *scales):
        latent, k_rope = (read(pages, table) for pages in (latents, ropes))
        return attend(q, rope, latent, k_rope, seen(lengths, q.shape[2], latent.shape[1]), *scales)

    return forward


in_pages, in_nz, in_rows = (partial(over, read) for read in (of_pages, of_nz, lambda cache, table: cache))
PAGES, NZ = (shapes(C, R, *nz, size=SIZE, blocks=BLOCKS) for nz in ((), (LANES,)))
ROWS = (B, ROOM, C), (B, ROOM, R)
EXAMPLES = (
    Example("pages", in_pages(explicit), inputs(1, PAGES, LENGTHS)),
    Example("pages, a sequence without keys", in_pages(restored), inputs(1, PAGES, EMPTY)),
    Example("pages, several queries", in_pages(by_sdpa, last), inputs(3, PAGES, torch.tensor([6, 12]))),
    Example("lines", in_nz(restored), inputs(1, NZ, EMPTY)),
    Example("lines, in the model's dtype", in_nz(in_the_dtype), inputs(1, NZ, LENGTHS)),
    Example("lines, several queries", in_nz(explicit, last), inputs(2, NZ, torch.tensor([6, 12]))),
    Example("rows", in_rows(by_sdpa), inputs(1, ROWS, LENGTHS)),
    Example("rows, several queries", in_rows(explicit, first_ones), inputs(2, ROWS, LENGTHS)),
)


def floats_alone(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """Queries that are not quantised."""
    latent = latent.float() * scale
    return read(scored(q, rope, latent, k_rope), latent, seen).to(q.dtype)


def by_token(q: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor, seen: Tensor, scale: Tensor) -> Tensor:
    """A scale for each token of the latent."""
    return restored(q, rope, latent, k_rope, seen, scale * torch.arange(1, latent.shape[1] + 1)[:, None])


def strange(lengths: Tensor, queries: int, keys: int) -> Tensor:
    """Every second key."""
    return below(lengths, keys) & (torch.arange(keys) * lengths.sum() % 2 == 0)


def apart(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    q, rope, latents, *rest = inputs(1, PAGES, LENGTHS)(dtype)
    return q, rope, latents.transpose(0, 1).contiguous().transpose(0, 1), *rest


DEQUANTISED = (
    Example("queries in floats", in_pages(floats_alone), inputs(1, PAGES, LENGTHS)),
    Example("a scale of each key", in_pages(by_token), inputs(1, PAGES, LENGTHS)),
    Example("one scale of all queries", in_pages(shared), inputs(1, PAGES, LENGTHS)),
    Example("any mask", in_rows(explicit, strange), inputs(1, ROWS, LENGTHS)),
)
"""What no operator takes in int8: the latent is dequantised, and attended to in floats."""
GATHERED = ((Example("pages that lie otherwise", in_pages(explicit), apart), "the pages are not contiguous"),)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""

TRIED = {"latent_attention": (*EXAMPLES, *(each for each, _ in GATHERED), *DEQUANTISED)}
