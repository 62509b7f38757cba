"""Attention over the pages of a cache as serving code writes it, and what only resembles it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import embedding

from fusion import Example
from tests.examples.attention import Attend, B, D, M, N, by_sdpa, written
from tests.examples.inputs import Inputs, Part, tensors
from tests.examples.masks import behind, later

WIDE, BLOCKS, SIZE, PAGES = 48, 7, 4, 3
ROOM = PAGES * SIZE
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])
LENGTHS, POSITION, EMPTY = torch.tensor([6, 11]), torch.tensor([5, 10]), torch.tensor([0, 12])
SINKS = torch.tensor([0.5, -1.0, 0.25, 2.0])


def inputs(queries: int, *more: Part, lanes: int = 0) -> Inputs:
    """Queries [B, N, S, D], pages of keys and values, or NZ pages of one head, the block table, and more."""
    page, width = ((1, WIDE // lanes, SIZE, lanes), WIDE) if lanes else ((SIZE, M, D), D)
    return tensors((B, N, queries, width), *2 * ((BLOCKS, *page),), TABLE, *more)


def rows(pages: Tensor, table: Tensor) -> Tensor:
    """[B, N, T, D] of the pages [Block, Size, M, D] of each sequence, every head for the queries that share it."""
    return pages[table].flatten(1, 2).transpose(1, 2).repeat_interleave(N // M, 1)


def over(attend: Attend, read: Callable[[Tensor, Tensor], Tensor] = rows) -> Attend:
    """The same over the rows that are read from pages."""
    return lambda q, keys, values, table, *more: attend(q, read(keys, table), read(values, table), *more)


hidden = partial(behind, keys=ROOM)
"""Keys behind the length."""


def of_lengths(room: int = ROOM) -> Attend:
    """By sdpa, over so many keys; a sequence without keys gives 0."""
    return by_sdpa(lambda lengths: ~behind(lengths, room), enable_gqa=True)


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


def with_sink(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head that no value belongs to."""
    s = (q @ k.transpose(-2, -1) * D**-0.5).masked_fill(hidden(lengths), -math.inf)
    s = torch.cat((s, sink.to(s.dtype).view(1, -1, 1, 1).expand(B, -1, q.shape[2], -1)), -1).softmax(-1)
    return s[..., :-1] @ v


def tokens(q: Tensor, keys: Tensor, values: Tensor, table: Tensor, lengths: Tensor) -> Tensor:
    """One token each, without a dim for it."""
    k, v = (pages[table].flatten(1, 2) for pages in (keys, values))
    s = torch.einsum("bnd,btnd->bnt", q[:, :M, 0], k) * D**-0.5
    shares = s.masked_fill((torch.arange(ROOM) >= lengths[:, None])[:, None], -math.inf).softmax(-1)
    return torch.einsum("bnt,btnd->bnd", shares, v)


step = over(written(hidden=hidden))
least = over(written(hidden=hidden, least=True))
first_at = over(written(hidden=lambda at: later(at, 3, ROOM)))
last_at = over(written(hidden=lambda lengths: later(lengths - 3, 3, ROOM), least=True))
learned = over(written(lambda scores, lengths: scores + lengths.view(B, 1, 1, 1).to(scores.dtype)))
"""A bias by length, which hides nothing."""
near = over(
    written(lambda scores, slopes, lengths: scores + slopes.view(-1, 1, 1) * torch.arange(ROOM).to(scores.dtype))
)
"""Slopes, over all that the pages hold."""
sdpa = over(by_sdpa(lambda lengths: ~hidden(lengths)))


def near_or_all(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
    """One slope, up to a length; a sequence without keys gives the mean."""
    near = torch.arange(ROOM).to(q.dtype) * 0.25
    scores = (q @ k.mT).float() * D**-0.5 + near.float()
    return scores.masked_fill(hidden(lengths), -1e30).softmax(-1).to(v.dtype) @ v


def of_segments(q: Tensor, keys: Tensor, values: Tensor, table: Tensor) -> Tensor:
    """A loop over packed sequences [T, N, D], each over so many keys of pages of its own."""
    outs: list[Tensor] = []
    for number, (each, count) in enumerate(zip(q.split((2, 1)), (7, 10), strict=True)):
        k, v = (pages[table[number]].flatten(0, 1)[:count].transpose(0, 1)[None] for pages in (keys, values))
        outs.append(by_sdpa(enable_gqa=True)(each.transpose(0, 1)[None], k, v)[0].transpose(0, 1))
    return torch.cat(outs)


SEGMENTS = tensors((3, N, D), *2 * ((BLOCKS, SIZE, M, D),), TABLE % BLOCKS)
EXAMPLES = (
    Example("a step", step, inputs(1, LENGTHS)),
    Example("a step, a sequence without keys", step, inputs(1, EMPTY)),
    Example("the least number", least, inputs(1, EMPTY)),
    Example("sdpa", sdpa, inputs(1, EMPTY)),
    Example("einsum up to a position", at_positions, inputs(1, POSITION)),
    Example("row by row", over(of_lengths(10), one_by_one), inputs(1, LENGTHS)),
    Example("an embedding", over(of_lengths(), looked_up), inputs(1, LENGTHS)),
    Example("heads before positions", over(of_lengths(), heads_first), inputs(1, LENGTHS)),
    Example("several queries", first_at, inputs(3, POSITION - 3)),
    Example("several queries up to a length", last_at, inputs(3, torch.tensor([2, 12]))),
    Example("no dim for queries", tokens, inputs(1, LENGTHS)),
    Example("whole pages", over(by_sdpa()), inputs(2)),
    Example("slopes over pages", near, inputs(1, (N,), LENGTHS)),
    Example("a sink over pages", over(with_sink), inputs(1, LENGTHS, SINKS)),
    Example("lines of one head", over(of_lengths(), of_nz), inputs(1, LENGTHS, lanes=16)),
    Example("segments in pages", of_segments, SEGMENTS),
)


def some_lanes(q: Tensor, keys: Tensor, values: Tensor, *more: Tensor) -> Tensor:
    """Pages of which every row holds more than is attended to."""
    return step(q[..., :8], keys[..., :8], values[..., :8], *more)


GATHERED = (
    (Example("some lanes of pages", some_lanes, inputs(1, LENGTHS)), "are not contiguous"),
    (Example("short lines", over(of_lengths(), of_nz), inputs(1, LENGTHS, lanes=8)), "read as lines of 8 lanes"),
)
"""Pages that cannot be read in place, whose rows are gathered before, and why."""
REJECTS = (
    Example("a bias", learned, inputs(1, LENGTHS), "what is added to the scores is not proven"),
    Example(
        "a slope, a sequence without keys",
        over(near_or_all),
        inputs(1, EMPTY),
        "beside it, a query without visible keys",
    ),
)

TRIED = {"attention": (*EXAMPLES, *(each for each, _ in GATHERED), *REJECTS)}
