"""Rows in int8 with a scale of their own: s = max|x| / 127, q = int8(round(x / s)).

Of s it does not matter where factors, casts, a bound below or the replacement of zeros stand; of q, on which side of
the rounding the bounds of int8 are: |x| / s is never above 127. A bound below the scale changes rows alone that are as
good as zeros (`FAINT`), where fewer whole numbers are told apart than could be.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion.analysis.rounding import Rounded, exact, is_float, unscaled
from fusion.graph import Algebra, Reading, Value

LARGEST = 127
_NARROW = (torch.float16, torch.bfloat16)
_SCALED = ("reshape", "expand", "cast", "scale", "clip", "shift")
UNSCALED = "numbers are rounded to int8 without a scale that is the largest of their row"
FAINT = 1e-5
"""A scale up to which a row counts as zeros: the least that quantisation code keeps scales at."""


@dataclass(frozen=True)
class _Scale:
    """factor · max|x| over the last dim, at least `least`; `odd` says what the operator does not do."""

    x: Value
    factor: float = 1.0
    least: float = 0.0
    narrow: bool = False
    odd: str = ""

    def times(self, factor: float) -> _Scale:
        """The scale · a number."""
        return replace(self, factor=self.factor * factor, least=self.least * factor)


def _scale(value: Value) -> _Scale | None:
    """What scale of rows `value` is; None where it is none at all."""
    if value.op == "greatest" and value.arg.op == "abs":
        one = value.attrs == (-1,)
        odd = "" if one else "one scale is shared by several tokens: the operator gives each token its own"
        return _Scale(exact(value.arg.arg), narrow=value.dtype in _NARROW, odd=odd)
    if value.op == "where":
        return _without_zeros(value)
    found = _scale(value.arg) if value.op in _SCALED and is_float(value) else None
    if found is None:
        return None
    found = replace(found, narrow=value.dtype in _NARROW)
    match value.op:
        case "scale":
            return found.times(value.attrs[0])
        case "clip" if math.isinf(value.attrs[1]) and found.factor > 0:
            return replace(found, least=max(found.least, value.attrs[0]))
        case "clip":
            return replace(found, odd="the scale has an upper bound, which the operator does not keep")
        case "shift":
            return replace(found, odd="a number is added to the scale, where the operator divides by the scale itself")
        case _:
            return found


def _without_zeros(value: Value) -> _Scale | None:
    """A scale in which another number stands where it is 0: such a row is quantised to zeros in any case."""
    condition, other, kept = value.args
    if (condition.op, condition.attrs, other.op) != ("compare", ("eq",), "full"):
        return None
    compared, zero = condition.args
    asked, found = _scale(compared), _scale(kept)
    if asked is None or found is None or (zero.op, zero.attrs) != ("full", (0,)):
        return None
    return found if (asked.x, asked.odd, asked.factor != 0) == (found.x, "", True) else None


def dynamic(a: Algebra, below: Rounded) -> tuple[Reading, Value, Reading] | str | None:
    """Rows in whole numbers, with their scale; why what is rounded is not that; None if nothing is like it."""
    if below.quotient.op in ("add", "shift") and any(each.op == "round" for each in below.quotient.args):
        return "a zero point is added to whole numbers, where those of the operator are symmetric"
    quotient, outside = unscaled(below.quotient)
    if quotient.op != "mul" or (not below.rounded and not _scale_in(quotient)):
        return None
    for divisor, dividend in (quotient.args, quotient.args[::-1]):
        inverse, factor = unscaled(divisor)
        scale = _scale(inverse.arg) if inverse.op == "power" and inverse.attrs == (-1.0,) else None
        if scale is None:
            continue
        x, more = unscaled(dividend)
        times = outside * factor * more
        if not times or not scale.factor:
            return "the rows are multiplied by 0, or divided by 0"
        scale, x = scale.times(1 / times), exact(x)
        base, number = unscaled(scale.x)
        if number and base is x:  # a number that stands behind the quotient here, and inside its scale
            scale, x, times = scale.times(number), scale.x, _near(times / number)
        reason = _unproven(below, scale, x, inverse.below("expand").shape)
        if reason:
            return reason
        s = a.scale(inverse.arg, 1 / times)
        s = a.reshape(s, (*x.shape[:-1], 1)) if math.prod(s.shape) == math.prod(x.shape[:-1]) else s
        how = {"x": x, "dtype": s.dtype}
        return Reading("quantise", {**how, "scale": s, "scheme": "dynamic"}), s, Reading("token_scale", how)
    return UNSCALED


def _near(number: float) -> float:
    """The whole number that a quotient of two numbers stands for, if it is one but for its rounding."""
    nearest = round(number)
    return float(nearest) if math.isclose(number, nearest, rel_tol=1e-12) else number


def _scale_in(quotient: Value) -> bool:
    factors = [unscaled(each)[0] for each in quotient.args]
    return any(each.op == "power" and _scale(each.arg) is not None for each in factors)


def _unproven(below: Rounded, scale: _Scale, x: Value, divisor: Sequence[Any]) -> str:
    """Why rows divided so, by numbers of that shape, are not what the operator gives, "" if they are."""
    others = "rows are divided by the scale of others"
    if scale.x.below("reshape") is not x.below("reshape") or scale.x.shape[-1:] != x.shape[-1:]:
        return others
    if scale.odd:
        return scale.odd
    if (1,) * (x.rank - len(divisor)) + tuple(divisor) != (*x.shape[:-1], 1):
        return others
    if not math.isclose(scale.factor * LARGEST, 1, rel_tol=1e-6):
        return f"the largest number of a row becomes {1 / scale.factor:g}, by the operator {LARGEST}"
    if not below.rounded:
        return "numbers are cut off toward zero, where the operator rounds to the nearest"
    if below.low > -LARGEST or below.high < LARGEST:
        return f"whole numbers are bounded by {below.low:g} and {below.high:g}, those of the operator by {LARGEST}"
    if scale.narrow and below.high > LARGEST:
        return "a scale of 16 bits is rounded, so that without a bound a row may leave int8"
    if scale.least > FAINT * (1 + 1e-6):
        return f"scales are at least {scale.least:g}: more rows than those that are as good as zeros would change"
    return ""
