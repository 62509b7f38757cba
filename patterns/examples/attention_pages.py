"""Attention over the pages of a cache as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, normal

B, N, M, D, BLOCKS, SIZE, PAGES = 2, 4, 2, 16, 7, 4, 3
ROOM = PAGES * SIZE
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])


def inputs(queries: int, *more: Tensor) -> Inputs:
    """Queries [B, N, S, D], pages of keys and values, the block table, and what else is asked for."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((B, N, queries, D), *2 * ((BLOCKS, SIZE, M, D),))
        data = (normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        return *data, TABLE.clone(), *(each.clone() for each in more)

    return make


LENGTHS, POSITION = torch.tensor([6, 11]), torch.tensor([5, 10])
SINKS = torch.tensor([0.5, -1.0, 0.25, 2.0])


def rows(pages: Tensor, table: Tensor) -> Tensor:
    """[B, N, T, D], every head for the queries that share it."""
    return pages[table].flatten(1, 2).transpose(1, 2).repeat_interleave(N // M, 1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled."""
    return q @ k.transpose(-2, -1) * D**-0.5


def hidden(lengths: Tensor, room: int = ROOM) -> Tensor:
    """[B, 1, 1, T], true behind the length."""
    return (torch.arange(room) >= lengths[:, None])[:, None, None]


def step(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One token each, softmax by hand; a sequence without keys gives NaN."""
    shares = scores(q, rows(keys, table)).masked_fill(hidden(lengths), -math.inf).softmax(-1)
    return shares @ rows(values, table)


def step_replaced(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The same with the least number; a sequence without keys gives the mean."""
    lowest = torch.finfo(q.dtype).min
    shares = scores(q, rows(keys, table)).masked_fill(hidden(lengths), lowest).softmax(-1)
    return shares @ rows(values, table)


def step_by_sdpa(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """The same by sdpa; a sequence without keys gives 0."""
    return scaled_dot_product_attention(q, rows(keys, table), rows(values, table), attn_mask=~hidden(lengths))


def step_at_positions(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """By einsum over groups of heads, up to a position."""
    k, v = (pages.index_select(0, table.flatten() % BLOCKS).view(B, ROOM, M, D) for pages in (keys, values))
    s = torch.einsum("bmgd,btmd->bmgt", q.view(B, M, N // M, D), k) * D**-0.5
    s = s.masked_fill((torch.arange(ROOM) > position[:, None])[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("bmgt,btmd->bmgd", s, v).reshape(B, N * D)


def step_row_by_row(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Rows by their number, and only the first of them."""
    places = ((table % BLOCKS)[:, :, None] * SIZE + torch.arange(SIZE)).view(B, ROOM)[:, :ROOM]
    k, v = (pages.view(-1, M, D)[places][:, :10].transpose(1, 2) for pages in (keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=~hidden(lengths, 10), enable_gqa=True)


def step_looked_up(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages as rows of a table."""
    k, v = (embedding(table % BLOCKS, pages.view(BLOCKS, -1)).view(B, ROOM, M, D) for pages in (keys, values))
    k, v = (each.transpose(1, 2) for each in (k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=~hidden(lengths), enable_gqa=True)


def heads_first(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages [Block, N, Size, D]."""
    k, v = (pages.view(BLOCKS, M, SIZE, D)[table].transpose(1, 2).reshape(B, M, ROOM, D) for pages in (keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=~hidden(lengths), enable_gqa=True)


def several(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """Several tokens each, the first at `position`."""
    at = position[:, None, None, None] + torch.arange(q.shape[2])[:, None]
    shares = scores(q, rows(keys, table)).masked_fill(torch.arange(ROOM) > at, -math.inf).softmax(-1)
    return shares @ rows(values, table)


def several_of_lengths(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Several tokens each, the last at `lengths` - 1; those that see nothing give the mean."""
    at = lengths[:, None, None, None] - q.shape[2] + torch.arange(q.shape[2])[:, None]
    unseen = torch.arange(ROOM) > at
    shares = scores(q, rows(keys, table)).masked_fill(unseen, torch.finfo(q.dtype).min).softmax(-1)
    return shares @ rows(values, table)


def whole(q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """Full pages, all of them."""
    return scaled_dot_product_attention(q, rows(keys, table), rows(values, table))


def with_sink(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head that no value belongs to."""
    s = scores(q, rows(keys, table)).masked_fill(hidden(lengths), -math.inf)
    s = torch.cat((s, sink.to(s.dtype).view(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)), -1).softmax(-1)
    return s[..., :-1] @ rows(values, table)


def tokens(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One token each, without a dim for it."""
    k, v = (pages[table].flatten(1, 2) for pages in (keys, values))
    s = torch.einsum("bnd,btnd->bnt", q[:, :M, 0], k) * D**-0.5
    shares = s.masked_fill((torch.arange(ROOM) >= lengths[:, None])[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnt,btnd->bnd", shares, v)


WIDE = 48


def lines(line: int = 16) -> Inputs:
    """Queries [B, N, 1, D] and pages of one head that hold rows in lines of NZ, [Block, 1, D / L, Size, L]."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = ((B, N, 1, WIDE), *2 * ((BLOCKS, 1, WIDE // line, SIZE, line),))
        data = (normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        return *data, TABLE.clone(), LENGTHS.clone()

    return make


def of_lines(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One head for all queries, whose rows the model puts in order."""
    k, v = (pages[table].permute(0, 2, 1, 4, 3, 5).reshape(B, 1, ROOM, WIDE) for pages in (keys, values))
    return scaled_dot_product_attention(q, k, v, attn_mask=~hidden(lengths), enable_gqa=True)


EMPTY = torch.tensor([0, 12])
EXAMPLES = (
    Example("a step", step, inputs(1, LENGTHS)),
    Example("a step, a sequence without keys", step, inputs(1, EMPTY)),
    Example("the least number", step_replaced, inputs(1, EMPTY)),
    Example("sdpa", step_by_sdpa, inputs(1, EMPTY)),
    Example("einsum up to a position", step_at_positions, inputs(1, POSITION)),
    Example("row by row", step_row_by_row, inputs(1, LENGTHS)),
    Example("an embedding", step_looked_up, inputs(1, LENGTHS)),
    Example("heads before positions", heads_first, inputs(1, LENGTHS)),
    Example("several queries", several, inputs(3, POSITION - 3)),
    Example("several queries up to a length", several_of_lengths, inputs(3, torch.tensor([2, 12]))),
    Example("no dim for queries", tokens, inputs(1, LENGTHS)),
    Example("whole pages", whole, inputs(2)),
    Example("a sink over pages", with_sink, inputs(1, LENGTHS, SINKS)),
    Example("lines of one head", of_lines, lines()),
)


def learned(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A bias by length, which hides nothing."""
    return (scores(q, rows(keys, table)) + lengths.view(B, 1, 1, 1).to(q.dtype)).softmax(-1) @ rows(values, table)


def some_lanes(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """Pages of which every row holds more than is attended to."""
    return step(q[..., :8], keys[..., :8], values[..., :8], table, lengths)


GATHERED = (
    (Example("some lanes of pages", some_lanes, inputs(1, LENGTHS)), "do not lie together"),
    (Example("short lines", of_lines, lines(8)), "in lines of 8 numbers"),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""
REJECTS = (Example("a bias", learned, inputs(1, LENGTHS), "not proven to be a mask"),)

TRIED = {"attention": (*EXAMPLES, *(each for each, _ in GATHERED), *REJECTS)}
"""Rule -> its examples and rejects."""
