"""Infinite numbers that a graph writes itself, as masks of scores are filled with them, and how far they get."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fusion.graph import Value

_ENDS = ("matmul", "softmax", "sigmoid", "tanh", "exp", "compare", "below", "input")
"""Ops whose results are finite, or taken to be, whatever they are computed from; or that read nothing."""

_OF_ROWS = ("greatest", "log_sum_exp")
"""Ops over rows whose results are -inf of rows of nothing else, and +inf of rows with one that is."""
_KEEPING = ("where", "add", "shift", "cast", "reshape", "permute", "expand", "slice", "cat", "index", "take", "full")
"""Ops that make no +inf of -inf."""


def may_hold_infinity(x: Value) -> bool:
    """Whether an infinite number that the graph writes may be among those of a value."""
    return any(map(_is_infinite, x.sources(_passed_on)))


def may_be_infinite_beside_numbers(x: Value) -> bool:
    """The same of what is computed from rows of which some numbers are infinite, but never all."""
    return any(map(_is_infinite, x.sources(lambda each: () if _leaves_out(each) else _passed_on(each))))


def _leaves_out(x: Value) -> bool:
    """Whether a number of each row is finite although others of the row are -inf; none of them is +inf."""
    return x.op in _OF_ROWS and not any(map(_is_above, x.arg.sources(_passed_on)))


def _is_above(x: Value) -> bool:
    """Whether +inf is written here, or may be made here of -inf."""
    if x.op in _KEEPING or (x.op == "scale" and x.attrs[0] > 0):
        return x.op == "full" and x.attrs[0] == math.inf
    return may_hold_infinity(x)


def _is_infinite(x: Value) -> bool:
    return x.op == "full" and math.isinf(x.attrs[0])


def _passed_on(x: Value) -> Sequence[Value]:
    """Of which arguments infinite numbers go on."""
    return () if x.op in _ENDS else x.args[1:] if x.op == "where" else x.args
