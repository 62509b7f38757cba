"""Interval arithmetic: bounds of all elements of an integer value, derived from how the value is computed.

remainder(x, m)  → 0 … m - 1          clamp(x, low, high)  → low … high          other ops from their arguments

A result that may overflow its dtype wraps round, and has the bounds of the dtype. Two assumptions: int64 inputs are
positions, sizes or slots, below 2^48 in magnitude; symbolic sizes are below 2^31, as no memory has more positions, so
that positions overflow only dtypes narrower than int32.
"""

from __future__ import annotations

import math

import torch

from fusion.analysis.dtypes import INTEGERS, is_integer
from fusion.graph import Value
from fusion.graph.dims import INDEX_DTYPES

_FAR = 2**48
_LARGEST = 2**31 - 1
Range = tuple[float, float]


def bounds(x: Value) -> Range:
    """Return bounds (low, high) of all elements of `x`, an integer tensor; infinite from 2^31 - 1 in magnitude."""
    low, high = _range(x)
    return -math.inf if low <= -_LARGEST else low, math.inf if high >= _LARGEST else high


def _range(x: Value) -> Range:
    computed = _computed(x)
    return computed if computed is not None and _fits(computed, x.dtype) else dtype_bounds(x.dtype)


def is_exact(x: Value) -> bool:
    """Return True if the integer result of `x` is proven not to overflow its dtype."""
    computed = _computed(x)
    return computed is not None and _fits(computed, x.dtype)


def keeps_integers(x: Value) -> bool:
    """Return True if `x` is a cast of integers to floats that is proven to round none of them."""
    if x.op != "cast" or x.dtype is None or not x.dtype.is_floating_point or not is_integer(x.arg):
        return False
    low, high = bounds(x.arg)
    return max(-low, high) <= 2 / torch.finfo(x.dtype).eps


def uncast(x: Value, *through: str) -> Value:
    """Strip casts between index dtypes that change no element of `x`, and ops named in `through`."""
    while x.op in through or (x.op == "cast" and {x.arg.dtype, x.dtype} <= INDEX_DTYPES and is_exact(x)):
        x = x.arg
    return x


def dtype_bounds(dtype: torch.dtype | None) -> Range:
    """Return the bounds of all numbers of `dtype`: ±2^48 for int64, and for dtypes that are no integers."""
    if dtype is torch.bool:
        return 0, 1
    if dtype not in INTEGERS or dtype is torch.int64:
        return -_FAR, _FAR
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _fits(interval: Range, dtype: torch.dtype | None) -> bool:
    if dtype not in INTEGERS:
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= interval[0] <= interval[1] <= limits.max


def _computed(x: Value) -> Range | None:
    """Return bounds of the result of `x` before it wraps round in its dtype; None if they are unknown."""
    match x.op:
        case "constant":
            return min(x.attrs[0], default=0), max(x.attrs[0], default=0)
        case "full":
            return x.attrs[0], x.attrs[0]
        case "number":
            size = x.attrs[0]
            return (size, size) if isinstance(size, int) else (0 if size.is_nonnegative else -_LARGEST, _LARGEST)
        case "arange":
            return _counted(x)
        case "largest_index" | "stable_largest_index":
            size = x.arg.shape[-1]
            return 0, size - 1 if isinstance(size, int) else _LARGEST
        case "first_greatest":
            size = x.arg.shape[x.attrs[0] if x.attrs else -1]
            return 0, size - 1 if isinstance(size, int) else _LARGEST
        case "ascending_index":
            size = x.shape[x.attrs[0]]
            return 0, size - 1 if isinstance(size, int) else _LARGEST
        case "reshape" | "expand" | "permute" | "slice" | "narrow" | "index" | "take" | "ascending":
            return _range(x.arg)
        case "cast":
            return _range(x.arg) if is_integer(x.arg) or x.arg.dtype is torch.bool else None
        case _:
            return _arithmetic(x)


def _arithmetic(x: Value) -> Range | None:
    match x.op:
        case "shift":
            low, high = _range(x.arg)
            return low + x.attrs[0], high + x.attrs[0]
        case "scale":
            return _scaled(_range(x.arg), x.attrs[0])
        case "cumsum":
            size = x.shape[x.attrs[0]]
            low, high = _range(x.arg)
            most = size if isinstance(size, int) else _LARGEST
            return min(low, low * most), max(high, high * most)
        case "add":
            (low, high), (least, most) = map(_range, x.args)
            return low + least, high + most
        case "where" | "cat":
            lows, highs = zip(*map(_range, x.args[1:] if x.op == "where" else x.args), strict=True)
            return min(lows), max(highs)
        case "floor_divide":
            low, high = _range(x.arg)
            return low // x.attrs[0], high // x.attrs[0]
        case "remainder":
            return 0, (x.attrs[0] if isinstance(x.attrs[0], int) else _LARGEST) - 1
        case "clamp":
            low, high = _range(x.arg)
            least, most = x.attrs
            return min(max(low, least), most), min(max(high, least), most)
        case _:
            return None


def _scaled(interval: Range, factor: float) -> Range:
    ends = sorted(each * factor for each in interval)
    return ends[0], ends[1]


def _counted(x: Value) -> Range:
    start, step = x.attrs
    size = x.shape[0] if isinstance(x.shape[0], int) else _LARGEST
    last = start + step * max(size - 1, 0)
    return min(start, last), max(start, last)
