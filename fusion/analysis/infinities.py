"""Infinite numbers that a graph writes itself, as masks of scores are filled with them, and how far they get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.graph import Value

_ENDS = ("matmul", "softmax", "sigmoid", "tanh", "exp", "compare", "below", "input")
"""Ops whose results are finite, or taken to be, whatever they are computed from; or that read nothing."""


def may_hold_infinity(x: Value) -> bool:
    """Whether an infinite number that the graph writes may be among those of a value."""
    return any(map(_is_infinite, x.sources(_passed_on)))


def _is_infinite(x: Value) -> bool:
    return x.op == "full" and math.isinf(x.attrs[0])


def _passed_on(x: Value) -> Sequence[Value]:
    """Of which arguments infinite numbers go on."""
    return () if x.op in _ENDS else x.args[1:] if x.op == "where" else x.args
