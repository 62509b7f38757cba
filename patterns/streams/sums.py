"""Sums over streams, Σ_j w_ij x_j, however the product is written: as matmul, or as a product that is summed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from fusion.analysis.dtypes import is_rounding
from fusion.graph import Algebra, Value
from fusion.graph.algebra import widens
from fusion.graph.contractions import swapped

_VIEWS = ("reshape", "permute", "expand", "slice")
_EACH, _FIRST, _SECOND = -2, -3, -2
"""Axis that is summed: of weighted streams; of entries [.., j, i, d], and of entries [.., i, j, d]."""


def unrounded(a: Algebra, x: Value) -> Value:
    """Strip the casts between floats below the views of `x`, as of gates, which operators read in float32."""
    return _without(a, x, is_rounding)


def exact(a: Algebra, x: Value) -> Value:
    """Strip the casts to wider floats below the views of `x`, as of streams, which operators read as they are."""
    return _without(a, x, lambda cast: is_rounding(cast) and widens(cast.arg.dtype, cast.dtype))


def _without(a: Algebra, x: Value, stripped: Callable[[Value], bool]) -> Value:
    """Strip the values below the views of `x` for which `stripped` holds."""
    if stripped(x):
        return _without(a, x.arg, stripped)
    if x.op not in _VIEWS:
        return x
    inner = _without(a, x.arg, stripped)
    return x if inner is x.arg else a.seen_as(inner, x)


def weighted_sum(a: Algebra, value: Value) -> Iterator[tuple[Value, Value]]:
    """Yield each pair (weights [*B, N], streams [*B, N, D]) of which `value` [*B, D] is Σ_j weights_j streams_j."""
    for weights, streams in _factors(value, _EACH):
        if weights.shape[-1] == 1 and streams.rank == weights.rank and streams.shape[-2] in (1, weights.shape[-2]):
            equal = (*weights.shape[:-1], streams.shape[-1])  # of streams that are one tensor, N times
            yield a.reshape(weights, weights.shape[:-1]), a.expand(streams, equal)
    if not value.rank:
        return
    product = a.reshape(value, (*value.shape[:-1], 1, value.shape[-1]))
    if product.op == "matmul" and product.args[0].shape[:-2] == product.args[1].shape[:-2]:
        left, right = product.args
        yield a.reshape(left, (*left.shape[:-2], left.shape[-1])), right


def mixed_streams(a: Algebra, value: Value) -> Iterator[tuple[Value, Value]]:
    """Yield each pair (matrix [*B, N, N], streams [*B, N, D]) of which `value` [*B, N, D] is matrixᵀ · streams."""
    if value.op == "matmul":
        yield swapped(a, value.args[0]), value.args[1]
    for matrix, streams in _factors(value, _FIRST):
        if matrix.shape[-1] == 1 and streams.shape[-2] == 1:
            yield a.reshape(matrix, matrix.shape[:-1]), a.reshape(streams, (*streams.shape[:-2], streams.shape[-1]))
    for matrix, streams in _factors(value, _SECOND):
        if matrix.shape[-1] == 1 and streams.rank == matrix.rank and streams.shape[-3] == 1:
            rows = a.reshape(matrix, matrix.shape[:-1])
            yield swapped(a, rows), a.reshape(streams, (*streams.shape[:-3], *streams.shape[-2:]))


def _factors(value: Value, axis: int) -> Iterator[tuple[Value, Value]]:
    """Yield both orders of the factors of a product, if `value` is their sum over `axis`, without that dim."""
    mean = value.arg.below("reshape") if value.op == "scale" else value
    if mean.op != "mean" or mean.attrs != (axis,) or mean is value:
        return
    product, size = mean.arg.below("cast"), mean.arg.shape[axis]
    left = (*product.shape[:axis], *product.shape[product.rank + axis + 1 :])
    is_sum = isinstance(size, int) and math.isclose(value.attrs[0], size, rel_tol=1e-9)
    if product.op == "mul" and product.rank >= 3 and is_sum and value.shape == left:
        yield product.args[0], product.args[1]
        yield product.args[1], product.args[0]
