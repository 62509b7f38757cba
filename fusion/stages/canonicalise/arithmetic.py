"""Arithmetic: sums, products, powers, elementwise functions, and clamps."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from fusion.analysis.dtypes import INTEGERS, is_exact, is_integer, rounded_number
from fusion.analysis.intervals import bounds, dtype_bounds
from fusion.analysis.lower_bounds import absorbs, is_above
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value
from fusion.graph.algebra import LONGEST, is_input_free
from fusion.graph.comparisons import moved
from fusion.graph.dims import INDEX_DTYPES, is_symbolic
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise.translators import Out, Translated, is_number, promote, translates, translations


def _converted(out: Out, number: Any) -> Any:
    """Return `number` as torch converts it to the dtype of `out`, if that is an integer one; unproven if too long."""
    if out.dtype not in INTEGERS:
        return number
    converted = proven(rounded_number(number, out.dtype))
    must(abs(converted) < LONGEST)
    return converted


def _factors(a: Algebra, out: Out, x: Any, y: Any) -> tuple[Any, Any]:
    """Cast `x` and `y` to the dtype of `out`; a 0-d constant of floats among them becomes a number."""
    x, y = promote(a, out, x, y)
    if _is_number(y) and isinstance(x, Value):
        return x, y.attrs[0]
    return (x.attrs[0], y) if _is_number(x) and isinstance(y, Value) else (x, y)


def _is_number(x: Any) -> bool:
    if not isinstance(x, Value) or (x.op, x.shape) != ("full", ()):
        return False
    return is_float(x) and math.isfinite(x.attrs[0]) and x.attrs[0] != 0


def _is_zero(x: Any) -> bool:
    if not isinstance(x, Value):
        return False
    below = x.below("expand", "reshape", "cast")
    return (below.op, below.attrs) == ("full", (0,))


@translates("aten.mul.Tensor", "aten.mul.Scalar")
def mul(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    """Translate x · y; a number among them becomes the factor of `scale`."""
    x, y = _factors(a, out, x, y)
    if is_number(x):
        x, y = y, x
    if is_number(y):
        return a.scale(x, _converted(out, y))
    return a.mul(x, y) if isinstance(x, Value) and isinstance(y, Value) else None


@translates("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    """Translate x / y to x · y⁻¹, or to `scale` of x by 1 / y for a number y.

    Return None, which leaves the call untranslated, if y is 0, or if x depends on no input and float32 rounds y.
    """
    x, y = _factors(a, out, x, y)
    if is_number(y):
        rounded = is_input_free(x) and not is_exact(y, torch.float32)  # torch rounds y before it divides
        return a.scale(x, 1 / y) if y and not rounded else None
    must(isinstance(y, Value))
    inverse = a.power(y, -1)
    return a.scale(inverse, x) if is_number(x) else a.mul(x, inverse)


@translates("aten.add.Tensor", "aten.add.Scalar")
def add(a: Algebra, out: Out, x: Any, y: Any, alpha: Any = 1, sign: int = 1) -> Translated:
    """Translate x + sign · alpha · y.

    The result is an operand itself where the other one is 0 everywhere, or a number too small to change any element.
    """
    x, y = promote(a, out, x, y)
    for same, other in ((x, y), (y, x)) if alpha == 1 else ():
        if isinstance(same, Value) and same.shape == out.shape and _is_zero(other) and (same is x or sign == 1):
            return same
    must(is_number(alpha))
    if is_symbolic(x) or is_symbolic(y):
        must(out.dtype is torch.int64)
        return moved(a, x, sign * alpha * y) if isinstance(x, Value) else moved(a, a.scale(y, sign * alpha), x)
    factor = _converted(out, sign * alpha)
    if is_number(x):
        x, y, factor = (a.scale(y, factor) if isinstance(y, Value) else y), x, 1
    if is_number(y):
        return x if absorbs(x, factor * y) else a.shift(x, _converted(out, factor * y))
    return a.add(x, a.scale(y, factor)) if isinstance(x, Value) and isinstance(y, Value) else None


def _power(a: Algebra, out: Out, x: Value, exponent: Any) -> Translated:
    return a.power(a.cast(x, out.dtype), exponent) if is_number(exponent) else None


def _power_of(a: Algebra, out: Out, base: Any, x: Value) -> Translated:
    """Translate base ** x, where `base` is a number or a constant tensor."""
    if isinstance(base, Value):
        base = base.below("reshape", "expand")
        must(base.op == "full")
        base = _converted(out, base.attrs[0])
    must(is_number(base) and proven(out.dtype).is_floating_point)
    return a.make("power_of", (a.cast(x, out.dtype),), (float(base),), out.shape, out.dtype)


def _relu(a: Algebra, x: Value) -> Value:
    """Build max(x, 0); a positive scale of `x` is moved outside."""
    if x.op == "scale" and x.attrs[0] > 0:
        return a.scale(a.unary("relu", x.arg), x.attrs[0])
    return a.unary("relu", x)


def _addcmul(a: Algebra, out: Out, x: Value, y: Value, z: Value, value: float = 1) -> Translated:
    x, y, z = promote(a, out, x, y, z)
    return a.add(x, a.scale(proven(a.mul(y, z)), value))


@translates("prims.fma.default")
def _fma(a: Algebra, out: Out, x: Any, y: Any, z: Any) -> Translated:
    return add(a, out, mul(a, out, x, y), z)


def _function(op: str, a: Algebra, out: Out, x: Value) -> Translated:
    return a.unary(op, a.cast(x, out.dtype))


def _by_divisor(op: str, a: Algebra, out: Out, x: Any, divisor: Any) -> Translated:
    """Translate `op` of x and a positive int, a remainder or a floor division, or a remainder by a symbolic size.

    A remainder of 0 <= x < divisor, and a quotient by 1, is x itself.

    """
    must(isinstance(x, Value))
    if op == "remainder" and is_symbolic(divisor):
        must(x.dtype in INDEX_DTYPES and divisor.is_positive)
        return _elementwise(a, op, x, (divisor,))
    must(x.dtype in INDEX_DTYPES and isinstance(divisor, int) and 0 < divisor <= dtype_bounds(x.dtype)[1])
    low, high = bounds(x)
    is_same = 0 <= low <= high < divisor if op == "remainder" else divisor == 1
    return x if is_same else _elementwise(a, op, x, (divisor,))


def _elementwise(a: Algebra, op: str, x: Value, attrs: tuple[Any, ...]) -> Value:
    """Build the elementwise `op` of integers `x`; an `expand` of `x` is moved outside."""
    if x.op == "expand":
        return a.expand(_elementwise(a, op, x.arg, attrs), x.shape)
    return a.make(op, (x,), attrs, x.shape, x.dtype)


_floor_divide = partial(_by_divisor, "floor_divide")


@translates("aten.div.Tensor_mode", "aten.div.Scalar_mode")
def _divide(a: Algebra, out: Out, x: Value, divisor: Any, *, rounding_mode: str | None = None) -> Translated:
    must(rounding_mode == "floor" or (rounding_mode == "trunc" and is_integer(x) and bounds(x)[0] >= 0))
    return _floor_divide(a, out, x, divisor)


def _clip(a: Algebra, x: Value, low: float, high: float) -> Value:
    """Build floats `x` clipped to [low, high].

    Nested clips become one; a lower bound alone is dropped where `x` is proven to be above it.
    """
    if x.op == "clip" and low <= high and x.attrs[0] <= x.attrs[1]:
        x, (low, high) = x.arg, (min(max(each, low), high) for each in x.attrs)
    if high == math.inf and is_above(x, low):
        return x
    return a.make("clip", (x,), (low, high), x.shape, x.dtype)


@translates("aten.clamp.default", "aten.clamp_min.default")
def _clamp(a: Algebra, out: Out, x: Value, low: Any = None, high: Any = None) -> Translated:
    """Translate a clamp of integers to "clamp", of floats to "clip", or to `relu` where 0 is the only bound.

    A missing bound is infinite.
    """
    if low == 0 and high is None and x.dtype not in INDEX_DTYPES:
        return _relu(a, x)
    limits = (-math.inf if low is None else low, math.inf if high is None else high)
    must(all(map(is_number, limits)))
    if proven(x.dtype).is_floating_point:
        return _clip(a, x, *map(float, limits))
    must(x.dtype in INDEX_DTYPES)  # narrower integers wrap round
    return _elementwise(a, "clamp", x, limits)


def _bounded(a: Algebra, x: Value, y: Value) -> tuple[Value, Any] | None:
    """Return (the other operand, the number) if one of `x` and `y` is one number everywhere; None if neither is."""
    for value, other in ((x, y), (y, x)):
        bound = other.below("expand")
        if bound.op == "full":
            return value, bound.attrs[0]
    return None


@translates("aten.maximum.default")
def _maximum(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    """Translate the maximum of a tensor and a constant to a clamp, of -min(x) and max(x) to max |x|."""
    bounded = _bounded(a, x, y)
    if bounded is not None:
        return _clamp(a, out, *bounded)
    return _magnitude(a, out, x, y) or _magnitude(a, out, y, x)


def _magnitude(a: Algebra, out: Out, negated: Value, largest: Value) -> Translated:
    if negated.op != "abs" and (negated.op, negated.attrs) != ("scale", (-1.0,)):
        return None
    low, high = negated.arg.below("reshape"), largest.below("abs", "reshape")
    low = low.arg.below("reshape") if low.op == "clip" and low.attrs == (-math.inf, 0.0) else low
    high = high.arg.below("reshape") if high.op == "relu" else high
    alike = (low.op, high.op) == ("least", "greatest") and (low.args, low.attrs) == (high.args, high.attrs)
    return a.reshape(a.reduce("greatest", a.unary("abs", high.arg), high.attrs), out.shape) if alike else None


@translates("aten.softplus.default")
def _softplus(a: Algebra, out: Out, x: Value, beta: float = 1, threshold: float = 20) -> Translated:
    """Translate log(1 + exp(x)), which torch takes as x above 20, where both round to the same number."""
    must((beta, threshold) == (1, 20))
    return a.unary("softplus", a.cast(x, out.dtype))


@translates("aten.minimum.default")
def _minimum(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    """Translate the minimum of a tensor and a constant to a clamp."""
    value, bound = proven(_bounded(a, x, y))
    return _clamp(a, out, value, None, bound)


translations(
    {
        "aten.sub.Tensor aten.sub.Scalar": partial(add, sign=-1),
        "aten.rsub.Scalar aten.rsub.Tensor": lambda a, out, x, y, alpha=1: add(a, out, y, x, alpha, sign=-1),
        "aten.neg.default": lambda a, out, x: a.scale(x, -1),
        "aten.addcmul.default": _addcmul,
        "aten.pow.Tensor_Scalar": _power,
        "aten.pow.Scalar aten.pow.Tensor_Tensor": _power_of,
        "aten.square.default": partial(_power, exponent=2),
        "aten.sqrt.default": partial(_power, exponent=0.5),
        "aten.rsqrt.default": partial(_power, exponent=-0.5),
        "aten.reciprocal.default": partial(_power, exponent=-1),
        "aten.log2.default": lambda a, out, x: a.scale(a.unary("log", a.cast(x, out.dtype)), 1 / math.log(2)),
        "aten.relu.default": lambda a, out, x: _relu(a, x),
        "aten.silu.default": lambda a, out, x: a.mul(x, a.unary("sigmoid", x)),
        "aten.gelu.default": lambda a, out, x, approximate="none": a.make(
            "gelu", (x,), (approximate,), x.shape, x.dtype
        ),
        "aten.remainder.Scalar": partial(_by_divisor, "remainder"),
        "aten.floor_divide.default": _floor_divide,
        "aten.clamp_max.default": lambda a, out, x, high: _clamp(a, out, x, None, high),
        "aten.fmod.Scalar": lambda a, out, x, divisor: a.make("fmod", (x,), (divisor,), out.shape, out.dtype),
        **{
            f"aten.{op}.default": partial(_function, op)
            for op in ("sigmoid", "cos", "sin", "tanh", "log", "abs", "round", "trunc")
        },
    }
)
