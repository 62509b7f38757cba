"""Magnitudes: upper bounds of the absolute values of all elements of a float value, such as slopes · positions."""

from __future__ import annotations

import math

import numpy as np
import torch

from fusion.analysis.dtypes import is_integer
from fusion.analysis.intervals import bounds
from fusion.graph import Value

_KEEPS = ("reshape", "expand", "permute", "slice", "index", "take", "abs")
_SHARES = ("sigmoid", "softmax", "tanh", "sin", "cos")


def largest(x: Value, steps: int = 16) -> float:
    """Return an upper bound of |x| for all elements; infinite if none is known within `steps` ops below `x`."""
    if is_integer(x) or x.dtype is torch.bool:
        return max(map(abs, bounds(x)))
    if not steps:
        return math.inf
    match x.op:
        case "full":
            return abs(x.attrs[0])
        case "constant":
            return float(np.abs(x.attrs[0]).max(initial=0))
        case op if op in _SHARES:
            return 1.0
        case "power_of" if 0 < x.attrs[0] <= 1 and _is_counted(x.arg):
            return 1.0
        case op if op in _KEEPS:
            return largest(x.arg, steps - 1)
        case "cast":
            return _cast(largest(x.arg, steps - 1), x)
        case "scale" | "shift" | "mul" | "add" | "where" | "cat":
            return _cast(_computed(x, steps - 1), x)
        case _:
            return math.inf


def _is_counted(x: Value) -> bool:
    """Return True if `x` is cast from integers that are proven not to be negative."""
    below = x.below("cast", "reshape", "expand")
    return is_integer(below) and bounds(below)[0] >= 0


def _computed(x: Value, steps: int) -> float:
    most = [largest(each, steps) for each in (x.args[1:] if x.op == "where" else x.args)]
    match x.op:
        case "scale":
            return most[0] * abs(x.attrs[0])
        case "shift":
            return most[0] + abs(x.attrs[0])
        case "mul":
            return math.prod(most) if 0 not in most else 0.0 if math.isfinite(max(most)) else math.inf
        case "add":
            return sum(most)
        case _:
            return max(most)


def _cast(most: float, x: Value) -> float:
    """Round the bound `most` up in the dtype of `x`; infinite if it may overflow there."""
    if x.dtype is None or not x.dtype.is_floating_point:
        return math.inf
    limits = torch.finfo(x.dtype)
    rounded = most * (1 + limits.eps)
    return rounded if rounded < limits.max else math.inf
