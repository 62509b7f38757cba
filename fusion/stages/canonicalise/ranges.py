"""Whole numbers within bounds: remainders, divisions that round down, clamps."""

from __future__ import annotations

import math
from typing import Any

from fusion.analysis.intervals import of_dtype
from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES
from fusion.stages.canonicalise.arithmetic import relu
from fusion.stages.canonicalise.translate import Out, Translated, is_number, translates


def _is_integer(x: Any, out: Out) -> bool:
    return isinstance(x, Value) and x.dtype in INDEX_DTYPES and out.dtype == x.dtype


@translates("aten.remainder.Scalar")
def _remainder(a: Algebra, out: Out, x: Value, divisor: Any) -> Translated:
    """x modulo a positive number, never negative itself."""
    fits = _is_integer(x, out) and isinstance(divisor, int) and 0 < divisor <= of_dtype(x.dtype)[1]
    return a.make("remainder", (x,), (divisor,), x.shape, x.dtype) if fits else None


@translates("aten.floor_divide.default")
def _floor_divide(a: Algebra, out: Out, x: Value, divisor: Any) -> Translated:
    fits = _is_integer(x, out) and isinstance(divisor, int) and 0 < divisor <= of_dtype(x.dtype)[1]
    return a.make("floor_divide", (x,), (divisor,), x.shape, x.dtype) if fits else None


@translates("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _divide(a: Algebra, out: Out, x: Value, divisor: Any, *, rounding_mode: str | None = None) -> Translated:
    return _floor_divide(a, out, x, divisor) if rounding_mode == "floor" else None


@translates("aten.clamp.default")
def _clamp(a: Algebra, out: Out, x: Value, low: Any = None, high: Any = None) -> Translated:
    """Whole numbers between two others, infinite where there is no bound; "clip" for others."""
    if low == 0 and high is None and x.dtype == out.dtype and x.dtype not in INDEX_DTYPES:
        return relu(a, out, x)
    limits = (-math.inf if low is None else low, math.inf if high is None else high)
    if not all(map(is_number, limits)) or x.dtype != out.dtype or x.dtype is None:
        return None
    if x.dtype.is_floating_point:
        return a.make("clip", (x,), tuple(map(float, limits)), x.shape, x.dtype)
    least, most = of_dtype(x.dtype)
    inside = all(math.isinf(each) or least <= each <= most for each in limits)
    return a.make("clamp", (x,), limits, x.shape, x.dtype) if _is_integer(x, out) and inside else None


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
