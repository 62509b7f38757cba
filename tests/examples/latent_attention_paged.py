"""Attention over the pages of a latent as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from fusion import Example
from tests.examples.attention import written
from tests.examples.attention_pages import BLOCKS, EMPTY, LENGTHS, ROOM, SIZE, TABLE, hidden
from tests.examples.caches import of_nz
from tests.examples.inputs import Inputs, Part, tensors, weight
from tests.examples.latent_attention import absorbed, by_sdpa, by_table, step
from tests.examples.masks import behind, later
from tests.examples.sparse_attention import B, C, D, E, N, over_latent

R = 16
SCALE = (D + R) ** -0.5


def inputs(queries: int, *more: Part, heads: int = N, lanes: int = 0, dims: tuple[int, ...] = ()) -> Inputs:
    """Queries [B, N, S, D + R], pages of latents and rotated lanes, the projection, the block table, and more.

    With `lanes`, NZ pages [Block, .., A, Size, L]; of several blocks of rotated lanes.
    """
    rope = 2 * R if lanes else R
    pages = ((*dims, width // lanes, SIZE, lanes) if lanes else (SIZE, width) for width in (C, rope))
    up = weight(3, heads * (D + E), C)
    return tensors((B, heads, queries, D + rope), *((BLOCKS, *each) for each in pages), up, TABLE, *more)


def shares(scores: Tensor, lengths: Tensor) -> tuple[Tensor]:
    """Weights of the keys below the length; a sequence without keys gives NaN."""
    return ((scores.float() * SCALE).masked_fill(hidden(lengths), -math.inf).softmax(-1).to(scores.dtype),)


@over_latent
def first(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """The first of all keys that the pages hold."""
    seen = ~behind(lengths, 10)
    return scaled_dot_product_attention(q, k[:, :, :10], v[:, :, :10], attn_mask=seen, scale=SCALE)


def several_absorbed(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, lengths: Tensor) -> Tensor:
    """Several tokens each, the last at `lengths` - 1, keys joined; those that see nothing give the mean."""
    nope, rotated = q.split((D, R), -1)
    up_key, up_value = up.unflatten(0, (N, -1)).split((D, E), 1)
    latent, rope = latent.unsqueeze(1), rope.unsqueeze(1)
    query, keys = torch.cat((nope @ up_key, rotated), -1), torch.cat((latent, rope), -1)
    scores = (query @ keys.transpose(-2, -1)).float() * SCALE
    unseen = later(lengths - q.shape[2], q.shape[2], ROOM)
    shares = scores.masked_fill(unseen, torch.finfo(q.dtype).min).softmax(-1).to(q.dtype)
    return shares @ latent @ up_value.transpose(-2, -1)


def turned_first(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages whose rows are put in order before they are gathered."""
    return pages.transpose(1, 2).reshape(BLOCKS, SIZE, -1)[table].view(B, ROOM, -1)


def of_a_head(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages with a dim for one head."""
    return pages[table].squeeze(2).permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2)


def together(q: Tensor, both: Tensor, _: Tensor, up: Tensor, *more: Tensor) -> Tensor:
    """Pages that hold the latent and its rotated lanes in one, which the operator takes apart."""
    return expanded(q, both[..., : C - R], both[..., C - R :], up[:, : C - R], *more)


def apart(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages [Block, Size, A, L], whose rows lie whole in memory."""
    return of_nz(pages.transpose(1, 2), table)


def rows_first(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Such pages."""
    q, latent, rope, *rest = inputs(1, LENGTHS, lanes=16)(dtype)
    return q, *(pages.transpose(1, 2).contiguous() for pages in (latent, rope)), *rest


by_matmuls = partial(written, scale=SCALE, wide=True)
by_two_products = absorbed(shares, "bnse")
below = by_sdpa(lambda lengths: ~hidden(lengths))
several = over_latent(by_matmuls(hidden=lambda at: later(at, 3, ROOM)))
expanded, whole = by_table(below), by_table(step)
in_order = by_table(by_two_products)
EXAMPLES = (
    Example("absorbed over pages", in_order, inputs(1, LENGTHS)),
    Example("absorbed over pages, three heads", in_order, inputs(1, LENGTHS, heads=3)),
    Example("absorbed, a sequence without keys", in_order, inputs(1, EMPTY)),
    Example(
        "expanded, the least number", by_table(over_latent(by_matmuls(hidden=hidden, least=True))), inputs(1, EMPTY)
    ),
    Example("expanded, sdpa", expanded, inputs(1, EMPTY)),
    Example("several queries over pages", by_table(several), inputs(3, torch.tensor([2, 8]))),
    Example("several queries, absorbed", by_table(several_absorbed), inputs(3, torch.tensor([2, 12]))),
    Example("the first rows", by_table(first), inputs(1, torch.tensor([0, 10]))),
    Example("whole pages", whole, inputs(1)),
    Example("pages in lines", by_table(by_two_products, of_nz), inputs(1, LENGTHS, lanes=16)),
    Example("pages in lines, turned before", by_table(by_two_products, turned_first), inputs(1, LENGTHS, lanes=16)),
    Example("pages of one head in lines", by_table(by_two_products, of_a_head), inputs(1, EMPTY, lanes=16, dims=(1,))),
    Example("pages in lines, expanded", by_table(below, of_nz), inputs(1, EMPTY, lanes=16)),
)
GATHERED = (
    (Example("one cache for both", together, inputs(1, LENGTHS)), "are not contiguous"),
    (Example("short lines", by_table(by_two_products, of_nz), inputs(1, LENGTHS, lanes=8)), "read as lines of 8 lanes"),
    (
        Example("lines of whole rows", by_table(by_two_products, apart), rows_first),
        "the lines of the pages are not contiguous",
    ),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""

TRIED = {"latent_attention": (*EXAMPLES, *(each for each, _ in GATHERED))}
