"""Magnitudes: which number no element of a value of floats passes, as slopes times positions have one."""

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
    """The magnitude that no number of `x` passes, infinite where it is not known so many steps below."""
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
    """Whether a value is cast from whole numbers of which none is below 0."""
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
    """What rounding makes of it; infinite where the dtype does not hold it."""
    if x.dtype is None or not x.dtype.is_floating_point:
        return math.inf
    held = torch.finfo(x.dtype)
    rounded = most * (1 + held.eps)
    return rounded if rounded < held.max else math.inf
