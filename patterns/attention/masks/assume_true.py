"""A mask without truths that are known to hold: a list where only listed keys are asked for, or one of all keys."""

from __future__ import annotations

from collections.abc import Callable

from fusion.graph import Algebra, Value
from fusion.graph.logic import constant, pointwise
from patterns.attention.masks.visible import negated

_VIEWS = ("reshape", "expand", "permute")


def granted(a: Algebra, x: Value, holds: Callable[[Value], bool]) -> Value:
    """What a mask is wherever some truths hold that it is made of, as far as it can be said without them."""
    known: dict[Value, Value] = {}  # a value may be reached in as many ways as 2 to the length of a chain

    def of(x: Value) -> Value:
        if x not in known:
            known[x] = constant(a, True, x.shape, x.dtype) if holds(x) else _left(a, x, of)
        return known[x]

    return of(x)


def _left(a: Algebra, x: Value, of: Callable[[Value], Value]) -> Value:
    """The same by what `of` leaves of its arguments."""
    if x.op not in ("not", "below", "and", "or", "where", *_VIEWS):
        return x
    args = [of(each) for each in x.args]
    if args == list(x.args):
        return x
    known = [_number(each) for each in args]
    match x.op:
        case "not" | "below" if known[0] is not None:
            return constant(a, not known[0] if x.op == "not" else known[0] < x.attrs[0], x.shape, x.dtype)
        case "not":
            return negated(a, args[0])
        case "and" | "or" if any(each is not None for each in known):
            return _joined(a, x, args)
        case "where" if known[0] is not None:
            return a.cast(a.expand(args[1] if known[0] else args[2], x.shape), x.dtype)
        case "below" | "and" | "or" | "where":
            return pointwise(a, x.op, args, x.attrs, x.dtype) or x
        case _:
            return a.seen_as(args[0], x)


def _number(x: Value) -> float | None:
    """The number that a value is everywhere, if it is so made."""
    below = x.below(*_VIEWS)
    return below.attrs[0] if below.op == "full" else None


def _joined(a: Algebra, x: Value, sides: list[Value]) -> Value:
    """Where both sides hold, or one of them, if that is known of one of them."""
    decides = x.op == "or"  # what one side must be for the other not to matter
    left = [each for each in sides if _number(each) is None]
    decided = any(bool(number) == decides for each in sides if (number := _number(each)) is not None)
    if decided or not left:
        return constant(a, decides == decided, x.shape, x.dtype)
    return a.expand(left[0], x.shape)
