"""Identities: products and sums that equal a simpler expression. Operands are matched in the order of the arguments."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from fusion.graph.value import Value

if TYPE_CHECKING:
    from fusion.graph.algebra import Algebra


def softmax(a: Algebra, numerator: Value, inverse: Value) -> Value | None:
    """Return softmax(x) for `numerator` = exp(x) and `inverse` = 1 / Σ exp(x) over one dim, which subtracts nothing
    before exp.

    None for other operands.
    """
    total = inverse.arg if inverse.op == "scale" else inverse
    if numerator.op != "exp" or total.op != "power" or total.arg.op != "mean" or total.arg.arg is not numerator:
        return None
    axes = total.arg.attrs
    summed = a.sum(numerator, axes)
    if len(axes) != 1 or summed is None or inverse is not a.power(summed, -1):
        return None
    return a.softmax(numerator.arg, axes[0], "nan", "nothing")


def below_greatest(x: Value, axis: int) -> Value | None:
    """Return the z of x = z - max(z) along `axis`, a negative axis; None for any other `x`."""
    for z, minus in x.operands("add"):
        greatest = minus.arg if (minus.op, minus.attrs) == ("scale", (-1.0,)) else minus
        if (greatest.op, greatest.attrs, greatest.args) == ("greatest", (axis,), (z,)):
            return z
    return None


def normalised(a: Algebra, x: Value, root: Value) -> tuple[Value, Value] | None:
    """Return `x` and (mean(x²) + eps)^e for x = s·z and `root` = (mean(z²)·s² + eps)^e; None for other operands."""
    if x.op != "scale" or root.op != "power" or root.arg.op != "shift" or root.arg.arg.op != "scale":
        return None
    average, factor = root.arg.arg.arg, root.arg.arg.attrs[0]
    if average.op != "mean" or average.arg.op != "power" or average.arg.attrs != (2.0,):
        return None
    if average.arg.arg is not x.arg or not math.isclose(factor, x.attrs[0] ** 2, rel_tol=1e-12):
        return None
    square = a.make("power", (x,), (2.0,), x.shape, x.dtype)
    return x, a.power(a.shift(a.mean(square, average.attrs), *root.arg.attrs), *root.attrs)


def variance(a: Algebra, squares: Value, other: Value) -> Value | None:
    """Return mean((x - mean(x))²) for `squares` = mean(x²) and `other` = -mean(x)²; None for other operands."""
    if other.op != "scale" or other.attrs != (-1.0,) or other.arg.op != "power" or other.arg.attrs != (2.0,):
        return None
    average = other.arg.arg
    if average.op != "mean" or squares is not a.mean(a.power(average.arg, 2), average.attrs):
        return None
    return _about(a, average)


def second_moment(a: Algebra, spread: Value, other: Value) -> Value | None:
    """Return mean(x²) for `spread` = mean((x - mean(x))²) and `other` = mean(x)²; None for other operands."""
    if (other.op, other.attrs) != ("power", (2.0,)) or other.arg.op != "mean" or spread.op != "mean":
        return None
    average = other.arg
    return a.mean(a.power(average.arg, 2), average.attrs) if spread is _about(a, average) else None


def _about(a: Algebra, average: Value) -> Value | None:
    """Build mean((x - average)²) over the same dims, where `average` is mean(x)."""
    centred = a.add(average.arg, a.scale(average, -1))
    return centred and a.mean(a.power(centred, 2), average.attrs)


def gain(a: Algebra, x: Value, product: Value) -> tuple[Value, Value] | None:
    """Return the factors x and 1 + w of the sum x + x·w, where w has one entry per channel; None for other operands."""
    if product.op != "mul" or x not in product.args:
        return None
    weight = product.args[1] if product.args[0] is x else product.args[0]
    per_channel = all(size == 1 for size in weight.shape[:-1])
    return (x, a.shift(weight, 1)) if per_channel else None
