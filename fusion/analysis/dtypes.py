"""Dtypes: conversion of numbers as torch does it, dtypes that represent all numbers of others, and type promotion.

Integers wrap round, fractions are truncated towards 0, every number but 0 is True.
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
"""The numpy dtype in which the elements of each torch dtype are computed here: float64 for all floats."""

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
INTEGERS = frozenset({torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})


def is_integer(x: Value) -> bool:
    """Return True if the dtype of `x` is an integer dtype; bool is none."""
    return x.dtype in INTEGERS


def is_rounding(x: Value) -> bool:
    """Return True if `x` is a cast between floats of at least 16 bits, which changes numbers by rounding at most."""
    return x.op == "cast" and x.dtype in _FLOATS and x.arg.dtype in _FLOATS


def unrounded(x: Value) -> Value:
    """Strip casts between floats from `x`."""
    while is_rounding(x):
        x = x.arg
    return x


def rows_below(x: Value) -> Value:
    """Strip casts between floats, and reshapes that keep the last dim, from `x`."""
    while is_rounding(x) or (x.op == "reshape" and x.shape[-1:] == x.arg.shape[-1:]):
        x = x.arg
    return x


def elements_below(x: Value) -> Value:
    """Strip casts between floats, and all reshapes, from `x`."""
    while is_rounding(x) or x.op == "reshape":
        x = x.arg
    return x


def rounded_to(numbers: Array, dtype: torch.dtype | None) -> Array | None:
    """Convert `numbers` (booleans, integers or float64) to `dtype` as torch does; None where torch leaves it open.

    Open are floats outside the range of an integer dtype, infinities and NaN among them, and dtypes not in `KINDS`.
    """
    if dtype not in KINDS:
        return None
    with np.errstate(all="ignore"):
        if dtype is torch.bool:
            return numbers != 0
        if dtype in INTEGERS:
            return _as_integers(numbers, dtype)
        return numbers.astype(np.float64) if dtype is torch.float64 else _rounded(numbers.astype(np.float32), dtype)


def _as_integers(numbers: Array, dtype: torch.dtype) -> Array | None:
    if numbers.dtype.kind == "f":
        numbers, limits = np.trunc(numbers), torch.iinfo(dtype)
        if not ((numbers >= limits.min) & (numbers < limits.max + 1.0)).all():
            return None
    return numbers.astype(KINDS[dtype])


def _rounded(numbers: Array, dtype: torch.dtype | None) -> Array:
    """Round float32 `numbers` to `dtype`, a float no wider than float32, to nearest even, as float64."""
    if dtype is torch.float16:
        numbers = numbers.astype(np.float16)
    elif dtype is torch.bfloat16:
        bits = numbers.view(np.uint32)
        even = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(0xFFFF0000)
        numbers = np.where(np.isfinite(numbers), even, bits).astype(np.uint32).view(np.float32)
    return numbers.astype(np.float64)


def rounded_number(value: Number, dtype: torch.dtype | None) -> Number | None:
    """Convert one number to `dtype` as `rounded_to` converts arrays; None where torch leaves the result open."""
    if isinstance(value, int) and dtype in INTEGERS:
        limits = torch.iinfo(dtype)
        return (value - limits.min) % (limits.max - limits.min + 1) + limits.min
    converted = rounded_to(np.array(float(value)), dtype)
    return None if converted is None else converted.item()


def holds(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Return True if the dtype `wide` represents every number of `narrow` exactly."""
    if narrow is torch.bool or widens(narrow, wide):
        return True
    if narrow not in INTEGERS or wide not in KINDS or wide is torch.bool:
        return False
    limits = torch.iinfo(narrow)
    if wide in INTEGERS:
        return torch.iinfo(wide).min <= limits.min and limits.max <= torch.iinfo(wide).max
    return max(-limits.min, limits.max) <= 2 / torch.finfo(wide).eps


def common(*operands: Value | Number) -> torch.dtype:
    """Return the dtype to which torch promotes tensors and numbers, as `torch.result_type` of all operands.

    A tensor without dims counts only if its category (boolean, integer, floating) is higher than that of all tensors
    with dims; a number only if its category is higher than that of all tensors.
    """
    ranks: tuple[list[torch.dtype], ...] = ([], [], [])
    for each in operands:
        if not isinstance(each, Value):
            ranks[2].append(_dtype_of(each))
        elif each.dtype is not None:
            ranks[0 if each.rank else 1].append(each.dtype)
    return reduce(_combined, (reduce(torch.promote_types, dtypes) for dtypes in ranks if dtypes))


def _dtype_of(x: Number) -> torch.dtype:
    if isinstance(x, bool):
        return torch.bool
    return torch.int64 if isinstance(x, int) else torch.get_default_dtype()


def _combined(higher: torch.dtype, lower: torch.dtype) -> torch.dtype:
    counts = higher is torch.bool or (lower.is_floating_point and not higher.is_floating_point) or lower.is_complex
    return torch.promote_types(higher, lower) if counts else higher


def is_exact(value: Number, dtype: torch.dtype) -> bool:
    """Return True if `dtype` represents the number `value` exactly."""
    converted = rounded_number(value, dtype)
    return converted is not None and (converted == value or (math.isnan(converted) and math.isnan(value)))
