"""cache[.., positions, ..] = rows, with the cache's own layout, order and dtype.

*Matches* index_copy, index_put, scatter and slices that are assigned: the canonicaliser proves whether positions are
consecutive. *Replaces with* `scatter_update` for consecutive ones, else `npu_scatter_nd_update`, whose coordinates are
integers alone; both become their in-place forms where the cache is an input that is written back.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lookalike, lowering, pattern, require, tensor


def coordinates(cache: Tensor, index: Tensor, axis: int) -> Tensor:
    """Where index [S] counts along `axis`: integers [*lead, S, axis + 1], lead being the dims before it."""
    lead, count = cache.shape[:axis], index.shape[0]
    grid = [
        torch.arange(size, device=cache.device, dtype=index.dtype).reshape(-1, *(1,) * (axis - place))
        for place, size in enumerate(lead)
    ]
    return torch.stack([each.expand(*lead, count) for each in (*grid, index)], dim=-1)


@dataclass(frozen=True)
class CacheWrite(Rule):
    """New rows of a cache."""

    def reference(self, cache: Tensor, rows: Tensor, start: Tensor, axis: int) -> Tensor:
        """The meaning: cache [*C], rows [*R] like it but for `axis`, start [] or one per batch row [B]."""
        positions = start.reshape(-1, 1) + torch.arange(rows.shape[axis])
        wide = [1] * cache.dim()
        wide[0], wide[axis] = positions.shape if axis else (1, -1)
        return cache.scatter(axis, positions.reshape(wide).expand(rows.shape), rows)

    @pattern
    def at_start(self, p, cache=tensor("*C"), rows=tensor("*R"), start=tensor("*S"), axis=attribute()):
        """From a position that the graph computes."""
        return p.write(cache=cache, rows=rows, start=start, axis=axis)

    @pattern
    def at_number(self, p, cache=tensor("*C"), rows=tensor("*R"), start=attribute(), axis=attribute()):
        """From a position that is known."""
        return p.write_slice(cache=cache, rows=rows, start=start, axis=axis)

    @pattern
    def at_rows(self, p, cache=tensor("*C"), rows=tensor("*R"), index=tensor("S"), axis=attribute()):
        """At any positions."""
        return p.write_rows(cache=cache, rows=rows, index=index, axis=axis)

    @pattern
    def at_places(
        self, p, cache=tensor("*C"), rows=tensor("*R"), index=tensor("S"), inner=tensor("S"), axis=attribute()
    ):
        """At any places of pages."""
        return p.write_places(cache=cache, rows=rows, index=index, inner=inner, axis=axis)

    @pattern
    def chosen(self, p, cache=tensor("*C"), rows=tensor("*R"), position=tensor("*S"), axis=attribute()):
        """One row of every sequence, chosen by comparing positions: nothing is written where none is equal."""
        return p.write_inside(cache=cache, rows=rows, position=position, axis=axis)

    @lookalike("its rows are added to what the cache holds, or chosen by a mask: the operator replaces numbered rows")
    def accumulated(self, p, cache=tensor("*C"), index=tensor("*I"), rows=tensor("*R")):
        """What is left of index_put: accumulate, or an index of booleans."""
        return p.op(("aten.index_put.default", "aten._unsafe_index_put.default"), cache, index, rows)

    @lowering
    def run(self, cache: Tensor, rows: Tensor, start: Any, axis: int):
        """Consecutive positions of every sequence."""
        require(start is not None, "the positions are not proven to be consecutive")
        require(axis != 0, "the positions count rows of the batch, which the operator takes one by one")
        return torch.ops.npu.scatter_update(cache, _starts(rows, start), rows, axis)

    @lowering
    def kept_outside(self, cache: Tensor, rows: Tensor, position: Any, axis: int):
        """One position of every sequence; where it lies outside, the row that is written is the one that was there."""
        require(position is not None, "the positions are not chosen by a comparison")
        require(axis != 0, "the positions count rows of the batch, which the operator takes one by one")
        starts, size = _starts(rows, position), cache.shape[axis]
        places = starts.clamp(0, size - 1)
        wide = [-1] + [1] * (cache.dim() - 1)
        old = cache.gather(axis, places.long().reshape(wide).expand(rows.shape))
        rows = torch.where((places == starts).reshape(wide), rows, old)
        return torch.ops.npu.scatter_update(cache, places, rows, axis)

    @lowering
    def row_by_row(self, cache: Tensor, rows: Tensor, index: Any, inner: Any, start: Any, axis: int):
        """Any positions, by coordinates."""
        if index is None:
            require(start is not None and axis == 0, "the positions are given for every sequence")
            index = _starts(rows, start)[:1] + torch.arange(rows.shape[0], device=cache.device)
        places = coordinates(cache, index, axis) if inner is None else torch.stack((index, inner), dim=-1)
        rows = rows.reshape(-1, *cache.shape[places.shape[-1] :])
        return torch.ops.npu.npu_scatter_nd_update(cache, places.reshape(-1, places.shape[-1]), rows)


def _starts(rows: Tensor, start: Any) -> Tensor:
    """A position for every row of the batch [B]."""
    if not isinstance(start, Tensor):
        return torch.full((rows.shape[0],), start, dtype=torch.int64, device=rows.device)
    return start if start.dim() else start.expand(rows.shape[0])
