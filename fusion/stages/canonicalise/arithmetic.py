"""Arithmetic: sums, products, powers and functions of single elements."""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.dtypes import INTEGERS, held_number, is_exact
from fusion.graph import Algebra, Value
from fusion.graph.algebra import LONGEST, of_constants
from fusion.stages.canonicalise.translate import Out, Translated, is_number, promote, translates


def _held(out: Out, number: Any) -> Any:
    """A number as whole numbers of the result's dtype are computed with; None for those too long to be exact."""
    if out.dtype not in INTEGERS:
        return number
    kept = held_number(number, out.dtype)
    return kept if kept is not None and abs(kept) < LONGEST else None


@translates("aten.mul.Tensor", "aten.mul.Scalar")
def mul(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    """x · y."""
    x, y = promote(a, out, x, y)
    if is_number(x):
        x, y = y, x
    if is_number(y):
        factor = _held(out, y)
        return None if factor is None else a.scale(x, factor)
    return a.mul(x, y) if isinstance(x, Value) and isinstance(y, Value) else None


@translates("aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor")
def div(a: Algebra, out: Out, x: Any, y: Any) -> Translated:
    """x / y."""
    x, y = promote(a, out, x, y)
    if is_number(y):
        rounded = of_constants(x) and not is_exact(y, torch.float32)  # before it divides
        return a.scale(x, 1 / y) if y and not rounded else None
    if not isinstance(y, Value):
        return None
    inverse = a.power(y, -1)
    return a.scale(inverse, x) if is_number(x) else a.mul(x, inverse)


@translates("aten.add.Tensor", "aten.add.Scalar")
def add(a: Algebra, out: Out, x: Any, y: Any, alpha: Any = 1) -> Translated:
    """x + alpha · y."""
    x, y = promote(a, out, x, y)
    factor = _held(out, alpha) if is_number(alpha) else None
    if factor is None:
        return None
    if is_number(x):
        x, y, factor = (a.scale(y, factor) if isinstance(y, Value) else y), x, 1
    if is_number(y):
        offset = _held(out, factor * y)
        return None if offset is None else a.shift(x, offset)
    return a.add(x, a.scale(y, factor)) if isinstance(x, Value) and isinstance(y, Value) else None


@translates("aten.sub.Tensor", "aten.sub.Scalar")
def sub(a: Algebra, out: Out, x: Any, y: Any, alpha: Any = 1) -> Translated:
    """x - alpha · y."""
    return add(a, out, x, y, -alpha) if is_number(alpha) else None


@translates("aten.rsub.Scalar", "aten.rsub.Tensor")
def rsub(a: Algebra, out: Out, x: Any, y: Any, alpha: Any = 1) -> Translated:
    """y - alpha · x."""
    return add(a, out, y, x, -alpha) if is_number(alpha) else None


@translates("aten.neg.default")
def neg(a: Algebra, out: Out, x: Value) -> Translated:
    """-x."""
    return a.scale(x, -1)


@translates("aten.addcmul.default")
def addcmul(a: Algebra, out: Out, x: Value, y: Value, z: Value, value: float = 1) -> Translated:
    """x + value · y · z."""
    x, y, z = promote(a, out, x, y, z)
    product = a.mul(y, z)
    return None if product is None else a.add(x, a.scale(product, value))


@translates("aten.pow.Tensor_Scalar")
def power(a: Algebra, out: Out, x: Value, exponent: Any) -> Translated:
    """x ** exponent."""
    return a.power(a.cast(x, out.dtype), exponent) if is_number(exponent) else None


def _power_of(exponent: float) -> Any:
    def translate(a: Algebra, out: Out, x: Value) -> Translated:
        return a.power(a.cast(x, out.dtype), exponent)

    return translate


translates("aten.square.default")(_power_of(2))
translates("aten.sqrt.default")(_power_of(0.5))
translates("aten.rsqrt.default")(_power_of(-0.5))
translates("aten.reciprocal.default")(_power_of(-1))


def _function(op: str) -> Any:
    def translate(a: Algebra, out: Out, x: Value) -> Translated:
        return a.unary(op, a.cast(x, out.dtype))

    return translate


for _name in ("sigmoid", "cos", "sin", "tanh", "log"):
    translates(f"aten.{_name}.default")(_function(_name))


@translates("aten.relu.default")
def relu(a: Algebra, out: Out, x: Value) -> Translated:
    """max(x, 0), with a positive factor outside."""
    if x.op == "scale" and x.attrs[0] > 0:
        return a.scale(a.unary("relu", x.arg), x.attrs[0])
    return a.unary("relu", x)


@translates("aten.silu.default")
def silu(a: Algebra, out: Out, x: Value) -> Translated:
    """x · sigmoid(x)."""
    return a.mul(x, a.unary("sigmoid", x))
