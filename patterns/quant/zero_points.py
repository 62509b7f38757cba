"""Zero points of int8 numbers: int8(round(x / s + z)), or int8(round(x / s) + z) for a whole z."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from fusion.analysis.dtypes import is_integer
from fusion.analysis.rounding import Rounded, rounded
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import proven

_VIEWS = ("reshape", "permute", "expand", "slice")


def rounded_last(a: Algebra, value: Value) -> Rounded:
    """Strip roundings, clips and casts from `value` as `rounded` does, and add a whole zero point before the rounding.

    round(x) + z is round(x + z) for a whole z, except where x is halfway between two integers: the sum may be rounded
    to the other of them.
    """
    outer = rounded(value)
    for rest, zero in addends(outer.quotient):
        inner = rounded(rest)
        if not (is_integral(zero) and inner.rounded and is_unbounded(inner) and inner.quotient.shape == rest.shape):
            continue
        below = inner.quotient
        total = a.add(below, a.cast(zero, below.dtype)) if isinstance(zero, Value) else a.shift(below, zero)
        return replace(outer, quotient=proven(total), rounded=True, cut=False)
    return outer


def addends(value: Value) -> Iterator[tuple[Value, Value | float]]:
    """Yield each split of the sum `value` into a rest and an addend, a number or a value; nothing for other values."""
    if value.op == "shift":
        yield value.arg, float(value.attrs[0])
    if value.op == "add":
        x, y = value.args
        yield from ((x, y), (y, x))


def is_integral(zero: Value | float) -> bool:
    """Return True if `zero` is a whole number, or is proven to hold whole numbers alone: it is cast from integers."""
    if not isinstance(zero, Value):
        return float(zero).is_integer()
    while zero.op in ("cast", *_VIEWS) and not is_integer(zero):
        zero = zero.arg
    return is_integer(zero)


def is_unbounded(below: Rounded) -> bool:
    """Return True if neither a clip nor a cast to integers bounds the numbers that `below` rounds."""
    return (below.low, below.high) == (-math.inf, math.inf) and not below.unbounded
