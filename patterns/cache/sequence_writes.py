"""Writes into the sequences of a cache one after the other, read as one write into all of them.

for b in range(B): cache[b, .., start[b] : start[b] + S[b]] = rows[b]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any

import torch

from fusion.graph import Algebra, Reading, Value
from fusion.graph.comparisons import number, steps
from fusion.graph.proof_steps import must, proof, proven


@dataclass(frozen=True)
class Sequences:
    """A write of `rows` [n, .., S, ..] along `axis` into the sequences from `first` on, at `start`: a tensor [] or a
    number.
    """

    first: int
    rows: Value
    axis: int
    start: Value | int

    @property
    def end(self) -> int:
        """The sequence behind the last one that is written."""
        return self.first + int(self.rows.shape[0])


def chain_of(value: Value) -> tuple[Value, list[Sequences]]:
    """Return the cache before `value`, a chain of writes into sequences, and these writes in the order of sequences."""
    writes: list[Sequences] = []
    while (write := _write_of(value)) is not None:
        writes.append(write)
        value = value.arg
    return value, sorted(writes, key=lambda each: each.first)


def _write_of(value: Value) -> Sequences | None:
    """Return the last write of `value` into sequences; None if there is none from one position on."""
    if value.op != "write_within" or value.attrs[2] not in ("start", "number"):
        return None
    (_, rows, *starts), (axis, first, _, *numbers) = value.args, value.attrs
    start = (*starts, *numbers)[0]
    is_one = not isinstance(start, Value) or prod(start.shape) == 1
    return Sequences(first, rows, axis, start) if is_one else None


@proof
def joined(a: Algebra, value: Value, like: Value) -> Sequence[Reading] | None:
    """Read `value`, a chain of writes into each sequence of a cache, as one write into the cache before them.

    Positions are built on the device of `like`, which caches share, so that keys and values have the same positions.
    None if a sequence is written twice or never, if rows depend on a write before them, or must be copied to be
    concatenated.
    """
    last = value.below("reshape")
    cache, writes = chain_of(last)
    must(len(writes) > 1 and len({each.axis for each in writes}) == 1)
    must(writes[0].first == 0 and writes[-1].end == cache.shape[0])
    must(all(one.end == other.first for one, other in pairwise(writes)))
    must(not _reads_writes([x for each in writes for x in (each.rows, each.start)], last, cache))
    cache = a.reshape(cache, value.shape)
    return _in_step(a, cache, writes, like) or _row_by_row(a, cache, writes, like)


@proof
def single_write(a: Algebra, value: Value, like: Value) -> Sequence[Reading] | None:
    """Read `value`, a write into one sequence of a cache [B, T, ..], as a write into pages of T rows; else None."""
    must(value.op == "write_within" and value.attrs[:1] == (1,) and value.rank > 2)
    write, cache, size = proven(_write_of(value)), value.arg, int(value.shape[1])
    must(write.rows.shape[0] == 1)
    rows = a.reshape(write.rows, (write.rows.shape[1], *write.rows.shape[2:]))
    sequences, places = _places(a, write, like)
    return (_to_pages(cache, rows, proven(a.add(a.scale(sequences, size), places))),)


def _reads_writes(values: Sequence[Any], last: Value, cache: Value) -> bool:
    """Return True if any tensor of `values` is computed from a write of the chain from `cache` to `last`."""
    chain = set[Value]()
    while last is not cache:
        chain.add(last)
        last = last.arg
    tensors = (each for each in values if isinstance(each, Value))
    return any(source in chain for each in tensors for source in each.sources())


@proof
def _in_step(a: Algebra, cache: Value, writes: Sequence[Sequences], like: Value) -> Sequence[Reading] | None:
    """Read `writes` of as many rows each as one write into `cache` [B, .., T, ..] from one position of each sequence
    on.

    None if they differ in their number of rows, or cover a part of a sequence.
    """
    shape: Any = cache.shape
    between = cache.rank - writes[0].rows.rank
    lead = prod(shape[1 : between + 1])
    must(len({each.rows.shape[1:] for each in writes}) == 1 and all(each.first % lead == 0 for each in writes))
    counts = [(each.end - each.first) // lead for each in writes]
    rows = proven(adjacent(a, [each.rows for each in writes], (*shape[1 : between + 1], *writes[0].rows.shape[1:])))
    axis = writes[0].axis + between
    starts = [each.start if isinstance(each.start, Value) else number(a, each.start, like) for each in writes]
    start = starts[0]
    if any(each is not start for each in starts):
        start = _stacked(a, [each for each, count in zip(starts, counts, strict=True) for _ in range(count)])
    written = Reading("write", {"cache": cache, "rows": rows, "axis": axis, "start": start}, over=cache)
    if axis != 1 or cache.rank < 3:
        return (written,)
    firsts = a.reshape(a.scale(steps(a, 0, shape[0], like), shape[1]), (shape[0], 1))
    starts = a.reshape(a.cast(start, torch.int64), (*start.shape, *(1,) * (2 - start.rank)))
    begins = proven(a.add(firsts, starts))
    slots = proven(a.add(begins, a.reshape(steps(a, 0, rows.shape[1], like), (1, rows.shape[1]))))
    flat = a.reshape(rows, (shape[0] * rows.shape[1], *rows.shape[2:]))
    return written, _to_pages(cache, flat, a.reshape(slots, flat.shape[:1]))


@proof
def _row_by_row(a: Algebra, cache: Value, writes: Sequence[Sequences], like: Value) -> Sequence[Reading] | None:
    """Read `writes` of any number of rows each as one write into `cache` [B, T, ..] or [B, M, T, ..], by sequence (and
    head) and position.
    """
    shape: Any = cache.shape
    width = cache.rank - writes[0].rows.rank
    must(all(each.axis == 1 for each in writes) and width < 2)
    heads = shape[1] if width else 1
    must(all(each.rows.shape[0] == heads for each in writes))
    rest = shape[2 + width :]
    by_token = [a.permute(each.rows, (1, 0, *range(2, each.rows.rank))) for each in writes]
    rows = proven(adjacent(a, by_token, (heads, *rest)))
    rows = a.reshape(rows, (rows.shape[0] * heads, *rest))
    sequences, places = (a.cat(parts, 0) for parts in zip(*(_places(a, each, like) for each in writes), strict=True))
    flat = a.reshape(cache, (shape[0] * heads, shape[1 + width], *rest))
    how = {"cache": flat, "rows": rows, "axis": 0, "index": sequences, "inner": places}
    written = Reading("write", how, over=flat)
    if width or cache.rank < 3:
        return (written,)
    return written, _to_pages(cache, rows, proven(a.add(a.scale(sequences, shape[1]), places)))


def _places(a: Algebra, write: Sequences, like: Value) -> tuple[Value, Value]:
    """Return sequence and position [S · n] of each row of `write`, a write of S rows into n sequences."""
    shape = (write.rows.shape[1], write.rows.shape[0])
    sequence = a.reshape(steps(a, write.first, shape[1], like), (1, shape[1]))
    place = a.reshape(steps(a, write.start if isinstance(write.start, int) else 0, shape[0], like), (shape[0], 1))
    if isinstance(write.start, Value):
        place = proven(a.add(place, a.cast(a.reshape(write.start, (1, 1)), torch.int64)))
    sequences, places = (a.reshape(a.expand(each, shape), (prod(shape),)) for each in (sequence, place))
    return sequences, places


def _to_pages(cache: Value, rows: Value, slots: Value) -> Reading:
    """Return the write of `rows` at `slots` of `cache` [B, T, ..], whose sequences are pages of T rows."""
    return Reading("write_pages", {"cache": cache, "rows": rows, "slots": slots, "nz_block": None}, over=cache)


@proof
def adjacent(a: Algebra, parts: Sequence[Value], row: Sequence[Any]) -> Value | None:
    """Return [n, *row], of which `parts` are the elements one after the other, or so for each part of their lanes; None
    if they must be copied.
    """
    if all((each.op, each.attrs) == ("cat", (each.rank - 1,)) for each in parts):
        must(len({tuple(lanes.shape[-1] for lanes in each.args) for each in parts}) == 1)
        columns = zip(*(each.args for each in parts), strict=True)
        return a.cat([proven(adjacent(a, each, (*row[:-1], each[0].shape[-1]))) for each in columns], -1)
    runs = [_elements(each) for each in parts]
    source, first, _ = runs[0]
    must(all(each[0] is source for each in runs) and all(one[2] == other[1] for one, other in pairwise(runs)))
    must(all(isinstance(each, int) for each in source.shape))
    width, size = prod(row), prod(source.shape)
    must(width and size % width == first % width == 0)
    return a.cut(a.reshape(source, (size // width, *row)), 0, first // width, runs[-1][2] // width)


def _elements(x: Value) -> tuple[Value, Any, Any]:
    """Return a value of which `x` is consecutive elements, with the first and the last but one of them."""
    first, count = 0, prod(x.shape)
    while x.op == "reshape" or (x.op == "slice" and x.attrs[3] == 1 and prod(x.shape[: x.attrs[0]]) == 1):
        if x.op == "slice":
            axis, start = x.attrs[:2]
            first += start * prod(x.shape[axis + 1 :])
        x = x.arg
    return x, first, first + count


def _stacked(a: Algebra, numbers: Sequence[Value]) -> Value:
    """Concatenate `numbers` of one element each to [n], below the casts and shifts that all of them have."""
    below = [each.below("reshape") for each in numbers]
    first = below[0]
    if first.op not in ("wrap", "cast", "shift") or len({(each.op, each.attrs, each.dtype) for each in below}) != 1:
        return a.cat([a.reshape(each, (1,)) for each in below], 0)
    stacked = _stacked(a, [each.arg for each in below])
    return a.make(first.op, (stacked,), first.attrs, stacked.shape, first.dtype)
