"""Below casts, roundings and factors: what a number was before."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from fusion.analysis.dtypes import is_rounding
from fusion.graph import Value
from fusion.graph.algebra import widens


def exact(x: Value) -> Value:
    """`x` before casts that keep every number."""
    while x.op == "cast" and widens(x.arg.dtype, x.dtype):
        x = x.arg
    return x


@dataclass(frozen=True)
class Rounded:
    """round(quotient) on the way to int8, and between which bounds."""

    quotient: Value
    low: float = -math.inf
    high: float = math.inf
    rounded: bool = False


def rounded(value: Value) -> Rounded:
    """What is cast to int8, below its rounding, its bounds and casts between floats."""
    if value.op == "round":
        return replace(rounded(value.arg), rounded=True)
    if value.op == "clip":
        found, (low, high) = rounded(value.arg), value.attrs
        return replace(found, low=max(found.low, low), high=min(found.high, high))
    if value.op == "reshape" or is_rounding(value):
        return rounded(value.arg)
    return Rounded(value)


def is_float(value: Value) -> bool:
    """Whether a value holds floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point


def unscaled(value: Value) -> tuple[Value, float]:
    """A value, and the number that it is multiplied by."""
    return (value.arg, value.attrs[0]) if value.op == "scale" else (value, 1.0)
