"""Floors: positive lower bounds of all elements of a value but NaN, derived from how the value is computed.

mean of the k largest of softmax(x) over E  ≥  1 / E         their sum, k · mean  ≥  k / E
"""

from __future__ import annotations

import torch

from fusion.analysis.dtypes import is_rounding, rows_below
from fusion.graph import Value
from fusion.graph.proof_steps import proven

_ROUNDED = 0.98
"""The factor by which rounding a softmax and a sum of its weights to 16 bits may lower a floor."""

_SHARES = tuple((-1, "nan", less) for less in ("greatest", "nothing"))
"""Attributes of softmaxes whose weights sum to 1: one that subtracts a rounded log-sum-exp does not."""


def is_above(x: Value, number: float) -> bool:
    """Return True if every element of `x` (floats) is proven to be greater than `number`, or NaN."""
    floor = _floor(x)
    return floor > 0 and number < _ROUNDED * floor  # 0 is no floor: elements may be negative


def absorbs(x: Value, number: float) -> bool:
    """Return True if x + `number` rounds to x in float64 for every element: less than half a unit in the last place."""
    return 0 <= number < _ROUNDED * _floor(x) * torch.finfo(torch.float64).eps / 4


def _floor(x: Value) -> float:
    """Return a positive lower bound of `x` as if no step were rounded to 16 bits; 0 if none is known."""
    match x.op:
        case "scale" if x.attrs[0] > 0:
            return _unless_subnormal(x.attrs[0] * _floor(x.arg), x)
        case "reshape":
            return _floor(x.arg)
        case "cast" if is_rounding(x):
            return _unless_subnormal(_floor(x.arg), x)
        case "mean" if x.attrs == (-1,):
            return _unless_subnormal(_mean_of_largest(x.arg), x)
        case _:
            return 0.0


def _mean_of_largest(x: Value) -> float:
    """Return 1 / E if `x` [.., k] is the k largest entries of a softmax over E: their mean is not less; 0 otherwise."""
    largest = rows_below(x)
    if largest.op != "largest":
        return 0.0
    shares = rows_below(largest.arg)
    size = shares.shape[-1]
    if shares.op != "softmax" or shares.attrs not in _SHARES or not isinstance(size, int):
        return 0.0
    return _unless_subnormal(1 / size, shares)


def _unless_subnormal(number: float, x: Value) -> float:
    """Return `number`, or 0 if it is subnormal in the dtype of `x`: `_ROUNDED`, by which floors are lowered for
    rounding, bounds the rounding of normal numbers alone.
    """
    return number if number and number >= torch.finfo(proven(x.dtype)).tiny else 0.0
