"""Partial evaluation of boolean masks, of which some operands are known to be True.

Used where a list of keys hides nothing: it has all keys, or only listed keys are asked for.
"""

from __future__ import annotations

from collections.abc import Callable

from fusion.graph import Algebra, Value
from fusion.graph.comparisons import constant, pointwise
from patterns.attention.masks.visible import negated

_VIEWS = ("reshape", "expand", "permute")


def assume_true(a: Algebra, x: Value, holds: Callable[[Value], bool]) -> Value:
    """Evaluate the boolean mask `x` partially, taking every operand for which `holds` is true as True."""
    memo: dict[Value, Value] = {}  # the number of paths to a value may be 2 to the depth of the mask

    def evaluate(x: Value) -> Value:
        if x not in memo:
            memo[x] = constant(a, True, x.shape, x.dtype) if holds(x) else _rebuilt(a, x, evaluate)
        return memo[x]

    return evaluate(x)


def _rebuilt(a: Algebra, x: Value, evaluate: Callable[[Value], Value]) -> Value:
    """Rebuild `x` over its operands evaluated by `evaluate`, folding constants.

    Ops that are no logic or views stay as they are.
    """
    if x.op not in ("not", "below", "and", "or", "where", *_VIEWS):
        return x
    args = [evaluate(each) for each in x.args]
    if args == list(x.args):
        return x
    known = [_constant_of(each) for each in args]
    match x.op:
        case "not" | "below" if known[0] is not None:
            return constant(a, not known[0] if x.op == "not" else known[0] < x.attrs[0], x.shape, x.dtype)
        case "not":
            return negated(a, args[0])
        case "and" | "or" if any(each is not None for each in known):
            return _simplified(a, x, args)
        case "where" if known[0] is not None:
            return a.cast(a.expand(args[1] if known[0] else args[2], x.shape), x.dtype)
        case "below" | "and" | "or" | "where":
            return pointwise(a, x.op, args, x.attrs, x.dtype) or x
        case _:
            return a.seen_as(args[0], x)


def _constant_of(x: Value) -> float | None:
    """Return the constant that `x` is everywhere, seen through views; None if `x` is no constant."""
    below = x.below(*_VIEWS)
    return below.attrs[0] if below.op == "full" else None


def _simplified(a: Algebra, x: Value, sides: list[Value]) -> Value:
    """Simplify the "and" or "or" `x` of the operands `sides`, at least one of which is constant."""
    decides = x.op == "or"  # the operand value that decides the result alone
    left = [each for each in sides if _constant_of(each) is None]
    decided = any(bool(number) == decides for each in sides if (number := _constant_of(each)) is not None)
    if decided or not left:
        return constant(a, decides == decided, x.shape, x.dtype)
    return a.expand(left[0], x.shape)
