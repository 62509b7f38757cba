"""Intervals: between which whole numbers every element of a value lies, as far as how it was computed tells.

remainder(x, m)  → 0 … m - 1          clamp(x, low, high)  → low … high          everything else from its arguments

What its dtype cannot hold wraps round, and is known to lie within the dtype only. Two things are assumed. Numbers of
int64 that only the inputs know are positions, sizes or slots, below 2^48. Symbolic sizes are below 2^31: more positions
fill no memory. So counting them wraps round in dtypes narrower than int32 alone.
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
    """The least and the greatest number that `x`, a tensor of whole numbers, can hold; infinite beyond all sizes."""
    low, high = _lies(x)
    return -math.inf if low <= -_LARGEST else low, math.inf if high >= _LARGEST else high


def _lies(x: Value) -> Range:
    found = _computed(x)
    return found if found is not None and _fits(found, x.dtype) else of_dtype(x.dtype)


def is_exact(x: Value) -> bool:
    """Whether what `x` computes of whole numbers is proven not to wrap round in its dtype."""
    found = _computed(x)
    return found is not None and _fits(found, x.dtype)


def keeps_integers(x: Value) -> bool:
    """True if `x` is a cast of integers to floats that is proven to round none of them."""
    if x.op != "cast" or x.dtype is None or not x.dtype.is_floating_point or not is_integer(x.arg):
        return False
    low, high = bounds(x.arg)
    return max(-low, high) <= 2 / torch.finfo(x.dtype).eps


def uncast(x: Value, *through: str) -> Value:
    """Whole numbers before casts that keep them, all of dtypes of positions; `through` are ops that are passed too."""
    while x.op in through or (x.op == "cast" and {x.arg.dtype, x.dtype} <= INDEX_DTYPES and is_exact(x)):
        x = x.arg
    return x


def of_dtype(dtype: torch.dtype | None) -> Range:
    """All that a tensor of a dtype may hold."""
    if dtype is torch.bool:
        return 0, 1
    if dtype not in INTEGERS or dtype is torch.int64:
        return -_FAR, _FAR
    return torch.iinfo(dtype).min, torch.iinfo(dtype).max


def _fits(found: Range, dtype: torch.dtype | None) -> bool:
    if dtype not in INTEGERS:
        return False
    limits = torch.iinfo(dtype)
    return limits.min <= found[0] <= found[1] <= limits.max


def _computed(x: Value) -> Range | None:
    """Where the numbers lie before they are kept in the dtype; None where that is not known."""
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
        case "ascending_index":
            size = x.shape[x.attrs[0]]
            return 0, size - 1 if isinstance(size, int) else _LARGEST
        case "reshape" | "expand" | "permute" | "slice" | "narrow" | "index" | "take" | "ascending":
            return _lies(x.arg)
        case "cast":
            return _lies(x.arg) if is_integer(x.arg) or x.arg.dtype is torch.bool else None
        case _:
            return _of_arithmetic(x)


def _of_arithmetic(x: Value) -> Range | None:
    match x.op:
        case "shift":
            low, high = _lies(x.arg)
            return low + x.attrs[0], high + x.attrs[0]
        case "scale":
            return _scaled(_lies(x.arg), x.attrs[0])
        case "cumsum":
            size = x.shape[x.attrs[0]]
            low, high = _lies(x.arg)
            most = size if isinstance(size, int) else _LARGEST
            return min(low, low * most), max(high, high * most)
        case "add":
            (low, high), (least, most) = map(_lies, x.args)
            return low + least, high + most
        case "where" | "cat":
            lows, highs = zip(*map(_lies, x.args[1:] if x.op == "where" else x.args), strict=True)
            return min(lows), max(highs)
        case "floor_divide":
            low, high = _lies(x.arg)
            return low // x.attrs[0], high // x.attrs[0]
        case "remainder":
            return 0, x.attrs[0] - 1
        case "clamp":
            low, high = _lies(x.arg)
            least, most = x.attrs
            return min(max(low, least), most), min(max(high, least), most)
        case _:
            return None


def _scaled(found: Range, factor: float) -> Range:
    ends = sorted(each * factor for each in found)
    return ends[0], ends[1]


def _counted(x: Value) -> Range:
    start, step = x.attrs
    size = x.shape[0] if isinstance(x.shape[0], int) else _LARGEST
    last = start + step * max(size - 1, 0)
    return min(start, last), max(start, last)
