"""Floors: positive numbers that no element of a value lies below, NaN apart, as far as how it was computed tells.

mean of the k largest of softmax(x) over E  ≥  1 / E         k · it, which is their sum  ≥  k / E
"""

from __future__ import annotations

import torch

from fusion.analysis.dtypes import is_rounding, rows_below
from fusion.graph import Value
from fusion.graph.proof import proven

_ROUNDED = 0.98
"""How much of a floor the roundings of a softmax and of a sum of its shares, in 16 bits, leave at least."""

_SHARES = tuple((-1, "nan", less) for less in ("greatest", "nothing"))
"""Attributes of a softmax whose shares add up to 1: a log-sum-exp that is subtracted is rounded."""


def is_above(x: Value, number: float) -> bool:
    """Whether every element of floats is proven to be larger than a number, or to be NaN."""
    floor = _floor(x)
    return floor > 0 and number < _ROUNDED * floor  # of what has no floor nothing is known, of negative numbers either


def absorbs(x: Value, number: float) -> bool:
    """Whether adding a number changes no element: it is less than half of what float64 tells apart there."""
    return 0 <= number < _ROUNDED * _floor(x) * torch.finfo(torch.float64).eps / 4


def _floor(x: Value) -> float:
    """0 where nothing is known."""
    match x.op:
        case "scale" if x.attrs[0] > 0:
            return _held(x.attrs[0] * _floor(x.arg), x)
        case "reshape":
            return _floor(x.arg)
        case "cast" if is_rounding(x):
            return _held(_floor(x.arg), x)
        case "mean" if x.attrs == (-1,):
            return _held(_mean_of_largest(x.arg), x)
        case _:
            return 0.0


def _mean_of_largest(x: Value) -> float:
    """Of a row of the largest of a softmax: these are no less, on the average, than all; the mean of none is NaN."""
    largest = rows_below(x)
    if largest.op != "largest":
        return 0.0
    shares = rows_below(largest.arg)
    size = shares.shape[-1]
    if shares.op != "softmax" or shares.attrs not in _SHARES or not isinstance(size, int):
        return 0.0
    return _held(1 / size, shares)


def _held(number: float, x: Value) -> float:
    """A number, 0 where the dtype of `x` holds it with fewer digits than others."""
    return number if number and number >= torch.finfo(proven(x.dtype)).tiny else 0.0
