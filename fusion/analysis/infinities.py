"""Infinite numbers that a graph writes itself, as masks of scores are filled with them, and how far they get."""

from __future__ import annotations

import math

from fusion.graph import Value

_ENDS = ("matmul", "softmax", "sigmoid", "tanh", "exp", "compare", "below", "input")
"""Ops whose results are finite, or taken to be, whatever they are computed from; or that read nothing."""


def may_hold_infinity(x: Value) -> bool:
    """Whether an infinite number that the graph writes may be among those of a value."""
    waiting, seen = [x], {x}
    while waiting:
        value = waiting.pop()
        if value.op == "full" and math.isinf(value.attrs[0]):
            return True
        args = () if value.op in _ENDS else value.args[1:] if value.op == "where" else value.args
        waiting.extend(each for each in args if each not in seen)
        seen.update(args)
    return False
