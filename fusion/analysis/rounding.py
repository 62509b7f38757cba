"""Below casts, roundings and factors: what a number was before."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.graph import Value
from fusion.graph.algebra import widens


def exact(x: Value) -> Value:
    """`x` before casts that keep every number."""
    while x.op == "cast" and widens(x.arg.dtype, x.dtype):
        x = x.arg
    return x


_WHOLE = frozenset({torch.int16, torch.int32, torch.int64})


@dataclass(frozen=True)
class Rounded:
    """round(quotient) on the way to int8, and between which bounds.

    `cut` says that fractions were cut off before anything rounded them, `unbounded` that dtypes of whole numbers held
    the quotient before it was bounded by what they hold.
    """

    quotient: Value
    low: float = -math.inf
    high: float = math.inf
    rounded: bool = False
    cut: bool = False
    unbounded: bool = False


def rounded(value: Value) -> Rounded:
    """What is cast to int8, below its rounding, its bounds and casts between floats and whole numbers."""
    passed = value.op == "reshape" or is_rounding(value) or (value.op == "cast" and value.arg.dtype in _WHOLE)
    if value.op not in ("round", "clip", "clamp", "trunc") and not (passed or _becomes_whole(value)):
        return Rounded(value)
    found = rounded(value.arg)
    match value.op:
        case "round":
            return replace(found, rounded=not found.cut)
        case "clip" | "clamp":
            low, high = value.attrs
            return replace(found, low=max(found.low, low), high=min(found.high, high))
        case _ if value.op == "trunc" or _becomes_whole(value):
            return _cut_off(found, value.dtype)
        case _:
            return found


def _becomes_whole(value: Value) -> bool:
    return value.op == "cast" and value.dtype in _WHOLE and is_float(value.arg)


def _cut_off(found: Rounded, dtype: torch.dtype | None) -> Rounded:
    """Without fractions, which what was rounded has not, perhaps in a dtype of whole numbers."""
    beyond = dtype in _WHOLE and not torch.iinfo(dtype).min <= found.low <= found.high <= torch.iinfo(dtype).max
    return replace(found, cut=found.cut or not found.rounded, unbounded=found.unbounded or beyond)


def is_float(value: Value) -> bool:
    """Whether a value holds floating-point numbers."""
    return value.dtype is not None and value.dtype.is_floating_point


def unscaled(value: Value) -> tuple[Value, float]:
    """A value, and the number that it is multiplied by."""
    return (value.arg, value.attrs[0]) if value.op == "scale" else (value, 1.0)
