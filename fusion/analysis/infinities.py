"""Infinities that a graph itself writes, such as the -inf of masks, and the values that they reach."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.graph import Value

_ENDS = ("matmul", "softmax", "sigmoid", "tanh", "exp", "compare", "below", "input")
"""Ops whose results are finite for infinite operands, or are assumed to be; and inputs, assumed finite."""


def may_hold_infinity(x: Value) -> bool:
    """Return True if an infinity that the graph writes as a constant may reach `x`."""
    return any(each.op == "full" and math.isinf(each.attrs[0]) for each in x.sources(_passed_on))


def _passed_on(x: Value) -> Sequence[Value]:
    """Return the arguments of `x` by which an infinity may come into the result of `x`."""
    return () if x.op in _ENDS else x.args[1:] if x.op == "where" else x.args
