"""Groups of rows: histograms of integers, sums into rows, and products with one matrix per group.

histc of integers                                            → histogram: how many are 0, 1, …
bincount                                                     → bincount: the same, at least `minlength` counts
searchsorted, bucketize                                      → searchsorted: insertion points in sorted numbers
index_add, accumulating index_put, scatter_add of full rows, scatter_reduce by sum  → add_rows(x, rows, index)
_grouped_mm of rows with one matrix per group                → grouped_matmul(x, matrices, end of each group)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise import listed_positions
from fusion.stages.canonicalise.translators import Out, Translated, translates


@translates("aten.histc.default")
def _histc(a: Algebra, out: Out, x: Value, bins: int = 100, min: Any = 0, max: Any = 0) -> Translated:
    """Translate a histogram of integers with one bin for each of 0, 1, …; `max` is the last integer or the next."""
    must(min == 0 and max in (bins - 1, bins) and bins > 1 and x.below("cast").dtype in INDEX_DTYPES)
    return a.make("histogram", (x,), (max,), out.shape, out.dtype)


@translates("aten.bincount.default")
def _bincount(a: Algebra, out: Out, x: Value, weights: Value | None = None, minlength: int = 0) -> Translated:
    must(weights is None)
    return a.make("bincount", (x,), (minlength,), out.shape, out.dtype)


@translates("aten.searchsorted.Tensor")
def _searchsorted(
    a: Algebra, out: Out, x: Value, numbers: Value, *, out_int32: bool = False, right: bool = False,
    side: str | None = None, sorter: Value | None = None,
) -> Translated:  # fmt: skip
    must(sorter is None)
    return a.make("searchsorted", (x, numbers), (right or side == "right",), out.shape, out.dtype)


@translates("aten.bucketize.Tensor")
def _bucketize(
    a: Algebra, out: Out, numbers: Value, x: Value, *, out_int32: bool = False, right: bool = False
) -> Translated:
    return _searchsorted(a, out, x, numbers, right=right)


@translates("aten._grouped_mm.default")
def _grouped_mm(
    a: Algebra, out: Out, x: Value, y: Value, ends: Value | None = None, bias: Value | None = None, *args: Any
) -> Translated:
    must((x.rank, y.rank) == (2, 3) and bias is None and x.dtype == out.dtype)
    return a.make("grouped_matmul", (x, y, proven(ends)), (), out.shape, out.dtype)


@translates("aten.index_add.default")
def _index_add(a: Algebra, out: Out, x: Value, dim: int, index: Value, rows: Value, alpha: Any = 1) -> Translated:
    must(dim % x.rank == 0 and index.rank == 1 and alpha == 1)
    return add_rows(a, x, rows, index)


@translates("aten.scatter_add.default")
def _scatter_add(a: Algebra, out: Out, x: Value, dim: int, index: Value, rows: Value) -> Translated:
    """Translate a scatter_add of counts, as `listed_positions.counted` does, or of full rows to `add_rows`.

    The index of full rows is expanded along them.
    """
    counts = listed_positions.counted(a, x, dim, index, rows)
    if counts is not None:
        return counts
    must(dim % x.rank == 0 and index.shape == rows.shape)
    own = index.arg if index.op == "expand" else index
    must(all(size == 1 for size in own.shape[1:]) and rows.shape[1:] == x.shape[1:])
    return add_rows(a, x, rows, a.reshape(own, rows.shape[:1]))


@translates("aten.scatter_reduce.two")
def _scatter_reduce(
    a: Algebra, out: Out, x: Value, dim: int, index: Value, rows: Value, reduce: str, include_self: bool = True
) -> Translated:
    """Translate scatter_reduce by sum as scatter_add, and by amax where `x` and `rows` are constant, and `rows` is the
    greater.
    """
    if reduce == "sum" and include_self:
        return _scatter_add(a, out, x, dim, index, rows)
    must(x.op == rows.op == "full" and reduce == "amax" and rows.attrs[0] >= x.attrs[0])
    return listed_positions.marked(a, x, dim, index, rows)


def add_rows(a: Algebra, x: Value, rows: Value, index: Value) -> Value:
    """Build `x` [N, ..] with row i of `rows` added to its row index[i]."""
    must(index.dtype in INDEX_DTYPES and rows.dtype == x.dtype)
    must(math.prod(index.shape) == rows.shape[0] and rows.shape[1:] == x.shape[1:])
    return a.make("add_rows", (x, rows, index), (), x.shape, x.dtype)


def put_rows(a: Algebra, x: Value, indices: Sequence[Value], rows: Value) -> Value | None:
    """Build an accumulating `index_put` into the rows of `x` [N, ..] that the single index names."""
    must(len(indices) == 1 and indices[0].rank == 1 and rows.shape == (*indices[0].shape, *x.shape[1:]))
    return add_rows(a, x, rows, indices[0])
