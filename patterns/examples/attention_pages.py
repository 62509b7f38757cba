"""Attention over the pages of a cache as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, scaled_dot_product_attention

from fusion import Example
from patterns.examples.inputs import Inputs, tensors

B, N, M, D, WIDE, BLOCKS, SIZE, PAGES = 2, 4, 2, 16, 48, 7, 4, 3
ROOM = PAGES * SIZE
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])


def inputs(queries: int, *more: Tensor, lanes: int = 0) -> Inputs:
    """Queries [B, N, S, D], pages of keys and values, or NZ pages of one head, the block table, and more."""
    page, width = ((1, WIDE // lanes, SIZE, lanes), WIDE) if lanes else ((SIZE, M, D), D)
    given = tensors((B, N, queries, width), *2 * ((BLOCKS, *page),))
    return lambda dtype: (*given(dtype), TABLE.clone(), *(each.clone() for each in more))


Attend = Callable[..., Tensor]
LENGTHS, POSITION, EMPTY = torch.tensor([6, 11]), torch.tensor([5, 10]), torch.tensor([0, 12])
SINKS = torch.tensor([0.5, -1.0, 0.25, 2.0])


def rows(pages: Tensor, table: Tensor) -> Tensor:
    """[B, N, T, D], every head for the queries that share it."""
    return pages[table].flatten(1, 2).transpose(1, 2).repeat_interleave(N // M, 1)


def scores(q: Tensor, k: Tensor) -> Tensor:
    """Scaled."""
    return q @ k.transpose(-2, -1) * D**-0.5


def hidden(q: Tensor, lengths: Tensor, room: int = ROOM) -> Tensor:
    """[B, 1, 1, T], true behind the length."""
    return (torch.arange(room) >= lengths[:, None])[:, None, None]


def behind(q: Tensor, position: Tensor) -> Tensor:
    """[B, 1, S, T], true behind each of several tokens, the first at `position`."""
    return torch.arange(ROOM) > position[:, None, None, None] + torch.arange(q.shape[2])[:, None]


def behind_the_last(q: Tensor, lengths: Tensor) -> Tensor:
    """The same, the last token at `lengths` - 1."""
    return torch.arange(ROOM) > lengths[:, None, None, None] - q.shape[2] + torch.arange(q.shape[2])[:, None]


def by_hand(unseen: Callable[..., Tensor] = hidden, lowest: bool = False) -> Attend:
    """Softmax by hand; a query without keys gives NaN, or by the least number the mean."""

    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, *more: Tensor) -> Tensor:
        fill = torch.finfo(q.dtype).min if lowest else -math.inf
        shares = scores(q, rows(keys, table)).masked_fill(unseen(q, *more), fill).softmax(-1)
        return shares @ rows(values, table)

    return forward


def by_sdpa(read: Callable[[Tensor, Tensor], Tensor] = rows) -> Attend:
    """By sdpa, over pages that `read` gives as [B, M, T, D]; a sequence without keys gives 0."""

    def forward(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, *lengths: Tensor) -> Tensor:
        k, v = (read(pages, table) for pages in (keys, values))
        seen = ~hidden(q, lengths[0], k.shape[2]) if lengths else None
        return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=read is not rows)

    return forward


def one_by_one(pages: Tensor, table: Tensor) -> Tensor:
    """Rows by their number, and only the first of them."""
    places = ((table % BLOCKS)[:, :, None] * SIZE + torch.arange(SIZE)).view(B, ROOM)[:, :ROOM]
    return pages.view(-1, M, D)[places][:, :10].transpose(1, 2)


def looked_up(pages: Tensor, table: Tensor) -> Tensor:
    """Pages as rows of a table."""
    return embedding(table % BLOCKS, pages.view(BLOCKS, -1)).view(B, ROOM, M, D).transpose(1, 2)


def heads_first(pages: Tensor, table: Tensor) -> Tensor:
    """Pages [Block, N, Size, D]."""
    return pages.view(BLOCKS, M, SIZE, D)[table].transpose(1, 2).reshape(B, M, ROOM, D)


def of_nz(pages: Tensor, table: Tensor) -> Tensor:
    """NZ pages of one head, whose rows the model puts in order."""
    return pages[table].permute(0, 2, 1, 4, 3, 5).reshape(B, 1, ROOM, WIDE)


def at_positions(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, position: Tensor) -> Tensor:
    """By einsum over groups of heads, up to a position."""
    k, v = (pages.index_select(0, table.flatten() % BLOCKS).view(B, ROOM, M, D) for pages in (keys, values))
    s = torch.einsum("bmgd,btmd->bmgt", q.view(B, M, N // M, D), k) * D**-0.5
    s = s.masked_fill((torch.arange(ROOM) > position[:, None])[:, None, None], -math.inf).softmax(-1)
    return torch.einsum("bmgt,btmd->bmgd", s, v).reshape(B, N * D)


def with_sink(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head that no value belongs to."""
    s = scores(q, rows(keys, table)).masked_fill(hidden(q, lengths), -math.inf)
    s = torch.cat((s, sink.to(s.dtype).view(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)), -1).softmax(-1)
    return s[..., :-1] @ rows(values, table)


def tokens(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One token each, without a dim for it."""
    k, v = (pages[table].flatten(1, 2) for pages in (keys, values))
    s = torch.einsum("bnd,btnd->bnt", q[:, :M, 0], k) * D**-0.5
    shares = s.masked_fill((torch.arange(ROOM) >= lengths[:, None])[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnt,btnd->bnd", shares, v)


step = by_hand()
EXAMPLES = (
    Example("a step", step, inputs(1, LENGTHS)),
    Example("a step, a sequence without keys", step, inputs(1, EMPTY)),
    Example("the least number", by_hand(lowest=True), inputs(1, EMPTY)),
    Example("sdpa", by_sdpa(), inputs(1, EMPTY)),
    Example("einsum up to a position", at_positions, inputs(1, POSITION)),
    Example("row by row", by_sdpa(one_by_one), inputs(1, LENGTHS)),
    Example("an embedding", by_sdpa(looked_up), inputs(1, LENGTHS)),
    Example("heads before positions", by_sdpa(heads_first), inputs(1, LENGTHS)),
    Example("several queries", by_hand(behind), inputs(3, POSITION - 3)),
    Example("several queries up to a length", by_hand(behind_the_last, True), inputs(3, torch.tensor([2, 12]))),
    Example("no dim for queries", tokens, inputs(1, LENGTHS)),
    Example("whole pages", by_sdpa(), inputs(2)),
    Example("a sink over pages", with_sink, inputs(1, LENGTHS, SINKS)),
    Example("lines of one head", by_sdpa(of_nz), inputs(1, LENGTHS, lanes=16)),
)


def learned(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """A bias by length, which hides nothing."""
    return (scores(q, rows(keys, table)) + lengths.view(B, 1, 1, 1).to(q.dtype)).softmax(-1) @ rows(values, table)


def some_lanes(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """Pages of which every row holds more than is attended to."""
    return step(q[..., :8], keys[..., :8], values[..., :8], *more)


GATHERED = (
    (Example("some lanes of pages", some_lanes, inputs(1, LENGTHS)), "do not lie together"),
    (Example("short lines", by_sdpa(of_nz), inputs(1, LENGTHS, lanes=8)), "in lines of 8 numbers"),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""
REJECTS = (Example("a bias", learned, inputs(1, LENGTHS), "not proven to be a mask"),)

TRIED = {"attention": (*EXAMPLES, *(each for each, _ in GATHERED), *REJECTS)}
