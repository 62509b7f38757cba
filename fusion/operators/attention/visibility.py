"""Visibility of keys to queries by lengths, sparse modes and masks, as one mask for all heads.

`visible` is for attention over all keys, `rows_of` for operators that read keys by lists. Layouts of the latter: "BSND"
is a batch with one length per sequence; "TND" is packed, with the inclusive prefix sums of the lengths; "PA_BSND" (keys
only) is paged, with one length per sequence.
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
"""Value of `pre_tokens` and `next_tokens` that limits nothing."""

Size = int  # or a torch.SymInt, which torch's own stubs call an int too
Length = Size | Tensor
Lengths = Sequence[Size] | Tensor | None


@dataclass(frozen=True)
class Band:
    """Mask of a call by its arguments: `sparse_mode`, the mask tensor, and how many tokens are visible before and after
    the diagonal."""

    mode: int = 0
    mask: Tensor | None = None
    before: int = UNLIMITED
    after: int = UNLIMITED


@dataclass(frozen=True)
class _Tokens:
    """Tokens along the last dim: position in their sequence, length of the sequence, mask of places that are tokens of
    a sequence, and segment id.

    All broadcast over [B, 1, S, T]; `valid` is None if all places are tokens, `sequence` is None unless packed.
    """

    position: Tensor
    length: Length
    valid: Tensor | None = None
    sequence: Tensor | None = None

    def as_rows(self) -> _Tokens:
        """Return the tokens with all fields along the last dim but one, that of queries, instead of the last, that of
        keys.
        """
        named = {"position": self.position, "length": self.length, "valid": self.valid, "sequence": self.sequence}
        transposed = {name: value.transpose(-2, -1) for name, value in named.items() if isinstance(value, Tensor)}
        return replace(self, **transposed)


def visible(
    query: Tensor, key: Tensor, lengths: tuple[Lengths, Lengths], band: Band, *, packed: bool, table: Tensor | None,
    padding: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Visible:  # fmt: skip
    """Return which of the keys `key` [B, M, T, D] each query `query` [B, N, S, D] sees.

    A query behind the last token of its sequence sees nothing.

    Args:
        query: the queries; packed sequences are one batch.
        key: the keys, gathered if they are in pages.
        lengths: lengths of the sequences in query and in key: one for each, one for all, or None for full ones. If
            `packed`, they are the inclusive prefix sums, but for keys in pages, which always have plain lengths.
        band: sparse mode and mask of the call.
        packed: True if the sequences are concatenated along one dim.
        table: block table [B, P] of keys in pages; None for rows.
        padding: number of rows behind the last token of each sequence, for query and for key; with None, sequences
            begin in the first row.
    """
    query_lengths, key_lengths = lengths
    several = packed and any(each is not None and len(each) > 1 for each in lengths)
    if several:
        rows = _packed(query.shape[-2], query_lengths, query.device)
        columns = _packed(key.shape[-2], key_lengths, key.device) if table is None else _paged(key, key_lengths, table)
    else:
        rows = _batched(query.shape[-2], query.shape[0], query_lengths, query.device, padding[0])
        columns = _batched(key.shape[-2], query.shape[0], key_lengths, key.device, padding[1])
    return _combined(rows.as_rows(), columns, band, query, key)


def mask_limits(when: str, *keys: tuple[str, str]) -> Iterator[Limit]:
    """Yield the limits on a mask in calls for which `when` holds: [1|B, 1, S, T], [1|B, S, T], [S, T], or [B, T] of one
    query.

    A mask may exceed S and T. `keys` are pairs of the number of keys, T, and the condition of calls that have so many.
    """
    yield Limit("rank(atten_mask) in (2, 3, 4)", when=when)
    yield Limit("size(atten_mask, 0) in (1, B)", when=f"{when} and rank(atten_mask) > 2")
    yield Limit("size(atten_mask, 0) == B", when=f"{when} and rank(atten_mask) == 2 and S == 1")
    yield Limit("size(atten_mask, 1) == 1", when=f"{when} and rank(atten_mask) == 4")
    yield Limit("size(atten_mask, -2) >= S", when=f"{when} and (rank(atten_mask) > 2 or S > 1)")
    for count, where in keys:
        yield Limit(f"size(atten_mask, -1) >= {count}", when=f"{when} and {where}")


def _batched(size: Size, batch: Size, given: Lengths, device: torch.device, padding: Tensor | None = None) -> _Tokens:
    """Return the tokens of `batch` sequences in `size` rows each, of which sequence i has `given[i]` tokens.

    They are in the first rows; with `padding`, in those that end that many rows before the last row.
    """
    position = torch.arange(size, device=device).reshape(1, 1, 1, -1)
    if given is None:
        return _Tokens(position, size)
    length = _length(given, batch, device)
    if padding is not None:
        first = size - padding.to(device).reshape(1, 1, 1, 1).clamp(min=0) - length
        position = position - first
        return _Tokens(position, length, (position >= 0) & (position < length) & (first >= 0))
    if not isinstance(length, Tensor) and known_true(length >= size):
        return _Tokens(position, size)
    return _Tokens(position, length, position < length)


def _length(given: Sequence[Size] | Tensor, batch: Size, device: torch.device) -> Length:
    """Return the lengths `given` of `batch` sequences: the one number if all are the same number, else [B or 1, 1, 1,
    1].
    """
    if isinstance(given, Tensor):
        return given[:batch].to(device).reshape(-1, 1, 1, 1)
    if all(known_true(each == given[0]) for each in given[1:]):
        return given[0]
    return counted(given, device)[:batch].reshape(-1, 1, 1, 1)


def counted(given: Sequence[Size] | Tensor, device: torch.device) -> Tensor:
    """Convert lengths to a tensor on `device`, ints to int64, without in-place writes, which AOT autograd rejects."""
    if isinstance(given, Tensor):
        return given.to(device)
    return torch.stack([torch.full((), each, dtype=torch.int64, device=device) for each in given])


def _packed(size: Size, given: Lengths, device: torch.device) -> _Tokens:
    """Return the tokens of sequences packed in `size` rows; `given` are the inclusive prefix sums of their lengths."""
    assert given is not None
    sequence, position, length, valid = packed_tokens(size, counted(given, device))
    return _Tokens(*(each.reshape(1, 1, 1, -1) for each in (position, length, valid, sequence)))


def _paged(key: Tensor, given: Lengths, table: Tensor | None) -> _Tokens:
    """Return the tokens of keys gathered from pages, of which sequence i has the rows of row i of `table`, one after
    the other.

    `given[i]` is the number of tokens of sequence i.
    """
    assert given is not None
    assert table is not None
    lengths = counted(given, key.device)
    room = key.shape[-2] // table.shape[0]
    token = torch.arange(key.shape[-2], device=key.device)
    sequence, position = token // room, token % room
    length = lengths[sequence]
    return _Tokens(*(each.reshape(1, 1, 1, -1) for each in (position, length, position < length, sequence)))


def _combined(rows: _Tokens, columns: _Tokens, band: Band, query: Tensor, key: Tensor) -> Visible:
    """Return the visible keys: valid, in the query's sequence, within the band along the diagonal, and not masked by
    the call.

    `rows` are the tokens of the queries, along the last dim but one, `columns` those of the keys, along the last.
    """
    terms = [each for each in (rows.valid, columns.valid) if each is not None]
    if rows.sequence is not None:
        terms.append(rows.sequence == columns.sequence)
    first, last, causal = _offsets(rows, columns, band)
    if causal and not terms and known_true(query.shape[-2] == key.shape[-2]):
        return Visible(causal=True)
    if last is not None:
        terms.append(columns.position <= rows.position + last)
    if first is not None:
        terms.append(columns.position >= rows.position + first)
    if band.mode in (0, 1) and band.mask is not None:
        terms.append(_unmasked(band.mask, query, key))
    return Visible(reduce(and_, terms) if terms else None)


def _offsets(rows: _Tokens, columns: _Tokens, band: Band) -> tuple[Length | None, Length | None, bool]:
    """Return bounds (a, b): the query at position p sees the keys at positions p + a … p + b of its sequence, by
    `band`.

    `rows` are the tokens of queries, `columns` those of keys. A bound is None if there is none. The third result is
    True for an upper-left causal mask.
    """
    if band.mode == 2:
        return None, 0, True
    if band.mode == 0 and band.mask is not None:
        before = None if band.before >= UNLIMITED else -band.before
        return before, None if band.after >= UNLIMITED else band.after, False
    if band.mode not in (3, 4):
        return None, None, False
    # In packed batches the offset is right only for pairs of one sequence; segment ids mask all others.
    offset = columns.length - rows.length
    if band.mode == 3:
        return None, offset, not isinstance(offset, Tensor) and known_true(offset == 0)
    before = None if band.before >= UNLIMITED else offset - band.before
    return before, None if band.after >= UNLIMITED else offset + band.after, False


def _unmasked(mask: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """Invert the mask of a call (not 0: masked), cropped to S and T, to a mask (True: visible) that broadcasts to
    [B, 1, S, T]."""
    rows, columns = query.shape[-2], key.shape[-2]
    if mask.dim() == 2 and rows == 1:
        mask = mask[:, None, None]
    elif mask.dim() == 3:
        mask = mask[:, None]
    return ~mask[..., :rows, :columns].bool()


@dataclass(frozen=True)
class Rows:
    """Segment id of the rows [B, S] or [T] of a query, and how many keys each sees, the first ones of its sequence;
    int64. A row past its sequence sees none.

    `first` is the index at which the packed keys of the sequence begin, None if keys are not packed.
    """

    sequence: Tensor
    seen: Tensor
    first: Tensor | None


def rows_of(given: Given, keys: str) -> Rows:
    """Return for each row of the query of a call, [B, S] or packed [T], its sequence and how many keys it sees.

    It sees all keys of its sequence, or with `sparse_mode` 3 those of a lower-right causal mask.

    Args:
        given: the arguments of the call.
        keys: "key" or "kv", the ending of the names of the arguments for layout and lengths of the keys.
    """
    query, query_lengths, key_lengths = (
        given[name] for name in ("query", "actual_seq_lengths_query", f"actual_seq_lengths_{keys}")
    )
    is_packed = given["layout_query"] == "TND"
    sequence, position, size, valid = (_packed_rows if is_packed else _batched_rows)(query, query_lengths)
    length, first = torch.full_like(sequence, given["key"].shape[1]), None
    if key_lengths is not None:
        ends = key_lengths.long()
        sizes = torch.diff(ends, prepend=ends.new_zeros(1)) if given[f"layout_{keys}"] == "TND" else ends
        length = _spread(sizes, sequence)
        first = None if sizes is ends else _spread(ends - sizes, sequence)
    seen = length - size + position + 1 if given["sparse_mode"] == 3 else length
    return Rows(sequence, (seen if valid is None else torch.where(valid, seen, 0)).clamp(min=0), first)


def packed_tokens(tokens: int, ends: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return for each of `tokens` rows of packed sequences, which end at `ends` [B]: segment id, position in the
    sequence, length of the sequence, and a mask that is False behind the last sequence."""
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    token = torch.arange(tokens, device=ends.device)
    passed = (token[:, None] >= ends).sum(-1)
    sequence = passed.clamp_max(ends.shape[0] - 1)
    return sequence, token - (ends - sizes)[sequence], sizes[sequence], passed < ends.shape[0]


_RowTuple = tuple[Tensor, Tensor, "Tensor | int", Tensor | None]
"""Per row: segment id, position in the sequence, length of the sequence, and mask of rows of a sequence (None: all)."""


def _packed_rows(query: Tensor, given: Tensor | None) -> _RowTuple:
    assert given is not None
    return packed_tokens(query.shape[0], given.long())


def _batched_rows(query: Tensor, given: Tensor | None) -> _RowTuple:
    """Return segment id, position, length and mask of the rows [B, S] of a batch with lengths `given` [B]."""
    batch, size = query.shape[:2]
    sequence = torch.arange(batch, device=query.device)[:, None].expand(batch, size)
    position = torch.arange(size, device=query.device).expand(batch, size)
    if given is None:
        return sequence, position, size, None
    sizes = _spread(given.long(), sequence)
    return sequence, position, sizes, position < sizes


def _spread(each: Tensor, sequence: Tensor) -> Tensor:
    """Expand `each` [B], one number per sequence, to rows [B, S] or [T] of the segment ids `sequence`."""
    return each[:, None].expand_as(sequence) if sequence.dim() == 2 else each[sequence]
