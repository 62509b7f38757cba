"""Values stripped of casts, of roundings to int8, and of constant factors."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.graph import Value
from fusion.graph.algebra import widens


def exact(x: Value) -> Value:
    """Strip casts to wider dtypes from `x`."""
    while x.op == "cast" and widens(x.arg.dtype, x.dtype):
        x = x.arg
    return x


_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Rounded:
    """The operand of a rounding to int8, with its modes.

    Attributes:
        quotient: the value before it is rounded and clipped.
        low: the lower bound to which the value is clipped.
        high: the upper bound.
        rounded: True if it is rounded to the nearest integer.
        cut: True if its fractions are truncated without a rounding before.
        unbounded: True if it is cast to an integer dtype before it is clipped to the range of that dtype.
    """

    quotient: Value
    low: float = -math.inf
    high: float = math.inf
    rounded: bool = False
    cut: bool = False
    unbounded: bool = False


def rounded(value: Value) -> Rounded:
    """Strip roundings, clips, reshapes and casts from the operand `value` of a cast to int8, and record their modes."""
    passed = value.op == "reshape" or is_rounding(value) or (value.op == "cast" and value.arg.dtype in _INTEGERS)
    if value.op not in ("round", "clip", "clamp", "trunc") and not (passed or _truncates(value)):
        return Rounded(value)
    below = rounded(value.arg)
    match value.op:
        case "round":
            return replace(below, rounded=not below.cut)
        case "clip" | "clamp":
            low, high = value.attrs
            return replace(below, low=max(below.low, low), high=min(below.high, high))
        case _ if value.op == "trunc" or _truncates(value):
            return _truncated(below, value.dtype)
        case _:
            return below


def _truncates(value: Value) -> bool:
    """Return True if `value` is a cast of floats to one of the dtypes `_INTEGERS`."""
    return value.op == "cast" and value.dtype in _INTEGERS and is_float(value.arg)


def _truncated(below: Rounded, dtype: torch.dtype | None) -> Rounded:
    """Return `below` with a cast to the integer `dtype` on top: `cut` is set unless it was rounded, and `unbounded` if
    the bounds of `below` are not within `dtype`.
    """
    beyond = dtype in _INTEGERS and not torch.iinfo(dtype).min <= below.low <= below.high <= torch.iinfo(dtype).max
    return replace(below, cut=below.cut or not below.rounded, unbounded=below.unbounded or beyond)


def is_float(value: Value) -> bool:
    """Return True if the dtype of `value` is a floating-point dtype."""
    return value.dtype is not None and value.dtype.is_floating_point


def unscaled(value: Value) -> tuple[Value, float]:
    """Split `value` into (x, factor) with `value` = x · factor, for a constant factor; 1.0 if there is none."""
    return (value.arg, value.attrs[0]) if value.op == "scale" else (value, 1.0)
