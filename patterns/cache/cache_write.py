"""cache[.., positions, ..] = rows, with the cache's own layout, order and dtype.

    pages:    keys[slot // Size, slot % Size] = key,  values[slot // Size, slot % Size] = value
    sliding:  cat(cache[S:], rows), a cache of the last T positions that takes S new ones

*Matches* index_copy, index_put, scatter and slices that are assigned: the canonicaliser proves whether positions are
consecutive, slots of pages, or the last ones of a cache that was rolled. *Replaces with* `scatter_update` for
consecutive positions, else `npu_scatter_nd_update`, which takes integer coordinates; keys and values in pages with one
call: atb's `_npu_reshape_and_cache` in eager mode, `npu_scatter_pa_kv_cache` for GE and for pages in NZ; a rolled cache
with one `cat`. Each becomes its in-place form where the cache is an input that is written back.
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
    """A cache of only the last positions along `axis`, and the `rows` that are appended to it."""

    cache: Any = tensor("*C")
    rows: Any = tensor("*R")
    axis: Any = attribute()


@dataclass(frozen=True)
class PlacedRows(SlidingCache):
    """A cache in which `rows` replace the entries at some positions along `axis`.

    One of the attributes gives the positions.

    Attributes:
        start: the first of consecutive positions: [] for all sequences, or [B] for each.
        number: a constant first position of all sequences.
        index: the positions [S], in any order.
    """

    start: Any = tensor("*S", optional=True)
    number: Any = attribute()
    index: Any = tensor("S", optional=True)


@dataclass(frozen=True)
class Cache(PlacedRows):
    """A cache that takes rows of all of its sequences, or of the first ones.

    Attributes:
        inner: positions [S] along the dim after `axis`; row s goes to the place (index[s], inner[s]).
        position: the position, [] or [B], of one row of every sequence, from where(arange == position, rows, cache):
            a position outside of the cache writes nothing.
    """

    inner: Any = tensor("S", optional=True)
    position: Any = tensor("*P", optional=True)

    @property
    def first(self) -> Any:
        """The first of consecutive positions, a tensor or a number; None for other positions."""
        return self.start if self.number is None else self.number


@dataclass(frozen=True)
class Sequences(PlacedRows):
    """A cache that takes rows of consecutive sequences, the first of which is `sequence`."""

    sequence: Any = attribute()

    def positions(self) -> Tensor:
        """Return the positions [S], or [B, S] if they differ between sequences."""
        if self.index is not None:
            return self.index
        steps = torch.arange(self.rows.shape[self.axis], device=self.cache.device)
        return self.number + steps if self.start is None else self.start[..., None] + steps


@dataclass(frozen=True)
class KeyValuePages(Group):
    """Pages [Block, Size, N, D] of keys `key_cache` and values `value_cache`, written at the same non-negative
    `slots`.
    """

    key_cache: Any = tensor("Block Size N D")
    value_cache: Any = tensor("Block Size N E")
    key: Any = tensor("T N D")
    value: Any = tensor("T N E")
    slots: Any = tensor("T", optional=True)
    nz_block: Any = attribute(None)

    def written(self, p):
        """Build the terms of the writes into both caches."""
        pairs = ((self.key_cache, self.key), (self.value_cache, self.value))
        return tuple(p.write_pages(cache=cache, rows=x, slots=self.slots, nz_block=self.nz_block) for cache, x in pairs)

    def guard(self) -> None:
        """Refuse writes whose places are not proven to be inside of their pages."""
        require(
            self.slots is not None,
            "slots: a place in a page is not proven to be below its size; npu_scatter_pa_kv_cache requires slots; "
            "write page = slot // Size and place = slot % Size",
        )

    def read(self) -> Sequence[Tensor]:
        """Return keys, values, and their caches as the operators take them; refuse caches that are not contiguous."""
        caches = (self.key_cache, self.value_cache)  # a kernel computes the address of a row from its slot alone
        require(
            all(each.is_contiguous() for each in caches),
            "cache: its pages are not contiguous; npu_scatter_pa_kv_cache writes them in place and requires "
            "contiguous ones; allocate the cache contiguous",
        )
        return self.key, self.value, *caches


@dataclass(frozen=True)
class KeyValueLines(KeyValuePages):
    """Pages in NZ, [Block, .., A, Size, L], of keys and of values that take rows [T, .., A, L] at the same slots."""

    key_cache: Any = tensor("*K L")
    value_cache: Any = tensor("*V M")
    key: Any = tensor("*R L")
    value: Any = tensor("*Q M")
    nz_block: Any = attribute(*pages.BLOCKS)

    def guard(self) -> None:
        """Refuse lines of other than 32 bytes."""
        pages.refuse_others(self.nz_block, "npu_scatter_pa_kv_cache", pages.line_of(self.key_cache.dtype))

    def read(self) -> Sequence[Tensor]:
        """Return keys and values as rows [T, 1, A · L] of one head, and their caches as [Block, A, Size, L]."""
        key, value, *caches = super().read()
        rows = (each.reshape(each.shape[0], 1, -1) for each in (key, value))
        return *rows, *(each.reshape(each.shape[0], -1, *each.shape[-2:]) for each in caches)

    def restored(self, *caches: Tensor) -> tuple[Tensor, ...]:
        """Reshape the caches of keys and of values to the shapes of the model."""
        return tuple(map(torch.reshape, caches, (self.key_cache.shape, self.value_cache.shape)))


ONE, BOTH, SEVERAL, SLIDING = (Cache,), (KeyValuePages,), (Sequences,), (SlidingCache,)
LINES = (KeyValueLines,)


@dataclass(frozen=True)
class CacheWrite(Rule):
    """A write of new rows into a cache."""

    aliases = ("kv_cache", "paged_write", "sliding_write", "reshape_and_cache", "scatter_pa_kv_cache")

    def reference(self, cache: Tensor, rows: Tensor, start: Tensor, axis: int) -> Tensor:
        """Compute `cache` [*C] with `rows` [*R] at the positions start, start + 1, .. along `axis`; start [] or [B]."""
        positions = start.reshape(-1, 1) + torch.arange(rows.shape[axis])
        wide = [1] * cache.dim()
        wide[0], wide[axis] = positions.shape if axis else (1, -1)
        return cache.scatter(axis, positions.reshape(wide).expand(rows.shape), rows)

    def within(self) -> frozenset[str]:
        """Name the rule that fuses the write with the choice of rows, into a buffer of selected rows."""
        return frozenset({"gather_selection_kv_cache"})

    @pattern
    @variants(into=(*BOTH, *LINES))
    def both(self, p, into):
        """key_cache[slot] = key and value_cache[slot] = value, slots of pages in rows or in lines of NZ"""
        return into.written(p)

    @pattern
    @variants(into=ONE)
    def written(self, p, into):
        """cache[b, .., position, ..] = rows[b], at consecutive or listed positions or places of pages"""
        return p.write(**vars(into))

    @pattern
    @variants(into=SEVERAL)
    def some_sequences(self, p, into):
        """cache[sequence + b, .., position, ..] = rows[b], as one layer writes into a cache of all layers"""
        return p.write_sequences(**vars(into))

    @pattern
    @variants(into=SLIDING)
    def slid(self, p, into):
        """cat(cache[.., S:, ..], rows[.., :S, ..]), also as a roll by S whose last S positions are overwritten"""
        return p.slide(**vars(into))

    def guard(self, into: Any):
        """Refuse a pair of caches with unproven slots, or with lines of other than 32 bytes."""
        if isinstance(into, KeyValuePages):
            into.guard()

    @lowering
    @variants(into=ONE)
    def run(self, into: Cache):
        """Emit scatter_update for consecutive positions of every sequence."""
        require(
            into.first is not None,
            "positions: they are not proven to be consecutive; scatter_update requires a run of positions; "
            "write start + torch.arange(S)",
        )
        require(
            into.axis != 0,
            "positions: they are along dim 0, the batch; scatter_update requires positions along another dim, "
            "of every sequence",
        )
        return torch.ops.npu.scatter_update(into.cache, _starts(into.rows, into.first), into.rows, into.axis)

    @lowering
    @variants(into=ONE)
    def inside_only(self, into: Cache):
        """Emit scatter_update for one position of every sequence; where it is outside of the cache, write back an old
        row.
        """
        require(
            into.position is not None,
            "positions: they are not chosen by a comparison; this call of scatter_update requires "
            "torch.where(torch.arange(T) == position, row, cache)",
        )
        require(
            into.axis != 0,
            "positions: they are along dim 0, the batch; scatter_update requires positions along another dim, "
            "of every sequence",
        )
        starts, size = _starts(into.rows, into.position), into.cache.shape[into.axis]
        places = starts.clamp(0, size - 1)
        wide = [-1] + [1] * (into.cache.dim() - 1)
        old = into.cache.gather(into.axis, places.long().reshape(wide).expand(into.rows.shape))
        rows = torch.where((places == starts).reshape(wide), into.rows, old)
        return torch.ops.npu.scatter_update(into.cache, places, rows, into.axis)

    @lowering
    @variants(into=ONE)
    def row_by_row(self, into: Cache):
        """Emit npu_scatter_nd_update for any positions, by coordinates."""
        index, inner = into.index, into.inner
        if index is None:
            require(
                into.first is not None and into.axis == 0,
                "positions: they are given for every sequence; npu_scatter_nd_update requires indices along "
                "one dim here",
            )
            index = _starts(into.rows, into.first)[:1] + torch.arange(into.rows.shape[0], device=into.cache.device)
        lead = into.cache.shape[: into.axis]
        return _scattered(into, coordinates(lead, index) if inner is None else torch.stack((index, inner), dim=-1))

    @lowering
    @variants(into=SEVERAL)
    def row_by_row_of_sequences(self, into: Sequences):
        """Emit npu_scatter_nd_update for any positions of some sequences, by coordinates."""
        return _scattered(into, coordinates(into.rows.shape[: into.axis], into.positions(), into.sequence))

    @lowering
    @variants(into=BOTH)
    def pages_by_atb(self, into: KeyValuePages):
        """Emit atb's _npu_reshape_and_cache for keys and values in one call."""
        return torch.ops.atb._npu_reshape_and_cache.functional(*into.read(), into.slots.int())

    @lowering
    @variants(into=BOTH)
    def pages(self, into: KeyValuePages):
        """Emit npu_scatter_pa_kv_cache for keys and values in one call."""
        return torch.ops.npu.npu_scatter_pa_kv_cache_functional(*into.read(), into.slots, cache_mode="Norm")

    @lowering
    @variants(into=LINES)
    def lines(self, into: KeyValueLines):
        """Emit npu_scatter_pa_kv_cache in mode PA_NZ for keys and values in one call."""
        caches = torch.ops.npu.npu_scatter_pa_kv_cache_functional(*into.read(), into.slots, cache_mode="PA_NZ")
        return into.restored(*caches)

    @lowering
    @variants(into=SLIDING)
    def joined(self, into: SlidingCache):
        """Emit one cat of the retained positions of the cache and the new rows."""
        length, size = into.rows.shape[into.axis], into.cache.shape[into.axis]
        return torch.cat((into.cache.narrow(into.axis, length, size - length), into.rows), into.axis)


def coordinates(lead: Sequence[int], index: Tensor, first: int = 0) -> Tensor:
    """Return the coordinates [*lead, S, axis + 1] of every entry at positions `index` along dim `axis` = len(lead).

    `index` is [S], or [B, S] if it differs along the first dim; `lead` are the sizes of the dims before `axis`.
    Coordinates along the first dim start at `first`.
    """
    grid = [
        torch.arange(size, device=index.device, dtype=index.dtype).reshape(-1, *(1,) * (len(lead) - axis))
        for axis, size in enumerate(lead)
    ]
    if first:
        grid[0] = grid[0] + first
    index = index.reshape(index.shape[0], *(1,) * (len(lead) - 1), -1) if index.dim() == 2 else index
    return torch.stack([each.expand(*lead, index.shape[-1]) for each in (*grid, index)], dim=-1)


def _scattered(into: Any, places: Tensor) -> Tensor:
    """Scatter `into.rows` into `into.cache` at the coordinates `places` [.., axes]."""
    rows = into.rows.reshape(-1, *into.cache.shape[places.shape[-1] :])
    return torch.ops.npu.npu_scatter_nd_update(into.cache, places.reshape(-1, places.shape[-1]), rows)


def _starts(rows: Tensor, start: Any) -> Tensor:
    """Expand `start`, a number or a tensor [] or [B], to one position of every sequence of `rows` [B]."""
    if not isinstance(start, Tensor):
        return torch.full((rows.shape[0],), start, dtype=torch.int64, device=rows.device)
    return start if start.dim() else start.expand(rows.shape[0])
