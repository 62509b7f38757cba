"""Writes into caches: every spelling of cache[.., positions, ..] = rows becomes one of these values.

    write(cache, rows, start; axis)         rows go to start, start + 1, … along axis; start is [] or [B]
    write_rows(cache, rows, *index; axis)   row i goes to index[i] (with two: index[0][i], index[1][i]); -1 is an error
    write_lines(cache, rows, block, place)  row i goes to cache[block[i], .., place[i], :], in lines of NZ
    write_within(cache, rows, place; …)     a write into some sequences, as those of one layer: see `inner_writes`
    slice_scatter, cat                      a write at a constant position

A negative position of index_put counts from the end: `wrap` makes that explicit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusion.analysis.consecutive_positions import Run, run, wrapped
from fusion.analysis.intervals import bounds
from fusion.graph import Algebra, Dim, Value, but_ones, unviewed
from fusion.graph.comparisons import number
from fusion.graph.dims import INDEX_DTYPES, broadcast
from fusion.graph.proof_steps import must, proof, proven
from fusion.stages.canonicalise import buffers, comparisons, grouped_rows, listed_positions, shapes
from fusion.stages.canonicalise.translators import Out, Translated, translates

# translators -------------------------------------------------------------------------------------------------------


@translates("aten.index_copy.default")
def _index_copy(a: Algebra, out: Out, cache: Value, dim: int, index: Value, rows: Value) -> Translated:
    must(index.rank == 1)
    return _write(a, cache, rows, index, dim % cache.rank, wraps=False)


@translates("aten.index_put.default", "aten._unsafe_index_put.default")
def _index_put(
    a: Algebra, out: Out, cache: Value, indices: Sequence[Value | None], rows: Value, accumulate: bool = False
) -> Translated:
    axes = [axis for axis, index in enumerate(indices) if index is not None]
    indexed = [index for index in indices if index is not None]
    if accumulate:
        return grouped_rows.put_rows(a, cache, indexed, rows) if axes == [0] else None
    if len(indexed) == 1 and indexed[0].dtype is torch.bool:
        return _masked(a, cache, indexed[0], rows, axes[0])
    must(all(index.dtype in INDEX_DTYPES for index in indexed))
    if len(indexed) == 1:
        return _one_index(a, cache, indexed[0], rows, axes[0])
    listed = comparisons.last_index(a, cache, indexed) if rows.dtype == cache.dtype else None
    if listed is not None and rows.op == "full" and unviewed(cache).op != "input":
        return listed_positions.marked(a, cache, -1, listed, rows)
    placed = None if listed is None else _listed(a, cache, -1, listed, rows)
    if placed is not None:
        return placed
    must(len(indexed) == 2 and axes[0] == 0)
    return _by_batch(a, cache, indexed, rows, axes[1]) or _by_page(a, cache, indexed, rows, axes[1])


def _masked(a: Algebra, x: Value, mask: Value, number: Value, axis: int) -> Value | None:
    """Translate x[.., mask] = number to where(mask, number, x); `mask` begins at `axis`.

    `x` must be computed by the graph, unless the number is constant.
    """
    must(number.rank == 0 and number.dtype == x.dtype)
    must(number.op == "full" or unviewed(x).op != "input")
    behind = x.rank - axis - mask.rank
    condition = a.reshape(mask, (*mask.shape, *(1,) * behind))
    return comparisons.where(a, condition, number, x, x.dtype)


def _one_index(a: Algebra, cache: Value, index: Value, rows: Value, axis: int) -> Value | None:
    lead, rest = cache.shape[:axis], cache.shape[axis + 1 :]
    count = math.prod(index.shape)
    rows = a.reshape(_spread(a, rows, (*lead, *index.shape, *rest)), (*lead, count, *rest))
    return _write(a, cache, rows, a.reshape(index, (count,)), axis, wraps=True)


def _spread(a: Algebra, rows: Value, shape: Sequence[Dim]) -> Value:
    """Expand `rows` to `shape`; unproven where they do not broadcast to it."""
    must(broadcast(rows.shape, shape) == tuple(shape))
    return a.expand(rows, shape)


@proof
def _by_batch(a: Algebra, cache: Value, indices: Sequence[Value], rows: Value, axis: int) -> Value | None:
    """Translate cache[arange(b), .., positions] = rows [b, (S), ..] to a write at own positions per sequence.

    `indices` are arange(b) and the positions, along the first dim and `axis` of `cache`. b may be less than the number
    of sequences: the first ones. Unproven for other indices.
    """
    batch, positions = indices[0], a.reshape(indices[1], indices[1].shape or (1,))
    count = batch.shape[0] if batch.rank else 1
    shape = proven(broadcast(batch.shape, positions.shape))
    must(shape[:1] == (count,) and len(shape) <= 2)
    must(batch.rank == len(shape) or count == 1)  # a lower rank would broadcast along the last dim
    must(run(a, a.reshape(batch, (count,))) == Run(None, 0) and _may_fit(count, cache.shape[0]))
    length = shape[1] if len(shape) == 2 else 1
    others = (*cache.shape[1:axis], *cache.shape[axis + 1 :])
    rows = a.reshape(_spread(a, rows, (*shape, *others)), (count, length, *others))
    order = (0, *range(2, axis + 1), 1, *range(axis + 1, cache.rank))
    positions = a.reshape(positions, (positions.shape[0], 1)) if len(shape) == 1 else positions
    if positions.shape[:-1] == (1,) and count == cache.shape[0]:  # all sequences share the positions
        positions = a.reshape(positions, positions.shape[-1:])
    return _write(a, cache, a.permute(rows, order), positions, axis, wraps=True)


def _may_fit(count: Dim, size: Dim) -> bool:
    """Return True if `count` may be at most `size`: more rows than that are an error in eager mode and in the
    operator.
    """
    return count <= size if isinstance(count, int) and isinstance(size, int) else True


def _by_page(a: Algebra, cache: Value, indices: Sequence[Value], rows: Value, axis: int) -> Value | None:
    """Translate cache[block, offset] = rows to `write_rows`, and cache[block, .., place] = rows to `write_lines`.

    `write_lines` is for pages [Block, .., A, Size, L] in NZ, which have A lines of L lanes per row.
    """
    must(axis == 1 or (cache.rank >= 4 and axis == cache.rank - 2))
    shape = proven(broadcast(*(index.shape for index in indices)))
    count, rest = math.prod(shape), (*cache.shape[1:axis], *cache.shape[axis + 1 :])
    rows = a.reshape(_spread(a, rows, (*shape, *rest)), (count, *rest))
    block, place = (
        wrapped(a, a.reshape(a.expand(each, shape), (count,)), cache.shape[where])
        for each, where in zip(indices, (0, axis), strict=True)
    )
    op, attrs = ("write_rows", (0,)) if axis == 1 else ("write_lines", ())
    return a.make(op, (cache, rows, block, place), attrs, cache.shape, cache.dtype)


@translates("aten.scatter.src")
def _scatter(a: Algebra, out: Out, cache: Value, dim: int, index: Value, rows: Value) -> Translated:
    """Translate cache.scatter(dim, index, rows), where `index` may be expanded along the other dims."""
    mask = listed_positions.marked(a, cache, dim, index, rows) if rows.op == "full" else None
    if mask is not None:
        return mask
    must(index.shape == rows.shape)
    placed = _listed(a, cache, dim, index, rows)
    return (
        placed
        or _scattered(a, cache, dim % cache.rank, index, rows)
        or listed_positions.placed(a, cache, dim, index, rows)
    )


@proof
def _scattered(a: Algebra, cache: Value, axis: int, index: Value, rows: Value) -> Value | None:
    """Translate a scatter whose positions vary along `axis` and the dim of sequences alone."""
    source = index.arg if index.op == "expand" else index
    varying = [place for place, size in enumerate(source.shape) if size != 1 and place != axis]
    must(varying in ([], [0]))
    shape = (source.shape[0], source.shape[axis]) if varying else (source.shape[axis],)
    return _write(a, cache, rows, a.reshape(source, shape), axis, wraps=False)


def _listed(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """Translate a write of `numbers` at `places`, positions of the last dim that each row lists.

    None if rows share positions, or if these are consecutive.
    """
    is_own = places.op != "expand" and _start(a, places) is None and math.prod(numbers.shape) == math.prod(places.shape)
    return listed_positions.placed(a, x, dim, places, a.reshape(numbers, places.shape)) if is_own else None


@translates("aten.index_select.default")
def _index_select(a: Algebra, out: Out, x: Value, dim: int, index: Value) -> Translated:
    """Translate consecutive positions to a slice, all positions modulo the size to a roll, others to an index."""
    return _consecutive(a, out, x, dim % x.rank, index) or comparisons.index(
        a, out, x, (*[None] * (dim % x.rank), index)
    )


def _consecutive(a: Algebra, out: Out, x: Value, dim: int, index: Value) -> Value | None:
    size = x.shape[dim]
    is_rolled = index.op == "fmod" and index.attrs == (size,)
    counted = run(a, index.arg if is_rolled else index)
    if counted is None or counted.start is not None or not isinstance(size, int) or not isinstance(out.shape[dim], int):
        return None
    first, length = counted.offset, int(out.shape[dim])
    if is_rolled and length == size and 0 <= first < size:
        return shapes.rolled(a, x, dim, first)
    return a.slice(x, dim, first, first + length) if 0 <= first <= size - length else None


@translates("aten.select_scatter.default")
def _select_scatter(a: Algebra, out: Out, x: Value, source: Value, dim: int, index: Any) -> Translated:
    axis = dim % x.rank
    must(isinstance(index, int) and isinstance(x.shape[axis], int) and x.shape[axis] and source.dtype == x.dtype)
    index %= int(x.shape[axis])
    rows = a.opened(source, axis)
    return buffers.sliced(a, x, rows, axis, index, index + 1)


def _write(a: Algebra, cache: Value, rows: Value, positions: Value, axis: int, wraps: bool) -> Value | None:
    """Build a write of `rows` at `positions` [S], or [B, S] with own positions per sequence, along `axis` of `cache`.

    `rows` have the dims of `cache`. With positions [B, S] there may be fewer sequences than in the cache: the first
    ones. `wraps`: True if negative positions count from the end.
    """
    length, size = positions.shape[-1], cache.shape[axis]
    batch = rows.shape[:1] if positions.rank == 2 and axis else cache.shape[:1]
    lead = (*batch, *cache.shape[1:axis]) if axis else ()
    must(rows.dtype == cache.dtype and rows.shape == (*lead, length, *cache.shape[axis + 1 :]))
    start = _start(a, positions)
    if isinstance(start, int):
        known = _known(a, cache, rows, start, axis, wraps)
        if known is not None:
            return known
        start = number(a, start, cache) if start >= 0 and _is_open(cache, rows, axis) else None
    if start is not None and (not wraps or length == 1 or bounds(start)[0] >= 0):
        start = wrapped(a, start, size) if wraps else start
        return a.make("write", (cache, rows, start), (axis,), cache.shape, cache.dtype)
    must(positions.rank == 1)
    index = wrapped(a, positions, size) if wraps else positions
    return a.make("write_rows", (cache, rows, index), (axis,), cache.shape, cache.dtype)


def _start(a: Algebra, positions: Value) -> Value | int | None:
    """Return the first of consecutive positions, an int where it is constant; None where they are not consecutive."""
    counted = run(a, positions)
    if counted is None and positions.shape[-1] == 1:
        counted = Run(a.reshape(positions, but_ones(positions.shape[:-1])), 0)
    if counted is None:
        return None
    return counted.offset if counted.start is None else a.shift(counted.start, counted.offset)


def _is_open(cache: Value, rows: Value, axis: int) -> bool:
    """Return True if it is unknown whether `rows` from a constant position on fit into `cache` along `axis`.

    A size is symbolic, or `rows` are of some sequences only.
    """
    sizes = (cache.shape[axis], rows.shape[axis])
    return not all(isinstance(size, int) for size in sizes) or rows.shape[:1] != cache.shape[:1]


def _known(a: Algebra, cache: Value, rows: Value, first: int, axis: int, wraps: bool) -> Value | None:
    size, length = cache.shape[axis], rows.shape[axis]
    if (_is_open(cache, rows, axis) and axis) or not (isinstance(size, int) and isinstance(length, int)):
        return None
    if wraps and first < 0:
        first += size
    return buffers.sliced(a, cache, rows, axis, first, first + length) if 0 <= first <= size - length else None
