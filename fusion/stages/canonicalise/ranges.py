"""Ranges: between which whole numbers every element of a value lies, as far as how it was computed tells.

remainder(x, m)  → 0 … m - 1          clamp(x, low, high)  → low … high          everything else from its arguments

Sums are taken not to overflow: positions are far from the ends of int64, and what int32 cannot hold is not bounded.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise.arithmetic import relu
from fusion.stages.canonicalise.translate import WHOLE, Out, Translated, is_number, translates

_ANY = (-math.inf, math.inf)

Range = tuple[float, float]


def bounds(x: Value) -> Range:
    """The least and the greatest number that `x`, a tensor of whole numbers, can hold; infinite where unknown."""
    match x.op:
        case "constant":
            return min(x.attrs[0], default=0), max(x.attrs[0], default=0)
        case "full":
            return x.attrs[0], x.attrs[0]
        case "number":
            size = x.attrs[0]
            return (size, size) if isinstance(size, int) else (0, math.inf) if size.is_nonnegative else _ANY
        case "arange":
            return _counted(x)
        case "reshape" | "expand" | "permute" | "slice" | "index":
            return bounds(x.arg)
        case "cast":
            return _within(bounds(x.arg), x.dtype) if {x.arg.dtype, x.dtype} <= WHOLE else _ANY
        case "shift":
            low, high = bounds(x.arg)
            return low + x.attrs[0], high + x.attrs[0]
        case "scale":
            return _scaled(bounds(x.arg), x.attrs[0])
        case "add":
            (low, high), (least, most) = map(bounds, x.args)
            return low + least, high + most  # a lower bound is never +inf, an upper one never -inf: no NaN
        case "where":
            (low, high), (least, most) = map(bounds, x.args[1:])
            return min(low, least), max(high, most)
        case "floor_divide":
            low, high = (each // x.attrs[0] if math.isfinite(each) else each for each in bounds(x.arg))
            return low, high
        case "remainder":
            return 0, x.attrs[0] - 1
        case "clamp":
            low, high = bounds(x.arg)
            least, most = x.attrs
            return min(max(low, least), most), min(max(high, least), most)
        case _:
            return _ANY


def _within(found: Range, dtype: torch.dtype | None) -> Range:
    """What a cast to `dtype` leaves as it is; other numbers wrap round."""
    limits = torch.iinfo(dtype or torch.int64)
    fits = dtype is torch.int64 or limits.min <= found[0] <= found[1] <= limits.max
    return found if fits else _ANY


def _scaled(found: Range, factor: float) -> Range:
    if not factor:
        return 0, 0
    ends = sorted(each * factor for each in found)
    return ends[0], ends[1]


def _counted(x: Value) -> Range:
    start, step = x.attrs
    size = x.shape[0]
    if not isinstance(size, int):
        return (start, math.inf) if step >= 0 else (-math.inf, start)
    last = start + step * max(size - 1, 0)
    return min(start, last), max(start, last)


def _is_whole(x: Any, out: Out) -> bool:
    return isinstance(x, Value) and x.dtype in WHOLE and out.dtype == x.dtype


@translates("aten.remainder.Scalar")
def _remainder(a: Algebra, out: Out, x: Value, divisor: Any) -> Translated:
    """x modulo a positive number, never negative itself."""
    fits = _is_whole(x, out) and isinstance(divisor, int) and divisor > 0
    return a.make("remainder", (x,), (divisor,), x.shape, x.dtype) if fits else None


@translates("aten.floor_divide.default")
def _floor_divide(a: Algebra, out: Out, x: Value, divisor: Any) -> Translated:
    fits = _is_whole(x, out) and isinstance(divisor, int) and divisor > 0
    return a.make("floor_divide", (x,), (divisor,), x.shape, x.dtype) if fits else None


@translates("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _divide(a: Algebra, out: Out, x: Value, divisor: Any, *, rounding_mode: str | None = None) -> Translated:
    return _floor_divide(a, out, x, divisor) if rounding_mode == "floor" else None


@translates("aten.clamp.default")
def _clamp(a: Algebra, out: Out, x: Value, low: Any = None, high: Any = None) -> Translated:
    """Whole numbers between two others, infinite where there is no bound; "clip" for others."""
    if low == 0 and high is None and x.dtype == out.dtype and x.dtype not in WHOLE:
        return relu(a, out, x)
    limits = (-math.inf if low is None else low, math.inf if high is None else high)
    if not all(map(is_number, limits)) or x.dtype != out.dtype or x.dtype is None:
        return None
    if x.dtype.is_floating_point:
        return a.make("clip", (x,), tuple(map(float, limits)), x.shape, x.dtype)
    return a.make("clamp", (x,), limits, x.shape, x.dtype) if _is_whole(x, out) else None


@translates("aten.clamp_min.default")
def _clamp_min(a: Algebra, out: Out, x: Value, low: Any) -> Translated:
    return _clamp(a, out, x, low)


@translates("aten.clamp_max.default")
def _clamp_max(a: Algebra, out: Out, x: Value, high: Any) -> Translated:
    return _clamp(a, out, x, None, high)


@translates("aten.maximum.default")
def _maximum(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    """The larger of a tensor and the same number everywhere."""
    x, y = (y, x) if x.op == "full" else (x, y)
    bound = y.arg if y.op == "expand" else y
    return _clamp(a, out, x, bound.attrs[0]) if bound.op == "full" and x.shape == out.shape else None
