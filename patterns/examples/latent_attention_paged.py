"""Attention over the pages of a latent as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal

B, N, D, C, R, E, BLOCKS, SIZE, PAGES = 2, 4, 16, 32, 16, 16, 7, 4, 3
ROOM = PAGES * SIZE
SCALE = (D + R) ** -0.5
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])


def inputs(queries: int, *more: Tensor, heads: int = N) -> Inputs:
    """Queries [B, N, S, D + R], pages of latents and rotated lanes, the block table, the projection, and more."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((B, heads, queries, D + R), (BLOCKS, SIZE, C), (BLOCKS, SIZE, R))
        data = (normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        up = torch.nn.Parameter((normal(3, heads * (D + E), C) / 8).to(dtype), requires_grad=False)
        return *data, TABLE.clone(), up, *(each.clone() for each in more)

    return make


LENGTHS, EMPTY = torch.tensor([6, 11]), torch.tensor([0, 12])


def hidden(lengths: Tensor) -> Tensor:
    """[B, 1, 1, T], true behind the length."""
    return (torch.arange(ROOM) >= lengths[:, None])[:, None, None]


def expanded(latent: Tensor, rope: Tensor, table: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, N, T, D + R] and values [B, N, T, E] of all heads."""
    latent, rope = (pages[table].flatten(1, 2) for pages in (latent, rope))
    k, v = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, E), -1)
    return torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1), v


def absorbed(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """One token each by two products; a sequence without keys gives NaN."""
    nope, rotated = q.split((D, R), -1)
    up_key, up_value = up.unflatten(0, (q.shape[1], -1)).split((D, E), 1)
    latent, rope = (pages[table].view(B, ROOM, -1) for pages in (latent, rope))
    query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
    scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
    shares = (scores.float() * SCALE).masked_fill(hidden(lengths), -math.inf).softmax(-1).to(q.dtype)
    return torch.einsum("bnsc,nec->bnse", torch.einsum("bnst,btc->bnsc", shares, latent), up_value)


def replaced(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Expanded, with the least number; a sequence without keys gives the mean."""
    k, v = expanded(latent, rope, table, up)
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    return scores.masked_fill(hidden(lengths), torch.finfo(q.dtype).min).softmax(-1).to(q.dtype) @ v


def by_sdpa(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Expanded, by sdpa."""
    return scaled_dot_product_attention(q, *expanded(latent, rope, table, up), ~hidden(lengths), scale=SCALE)


def several(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, position: Tensor) -> Tensor:
    """Several tokens each, the first at `position`."""
    at = position[:, None, None, None] + torch.arange(q.shape[2])[:, None]
    k, v = expanded(latent, rope, table, up)
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    return scores.masked_fill(torch.arange(ROOM) > at, -math.inf).softmax(-1).to(q.dtype) @ v


def several_absorbed(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Several tokens each, the last at `lengths` - 1, keys joined; those that see nothing give the mean."""
    nope, rotated = q.split((D, R), -1)
    up_key, up_value = up.unflatten(0, (N, -1)).split((D, E), 1)
    latent, rope = (pages[table].view(B, 1, ROOM, -1) for pages in (latent, rope))
    query, keys = torch.cat((nope @ up_key, rotated), -1), torch.cat((latent, rope), -1)
    at = lengths[:, None, None, None] - q.shape[2] + torch.arange(q.shape[2])[:, None]
    scores = (query @ keys.transpose(-2, -1)).float() * SCALE
    shares = scores.masked_fill(torch.arange(ROOM) > at, torch.finfo(q.dtype).min).softmax(-1).to(q.dtype)
    return shares @ latent @ up_value.transpose(-2, -1)


def whole(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor) -> Tensor:
    """Full pages, all of them."""
    return scaled_dot_product_attention(q, *expanded(latent, rope, table, up), scale=SCALE)


def cut(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Expanded, the first rows of all that the pages hold."""
    k, v = (each[:, :, :10] for each in expanded(latent, rope, table, up))
    return scaled_dot_product_attention(q, k, v, ~hidden(lengths)[..., :10], scale=SCALE)


WIDE = 2 * R
"""Rotated lanes of rows in lines, of which there are several."""


def lines(queries: int, *more: Tensor, line: int = 16, heads: tuple[int, ...] = ()) -> Inputs:
    """The same inputs with pages in lines of NZ, [Block, .., A, Size, L]."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        _, _, _, *rest = inputs(queries, *more)(dtype)
        shapes = (C, WIDE)
        pages = (normal(n + 1, BLOCKS, *heads, width // line, SIZE, line).to(dtype) for n, width in enumerate(shapes))
        return normal(0, B, N, queries, D + WIDE).to(dtype), *pages, *rest

    return make


Rows = Callable[[Tensor, Tensor], Tensor]


def turned(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of gathered lines."""
    return pages[table].transpose(2, 3).reshape(B, ROOM, -1)


def turned_first(pages: Tensor, table: Tensor) -> Tensor:
    """Lines that are rows before they are gathered."""
    return pages.transpose(1, 2).reshape(BLOCKS, SIZE, -1)[table].view(B, ROOM, -1)


def of_a_head(pages: Tensor, table: Tensor) -> Tensor:
    """The same of pages with a dim for one head."""
    return pages[table].squeeze(2).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def lined(rows: Rows) -> Callable[..., Tensor]:
    """Attention to the rows, absorbed, one query of each sequence."""

    def forward(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
        nope, rotated = q.split((D, WIDE), -1)
        up_key, up_value = up.unflatten(0, (N, -1)).split((D, E), 1)
        latent, rope = (rows(pages, table) for pages in (latent, rope))
        query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
        shares = (scores.float() * SCALE).masked_fill(hidden(lengths), -math.inf).softmax(-1).to(q.dtype)
        return torch.einsum("bnsc,nec->bnse", torch.einsum("bnst,btc->bnsc", shares, latent), up_value)

    return forward


def lined_sdpa(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Expanded, by sdpa, over pages in lines."""
    latent, rope = (turned(pages, table) for pages in (latent, rope))
    k, v = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, E), -1)
    k = torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1)
    return scaled_dot_product_attention(q, k, v, ~hidden(lengths), scale=SCALE)


EXAMPLES = (
    Example("absorbed over pages", absorbed, inputs(1, LENGTHS)),
    Example("absorbed over pages, three heads", absorbed, inputs(1, LENGTHS, heads=3)),
    Example("absorbed, a sequence without keys", absorbed, inputs(1, EMPTY)),
    Example("expanded, the least number", replaced, inputs(1, EMPTY)),
    Example("expanded, sdpa", by_sdpa, inputs(1, EMPTY)),
    Example("several queries over pages", several, inputs(3, torch.tensor([2, 8]))),
    Example("several queries, absorbed", several_absorbed, inputs(3, torch.tensor([2, 12]))),
    Example("the first rows", cut, inputs(1, torch.tensor([0, 10]))),
    Example("whole pages", whole, inputs(1)),
    Example("pages in lines", lined(turned), lines(1, LENGTHS)),
    Example("pages in lines, turned before", lined(turned_first), lines(1, LENGTHS)),
    Example("pages of one head in lines", lined(of_a_head), lines(1, EMPTY, heads=(1,))),
    Example("pages in lines, expanded", lined_sdpa, lines(1, EMPTY)),
)


def together(q: Tensor, both: Tensor, _: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Pages that hold the latent and its rotated lanes in one, which the operator takes apart."""
    return by_sdpa(q, both[..., : C - R], both[..., C - R :], table, up[:, : C - R], lengths)


def apart(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Lines of pages whose rows lie whole in memory."""
    return lined(turned)(q, latent.transpose(1, 2), rope.transpose(1, 2), table, up, lengths)


def whole_rows(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Pages [Block, Size, A, L]."""
    q, latent, rope, *rest = lines(1, LENGTHS)(dtype)
    return q, *(pages.transpose(1, 2).contiguous() for pages in (latent, rope)), *rest


GATHERED = (
    (Example("one cache for both", together, inputs(1, LENGTHS)), "do not lie together"),
    (Example("short lines", lined(turned), lines(1, LENGTHS, line=8)), "in lines of 8 numbers"),
    (Example("lines of whole rows", apart, whole_rows), "the lines of the pages do not lie together"),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""

TRIED = {"latent_attention": (*EXAMPLES, *(each for each, _ in GATHERED))}
"""Rule -> its examples."""
