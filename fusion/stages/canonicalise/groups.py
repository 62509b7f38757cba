"""Groups of rows: how many of each number there are, sums into rows, and products by a matrix for each group.

histc of whole numbers                                       → histogram: how many are 0, 1, …
bincount                                                     → bincount: the same, at least as many as asked for
searchsorted, bucketize                                      → searchsorted: where others belong among sorted numbers
index_add, index_put that adds, scatter_add of whole rows    → add_rows(x, rows, index)
_grouped_mm of rows by a matrix for each group               → grouped_matmul(x, matrices, where each group ends)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES
from fusion.graph.proof import must, proven
from fusion.stages.canonicalise import lists
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.histc.default")
def _histc(a: Algebra, out: Out, x: Value, bins: int = 100, min: Any = 0, max: Any = 0) -> Translated:
    """Bins of one whole number each, from 0 on: the last one ends with its number, or with the next."""
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
    """At places of a list; or of whole rows: the index is repeated along them."""
    counts = lists.counted(a, x, dim, index, rows)
    if counts is not None:
        return counts
    must(dim % x.rank == 0 and index.shape == rows.shape)
    own = index.arg if index.op == "expand" else index
    must(all(size == 1 for size in own.shape[1:]) and rows.shape[1:] == x.shape[1:])
    return add_rows(a, x, rows, a.reshape(own, rows.shape[:1]))


def add_rows(a: Algebra, x: Value, rows: Value, index: Value) -> Value:
    """`x` with row i of `rows` added to its row index[i]."""
    must(index.dtype in INDEX_DTYPES and rows.dtype == x.dtype)
    must(math.prod(index.shape) == rows.shape[0] and rows.shape[1:] == x.shape[1:])
    return a.make("add_rows", (x, rows, index), (), x.shape, x.dtype)


def put_rows(a: Algebra, x: Value, found: Sequence[Value], rows: Value) -> Value | None:
    """`index_put` that adds to rows named by one index."""
    must(len(found) == 1 and found[0].rank == 1 and rows.shape == (*found[0].shape, *x.shape[1:]))
    return add_rows(a, x, rows, found[0])
