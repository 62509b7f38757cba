"""Logic: positions, constants, comparisons and choices, from which masks are built.

arange(start, …, step)          → arange: start + step · position      zeros, ones, full     → full
x >= y, x > y                   → compare(y ≤ x), compare(y < x)       tril, triu            → where
masked_fill(x, c, v)            → where(c, v, x)                       softmax in all forms  → softmax
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.analysis.dtypes import common, held_number, holds
from fusion.graph import Algebra, Value
from fusion.graph.logic import compare, constant, pointwise, positions, softmax, where
from fusion.stages.canonicalise.translate import Out, Translated, is_number, translates


def _held(a: Algebra, number: Any, shape: Sequence[Any], dtype: torch.dtype | None) -> Value | None:
    """A constant as torch makes it of any number; floats are not rounded, as other constants are not."""
    if not isinstance(number, (int, float)) or dtype is None:
        return None
    kept = number if dtype.is_floating_point else held_number(number, dtype)
    return None if kept is None else constant(a, kept, shape, dtype)


@translates("aten.arange.default")
def _arange(a: Algebra, out: Out, end: Any, **kwargs: Any) -> Translated:
    return _arange_step(a, out, 0, end)


@translates("aten.arange.start")
def _arange_start(a: Algebra, out: Out, start: Any, end: Any, **kwargs: Any) -> Translated:
    return _arange_step(a, out, start, end)


@translates("prims.iota.default")
def _iota(a: Algebra, out: Out, length: Any, *, start: Any, step: Any, **kwargs: Any) -> Translated:
    return _arange_step(a, out, start, None, step)


@translates("aten.arange.start_step")
def _arange_step(a: Algebra, out: Out, start: Any, end: Any, step: Any = 1, **kwargs: Any) -> Translated:
    whole = isinstance(start, int) and isinstance(step, int)
    return a.make("arange", (), (start, step), out.shape, out.dtype) if whole else None


def _filled(value: Any) -> Any:
    def translate(a: Algebra, out: Out, *args: Any, **kwargs: Any) -> Translated:
        return constant(a, value, out.shape, out.dtype)

    return translate


for _names, _value in ((("zeros", "new_zeros", "zeros_like"), 0), (("ones", "new_ones", "ones_like"), 1)):
    for _name in _names:
        translates(f"aten.{_name}.default")(_filled(_value))


@translates("aten.full.default", "aten.full_like.default", "aten.new_full.default")
def _full(a: Algebra, out: Out, like: Any, *args: Any, **kwargs: Any) -> Translated:
    number = args[-1]
    return _held(a, number, out.shape, out.dtype)


@translates("aten.scalar_tensor.default")
def _scalar(a: Algebra, out: Out, number: Any, **kwargs: Any) -> Translated:
    return _held(a, number, (), out.dtype)


def _comparison(op: str, swap: bool) -> Any:
    def translate(a: Algebra, out: Out, x: Value, y: Any) -> Translated:
        both = _alike(a, x, y)
        return None if both is None else compare(a, op, *(both[::-1] if swap else both))

    return translate


def _alike(a: Algebra, x: Value, y: Any) -> tuple[Value, Value] | None:
    """Both sides of a comparison, cast where the dtype in which torch compares does not hold them all."""
    if x.dtype is None or not isinstance(y, (Value, int, float)):
        return None
    dtype = common(x, y)
    other = _held(a, y, (), dtype) if not isinstance(y, Value) else y
    if other is None or other.dtype is None:
        return None
    left, right = (each if each.dtype and holds(dtype, each.dtype) else a.cast(each, dtype) for each in (x, other))
    return left, right


for _name, _op, _swap in (
    ("le", "le", False), ("lt", "lt", False), ("ge", "le", True), ("gt", "lt", True), ("eq", "eq", False),
    ("ne", "ne", False),
):  # fmt: skip
    for _overload in ("Tensor", "Scalar"):
        translates(f"aten.{_name}.{_overload}")(_comparison(_op, _swap))


def _connective(op: str) -> Any:
    def translate(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
        x, y = (constant(a, bool(each), (), torch.bool) if is_number(each) else each for each in (x, y))
        if not isinstance(x, Value) or not isinstance(y, Value) or {x.dtype, y.dtype} != {torch.bool}:
            return None
        return pointwise(a, op, (x, y), (), torch.bool)

    return translate


for _op in ("and", "or"):
    for _name in (f"bitwise_{_op}.Tensor", f"logical_{_op}.default", f"__{_op}__.Tensor", f"bitwise_{_op}.Scalar"):
        translates(f"aten.{_name}")(_connective(_op))


@translates("aten.bitwise_not.default", "aten.logical_not.default")
def _not(a: Algebra, out: Out, x: Value) -> Translated:
    if out.dtype is not torch.bool:
        return None
    return x.arg if x.op == "not" else pointwise(a, "not", (a.cast(x, torch.bool),), (), torch.bool)


@translates("aten.isnan.default")
def _isnan(a: Algebra, out: Out, x: Value) -> Translated:
    return a.make("isnan", (x,), (), x.shape, torch.bool)


@translates("aten.nan_to_num.default")
def _nan_to_num(a: Algebra, out: Out, x: Value, nan: Any = None, *args: Any) -> Translated:
    """Of a softmax, which is infinite nowhere."""
    if x.op != "softmax" or nan not in (None, 0):
        return None
    return where(a, a.make("isnan", (x,), (), x.shape, torch.bool), constant(a, 0, (), x.dtype), x, x.dtype)


@translates("aten.any.dim")
def _any(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    axis = dim % x.rank
    kept = (*x.shape[:axis], 1, *x.shape[axis + 1 :])
    return a.reshape(a.make("any", (a.cast(x, torch.bool),), (axis,), kept, torch.bool), out.shape)


@translates("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf", "aten.where.Scalar")
def _where(a: Algebra, out: Out, condition: Value, x: Any, y: Any) -> Translated:
    yes, no = (_side(a, out, each) for each in (x, y))
    return None if yes is None or no is None else where(a, condition, yes, no, out.dtype)


def _side(a: Algebra, out: Out, x: Any) -> Value | None:
    """A number or a tensor that is chosen, in the dtype of the choice."""
    if not isinstance(x, Value):
        return _held(a, x, (), out.dtype)
    return (_held(a, x.attrs[0], x.shape, out.dtype) if x.op == "full" else None) or a.cast(x, out.dtype)


@translates("aten.masked_fill.Scalar", "aten.masked_fill.Tensor")
def _masked_fill(a: Algebra, out: Out, x: Value, condition: Value, fill: Any) -> Translated:
    return _where(a, out, condition, fill, x)


def _triangle(upper: bool) -> Any:
    def translate(a: Algebra, out: Out, x: Value, diagonal: Any = 0) -> Translated:
        if x.rank < 2 or not isinstance(diagonal, int):
            return None
        row = a.shift(positions(a, x.shape[-2], 2, -2), diagonal)
        column = positions(a, x.shape[-1], 2, -1)
        kept = compare(a, "le", row, column) if upper else compare(a, "le", column, row)
        return None if kept is None else where(a, kept, x, constant(a, 0, (), x.dtype), x.dtype)

    return translate


translates("aten.triu.default")(_triangle(True))
translates("aten.tril.default")(_triangle(False))


@translates("aten.cumsum.default")
def _cumsum(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return a.make("cumsum", (a.cast(x, out.dtype),), (dim % x.rank,), x.shape, out.dtype)


@translates("aten.index.Tensor")
def _index(a: Algebra, out: Out, x: Value, indices: Sequence[Any]) -> Translated:
    """x[i, j, …] for whole numbers, with the places of the indices as attribute."""
    given = [(place, each) for place, each in enumerate(indices) if each is not None]
    whole = all(isinstance(each, Value) and each.dtype in (torch.int64, torch.int32) for _, each in given)
    if not whole:
        return None
    return a.make("index", (x, *(each for _, each in given)), tuple(place for place, _ in given), out.shape, out.dtype)


@translates("aten.softmax.int", "aten._softmax.default")
def _softmax(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return softmax(a, a.cast(x, out.dtype), dim, "nan") if x.rank else None


@translates("aten._safe_softmax.default")
def _safe_softmax(a: Algebra, out: Out, x: Value, dim: int, dtype: Any = None) -> Translated:
    return softmax(a, a.cast(x, out.dtype), dim, "zero") if x.rank else None
