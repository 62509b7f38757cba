"""Logic: positions, constants, comparisons and choices, from which masks are built, and the k largest of a row.

arange(start, …, step)          → arange: start + step · position      zeros, ones, full     → full
x >= y, x > y                   → compare(y ≤ x), compare(y < x)       tril, triu            → where
masked_fill(x, c, v)            → where(c, v, x)                       softmax in all forms  → softmax
x.gather(i, places)             → take(x, places): x[*own, places[*own, ..], :], none counted from the end;
                                  largest(x) where these are the places of the largest of x

sort, argsort, descending       → largest, largest_index; if equals keep their order stable_largest, _index
sort, argsort, ascending        → ascending, ascending_index; of one value the same if both or none keep equals in order

The k largest are values "largest" and places "largest_index", which share x and k; places of shares are those of their
logits. Sorted or not: where a model asks
for no order, descending is one of those that it may get. Which of equal values are chosen, and in what order they
stand, torch leaves open as well.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusion.analysis.dtypes import common, held_number, holds
from fusion.analysis.intervals import bounds, keeps_integers, uncast
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.dims import INDEX_DTYPES, is_symbolic
from fusion.graph.logic import compare, constant, moved, negated, number, pointwise, positions, where
from fusion.graph.proof import must, proof, proven
from fusion.stages.canonicalise import lists
from fusion.stages.canonicalise.translate import Out, Translated, translates, translations

_LARGEST_INDICES = ("largest_index", "stable_largest_index")


def _held(a: Algebra, number: Any, shape: Sequence[Any], dtype: torch.dtype | None) -> Value:
    """A constant as torch makes it of any number; floats are not rounded, as other constants are not."""
    must(isinstance(number, (int, float)))
    kept = number if proven(dtype).is_floating_point else held_number(number, proven(dtype))
    return constant(a, proven(kept), shape, dtype)


def _arange(a: Algebra, out: Out, start: Any, step: Any = 1) -> Translated:
    if not isinstance(step, int):
        return None
    if is_symbolic(start):
        must(start.is_integer and out.dtype in (torch.int64, torch.float32, torch.float64))  # which hold positions
        counted = moved(a, a.make("arange", (), (0, step), out.shape, torch.int64), start)
        return a.cast(proven(counted), out.dtype)
    return a.make("arange", (), (start, step), out.shape, out.dtype) if isinstance(start, int) else None


def _filled(value: Any, a: Algebra, out: Out, *args: Any, **kwargs: Any) -> Translated:
    return constant(a, value, out.shape, out.dtype)


translations(
    {
        "aten.arange.default": lambda a, out, end, **how: _arange(a, out, 0),
        "aten.arange.start": lambda a, out, start, end, **how: _arange(a, out, start),
        "aten.arange.start_step": lambda a, out, start, end, step=1, **how: _arange(a, out, start, step),
        "prims.iota.default": lambda a, out, length, *, start, step, **how: _arange(a, out, start, step),
        "aten.zeros.default aten.new_zeros.default aten.zeros_like.default": partial(_filled, 0),
        "aten.ones.default aten.new_ones.default aten.ones_like.default": partial(_filled, 1),
        "aten.full.default aten.full_like.default aten.new_full.default": lambda a, out, like, *args, **how: _held(
            a, args[-1], out.shape, out.dtype
        ),
        "aten.fill.Scalar": lambda a, out, x, number: _held(a, number, out.shape, out.dtype),
        "aten.scalar_tensor.default": lambda a, out, number, **how: _held(a, number, (), out.dtype),
    }
)


@translates("aten.fill.Tensor", any_rank=True)
def _fill(a: Algebra, out: Out, x: Value, one: Value) -> Translated:
    """The same number everywhere, where it is known."""
    return _held(a, one.attrs[0], out.shape, out.dtype) if one.op == "full" else None


def _comparison(op: str, swap: bool, a: Algebra, out: Out, x: Value, y: Any) -> Translated:
    """x op y, or y op x, cast where the dtype in which torch compares does not hold them all."""
    if is_symbolic(y):
        must(x.dtype is torch.int64)
        y = number(a, y, x)
    dtype = common(x, y)
    other = y if isinstance(y, Value) else _held(a, y, (), dtype)
    left, right = (each if each.dtype and holds(dtype, each.dtype) else a.cast(each, dtype) for each in (x, other))
    left, right = (right, left) if swap else (left, right)
    return lists.any_named(a, op, left, right) or compare(a, op, left, right)


def _connective(op: str, a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    x, y = (constant(a, each, (), torch.bool) if isinstance(each, bool) else each for each in (x, y))
    must(isinstance(x, Value) and isinstance(y, Value) and {x.dtype, y.dtype} == {torch.bool})
    return pointwise(a, op, (x, y), (), torch.bool)


translations(
    {
        "aten.le.Tensor aten.le.Scalar": partial(_comparison, "le", False),
        "aten.lt.Tensor aten.lt.Scalar": partial(_comparison, "lt", False),
        "aten.ge.Tensor aten.ge.Scalar": partial(_comparison, "le", True),
        "aten.gt.Tensor aten.gt.Scalar": partial(_comparison, "lt", True),
        "aten.eq.Tensor aten.eq.Scalar": partial(_comparison, "eq", False),
        "aten.ne.Tensor aten.ne.Scalar": partial(_comparison, "ne", False),
        "aten.bitwise_and.Tensor aten.bitwise_and.Scalar": partial(_connective, "and"),
        "aten.logical_and.default aten.__and__.Tensor": partial(_connective, "and"),
        "aten.bitwise_or.Tensor aten.bitwise_or.Scalar": partial(_connective, "or"),
        "aten.logical_or.default aten.__or__.Tensor": partial(_connective, "or"),
    }
)


@translates("aten.bitwise_not.default", "aten.logical_not.default")
def _not(a: Algebra, out: Out, x: Value) -> Translated:
    return negated(a, a.cast(x, torch.bool))


def _isnan(a: Algebra, x: Value) -> Value:
    return a.make("isnan", (x,), (), x.shape, torch.bool)


def _is_infinite(number: float, a: Algebra, out: Out, x: Value) -> Translated:
    return compare(a, "eq", x, constant(a, number, (), x.dtype)) if is_float(x) else None


@translates("aten.nan_to_num.default")
def _nan_to_num(a: Algebra, out: Out, x: Value, nan: Any = None, *args: Any) -> Translated:
    """Of a softmax, which is infinite nowhere."""
    must(x.op == "softmax" and nan in (None, 0))
    return where(a, _isnan(a, x), constant(a, 0, (), x.dtype), x, x.dtype)


@translates("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(a: Algebra, out: Out, condition: Value, x: Any, y: Any) -> Translated:
    return where(a, condition, _side(a, out, x), _side(a, out, y), out.dtype)


def _side(a: Algebra, out: Out, x: Any) -> Value:
    """A number or a tensor that is chosen, in the dtype of the choice."""
    if not isinstance(x, Value):
        return _held(a, x, (), out.dtype)
    return (proof(_held)(a, x.attrs[0], x.shape, out.dtype) if x.op == "full" else None) or a.cast(x, out.dtype)


def _triangle(upper: bool, a: Algebra, out: Out, x: Value, diagonal: Any = 0) -> Translated:
    row = proven(moved(a, positions(a, x.shape[-2], 2, -2), diagonal))
    column = positions(a, x.shape[-1], 2, -1)
    kept = proven(compare(a, "le", row, column) if upper else compare(a, "le", column, row))
    return where(a, kept, x, constant(a, 0, (), x.dtype), x.dtype)


@translates("aten.cumsum.default")
def _cumsum(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return a.make("cumsum", (a.cast(x, out.dtype),), (dim % x.rank,), x.shape, out.dtype)


@translates("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(a: Algebra, out: Out, x: Value, indices: Sequence[Any]) -> Translated:
    """x[i, j, …] for whole numbers, with the places of the indices as attribute; see `_gather` for x[own, …, j]."""
    given = [(place, each) for place, each in enumerate(indices) if each is not None]
    must(all(isinstance(each, Value) and each.dtype in INDEX_DTYPES for _, each in given))
    last = of_own_rows(a, x, [each for _, each in given])
    if last is not None:
        return _gather(a, out, x, -1, last)
    return a.make("index", (x, *(each for _, each in given)), tuple(place for place, _ in given), out.shape, out.dtype)


def of_own_rows(a: Algebra, x: Value, indices: Sequence[Value]) -> Value | None:
    """Places in the last dim of `x` that are named beside the own position in every other; none from the end."""
    shape = broadcast(*(each.shape for each in indices))
    if x.rank < 2 or len(indices) != x.rank or shape is None or shape[:-1] != x.shape[:-1]:
        return None
    *rows, last = indices
    if last.shape != shape or last.op == "expand":
        return None  # places that rows share
    own = all(_is_position(a, each, axis, shape) for axis, each in enumerate(rows))
    return last if own and bounds(last)[0] >= 0 else None


def _is_position(a: Algebra, x: Value, axis: int, shape: Sequence[Any]) -> bool:
    """Whether whole numbers are the position along one dim of a shape to which they broadcast."""
    x = uncast(x.below("expand"))
    if shape[axis] == 1 and bounds(x) == (0, 0):
        return True
    line = positions(a, shape[axis], len(shape), axis)
    return a.reshape(x, (*[1] * (len(shape) - x.rank), *x.shape)) is line


@translates("aten.gather.default")
def _gather(a: Algebra, out: Out, x: Value, dim: int, places: Value, **kwargs: Any) -> Translated:
    """Rows of the last dims, where places are repeated along these; x[i, ..] of its own position in every dim before.

    A dim before that `x` is repeated along is left out, if all behind it are. What stands at the places of the largest
    are the largest.
    """
    dim %= x.rank
    largest = uncast(places)
    if largest.op in _LARGEST_INDICES and _ranked(x) is _ranked(largest.arg) and dim == x.rank - 1:
        return a.make(largest.op.removesuffix("_index"), (x,), largest.attrs, out.shape, out.dtype)
    source, listed = (each.arg if each.op == "expand" else each for each in (x, places))
    rest = x.shape[dim + 1 :]
    must(all(size == 1 for size in listed.shape[dim + 1 :]) and places.shape[dim + 1 :] == rest)
    own = [size for size in source.shape[:dim] if size != 1]
    if source.shape[dim:] != x.shape[dim:] or source.shape[: len(own)] != tuple(own):
        source, own = x, list(x.shape[:dim])
    must(tuple(own) == places.shape[: len(own)])
    numbers = a.reshape(a.expand(listed, (*places.shape[: dim + 1], *[1] * len(rest))), places.shape[: dim + 1])
    return a.make("take", (a.reshape(source, (*own, *x.shape[dim:])), numbers), (), out.shape, out.dtype)


def _softmax(empty: str, a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return a.softmax(a.cast(x, out.dtype), dim, empty)


translations(
    {
        "aten.embedding.default": lambda a, out, rows, places, *args: index(a, out, rows, (places,)),
        "aten.isnan.default": lambda a, out, x: _isnan(a, x),
        "aten.isinf.default": lambda a, out, x: _is_infinite(math.inf, a, out, a.unary("abs", x)),
        "aten.isneginf.default": partial(_is_infinite, -math.inf),
        "aten.masked_fill.Scalar aten.masked_fill.Tensor": lambda a, out, x, mask, fill: _where(a, out, mask, fill, x),
        "aten.triu.default": partial(_triangle, True),
        "aten.tril.default": partial(_triangle, False),
        "aten.softmax.int aten._softmax.default": partial(_softmax, "nan"),
        "aten._safe_softmax.default": partial(_softmax, "zero"),
    }
)


# the k largest -----------------------------------------------------------------------------------------------------


@translates("aten.topk.default")
def _topk(
    a: Algebra, out: Out, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Translated:
    must(largest and dim % x.rank == x.rank - 1)
    return of_largest(a, x, k)


def of_largest(a: Algebra, x: Value, k: Any) -> tuple[Value, Value]:
    """Return the `k` largest of each row of `x`, and their places; shares of a softmax are ordered as its logits.

    What is added to whole rows is added to the largest alone: sums are rounded in order.
    """
    shape: tuple[Any, ...] = (*x.shape[:-1], k)
    for rows, added in (x.args, x.args[::-1]) if x.op == "add" else ():
        if rows.shape == x.shape and added.shape[-1:] == (1,):
            values, places = of_largest(a, rows, k)
            return proven(a.add(values, added)), places
    ranked = x.arg if is_shares(x) else x
    return a.make("largest", (x,), (k,), shape, x.dtype), a.make("largest_index", (ranked,), (k,), shape, torch.int64)


def _ranked(x: Value) -> Value:
    """What has the order of `x` along the last dim: before a softmax over it, and before it was widened."""
    while is_shares(x) or (x.op == "cast" and widens(x.arg.dtype, x.dtype)):
        x = x.arg
    return x


def is_shares(x: Value) -> bool:
    """Whether a value is a softmax over its last dim."""
    return x.op == "softmax" and x.attrs[0] == -1


@translates("aten.sort.default")
def _sort(a: Algebra, out: Out, x: Value, dim: int = -1, descending: bool = False) -> Translated:
    """In descending order, all are the largest."""
    return _sorted(a, x, dim, descending, False)


@translates("aten.sort.stable")
def _stable_sort(
    a: Algebra, out: Out, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Translated:
    return _sorted(a, x, dim, descending, bool(stable))


def _sorted(a: Algebra, x: Value, dim: int, descending: bool, stable: bool) -> tuple[Value, Value]:
    """Return `x` in order along a dim, and where each number stood; `stable`: True if equals keep their order.

    In descending order all are the largest, and so they are in ascending order times -1. Those of a stable sort have
    ops of their own, since operators leave the order of equals open.
    """
    if (x.op, x.attrs) == ("scale", (-1.0,)) and is_float(x) and not descending:
        values, places = _sorted(a, x.arg, dim, True, stable)
        return a.scale(values, *x.attrs), places
    if not descending:
        return _ascending(a, x, dim, stable)
    must(dim % x.rank == x.rank - 1)
    if not stable:
        return of_largest(a, x, x.shape[-1])
    count = x.shape[-1:]
    places = a.make("stable_largest_index", (x,), count, x.shape, torch.int64)
    return a.make("stable_largest", (x,), count, x.shape, x.dtype), places


def _ascending(a: Algebra, x: Value, dim: int, stable: bool) -> tuple[Value, Value]:
    """Sort `x` along a dim: the numbers, and where each stood; `stable`: True if equals keep their order.

    Integers have the order of the floats that they are cast to.
    """
    if keeps_integers(x):
        values, places = _ascending(a, x.arg, dim, stable)
        return a.cast(values, x.dtype), places
    attrs = (dim % x.rank, stable)
    places = a.make("ascending_index", (x,), attrs, x.shape, torch.int64)
    return a.make("ascending", (x,), attrs, x.shape, x.dtype), places
