"""Dtypes: which numbers they hold, what torch makes of others, and in which one it computes with several.

Whole numbers wrap round, fractions are cut off towards 0, everything but 0 is true.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch

from fusion.graph import Value
from fusion.graph.algebra import widens

Array = np.ndarray[Any, Any]
Number = int | float

KINDS: Mapping[torch.dtype, Any] = {
    torch.bool: np.bool_, torch.uint8: np.uint8, torch.int8: np.int8, torch.int16: np.int16, torch.int32: np.int32,
    torch.int64: np.int64, torch.float16: np.float64, torch.bfloat16: np.float64, torch.float32: np.float64,
    torch.float64: np.float64,
}  # fmt: skip
"""In what numpy keeps the numbers of each dtype: whole ones as they are, others as float64."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_integer(x: Value) -> bool:
    """Whether a value holds whole numbers, booleans not counted."""
    return x.dtype in INTEGERS


def is_rounding(x: Value) -> bool:
    """Whether a value is a cast between floats of at least 16 bits, which changes its numbers by rounding alone."""
    return x.op == "cast" and x.dtype in _FLOATS and x.arg.dtype in _FLOATS


def rows_below(x: Value) -> Value:
    """What a value is rounded from, or rows of it that are arranged otherwise before the last dim."""
    while is_rounding(x) or (x.op == "reshape" and x.shape[-1:] == x.arg.shape[-1:]):
        x = x.arg
    return x


def held(numbers: Array, dtype: torch.dtype | None) -> Array | None:
    """What torch makes of these numbers (booleans, whole numbers or float64) in a dtype; None where it leaves it open.

    Left open are fractions, infinities and NaN beyond the whole numbers of the dtype, and dtypes that are not known.
    """
    if dtype not in KINDS:
        return None
    with np.errstate(all="ignore"):
        if dtype is torch.bool:
            return numbers != 0
        if dtype in INTEGERS:
            return _whole(numbers, dtype)
        return numbers.astype(np.float64) if dtype is torch.float64 else _rounded(numbers.astype(np.float32), dtype)


def _whole(numbers: Array, dtype: torch.dtype) -> Array | None:
    if numbers.dtype.kind == "f":
        numbers, limits = np.trunc(numbers), torch.iinfo(dtype)
        if not ((numbers >= limits.min) & (numbers < limits.max + 1.0)).all():
            return None
    return numbers.astype(KINDS[dtype])


def _rounded(numbers: Array, dtype: torch.dtype | None) -> Array:
    """float32 in a dtype that is not wider, to the nearest number and of two such to the even one."""
    if dtype is torch.float16:
        numbers = numbers.astype(np.float16)
    elif dtype is torch.bfloat16:
        bits = numbers.view(np.uint32)
        even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        numbers = np.where(np.isfinite(numbers), even, bits).astype(np.uint32).view(np.float32)
    return numbers.astype(np.float64)


def held_number(value: Number, dtype: torch.dtype | None) -> Number | None:
    """What torch makes of one number in a dtype; None where it leaves it open."""
    if isinstance(value, int) and dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return (value - limits.min) % (limits.max - limits.min + 1) + limits.min
    found = held(np.array(float(value)), dtype)
    return None if found is None else found.item()


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether one dtype holds every number of another."""
    if narrow is torch.bool or widens(narrow, wide):
        return True
    if narrow not in INTEGERS or wide not in KINDS or wide is torch.bool:
        return False
    limits = torch.iinfo(narrow)
    if wide in INTEGERS:
        return torch.iinfo(wide).min <= limits.min and limits.max <= torch.iinfo(wide).max
    return max(-limits.min, limits.max) <= 2 / torch.finfo(wide).eps


def common(*operands: Value | Number) -> torch.dtype:
    """The dtype in which torch computes with tensors and numbers: `torch.result_type`.

    A tensor without dims counts only where it is of a higher kind (boolean, whole, floating), a number even less.
    """
    ranks: tuple[list[torch.dtype], ...] = ([], [], [])
    for each in operands:
        if not isinstance(each, Value):
            ranks[2].append(_of_number(each))
        elif each.dtype is not None:
            ranks[0 if each.rank else 1].append(each.dtype)
    return reduce(_combined, (reduce(torch.promote_types, dtypes) for dtypes in ranks if dtypes))


def _of_number(x: Number) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    return torch.int64 if isinstance(x, int) else torch.get_default_dtype()


def _combined(higher: torch.dtype, lower: torch.dtype) -> torch.dtype:
    counts = higher is torch.bool or (lower.is_floating_point and not higher.is_floating_point) or lower.is_complex
    return torch.promote_types(higher, lower) if counts else higher


def is_exact(value: Number, dtype: torch.dtype) -> bool:
    """Whether a dtype holds a number as it is."""
    kept = held_number(value, dtype)
    return kept is not None and (kept == value or (math.isnan(kept) and math.isnan(value)))
