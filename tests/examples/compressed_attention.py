"""Attention over a window and compressed keys as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fusion import Example
from tests.examples.inputs import Inputs, Part, tensors

B, N, D, WINDOW = 2, 4, 16, 128
SCALE = D**-0.5
Mask = Callable[[Tensor, int, int], Tensor]


def inputs(queries: int, entries: int, *more: Part, before: int = 0) -> Inputs:
    """Queries [B, N, S, D], keys [B, 1, `before` + S, D], entries [B, 1, C, D], a sink [N], and `more`."""
    return tensors((B, N, queries, D), (B, 1, before + queries, D), (B, 1, entries, D), (N,), *more)


def attended(q: Tensor, keys: Tensor, sink: Tensor, mask: Tensor | None) -> Tensor:
    """Softmax attention whose sink is a column of the scores, as gpt-oss and DeepSeek-V4 write it."""
    scores = q @ keys.expand(-1, N, -1, -1).mT * SCALE
    scores = scores if mask is None else scores + mask
    joined = torch.cat((scores, sink.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], 1)), dim=-1)
    joined = joined - joined.max(-1, keepdim=True).values
    shares = torch.softmax(joined, dim=-1, dtype=joined.dtype)[..., :-1]
    return (shares.to(q.dtype) @ keys.expand(-1, N, -1, -1)).transpose(1, 2).contiguous()


def window(q: Tensor, span: int = WINDOW) -> Tensor:
    """0 where a key is among the last `span` up to the query, else -inf [B, 1, S, S]."""
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(q.shape[2])[None]
    mask = torch.where((j <= i) & (j > i - span), 0.0, -torch.inf).to(q.dtype)
    return mask.expand(q.shape[0], 1, -1, -1)


def closed(q: Tensor, entries: Tensor, ratio: int, ahead: int = 1) -> Tensor:
    """0 where all tokens of an entry are at most at the query, else -inf [B, 1, S, C]."""
    rows, count = q.shape[2], entries.shape[2]
    bound = (torch.arange(rows) + ahead) // ratio
    later = torch.arange(count).view(1, 1, 1, -1) >= bound.view(1, 1, -1, 1)
    return q.new_zeros((q.shape[0], 1, rows, count)).masked_fill(later, -torch.inf)


def listed(q: Tensor, entries: Tensor, scores: Tensor, ratio: int, count: int = 2) -> Tensor:
    """0 at the entries with the largest `scores` [B, S, C] whose tokens are at most at the query, else -inf."""
    room, bound = entries.shape[2], ((torch.arange(q.shape[2]) + 1) // ratio).view(1, -1, 1)
    best = scores.masked_fill(torch.arange(room) >= bound, -torch.inf).topk(count, dim=-1).indices
    named = torch.where(best >= bound, torch.full_like(best, -1), best)
    safe = torch.where(named >= 0, named, torch.full_like(named, room))
    mask = q.new_full((q.shape[0], 1, q.shape[2], room + 1), -torch.inf)
    return mask.scatter(-1, safe.unsqueeze(1), 0.0)[..., :room]


def over_window(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor) -> Tensor:
    """A layer without compressed keys."""
    return attended(q, keys, sink, window(q))


def over_entries(
    q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor, ratio: int = 16, seen: int = 128, ahead: int = 1
) -> Tensor:
    """A layer whose queries see every entry that is closed."""
    mask = torch.cat((window(q, seen), closed(q, entries, ratio, ahead)), dim=-1)
    return attended(q, torch.cat((keys, entries), dim=2), sink, mask)


def over_listed(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor, scores: Tensor) -> Tensor:
    """A layer whose queries see the listed entries among those that are closed."""
    mask = torch.cat((window(q), listed(q, entries, scores, 4)), dim=-1)
    return attended(q, torch.cat((keys, entries), dim=2), sink, mask)


def one_query(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor) -> Tensor:
    """A step that sees the last 128 keys and every entry."""
    return attended(q, torch.cat((keys, entries), dim=2), sink, None)


def _ahead(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor) -> Tensor:
    return over_entries(q, keys, entries, sink, ahead=16)


def _open_list(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor, scores: Tensor) -> Tensor:
    mask = q.new_full((B, 1, q.shape[2], entries.shape[2]), -torch.inf)
    chosen = mask.scatter(-1, scores.topk(2, dim=-1).indices.unsqueeze(1), 0.0)
    return attended(q, torch.cat((keys, entries), dim=2), sink, torch.cat((window(q), chosen), dim=-1))


def _short_window(q: Tensor, keys: Tensor, entries: Tensor, sink: Tensor) -> Tensor:
    return over_entries(q, keys, entries, sink, seen=64)


ROWS, SCORES = 150, (B, 150, 37)
EXAMPLES: tuple[Any, ...] = (
    Example("window", over_window, inputs(ROWS, 1)),
    Example("entries", over_entries, inputs(ROWS, 9)),
    Example("one entry", lambda *of: over_entries(*of, ratio=128), inputs(ROWS, 1)),
    Example("listed entries", over_listed, inputs(ROWS, 37, SCORES)),
    Example("one query", one_query, inputs(1, 5, before=127)),
)
REJECTS: tuple[Any, ...] = (
    Example("entries of later tokens", _ahead, inputs(ROWS, 9), refusal="sparse_flash_mla requires tokens // ratio"),
    Example("a list without a bound", _open_list, inputs(ROWS, 37, SCORES), refusal="sparse_flash_mla skips such"),
    Example("another window", _short_window, inputs(ROWS, 9), refusal="sparse_flash_mla requires these"),
)
TRIED = {"compressed_attention": (*EXAMPLES, *REJECTS)}
