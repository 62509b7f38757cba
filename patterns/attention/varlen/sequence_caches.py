"""Keys of several sequences, each the first rows of one sequence of a cache, read as that cache.

    cache[0, :, :length[0]], cache[1, :, :length[1]], ..      cache [B, M, T, D] or [B, T, M, D], and the lengths

Writes into other sequences may lie between the reads: the cache that is read is the one behind all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Value
from fusion.graph.comparisons import steps
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.varlen.segment_orders import ROWS
from patterns.cache.sequence_writes import chain_of

HEADS_LAST = (0, 2, 1, 3)
_SIZES = (128, 64, 32, 16)
"""Rows of a page, the preferred size first: every call that reads pages takes 128."""


@dataclass(frozen=True)
class SequenceCache:
    """A cache of which each sequence is read up to a length of its own.

    Attributes:
        cache: [B, M, T, D], or [B, T, M, D] if `heads_last`.
        heads_last: True if a row holds all heads.
        first: the first sequence that is read.
        lengths: the number of rows that are read of each sequence from `first` on.
    """

    cache: Value
    heads_last: bool
    first: int
    lengths: tuple[int, ...]

    def rows(self, a: Algebra) -> Value:
        """Return all rows [B, M, T, D] of the sequences that are read."""
        return a.cut(_heads_first(a, self.cache, self.heads_last), 0, self.first, self.first + len(self.lengths))

    @proof
    def pages(self, a: Algebra, like: Value) -> dict[str, Any] | None:
        """Return the cache as consecutive pages, with their size, layout and block table [B, P] on the device of
        `like`.

        Pages of rows with all heads are parts of a sequence, others whole sequences. None if no size of pages divides
        the rows of a sequence.
        """
        room: Any = self.cache.shape[1 if self.heads_last else ROWS]
        size = next((each for each in _SIZES if room % each == 0), None) if self.heads_last else room
        size = proven(size)
        count = room // size
        blocks: Any = self.cache.shape[0] * count
        pages = a.reshape(self.cache, (blocks, size, *self.cache.shape[2:])) if self.heads_last else self.cache
        batch = len(self.lengths)
        table = a.reshape(steps(a, self.first * count, batch * count, like), (batch, count))
        layout = "BSND" if self.heads_last else "BNSD"
        return {"pages": pages, "block_table": table, "size": size, "layout": layout}


@proof
def cache_of(graph: Graph, parts: Sequence[Value]) -> SequenceCache | None:
    """Return the cache of which `parts` [1, M, n, D] are the first rows of its sequences, in their order; else None."""
    bases = [each.below("permute", "reshape", "slice") for each in parts]
    must(all(each.shape[0] == 1 and isinstance(each.shape[ROWS], int) for each in parts))
    origins = {chain_of(each)[0].below("reshape") for each in bases}
    must(len(origins) == 1)
    (origin,) = origins
    caches = (_cache(graph.algebra, value, bases, parts) for value in _states(graph, origin))
    return proven(next(filter(None, caches), None))


def _states(graph: Graph, origin: Value) -> list[Value]:
    """List `origin` and the values that writes into sequences make of it, the last one first."""
    written = [each for each in graph.places if chain_of(each.below("reshape"))[0].below("reshape") is origin]
    return [*reversed(written)]


@proof
def _cache(a: Algebra, cache: Value, bases: Sequence[Value], parts: Sequence[Value]) -> SequenceCache | None:
    """Return `cache` [B, ..] if `parts` of `bases`, states of the same cache, are the first rows of its sequences."""
    _, heads, _, width = parts[0].shape
    must(cache.rank in (3, 4) and all(isinstance(each, int) for each in cache.shape))
    heads_last = cache.rank == 3 or cache.shape[2] == heads
    batch, size = int(cache.shape[0]), cache.shape[1] if heads_last else cache.shape[2]
    shape = (batch, size, heads, width) if heads_last else (batch, heads, size, width)
    must(prod(shape) == prod(cache.shape))
    views = [a.reshape(each, shape) for each in bases]
    starts = range(batch - len(parts) + 1)
    first = proven(next((n for n in starts if _is_cut(a, views[0], n, heads_last, parts[0])), None))
    for place, (base, view, part) in enumerate(zip(bases, views, parts, strict=True), first):
        must(_is_cut(a, view, place, heads_last, part) and _agree(cache.below("reshape"), base, place, batch))
    return SequenceCache(a.reshape(cache, shape), heads_last, first, tuple(int(each.shape[ROWS]) for each in parts))


def _is_cut(a: Algebra, cache: Value, place: int, heads_last: bool, part: Value) -> bool:
    """Return True if `part` [1, M, n, D] is the first n rows of the sequence `place` of `cache`."""
    return any(a.cut(each, ROWS, 0, int(part.shape[ROWS])) is part for each in _sequence(a, cache, place, heads_last))


def _sequence(a: Algebra, cache: Value, place: int, heads_last: bool) -> list[Value]:
    """Return the rows [1, M, T, D] of the sequence `place` of `cache`: a slice of sequences, or of all their heads.

    One head may have no dim before the slice.
    """
    sequence = a.cut(_heads_first(a, cache, heads_last), 0, place, place + 1)
    heads = int(cache.shape[2 if heads_last else 1])
    if heads == 1:
        alone = a.cut(a.reshape(cache, (cache.shape[0], *sequence.shape[2:])), 0, place, place + 1)
        return [sequence, a.reshape(alone, sequence.shape)]
    if heads_last:
        return [sequence]
    flat = a.reshape(cache, (1, cache.shape[0] * heads, *cache.shape[2:]))
    return [sequence, a.cut(flat, 1, place * heads, (place + 1) * heads)]


def _agree(cache: Value, base: Value, place: int, count: int) -> bool:
    """Return True if `cache` and `base`, states of one cache of `count` sequences, agree on the sequence `place`."""
    if cache is base:
        return True
    own = []
    for state in (cache, base):
        lead = int(state.shape[0]) // count
        own.append([w for w in chain_of(state)[1] if w.first < (place + 1) * lead and w.end > place * lead])
    return own[0] == own[1]


def _heads_first(a: Algebra, cache: Value, heads_last: bool) -> Value:
    return a.permute(cache, HEADS_LAST) if heads_last else cache
