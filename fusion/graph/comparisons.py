"""Constants, positions, comparisons and choices as values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import Algebra, Value, broadcast
from fusion.graph.dims import INDEX_DTYPES, is_symbolic
from fusion.graph.proof_steps import proven

i64 = torch.int64


def constant(a: Algebra, number: float, shape: Sequence[Any] = (), dtype: torch.dtype | None = i64) -> Value:
    """Build a tensor of `shape` filled with `number`."""
    return a.make("full", (), (number,), tuple(shape), dtype)


def positions(a: Algebra, size: Any, rank: int = 1, axis: int = -1) -> Value:
    """Build arange(`size`) of int64 along `axis` of a tensor of `rank` dims; the others have size 1."""
    line = a.make("arange", (), (0, 1), (size,), i64)
    shape: list[Any] = [1] * rank
    shape[axis] = size
    return a.reshape(line, tuple(shape))


def number(a: Algebra, size: Any, like: Value) -> Value:
    """Build an int64 tensor [] of `size`, which may be symbolic, on the device of `like`."""
    return a.make("number", (like,), (size,), (), i64)


def steps(a: Algebra, start: int, count: Any, like: Value) -> Value:
    """Build int64 `start`, `start` + 1, .. [`count`] on the device of `like`."""
    return a.make("steps", (like,), (start,), (count,), i64)


def moved(a: Algebra, x: Value, size: Any) -> Value | None:
    """Build `x` + `size` for an int64 `x`."""
    return a.add(x, number(a, size, x)) if is_symbolic(size) else a.shift(x, size)


def compare(a: Algebra, op: str, x: Value, y: Value) -> Value | None:
    """Build the boolean x `op` y, for `op` in "le", "lt", "eq", "ne"."""
    return pointwise(a, "compare", (x, y), (op,), torch.bool)


def where(a: Algebra, condition: Value, x: Value, y: Value, dtype: torch.dtype | None) -> Value | None:
    """Build where(condition, x, y), simplified.

    A choice in `x` or `y` by the same condition or its negation is resolved. A softmax with fully masked rows replaced
    by 0 becomes a softmax that gives 0 in such rows.
    """
    shape = broadcast(*(each.shape for each in (condition, x, y)))
    x, y = _decided(a, condition, x, True), _decided(a, condition, y, False)
    replaced = x.op == "full" and x.attrs == (0,) and y.op == "softmax" and y.attrs[:2] == (-1, "nan")
    if replaced and (_sees_nothing(condition, y.arg) or _is_nan(condition, y) or hides(a, condition, y.arg)):
        return a.softmax(y.arg, -1, "zero", y.attrs[2])
    if _is_never(condition) and y.shape == condition.shape and math.prod(x.shape) == 1:
        return y
    chosen = pointwise(a, "where", (condition, x, y), (), dtype)
    return chosen if chosen is None or shape is None else a.expand(chosen, shape)


def _decided(a: Algebra, condition: Value, x: Value, holds: bool) -> Value:
    """Resolve choices in `x` by `condition` or its negation, given that `condition` is `holds`."""
    choice = x.below("expand")
    if choice.op != "where" or choice.dtype != x.dtype:
        return x
    same = choice.arg.below("expand") is condition.below("expand")
    if not same and not are_contrary(a, choice.arg.below("expand"), condition.below("expand")):
        return x
    return _decided(a, condition, choice.args[1 if same == holds else 2], holds)


def _is_never(condition: Value) -> bool:
    """Return True if `condition` is `softmax == ±inf`, which never holds."""
    if condition.op != "compare" or condition.attrs != ("eq",) or condition.arg.op != "softmax":
        return False
    return condition.args[1].op == "full" and math.isinf(condition.args[1].attrs[0])


def either(a: Algebra, x: Value, y: Value) -> Value | None:
    """Build the logical or of `x` and `y`."""
    return pointwise(a, "or", (x, y), (), torch.bool)


def negated(a: Algebra, x: Value) -> Value:
    """Build the logical not of `x`."""
    return x.arg if x.op == "not" else proven(pointwise(a, "not", (x,), (), torch.bool))


def pointwise(
    a: Algebra, op: str, args: Sequence[Value], attrs: tuple[Any, ...], dtype: torch.dtype | None
) -> Value | None:
    """Build an elementwise `op` of `args`, below the expands of the arguments; None if the shapes do not broadcast."""
    shape = broadcast(*(each.shape for each in args))
    plain = [each.arg if each.op == "expand" else each for each in args]
    once = broadcast(*(each.shape for each in plain))
    if shape is None or once is None:
        return None
    return a.expand(a.make(op, plain, attrs, once, dtype), shape)


def _sees_nothing(condition: Value, scores: Value) -> bool:
    """Return True if `condition` is `~any(scores != -inf, -1)`: the row is fully masked."""
    if condition.op != "not" or condition.arg.op != "any" or condition.arg.attrs != (-1,):
        return False
    visible = condition.arg.arg
    lowest = visible.arg if visible.op == "not" else visible
    if lowest.op != "compare" or lowest.attrs != ("eq" if visible.op == "not" else "ne",):
        return False
    tested, bound = lowest.args
    while scores.op == "cast" and tested is not scores:
        scores = scores.arg
    return tested is scores and bound.op == "full" and bound.attrs == (-math.inf,)


def _is_nan(condition: Value, x: Value) -> bool:
    unequal = condition.op == "compare" and condition.attrs == ("ne",) and condition.args == (x, x)
    return unequal or (condition.op == "isnan" and condition.arg is x)


def hides(a: Algebra, condition: Value, scores: Value, least: float = -math.inf) -> bool:
    """Return True if `condition` holds only at `scores` replaced by a number <= `least`, or in rows of such scores
    alone.
    """
    scores = scores.below("cast")
    if scores.op != "where":
        return False
    lowest = [each.op == "full" and each.attrs[0] <= least for each in scores.args[1:]]
    if lowest[0] and scores.args[0] is condition:
        return True
    if lowest[1] and condition.shape == scores.args[0].shape and are_contrary(a, condition, scores.args[0]):
        return True
    row = condition.below("reshape")
    each = row.arg.below("reshape") if row.op == "not" else row
    lead = (*(1,) * (scores.args[0].rank - condition.rank), *condition.shape)
    if row is each or (each.op, each.attrs) != ("any", (-1,)) or lead != (*scores.args[0].shape[:-1], 1):
        return False
    visible = a.reshape(each.arg, scores.args[0].shape)
    return (lowest[1] and visible is scores.args[0]) or (lowest[0] and are_contrary(a, visible, scores.args[0]))


def are_contrary(a: Algebra, x: Value, y: Value) -> bool:
    """Return True if one of the conditions `x` and `y` is the negation of the other, up to reshapes."""
    below = [each.below("reshape") for each in (x, y)]
    return any(
        math.prod(one.shape) == math.prod(other.shape) and _is_negated(a, one, other)
        for one, other in ((below[0], y), (below[1], x))
    )


def _is_negated(a: Algebra, x: Value, y: Value) -> bool:
    """Return True if `x` has the form of the negation of `y`: not y, y == False, or the contrary comparison."""
    if x.op == "not":
        return a.reshape(x.arg, y.shape) is y
    if x.op != "compare":
        return False
    if x.attrs == ("eq",) and x.arg.dtype is torch.bool and (x.args[1].op, x.args[1].attrs) == ("full", (0,)):
        return a.reshape(x.arg, y.shape) is y
    other = y.below("reshape")
    if other.op != "compare":
        return False
    kinds, are_ints = {x.attrs[0], other.attrs[0]}, all(each.dtype in INDEX_DTYPES for each in x.args)
    return (kinds == {"eq", "ne"} and x.args == other.args) or (
        kinds == {"lt", "le"} and are_ints and x.args == other.args[::-1]
    )
