"""Which sequence each row of a query is of, and how many of its keys it sees, from lengths in tensors.

`layout` "BSND" has a batch of sequences, one length for each; "TND" has them one after the other in one dim of tokens,
told by the prefix sums of their lengths; "PA_BSND" (keys only) has pages, one length for each sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fusion.operators.calling import Given


@dataclass(frozen=True)
class Rows:
    """Of the rows [B, S] or [T] of a query, int64: number of the sequence; how many of its first keys are seen.

    `first` is where packed keys of the sequence begin, 0 where they are not packed. A row past its sequence sees none.
    """

    sequence: Tensor
    seen: Tensor
    first: Tensor


def rows_of(given: Given, keys: str) -> Rows:
    """The rows of `query` [B, S, N, D] or [T, N, D] in `layout_query` against `key` in the layout of `keys`.

    Each row sees the whole sequence of keys; where it is causal (`sparse_mode` 3), the last row of a sequence does, and
    every row before it one key less than the next.
    """
    query, of_query, of_key = (
        given[name] for name in ("query", "actual_seq_lengths_query", f"actual_seq_lengths_{keys}")
    )
    rows = _packed(query, of_query) if given["layout_query"] == "TND" else _batched(query, of_query)
    sequence, position, size, held = rows
    length, first = _keys(given["key"], given[f"layout_{keys}"], of_key, sequence)
    seen = length - size + position + 1 if given["sparse_mode"] == 3 else length
    return Rows(sequence, torch.where(held, seen, 0).clamp(min=0), first)


def packed(tokens: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every token [T] of sequences that end at `ends`: sequence, place in it, its length; whether it is of one."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    token = torch.arange(tokens, device=ends.device)
    passed = (token[:, None] >= ends).sum(-1)
    sequence = passed.clamp_max(ends.shape[0] - 1)
    return sequence, token - (ends - sizes)[sequence], sizes[sequence], passed < ends.shape[0]


def _packed(query: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    assert given is not None
    return packed(query.shape[0], given.long())


def _batched(query: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The same of every row [B, S]."""
    batch, size = query.shape[:2]
    sequence = torch.arange(batch, device=query.device)[:, None].expand(batch, size)
    position = torch.arange(size, device=query.device).expand(batch, size)
    sizes = torch.full_like(sequence, size) if given is None else given.long()[sequence]
    return sequence, position, sizes, position < sizes


def _keys(key: Tensor, layout: str, given: Tensor | None, sequence: Tensor) -> tuple[Tensor, Tensor]:
    """Length of the keys of each row's sequence, and where they begin."""
    start = torch.zeros_like(sequence)
    if given is None:
        return torch.full_like(sequence, key.shape[1]), start
    if layout != "TND":
        return given.long()[sequence], start
    ends = given.long()
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    return sizes[sequence], (ends - sizes)[sequence]
