"""Attention over the pages of a latent as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal, tensors

B, N, D, C, R, E, BLOCKS, SIZE, PAGES = 2, 4, 16, 32, 16, 16, 7, 4, 3
ROOM = PAGES * SIZE
SCALE = (D + R) ** -0.5
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])


def inputs(queries: int, *more: Tensor, heads: int = N, lanes: int = 0, dims: tuple[int, ...] = ()) -> Inputs:
    """Queries [B, N, S, D + R], pages of latents and rotated lanes, the block table, the projection, and more.

    With `lanes`, NZ pages [Block, .., A, Size, L]; of several blocks of rotated lanes.
    """
    rope = 2 * R if lanes else R
    pages = ((*dims, width // lanes, SIZE, lanes) if lanes else (SIZE, width) for width in (C, rope))
    given = tensors((B, heads, queries, D + rope), *((BLOCKS, *each) for each in pages))

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        up = torch.nn.Parameter((normal(3, heads * (D + E), C) / 8).to(dtype), requires_grad=False)
        return *given(dtype), TABLE.clone(), up, *(each.clone() for each in more)

    return make


Rows = Callable[[Tensor, Tensor], Tensor]
LENGTHS, EMPTY = torch.tensor([6, 11]), torch.tensor([0, 12])


def hidden(lengths: Tensor) -> Tensor:
    """[B, 1, 1, T], true behind the length."""
    return (torch.arange(ROOM) >= lengths[:, None])[:, None, None]


def of_pages(pages: Tensor, table: Tensor) -> Tensor:
    """Their rows [B, T, ..]."""
    return pages[table].view(B, ROOM, -1)


def of_nz(pages: Tensor, table: Tensor) -> Tensor:
    """Rows of gathered NZ pages."""
    return pages[table].transpose(2, 3).reshape(B, ROOM, -1)


def turned_first(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages whose rows are put in order before they are gathered."""
    return pages.transpose(1, 2).reshape(BLOCKS, SIZE, -1)[table].view(B, ROOM, -1)


def of_a_head(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages with a dim for one head."""
    return pages[table].squeeze(2).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def expanded(attend: Callable[..., Tensor], rows: Rows = of_pages) -> Callable[..., Tensor]:
    """Over keys [B, N, T, D + R] and values [B, N, T, E] of all heads."""

    def forward(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, *more: Tensor) -> Tensor:
        latent, rope = (rows(pages, table) for pages in (latent, rope))
        k, v = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, E), -1)
        return attend(q, torch.cat((k, rope[:, None].expand(-1, N, -1, -1)), -1), v, *more)

    return forward


def absorbed(rows: Rows = of_pages) -> Callable[..., Tensor]:
    """One token each by two products; a sequence without keys gives NaN."""

    def forward(q: Tensor, latent: Tensor, rope: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
        nope, rotated = q.split((D, q.shape[-1] - D), -1)
        up_key, up_value = up.unflatten(0, (q.shape[1], -1)).split((D, E), 1)
        latent, rope = (rows(pages, table) for pages in (latent, rope))
        query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
        shares = (scores.float() * SCALE).masked_fill(hidden(lengths), -math.inf).softmax(-1).to(q.dtype)
        return torch.einsum("bnsc,nec->bnse", torch.einsum("bnst,btc->bnsc", shares, latent), up_value)

    return forward


def replaced(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The least number; a sequence without keys gives the mean."""
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    return scores.masked_fill(hidden(lengths), torch.finfo(q.dtype).min).softmax(-1).to(q.dtype) @ v


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, *lengths: Tensor) -> Tensor:
    """By sdpa, over as many keys as there are rows."""
    seen = ~hidden(lengths[0])[..., : k.shape[2]] if lengths else None
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, scale=SCALE)


def several(q: Tensor, k: Tensor, v: Tensor, position: Tensor) -> Tensor:
    """Several tokens each, the first at `position`."""
    at = position[:, None, None, None] + torch.arange(q.shape[2])[:, None]
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


def first(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The first rows of all that the pages hold."""
    return by_sdpa(q, k[:, :, :10], v[:, :, :10], lengths)


whole = expanded(by_sdpa)
EXAMPLES = (
    Example("absorbed over pages", absorbed(), inputs(1, LENGTHS)),
    Example("absorbed over pages, three heads", absorbed(), inputs(1, LENGTHS, heads=3)),
    Example("absorbed, a sequence without keys", absorbed(), inputs(1, EMPTY)),
    Example("expanded, the least number", expanded(replaced), inputs(1, EMPTY)),
    Example("expanded, sdpa", whole, inputs(1, EMPTY)),
    Example("several queries over pages", expanded(several), inputs(3, torch.tensor([2, 8]))),
    Example("several queries, absorbed", several_absorbed, inputs(3, torch.tensor([2, 12]))),
    Example("the first rows", expanded(first), inputs(1, torch.tensor([0, 10]))),
    Example("whole pages", whole, inputs(1)),
    Example("pages in lines", absorbed(of_nz), inputs(1, LENGTHS, lanes=16)),
    Example("pages in lines, turned before", absorbed(turned_first), inputs(1, LENGTHS, lanes=16)),
    Example("pages of one head in lines", absorbed(of_a_head), inputs(1, EMPTY, lanes=16, dims=(1,))),
    Example("pages in lines, expanded", expanded(by_sdpa, of_nz), inputs(1, EMPTY, lanes=16)),
)


def together(q: Tensor, both: Tensor, _: Tensor, table: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Pages that hold the latent and its rotated lanes in one, which the operator takes apart."""
    latent, rope = both[..., : C - R], both[..., C - R :]
    return whole(q, latent, rope, table, up[:, : C - R], lengths)


def apart(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages [Block, Size, A, L], whose rows lie whole in memory."""
    return of_nz(pages.transpose(1, 2), table)


def rows_first(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Such pages."""
    q, latent, rope, *rest = inputs(1, LENGTHS, lanes=16)(dtype)
    return q, *(pages.transpose(1, 2).contiguous() for pages in (latent, rope)), *rest


GATHERED = (
    (Example("one cache for both", together, inputs(1, LENGTHS)), "do not lie together"),
    (Example("short lines", absorbed(of_nz), inputs(1, LENGTHS, lanes=8)), "in lines of 8 numbers"),
    (Example("lines of whole rows", absorbed(apart), rows_first), "the lines of the pages do not lie together"),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""

TRIED = {"latent_attention": (*EXAMPLES, *(each for each, _ in GATHERED))}
