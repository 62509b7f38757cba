"""Recognition of log Σ exp(x), and of x less a number of each row, in the ways in which models write them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from fusion.graph import Value, but_ones
from fusion.graph.simplifications import below_greatest


def differences(x: Value) -> list[tuple[Value, Value]]:
    """List the pairs (z, r) with `x` = z - r, where r [.., 1] is one number of each row of z."""
    pairs = x.operands("add")
    less = [(z, minus) for z, minus in pairs if minus.op == "scale" and minus.attrs == (-1.0,)]
    return [(z, minus.arg) for z, minus in less if _is_per_row(minus, z)]


def _is_per_row(value: Value, z: Value) -> bool:
    return (1,) * (z.rank - value.rank) + value.shape == (*z.shape[:-1], 1)


class LogSum(NamedTuple):
    """log Σ exp(x) over the last dim; `guarded` is True if it is finite where every exp(x) underflows to 0."""

    x: Value
    guarded: bool


def log_sum(value: Value) -> LogSum | None:
    """Recognise log Σ exp(x), or r + log Σ exp(x - r) for a number r of each row; None for any other value."""
    value = bare(value)
    if value.op == "log_sum_exp":
        return LogSum(value.arg, True) if value.attrs == (-1,) else None
    if value.op == "log":
        z = _exponents(value)
        return None if z is None else LogSum(z, below_greatest(z, -1) is not None)
    for top, log in value.operands("add"):
        z = _exponents(bare(log))
        shifted = [] if z is None else [x for x, less in differences(z) if bare(less) is bare(top)]
        if z is not None and shifted:
            return LogSum(shifted[0], below_greatest(z, -1) is not None)
    return None


def summed(value: Value) -> Value | None:
    """Return the x of which `value` is log Σ exp(x) over the last dim; None for any other value."""
    read = log_sum(value)
    return read and read.x


def _exponents(log: Value) -> Value | None:
    """Return the z of `log` = log Σ exp(z) over the last dim; None for any other value."""
    if log.op != "log":
        return None
    inner = bare(log.arg)
    mean = bare(inner.arg) if inner.op == "scale" else inner
    exp = bare(mean.arg) if mean.op == "mean" else mean
    is_sum = mean.op == "mean" and mean.attrs == (-1,) and inner.attrs[:1] == mean.arg.shape[-1:] == exp.shape[-1:]
    return exp.arg if is_sum and exp.op == "exp" else None


def bare(x: Value) -> Value:
    """Strip reshapes that only insert or remove dims of size 1 from `x`."""
    while x.op == "reshape" and but_ones(x.shape) == but_ones(x.arg.shape):
        x = x.arg
    return x


def decomposed(x: Value) -> tuple[Value, ...]:
    """Return (x, y) if `x` is logaddexp(x, y) written by a where, in the decomposition of PyTorch; () for any other
    where.

    where(x and y are the same infinity, x, max(x, y) + log1p(exp(min(x, y) - max(x, y))))
    """
    same, one, added = x.args
    if same.op != "and" or added.op != "add":
        return ()
    for top, log in added.operands():
        z = log.arg.arg if log.op == "aten.log1p.default" and log.arg.op == "exp" else None
        if z is None or z.op != "add" or top.op != "where":
            continue
        for least, minus in z.operands():
            lower = minus.op == "scale" and minus.attrs[0] == -1 and minus.arg is top and least.op == "where"
            if lower and _are_ordered(top, least) and one in top.args[1:] and _is_same_infinity(same, top.args[1:]):
                return tuple(top.args[1:])
    return ()


def _are_ordered(top: Value, least: Value) -> bool:
    """Return True if `top` = where(y <= x, x, y) and `least` = where(y <= x, y, x)."""
    order, x, y = top.args
    ordered = order.op == "compare" and order.attrs[0] in ("le", "lt") and order.args == (y, x)
    return ordered and least.args == (order, y, x)


def _is_same_infinity(condition: Value, both: Sequence[Value]) -> bool:
    """Return True if `condition` holds only where the two values `both` are equal and not finite."""
    equal = any(
        each.op == "compare" and each.attrs == ("eq",) and set(each.args) == set(both) for each in condition.args
    )
    return equal and any(each.op == "not" and _is_finite(each.arg, both) for each in condition.args)


def _is_finite(condition: Value, both: Sequence[Value]) -> bool:
    """Return True if `condition` is (|x| != inf) · (x == x), true for finite x, where x is one of the values `both`."""
    if condition.op != "mul":
        return False
    for other, own in condition.operands():
        x = own.arg if own.attrs == ("eq",) and own.args[0] is own.args[1] else None
        size = other.args if other.attrs == ("ne",) else ()
        infinite = any(each.op == "full" and each.attrs == (float("inf"),) for each in size)
        if x in both and infinite and any(each.op == "abs" and each.arg is x for each in size):
            return True
    return False
