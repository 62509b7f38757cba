"""cache[.., positions, ..] = rows, with the cache's own layout, order and dtype.

    pages:    keys[slot // Size, slot % Size] = key,  values[slot // Size, slot % Size] = value
    sliding:  cat(cache[S:], rows), a cache of the last T positions that takes S new ones

*Matches* index_copy, index_put, scatter and slices that are assigned: the canonicaliser proves whether positions are
consecutive, slots of pages, or the last ones of a cache that was rolled. *Replaces with* `scatter_update` for
consecutive positions, else `npu_scatter_nd_update`, whose coordinates are integers alone; keys and values in pages at
once with atb's `_npu_reshape_and_cache` where calls are launched one by one, with `npu_scatter_pa_kv_cache` for GE and
in lines of NZ; a rolled cache with one `cat`. They become their in-place forms where the cache is an input that is
written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, require, tensor, variants
from patterns.cache import pages


@dataclass(frozen=True)
class SlidingCache(Group):
    """A cache that keeps the last positions along `axis` only."""

    cache: Any = tensor("*C")
    rows: Any = tensor("*R")
    axis: Any = attribute()


@dataclass(frozen=True)
class PlacedRows(SlidingCache):
    """A cache whose rows are replaced along `axis`.

    Attributes:
        start: the first of consecutive positions, or that of every sequence; `number` where it is known.
        index: any positions.
    """

    start: Any = tensor("*S", optional=True)
    number: Any = attribute()
    index: Any = tensor("S", optional=True)


@dataclass(frozen=True)
class Cache(PlacedRows):
    """All sequences, or the first ones.

    Attributes:
        inner: with `index` any places of pages.
        position: that of one row of every sequence, chosen by comparing: nothing is written where none is equal.
    """

    inner: Any = tensor("S", optional=True)
    position: Any = tensor("*P", optional=True)

    @property
    def first(self) -> Any:
        """The first of consecutive positions, None for others."""
        return self.start if self.number is None else self.number


@dataclass(frozen=True)
class Sequences(PlacedRows):
    """Some sequences, from `sequence` on."""

    sequence: Any = attribute()

    def positions(self) -> Tensor:
        """[S], or [B, S] where they differ between sequences."""
        if self.index is not None:
            return self.index
        steps = torch.arange(self.rows.shape[self.axis], device=self.cache.device)
        return self.number + steps if self.start is None else self.start[..., None] + steps


@dataclass(frozen=True)
class KeyValuePages(Group):
    """Pages [Block, Size, N, D] of keys and of values that take rows at the same slots, which are never negative."""

    key_cache: Any = tensor("Block Size N D")
    value_cache: Any = tensor("Block Size N E")
    key: Any = tensor("T N D")
    value: Any = tensor("T N E")
    slots: Any = tensor("T", optional=True)
    nz_block: Any = attribute(None)

    def written(self, p):
        """Both writes."""
        both = ((self.key_cache, self.key), (self.value_cache, self.value))
        return tuple(p.write_pages(cache=cache, rows=x, slots=self.slots, nz_block=self.nz_block) for cache, x in both)

    def guard(self) -> None:
        """Slots that are proven."""
        require(
            self.slots is not None,
            "the place is not proven to lie in its page: slot % Size is; write page = slot // Size "
            "and place = slot % Size",
        )

    def read(self) -> Sequence[Tensor]:
        """Rows and caches, which may have no gaps and no other order: a kernel finds a row by its slot alone."""
        caches = (self.key_cache, self.value_cache)
        require(
            all(each.is_contiguous() for each in caches),
            "the pages are not contiguous; the operator writes and reads them in place; allocate the cache contiguous",
        )
        return self.key, self.value, *caches


@dataclass(frozen=True)
class KeyValueLines(KeyValuePages):
    """The same in lines of NZ, [Block, .., A, Size, L], that take rows [T, .., A, L]."""

    key_cache: Any = tensor("*K L")
    value_cache: Any = tensor("*V M")
    key: Any = tensor("*R L")
    value: Any = tensor("*Q M")
    nz_block: Any = attribute(*pages.BLOCKS)

    def guard(self) -> None:
        """Lines of 32 bytes."""
        pages.refuse_others(self.nz_block, pages.NZ_INT8 if self.key_cache.dtype.itemsize == 1 else pages.NZ)

    def read(self) -> Sequence[Tensor]:
        """Rows [T, 1, A · L], as of one head, and caches [Block, A, Size, L]."""
        key, value, *caches = super().read()
        rows = (each.reshape(each.shape[0], 1, -1) for each in (key, value))
        return *rows, *(each.reshape(each.shape[0], -1, *each.shape[-2:]) for each in caches)

    def restored(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Both as the model has them."""
        return tuple(map(torch.reshape, caches, (self.key_cache.shape, self.value_cache.shape)))


ONE, BOTH, OF_SEQUENCES, SLIDING = (Cache,), (KeyValuePages,), (Sequences,), (SlidingCache,)
LINES = (KeyValueLines,)


@dataclass(frozen=True)
class CacheWrite(Rule):
    """New rows of a cache."""

    aliases = ("kv_cache", "paged_write", "sliding_write", "reshape_and_cache", "scatter_pa_kv_cache")

    def reference(self, cache: Tensor, rows: Tensor, start: Tensor, axis: int) -> Tensor:
        """The meaning: cache [*C], rows [*R] like it but for `axis`, start [] or one per batch row [B]."""
        positions = start.reshape(-1, 1) + torch.arange(rows.shape[axis])
        wide = [1] * cache.dim()
        wide[0], wide[axis] = positions.shape if axis else (1, -1)
        return cache.scatter(axis, positions.reshape(wide).expand(rows.shape), rows)

    def within(self) -> frozenset[str]:
        """A buffer of listed rows."""
        return frozenset({"gather_selection_kv_cache"})

    @pattern
    @variants(into=(*BOTH, *LINES))
    def both(self, p, into):
        """Keys and values, to rows of all pages by their number, or by a block and a place in it."""
        return into.written(p)

    @pattern
    @variants(into=ONE)
    def written(self, p, into):
        """To positions or places of one cache."""
        return p.write(**vars(into))

    @pattern
    @variants(into=OF_SEQUENCES)
    def of_sequences(self, p, into):
        """To positions of some sequences, as those of a layer in a cache of all layers."""
        return p.write_sequences(**vars(into))

    @pattern
    @variants(into=SLIDING)
    def slid(self, p, into):
        """A roll by S whose last S positions are overwritten: the canonicaliser proves which positions stay."""
        return p.slide(**vars(into))

    def guard(self, into: Any):
        """What a pair of caches asks for."""
        if isinstance(into, KeyValuePages):
            into.guard()

    @lowering
    @variants(into=ONE)
    def run(self, into: Cache):
        """Consecutive positions of every sequence."""
        require(into.first is not None, "the positions are not proven to be consecutive")
        require(into.axis != 0, "the positions count rows of the batch, which the operator takes one by one")
        return torch.ops.npu.scatter_update(into.cache, _starts(into.rows, into.first), into.rows, into.axis)

    @lowering
    @variants(into=ONE)
    def kept_outside(self, into: Cache):
        """One position of every sequence; where it lies outside, the row that is written is the one that was there."""
        require(into.position is not None, "the positions are not chosen by a comparison")
        require(into.axis != 0, "the positions count rows of the batch, which the operator takes one by one")
        starts, size = _starts(into.rows, into.position), into.cache.shape[into.axis]
        places = starts.clamp(0, size - 1)
        wide = [-1] + [1] * (into.cache.dim() - 1)
        old = into.cache.gather(into.axis, places.long().reshape(wide).expand(into.rows.shape))
        rows = torch.where((places == starts).reshape(wide), into.rows, old)
        return torch.ops.npu.scatter_update(into.cache, places, rows, into.axis)

    @lowering
    @variants(into=ONE)
    def row_by_row(self, into: Cache):
        """Any positions, by coordinates."""
        index, inner = into.index, into.inner
        if index is None:
            require(into.first is not None and into.axis == 0, "the positions are given for every sequence")
            index = _starts(into.rows, into.first)[:1] + torch.arange(into.rows.shape[0], device=into.cache.device)
        lead = into.cache.shape[: into.axis]
        return _scattered(into, coordinates(lead, index) if inner is None else torch.stack((index, inner), dim=-1))

    @lowering
    @variants(into=OF_SEQUENCES)
    def row_by_row_of_sequences(self, into: Sequences):
        """Any positions, by coordinates."""
        return _scattered(into, coordinates(into.rows.shape[: into.axis], into.positions(), into.sequence))

    @lowering
    @variants(into=BOTH)
    def pages_by_atb(self, into: KeyValuePages):
        """One call for both, of the transformer library."""
        return torch.ops.atb._npu_reshape_and_cache.functional(*into.read(), into.slots.int())

    @lowering
    @variants(into=BOTH)
    def pages(self, into: KeyValuePages):
        """One call for both."""
        return torch.ops.npu.npu_scatter_pa_kv_cache_functional(*into.read(), into.slots, cache_mode="Norm")

    @lowering
    @variants(into=LINES)
    def lines(self, into: KeyValueLines):
        """One call for both."""
        caches = torch.ops.npu.npu_scatter_pa_kv_cache_functional(*into.read(), into.slots, cache_mode="PA_NZ")
        return into.restored(*caches)

    @lowering
    @variants(into=SLIDING)
    def joined(self, into: SlidingCache):
        """One kernel."""
        length, size = into.rows.shape[into.axis], into.cache.shape[into.axis]
        return torch.cat((into.cache.narrow(into.axis, length, size - length), into.rows), into.axis)


def coordinates(lead: Sequence[int], index: Tensor, first: int = 0) -> Tensor:
    """Where index [S], or [B, S] of each sequence, counts: integers [*lead, S, axis + 1].

    `lead` are the sizes of the dims before it, of which the first counts from `first` on.
    """
    grid = [
        torch.arange(size, device=index.device, dtype=index.dtype).reshape(-1, *(1,) * (len(lead) - place))
        for place, size in enumerate(lead)
    ]
    if first:
        grid[0] = grid[0] + first
    index = index.reshape(index.shape[0], *(1,) * (len(lead) - 1), -1) if index.dim() == 2 else index
    return torch.stack([each.expand(*lead, index.shape[-1]) for each in (*grid, index)], dim=-1)


def _scattered(into: Any, places: Tensor) -> Tensor:
    """The cache with rows at places [.., axes]."""
    rows = into.rows.reshape(-1, *into.cache.shape[places.shape[-1] :])
    return torch.ops.npu.npu_scatter_nd_update(into.cache, places.reshape(-1, places.shape[-1]), rows)


def _starts(rows: Tensor, start: Any) -> Tensor:
    """A position for every row of the batch [B]."""
    if not isinstance(start, Tensor):
        return torch.full((rows.shape[0],), start, dtype=torch.int64, device=rows.device)
    return start if start.dim() else start.expand(rows.shape[0])
