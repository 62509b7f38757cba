"""Which keys a query sees: from lengths, sparse modes and masks, without a mask per head.

`visible` is for attention over whole sequences, `rows_of` for operators that read keys by lists: their `layout` "BSND"
has a batch of sequences, one length for each; "TND" has them one after the other in one dim of tokens, told by the
prefix sums of their lengths; "PA_BSND" (keys only) has pages, one length for each sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

import torch
from torch import Tensor

from fusion._torch.tensors import known_true
from fusion.operators.attention.softmax import Visible
from fusion.operators.calling import Given
from fusion.operators.limits import Limit

UNLIMITED = 2147483647
"""`pre_tokens` and `next_tokens` that limit nothing."""

Size = int  # or a torch.SymInt, which torch's own stubs call an int too
Length = Size | Tensor
Lengths = Sequence[Size] | Tensor | None


@dataclass(frozen=True)
class Band:
    """What `sparse_mode` and its companions say."""

    mode: int = 0
    mask: Tensor | None = None
    before: int = UNLIMITED
    after: int = UNLIMITED


@dataclass(frozen=True)
class _Places:
    """Where tokens stand: position in their sequence, its length, which of them hold a token, and which sequence.

    Everything broadcasts over [B, 1, S, T]; `held` is None if all do, `sequence` if a batch is not packed.
    """

    position: Tensor
    length: Length
    held: Tensor | None = None
    sequence: Tensor | None = None

    def as_rows(self) -> _Places:
        """The same for queries, which run along the last dim but one."""
        named = {"position": self.position, "length": self.length, "held": self.held, "sequence": self.sequence}
        turned = {name: value.transpose(-2, -1) for name, value in named.items() if isinstance(value, Tensor)}
        return replace(self, **turned)


def visible(
    query: Tensor, key: Tensor, lengths: tuple[Lengths, Lengths], band: Band, *, packed: bool, table: Tensor | None,
    padding: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Visible:  # fmt: skip
    """Return which of the keys [B, M, T, D] each query [B, N, S, D] sees.

    `lengths` of the sequences in query and key: one per batch, one for all, or None; prefix sums if packed, except
    those of paged keys (`table` [B, blocks]), which are always one per sequence. A row past its sequence sees nothing.
    `padding` of query and key: how many rows stand behind the last token of each sequence; without, all but the tokens.
    """
    of_query, of_key = lengths
    several = packed and any(each is not None and len(each) > 1 for each in lengths)
    if several:
        rows = _packed(query.shape[-2], of_query, query.device)
        columns = _paged(key, of_key, table) if table is not None else _packed(key.shape[-2], of_key, key.device)
    else:
        rows = _batched(query.shape[-2], query.shape[0], of_query, query.device, padding[0])
        columns = _batched(key.shape[-2], query.shape[0], of_key, key.device, padding[1])
    return _combined(rows.as_rows(), columns, band, query, key)


def mask_limits(when: str, *keys: tuple[str, str]) -> Iterator[Limit]:
    """Yield limits of a mask in calls for which `when` holds: [1|B, 1, S, T], [1|B, S, T], [S, T], of one query [B, T].

    A mask may have more rows and columns than there are queries and `keys`, pairs of their number and of a condition.
    """
    yield Limit("rank(atten_mask) in (2, 3, 4)", when=when)
    yield Limit("size(atten_mask, 0) in (1, B)", when=f"{when} and rank(atten_mask) > 2")
    yield Limit("size(atten_mask, 0) == B", when=f"{when} and rank(atten_mask) == 2 and S == 1")
    yield Limit("size(atten_mask, 1) == 1", when=f"{when} and rank(atten_mask) == 4")
    yield Limit("size(atten_mask, -2) >= S", when=f"{when} and (rank(atten_mask) > 2 or S > 1)")
    for count, where in keys:
        yield Limit(f"size(atten_mask, -1) >= {count}", when=f"{when} and {where}")


def _batched(size: Size, batch: Size, given: Lengths, device: torch.device, padding: Tensor | None = None) -> _Places:
    position = torch.arange(size, device=device).reshape(1, 1, 1, -1)
    if given is None:
        return _Places(position, size)
    length = _length(given, batch, device)
    if padding is not None:
        first = size - padding.to(device).reshape(1, 1, 1, 1).clamp(min=0) - length
        position = position - first
        return _Places(position, length, (position >= 0) & (position < length) & (first >= 0))
    if not isinstance(length, Tensor) and known_true(length >= size):
        return _Places(position, size)
    return _Places(position, length, position < length)


def _length(given: Sequence[Size] | Tensor, batch: Size, device: torch.device) -> Length:
    """One size for all, or a tensor [B, 1, 1, 1]."""
    if isinstance(given, Tensor):
        return given[:batch].to(device).reshape(-1, 1, 1, 1)
    if all(known_true(each == given[0]) for each in given[1:]):
        return given[0]
    return counted(given, device)[:batch].reshape(-1, 1, 1, 1)


def counted(given: Sequence[Size] | Tensor, device: torch.device) -> Tensor:
    """Lengths in a tensor, int64 where they are numbers; made without writes, which AOT autograd would not take."""
    if isinstance(given, Tensor):
        return given.to(device)
    return torch.stack([torch.full((), each, dtype=torch.int64, device=device) for each in given])


def _packed(size: Size, given: Lengths, device: torch.device) -> _Places:
    """Sequences that stand one after the other, from the prefix sums of their lengths."""
    assert given is not None
    sequence, position, length, held = packed(size, counted(given, device))
    return _Places(*(each.reshape(1, 1, 1, -1) for each in (position, length, held, sequence)))


def _paged(key: Tensor, given: Lengths, table: Tensor | None) -> _Places:
    """Sequences that each fill the pages of one row of the table, from their lengths."""
    assert given is not None
    assert table is not None
    lengths = counted(given, key.device)
    room = key.shape[-2] // table.shape[0]
    token = torch.arange(key.shape[-2], device=key.device)
    sequence, position = token // room, token % room
    length = lengths[sequence]
    return _Places(*(each.reshape(1, 1, 1, -1) for each in (position, length, position < length, sequence)))


def _combined(rows: _Places, columns: _Places, band: Band, query: Tensor, key: Tensor) -> Visible:
    terms = [each for each in (rows.held, columns.held) if each is not None]
    if rows.sequence is not None:
        terms.append(rows.sequence == columns.sequence)
    first, last, causal = _limits(rows, columns, band)
    if causal and not terms and known_true(query.shape[-2] == key.shape[-2]):
        return Visible(causal=True)
    if last is not None:
        terms.append(columns.position <= rows.position + last)
    if first is not None:
        terms.append(columns.position >= rows.position + first)
    if band.mode in (0, 1) and band.mask is not None:
        terms.append(_open(band.mask, query, key))
    return Visible(reduce(and_, terms) if terms else None)


def _limits(rows: _Places, columns: _Places, band: Band) -> tuple[Length | None, Length | None, bool]:
    """First and last key that a query sees, relative to its own position, and whether that is plainly causal."""
    if band.mode == 2:
        return None, 0, True
    if band.mode == 0 and band.mask is not None:
        before = None if band.before >= UNLIMITED else -band.before
        return before, None if band.after >= UNLIMITED else band.after, False
    if band.mode not in (3, 4):
        return None, None, False
    # In packed batches this is meant, and right, where query and key are of one sequence.
    offset = columns.length - rows.length
    if band.mode == 3:
        return None, offset, not isinstance(offset, Tensor) and known_true(offset == 0)
    before = None if band.before >= UNLIMITED else offset - band.before
    return before, None if band.after >= UNLIMITED else offset + band.after, False


def _open(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """A mask of the call (True or not 0: hidden), which may be padded, as what is seen, over [B, 1, S, T]."""
    rows, columns = query.shape[-2], key.shape[-2]
    if mask.dim() == 2 and rows == 1:
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    return ~mask[..., :rows, :columns].bool()


@dataclass(frozen=True)
class Rows:
    """Of the rows [B, S] or [T] of a query, int64: number of the sequence; how many of its first keys are seen.

    `first` is where packed keys of the sequence begin, None where they are not packed. A row past its sequence sees
    none.
    """

    sequence: Tensor
    seen: Tensor
    first: Tensor | None


def rows_of(given: Given, keys: str) -> Rows:
    """The rows of `query` [B, S, N, D] or [T, N, D] in `layout_query` against `key` in the layout of `keys`.

    Each row sees the whole sequence of keys; where it is causal (`sparse_mode` 3), the last row of a sequence does, and
    every row before it one key less than the next.
    """
    query, of_query, of_key = (
        given[name] for name in ("query", "actual_seq_lengths_query", f"actual_seq_lengths_{keys}")
    )
    is_packed = given["layout_query"] == "TND"
    sequence, position, size, held = (_packed_rows if is_packed else _batched_rows)(query, of_query)
    length, first = torch.full_like(sequence, given["key"].shape[1]), None
    if of_key is not None:
        ends = of_key.long()
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)) if given[f"layout_{keys}"] == "TND" else ends
        length = _spread(sizes, sequence)
        first = None if sizes is ends else _spread(ends - sizes, sequence)
    seen = length - size + position + 1 if given["sparse_mode"] == 3 else length
    return Rows(sequence, (seen if held is None else torch.where(held, seen, 0)).clamp(min=0), first)


def packed(tokens: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Of every token [T] of sequences that end at `ends`: sequence, place in it, its length; whether it is of one."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    token = torch.arange(tokens, device=ends.device)
    passed = (token[:, None] >= ends).sum(-1)
    sequence = passed.clamp_max(ends.shape[0] - 1)
    return sequence, token - (ends - sizes)[sequence], sizes[sequence], passed < ends.shape[0]


Of = tuple[Tensor, Tensor, "Tensor | int", Tensor | None]
"""Of every row: sequence, place in it, its length; whether it is of one, None where each is."""


def _packed_rows(query: Tensor, given: Tensor | None) -> Of:
    assert given is not None
    return packed(query.shape[0], given.long())


def _batched_rows(query: Tensor, given: Tensor | None) -> Of:
    """The same of every row [B, S]."""
    batch, size = query.shape[:2]
    sequence = torch.arange(batch, device=query.device)[:, None].expand(batch, size)
    position = torch.arange(size, device=query.device).expand(batch, size)
    if given is None:
        return sequence, position, size, None
    sizes = _spread(given.long(), sequence)
    return sequence, position, sizes, position < sizes


def _spread(each: Tensor, sequence: Tensor) -> Tensor:
    """What is given of each sequence [B] for the rows [B, S] or [T] of them."""
    return each[:, None].expand_as(sequence) if sequence.dim() == 2 else each[sequence]
