"""Constants, positions, comparisons and choices, as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import Algebra, Value, broadcast
from fusion.graph.dims import is_symbolic
from fusion.graph.proof import proven

i64 = torch.int64


def constant(a: Algebra, number: float, shape: Sequence[Any] = (), dtype: torch.dtype | None = i64) -> Value:
    """The same number everywhere."""
    return a.make("full", (), (number,), tuple(shape), dtype)


def positions(a: Algebra, size: Any, rank: int = 1, axis: int = -1) -> Value:
    """0, 1, … along one axis of `rank`, the other dims of size 1."""
    line = a.make("arange", (), (0, 1), (size,), i64)
    shape: list[Any] = [1] * rank
    shape[axis] = size
    return a.reshape(line, tuple(shape))


def number(a: Algebra, size: Any, beside: Value) -> Value:
    """A size, symbolic or not, as a tensor [] of int64 on the device of another."""
    return a.make("number", (beside,), (size,), (), i64)


def moved(a: Algebra, x: Value, size: Any) -> Value | None:
    """Whole numbers of int64, plus a size."""
    return a.add(x, number(a, size, x)) if is_symbolic(size) else a.shift(x, size)


def compare(a: Algebra, op: str, x: Value, y: Value) -> Value | None:
    """x op y, for op in "le", "lt", "eq", "ne"."""
    return pointwise(a, "compare", (x, y), (op,), torch.bool)


def where(a: Algebra, condition: Value, x: Value, y: Value, dtype: torch.dtype | None) -> Value | None:
    """x where the condition holds, else y; a softmax with rows of -inf replaced by 0 is one that gives 0 there."""
    replaced = x.op == "full" and x.attrs == (0,) and y.op == "softmax" and y.attrs[:2] == (-1, "nan")
    if replaced and (_sees_nothing(condition, y.arg) or _is_nan(condition, y) or _is_hidden(a, condition, y.arg)):
        return softmax(a, y.arg, -1, "zero", y.attrs[2])
    if _is_never(condition) and y.shape == condition.shape and math.prod(x.shape) == 1:
        return y
    return pointwise(a, "where", (condition, x, y), (), dtype)


def _is_never(condition: Value) -> bool:
    """Whether it asks where a softmax is infinite."""
    if condition.op != "compare" or condition.attrs != ("eq",) or condition.arg.op != "softmax":
        return False
    return condition.args[1].op == "full" and math.isinf(condition.args[1].attrs[0])


def either(a: Algebra, x: Value, y: Value) -> Value | None:
    """Where x or y holds."""
    return pointwise(a, "or", (x, y), (), torch.bool)


def negated(a: Algebra, x: Value) -> Value:
    """Where booleans are not true."""
    return x.arg if x.op == "not" else proven(pointwise(a, "not", (x,), (), torch.bool))


def pointwise(
    a: Algebra, op: str, args: Sequence[Value], attrs: tuple[Any, ...], dtype: torch.dtype | None
) -> Value | None:
    """What is repeated in all of them is repeated behind it."""
    shape = broadcast(*(each.shape for each in args))
    plain = [each.arg if each.op == "expand" else each for each in args]
    once = broadcast(*(each.shape for each in plain))
    if shape is None or once is None:
        return None
    return a.expand(a.make(op, plain, attrs, once, dtype), shape)


def _sees_nothing(condition: Value, scores: Value) -> bool:
    """Whether a condition says of each row that all its scores are -inf."""
    if condition.op != "not" or condition.arg.op != "any" or condition.arg.attrs != (-1,):
        return False
    seen = condition.arg.arg
    lowest = seen.arg if seen.op == "not" else seen
    if lowest.op != "compare" or lowest.attrs != ("eq" if seen.op == "not" else "ne",):
        return False
    tested, bound = lowest.args
    while scores.op == "cast" and tested is not scores:
        scores = scores.arg
    return tested is scores and bound.op == "full" and bound.attrs == (-math.inf,)


def _is_nan(condition: Value, x: Value) -> bool:
    """Whether a condition holds where `x` is NaN."""
    unequal = condition.op == "compare" and condition.attrs == ("ne",) and condition.args == (x, x)
    return unequal or (condition.op == "isnan" and condition.arg is x)


def _is_hidden(a: Algebra, condition: Value, scores: Value) -> bool:
    """Whether a condition holds where scores have been replaced by -inf, or in rows in which all have."""
    scores = scores.below("cast")
    if scores.op != "where":
        return False
    lowest = [each.op == "full" and each.attrs == (-math.inf,) for each in scores.args[1:]]
    if lowest[0] and scores.args[0] is condition:
        return True
    row = condition.below("reshape")
    each = row.arg.below("reshape") if row.op == "not" else row
    lead = (*(1,) * (scores.args[0].rank - condition.rank), *condition.shape)
    if row is each or (each.op, each.attrs) != ("any", (-1,)) or lead != (*scores.args[0].shape[:-1], 1):
        return False
    seen = a.reshape(each.arg, scores.args[0].shape)
    return (lowest[1] and seen is scores.args[0]) or (lowest[0] and _are_contrary(a, seen, scores.args[0]))


def _are_contrary(a: Algebra, x: Value, y: Value) -> bool:
    """Whether one of two is what the other is not, perhaps with other dims."""
    below = [each.below("reshape") for each in (x, y)]
    return any(
        one.op == "not" and math.prod(one.shape) == math.prod(other.shape) and a.reshape(one.arg, other.shape) is other
        for one, other in ((below[0], y), (below[1], x))
    )


def softmax(a: Algebra, x: Value, dim: int, empty: str, safe: bool = True) -> Value:
    """exp(x) / Σ exp(x) along a dim; `empty` says what a row of -inf gives: "nan" or "zero".

    A safe one subtracts the greatest of each row first. Another gives the same of a row whose exp(x) are all 0.
    """
    return a.make("softmax", (x,), (dim % x.rank - x.rank, empty, safe), x.shape, x.dtype)
