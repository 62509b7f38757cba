"""Logic: positions, constants, comparisons and choices, which masks are made of; softmax; sort and top-k.

arange(start, …, step)          → arange: start + step · position      zeros, ones, full     → full
x >= y, x > y                   → compare(y ≤ x), compare(y < x)       tril, triu            → where
masked_fill(x, c, v)            → where(c, v, x)                       softmax in all forms  → softmax
x.gather(i, places)             → take(x, places): x[*own, places[*own, ..], :], no place counting from the end;
                                  largest(x) where these are the places of the largest of x

sort, argsort, descending       → largest, largest_index; of a stable sort stable_largest, stable_largest_index
sort, argsort, ascending        → ascending, ascending_index, with the attribute `stable`

The k largest are two values, "largest" and "largest_index" (their places), with the same x and k. Softmax shares have
the places of their logits. An unsorted top-k is translated as a sorted one: descending order is one of those that torch
may return. Which of equal numbers are chosen, and their order, torch leaves open too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusion.analysis.dtypes import common, holds, rounded_number
from fusion.analysis.intervals import bounds, keeps_integers, uncast
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.comparisons import compare, constant, moved, negated, number, pointwise, positions, where
from fusion.graph.dims import INDEX_DTYPES, is_symbolic
from fusion.graph.proof_steps import must, proof, proven
from fusion.stages.canonicalise import listed_positions
from fusion.stages.canonicalise.translators import Out, Translated, translates, translations

_LARGEST_INDICES = ("largest_index", "stable_largest_index")


def _converted(a: Algebra, number: Any, shape: Sequence[Any], dtype: torch.dtype | None) -> Value:
    """Build the constant `number` as torch converts it to `dtype`: wrapped for integers; floats are left unrounded."""
    must(isinstance(number, (int, float)))
    converted = number if proven(dtype).is_floating_point else rounded_number(number, proven(dtype))
    return constant(a, proven(converted), shape, dtype)


def _arange(a: Algebra, out: Out, start: Any, step: Any = 1) -> Translated:
    if not isinstance(step, int):
        return None
    if is_symbolic(start):
        must(
            start.is_integer and out.dtype in (torch.int64, torch.float32, torch.float64)
        )  # dtypes that represent every position
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
        "aten.full.default aten.full_like.default aten.new_full.default": lambda a, out, like, *args, **how: _converted(
            a, args[-1], out.shape, out.dtype
        ),
        "aten.fill.Scalar": lambda a, out, x, number: _converted(a, number, out.shape, out.dtype),
        "aten.scalar_tensor.default": lambda a, out, number, **how: _converted(a, number, (), out.dtype),
    }
)


@translates("aten.fill.Tensor", any_rank=True)
def _fill(a: Algebra, out: Out, x: Value, one: Value) -> Translated:
    """Translate a fill by a 0-d tensor whose number is known."""
    return _converted(a, one.attrs[0], out.shape, out.dtype) if one.op == "full" else None


def _comparison(op: str, swap: bool, a: Algebra, out: Out, x: Value, y: Any) -> Translated:
    """Translate x op y, or with `swap` y op x.

    An operand is cast to torch's common dtype only if that changes its numbers. A comparison of counts of list entries
    becomes a test for listed positions.
    """
    if is_symbolic(y):
        must(x.dtype is torch.int64)
        y = number(a, y, x)
    dtype = common(x, y)
    other = y if isinstance(y, Value) else _converted(a, y, (), dtype)
    left, right = (each if each.dtype and holds(dtype, each.dtype) else a.cast(each, dtype) for each in (x, other))
    left, right = (right, left) if swap else (left, right)
    return listed_positions.any_named(a, op, left, right) or compare(a, op, left, right)


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
    """Translate nan_to_num of a softmax, which is never infinite, to where(isnan(x), 0, x)."""
    must(x.op == "softmax" and nan in (None, 0))
    return where(a, _isnan(a, x), constant(a, 0, (), x.dtype), x, x.dtype)


@translates("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(a: Algebra, out: Out, condition: Value, x: Any, y: Any) -> Translated:
    return where(a, condition, _side(a, out, x), _side(a, out, y), out.dtype)


def _side(a: Algebra, out: Out, x: Any) -> Value:
    """Build one side `x` of a choice, a value or a number, in the dtype of the choice."""
    if not isinstance(x, Value):
        return _converted(a, x, (), out.dtype)
    return (proof(_converted)(a, x.attrs[0], x.shape, out.dtype) if x.op == "full" else None) or a.cast(x, out.dtype)


def _triangle(upper: bool, a: Algebra, out: Out, x: Value, diagonal: Any = 0) -> Translated:
    row = proven(moved(a, positions(a, x.shape[-2], 2, -2), diagonal))
    column = positions(a, x.shape[-1], 2, -1)
    inside = proven(compare(a, "le", row, column) if upper else compare(a, "le", column, row))
    return where(a, inside, x, constant(a, 0, (), x.dtype), x.dtype)


@translates("aten.cumsum.default")
def _cumsum(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return a.make("cumsum", (a.cast(x, out.dtype),), (dim % x.rank,), x.shape, out.dtype)


@translates("aten.index.Tensor", "aten._unsafe_index.Tensor")
def index(a: Algebra, out: Out, x: Value, indices: Sequence[Any]) -> Translated:
    """Translate x[i, j, …] by integer tensors to "index", with the indexed dims as its attribute.

    Where every index but the last is the own position of its dim, the call is translated as a gather along the last
    dim.
    """
    given = [(place, each) for place, each in enumerate(indices) if each is not None]
    must(all(isinstance(each, Value) and each.dtype in INDEX_DTYPES for _, each in given))
    last = last_index(a, x, [each for _, each in given])
    if last is not None:
        return _gather(a, out, x, -1, last)
    return a.make("index", (x, *(each for _, each in given)), tuple(place for place, _ in given), out.shape, out.dtype)


def last_index(a: Algebra, x: Value, indices: Sequence[Value]) -> Value | None:
    """Return the last of `indices`, if all before it are the own positions along their dims; else None.

    Then x[indices] reads, or writes, along the last dim of `x` alone. The last index must not be negative, nor be
    expanded along rows.
    """
    shape = broadcast(*(each.shape for each in indices))
    if x.rank < 2 or len(indices) != x.rank or shape is None or shape[:-1] != x.shape[:-1]:
        return None
    *rows, last = indices
    if last.shape != shape or last.op == "expand":
        return None
    own = all(_is_position(a, each, axis, shape) for axis, each in enumerate(rows))
    return last if own and bounds(last)[0] >= 0 else None


def _is_position(a: Algebra, x: Value, axis: int, shape: Sequence[Any]) -> bool:
    """Return True if `x`, which broadcasts to `shape`, is the position along `axis`."""
    x = uncast(x.below("expand"))
    if shape[axis] == 1 and bounds(x) == (0, 0):
        return True
    line = positions(a, shape[axis], len(shape), axis)
    return a.reshape(x, (*[1] * (len(shape) - x.rank), *x.shape)) is line


@translates("aten.gather.default")
def _gather(a: Algebra, out: Out, x: Value, dim: int, places: Value, **kwargs: Any) -> Translated:
    """Translate a gather along `dim` with `places` that are expanded along the dims behind it.

    The result is "take": x[i, .., places[i, .., j], ..] with the own position i in every dim before `dim`. A leading
    dim along which `x` is expanded is dropped, if all dims between it and `dim` are too. A gather at the places of the
    largest of `x` is "largest".
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
    return top_k(a, x, k)


def top_k(a: Algebra, x: Value, k: Any) -> tuple[Value, Value]:
    """Build the `k` largest of each row of `x` and their places; softmax shares are ordered as their logits.

    A term that is constant per row is added to the largest alone: rounding a sum preserves order.
    """
    shape: tuple[Any, ...] = (*x.shape[:-1], k)
    for rows, added in x.operands("add"):
        if rows.shape == x.shape and added.shape[-1:] == (1,):
            values, places = top_k(a, rows, k)
            return proven(a.add(values, added)), places
    ranked = x.arg if is_shares(x) else x
    return a.make("largest", (x,), (k,), shape, x.dtype), a.make("largest_index", (ranked,), (k,), shape, torch.int64)


def _ranked(x: Value) -> Value:
    """Peel softmax over the last dim and widening casts off `x`: the result has the same order along that dim."""
    while is_shares(x) or (x.op == "cast" and widens(x.arg.dtype, x.dtype)):
        x = x.arg
    return x


def is_shares(x: Value) -> bool:
    """Return True if `x` is a softmax over its last dim."""
    return x.op == "softmax" and x.attrs[0] == -1


@translates("aten.sort.default")
def _sort(a: Algebra, out: Out, x: Value, dim: int = -1, descending: bool = False) -> Translated:
    """Translate an unstable sort; the descending one is the top-k of all."""
    return _sorted(a, x, dim, descending, False)


@translates("aten.sort.stable")
def _stable_sort(
    a: Algebra, out: Out, x: Value, *, stable: bool | None = None, dim: int = -1, descending: bool = False
) -> Translated:
    return _sorted(a, x, dim, descending, bool(stable))


def _sorted(a: Algebra, x: Value, dim: int, descending: bool, stable: bool) -> tuple[Value, Value]:
    """Build `x` sorted along `dim`, and the place from which each number comes.

    Descending, all numbers are the largest; an ascending sort of -x is a descending one of x. A `stable` descending
    sort has ops of its own, since the fused operators leave the order of equal numbers open.
    """
    if (x.op, x.attrs) == ("scale", (-1.0,)) and is_float(x) and not descending:
        values, places = _sorted(a, x.arg, dim, True, stable)
        return a.scale(values, *x.attrs), places
    if not descending:
        return _ascending(a, x, dim, stable)
    must(dim % x.rank == x.rank - 1)
    if not stable:
        return top_k(a, x, x.shape[-1])
    count = x.shape[-1:]
    places = a.make("stable_largest_index", (x,), count, x.shape, torch.int64)
    return a.make("stable_largest", (x,), count, x.shape, x.dtype), places


def _ascending(a: Algebra, x: Value, dim: int, stable: bool) -> tuple[Value, Value]:
    """Build `x` in ascending order along `dim`, and the place from which each number comes.

    Integers that are cast to floats are sorted as integers, if the cast keeps them.
    """
    if keeps_integers(x):
        values, places = _ascending(a, x.arg, dim, stable)
        return a.cast(values, x.dtype), places
    attrs = (dim % x.rank, stable)
    places = a.make("ascending_index", (x,), attrs, x.shape, torch.int64)
    return a.make("ascending", (x,), attrs, x.shape, x.dtype), places
