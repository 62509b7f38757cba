"""What stands before latent attention over pages as serving code writes it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.mla_prolog import (
    DR,
    HE,
    B,
    C,
    D,
    N,
    norm,
    rope_last,
    rows_of,
    tables,
    weights,
)

BLOCKS, SIZE = 9, 4
TABLE = torch.tensor([[3, 8, 1], [5, 2, 7]])
LENGTHS = torch.tensor([6, 11])


def inputs(queries: int, *more: Tensor, heads: tuple[int, ...] = ()) -> Inputs:
    """Hidden states, weights, tables, pages of both caches, the block table, lengths with the new tokens, and slots."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = [normal(8, B, queries, HE), *weights(), *tables((B, queries))]
        pages = (normal(9 + n, BLOCKS, SIZE, *heads, width) for n, width in enumerate((C, DR)))
        at = LENGTHS[:, None] - queries + torch.arange(queries)
        slots = (TABLE.gather(1, at // SIZE) * SIZE + at % SIZE).flatten()
        return *(each.to(dtype) for each in (*given, *pages)), TABLE.clone(), LENGTHS.clone(), slots, *more

    return make


Write = Callable[[Tensor, Tensor, Tensor], None]


Read = Callable[[Tensor, Tensor], Tensor]


def whole(pages: Tensor, table: Tensor) -> Tensor:
    """The rows of all pages of each sequence."""
    return pages[table].reshape(B, -1, pages.shape[-1])


def of_lines(pages: Tensor, table: Tensor) -> Tensor:
    """The same, of pages [Block, A, Size, L] or [Block, 1, A, Size, L]."""
    return pages[table].flatten(2, -3).transpose(2, 3).reshape(B, -1, pages.shape[-3] * pages.shape[-1])


def attended(q: Tensor, latent: Tensor, rope: Tensor, ukv: Tensor, lengths: Tensor) -> Tensor:
    """The last queries [B, N, S, D + Dr] of sequences so long, over keys and values expanded from rows [B, T, ..]."""
    (heads, queries), width = q.shape[1:3], q.shape[-1] - rope.shape[-1]
    both = linear(latent, ukv).unflatten(-1, (heads, -1)).transpose(1, 2)
    nope, values = both.split((width, both.shape[-1] - width), dim=-1)
    keys = torch.cat((nope, rope.unsqueeze(1).expand(-1, heads, -1, -1)), dim=-1)
    at = lengths[:, None] - queries + torch.arange(queries)
    seen = torch.arange(latent.shape[1]) <= at[:, None, :, None]
    return scaled_dot_product_attention(q, keys, values, attn_mask=seen)


def model_of(write: Write, read: Read = whole) -> Callable[..., Tensor]:
    """A function that writes the rows of a token, or of several, and attends to the pages."""

    def forward(
        x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor,
        sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
    ) -> Tensor:  # fmt: skip
        queries = x.shape[1]
        q = linear(norm(linear(x, dq), gain_q), uq).reshape(B, queries, N, -1).transpose(1, 2)
        q = rope_last(q, cos.unsqueeze(-3), sin.unsqueeze(-3))
        for pages, rows in zip((latents, ropes), rows_of(x, dkv, gain_kv, cos, sin), strict=True):
            write(pages, rows.flatten(0, 1), slots)
        latent, rope = (read(pages, table) for pages in (latents, ropes))
        return attended(q, latent, rope, ukv, lengths)

    return forward


def viewed(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Rows of all pages by their number."""
    pages.view(-1, rows.shape[-1])[slots] = rows


def copied(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same by index_copy."""
    pages.view(-1, rows.shape[-1]).index_copy_(0, slots, rows)


def of_a_head(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, Size, 1, D]."""
    pages.view(-1, 1, rows.shape[-1])[slots] = rows.unsqueeze(1)


def by_block(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A block and a place in it."""
    pages[slots // SIZE, slots % SIZE] = rows


def in_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, A, Size, L] that hold a row in lines."""
    size = pages.shape[-2]
    pages[slots // size, :, slots % size] = rows.unflatten(-1, (-1, pages.shape[-1]))


def of_a_head_in_lines(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """The same of pages [Block, 1, A, Size, L]."""
    pages[slots // SIZE, :, :, slots % SIZE] = rows.view(rows.shape[0], 1, -1, pages.shape[-1])


def lines(queries: int, line: int = 16, *heads: int) -> Inputs:
    """The same inputs with pages in lines."""
    plain = inputs(queries)

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        given = list(plain(dtype))
        for place in (-5, -4):
            given[place] = given[place].view(BLOCKS, *heads, -1, SIZE, line)
        return tuple(given)

    return make


def anywhere(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """A place that may lie in no page."""
    pages[slots // SIZE, slots - slots // SIZE * SIZE] = rows


def two_in_a_row(pages: Tensor, rows: Tensor, slots: Tensor) -> None:
    """Pages [Block, Size, 2, D] that take two tokens of a sequence at one slot."""
    pages.view(-1, *pages.shape[2:])[slots.view(B, 2)[:, 0]] = rows.view(B, 2, -1)


def turned_pages(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages that lie in memory as [Size, Block, ..]."""
    *given, latents, ropes, table, lengths, slots = inputs(1)(dtype)
    latents, ropes = (each.transpose(0, 1).contiguous().transpose(0, 1) for each in (latents, ropes))
    return *given, latents, ropes, table, lengths, slots


def packed(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Tokens without their sequences, of which each has one."""
    x, *some, cos, sin, latents, ropes, table, lengths, slots = inputs(1)(dtype)
    return x[:, 0], *some, cos[:, 0], sin[:, 0], latents, ropes, table, lengths, slots


def stepped(
    x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor,
    sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """A step of packed tokens that absorbs both projections, by einsum."""
    q = linear(norm(linear(x, dq), gain_q), uq).view(x.shape[0], N, -1)
    nope, turned = rope_last(q, cos.unsqueeze(1), sin.unsqueeze(1)).split((D, DR), dim=-1)
    for pages, rows in zip((latents, ropes), rows_of(x, dkv, gain_kv, cos, sin), strict=True):
        viewed(pages, rows, slots)
    latent, rope = (whole(pages, table) for pages in (latents, ropes))
    up, down = ukv.view(N, -1, C).split((D, ukv.shape[0] // N - D), dim=1)
    absorbed = torch.einsum("tnd,ndc->tnc", nope, up)
    scores = torch.einsum("tnc,tkc->tnk", absorbed, latent) + torch.einsum("tnr,tkr->tnk", turned, rope)
    hidden = torch.arange(latent.shape[1]) >= lengths[:, None, None]
    weights = (scores.float() * 0.3).masked_fill(hidden, -torch.inf).softmax(-1).to(x.dtype)
    return torch.einsum("tnc,nec->tne", torch.einsum("tnk,tkc->tnc", weights, latent), down).flatten(1)


def expanding(
    x: Tensor, dq: Tensor, uq: Tensor, dkv: Tensor, gain_q: Tensor, gain_kv: Tensor, ukv: Tensor, cos: Tensor,
    sin: Tensor, latents: Tensor, ropes: Tensor, table: Tensor, lengths: Tensor, slots: Tensor,
) -> Tensor:  # fmt: skip
    """A step of packed tokens over expanded keys and values."""
    q = linear(norm(linear(x, dq), gain_q), uq).view(x.shape[0], N, -1)
    q = rope_last(q, cos.unsqueeze(1), sin.unsqueeze(1))
    for pages, rows in zip((latents, ropes), rows_of(x, dkv, gain_kv, cos, sin), strict=True):
        by_block(pages, rows, slots)
    latent, rope = (whole(pages, table) for pages in (latents, ropes))
    return attended(q.unsqueeze(2), latent, rope, ukv, lengths).squeeze(2)


EXAMPLES = (
    Example("a token through a view", model_of(viewed), inputs(1)),
    Example("two tokens by index_copy", model_of(copied), inputs(2)),
    Example("pages of one head", model_of(of_a_head), inputs(1, heads=(1,))),
    Example("a token by block", model_of(by_block), inputs(1)),
    Example("packed tokens that absorb", stepped, packed),
    Example("packed tokens over expanded keys", expanding, packed),
    Example("a token in lines", model_of(in_lines, of_lines), lines(1)),
    Example("two tokens in lines of a head", model_of(of_a_head_in_lines, of_lines), lines(2, 16, 1)),
)
REJECTS = (
    Example("places of unknown range", model_of(anywhere), inputs(1), "not proven to lie in its page"),
    Example("two tokens at a slot", model_of(two_in_a_row), inputs(2, heads=(2,)), "hold several heads"),
    Example("short lines", model_of(in_lines, of_lines), lines(1, 8), "in lines of 8 numbers"),
    Example("pages that lie otherwise", model_of(by_block), turned_pages, "the pages are not contiguous"),
)
