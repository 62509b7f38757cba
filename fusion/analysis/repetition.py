"""Entries that stand several times in a row along a dim, as heads of keys do for the queries that share them.

x.repeat_interleave(n, d)    x[:, :, None].expand(..).reshape(..)    x.expand(..)        every entry n times
x.repeat(1, n, 1)                                                                       all entries n times: none
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from fusion.graph import Algebra, Value


def unrepeated(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """`x` with entries along `axis` once that are repeated in a row, and how often each was; else itself and 1."""
    match x.op:
        case "cast" | "scale":
            below, times = unrepeated(a, x.arg, axis)
            whole = a.cast(below, x.dtype) if x.op == "cast" else a.scale(below, *x.attrs)
            return (whole, times) if below is not x.arg else (x, 1)
        case "slice" if x.attrs[0] != axis:
            below, times = unrepeated(a, x.arg, axis)
            return (a.cut(below, *x.attrs), times) if below is not x.arg else (x, 1)
        case "permute":
            below, times = unrepeated(a, x.arg, x.attrs[axis])
            return (a.permute(below, x.attrs), times) if below is not x.arg else (x, 1)
        case "expand":
            return _expanded(a, x, axis)
        case "cat" if x.attrs != (axis,):
            return _joined(a, x, axis)
        case "reshape":
            return _reshaped(a, x, axis)
        case _:
            return x, 1


def _sized(x: Value, axis: int, size: Any) -> tuple[Any, ...]:
    """The shape of `x` with another size along `axis`."""
    return (*x.shape[:axis], size, *x.shape[axis + 1 :])


def _expanded(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Of one entry, or of those that are repeated below other dims that are expanded."""
    if x.arg.shape[axis] == 1:
        size = x.shape[axis]
        return (a.expand(x.arg, _sized(x, axis, 1)), size) if size != 1 else (x, 1)
    below, times = unrepeated(a, x.arg, axis)
    return (a.expand(below, _sized(x, axis, below.shape[axis])), times) if below is not x.arg else (x, 1)


def _joined(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Pieces beside each other, each entry as often as it is in all of them."""
    size: Any = x.shape[axis]
    found = [unrepeated(a, each, axis) for each in x.args]
    often = [times for _, times in found]
    times = gcd(*often) if all(isinstance(each, int) for each in (size, *often)) else 1
    if times == 1:
        return x, 1
    pieces = [_repeated(a, below, axis, size // times) for below, _ in found]
    return a.cat(pieces, *x.attrs), times


def _repeated(a: Algebra, x: Value, axis: int, size: int) -> Value:
    """So many entries along `axis`, of fewer that divide them."""
    own, rest = x.shape[: axis + 1], x.shape[axis + 1 :]
    wide = a.expand(a.reshape(x, (*own, 1, *rest)), (*own, size // int(x.shape[axis]), *rest))
    return a.reshape(wide, _sized(x, axis, size))


def _reshaped(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Of a dim that was joined from several, of which the last are repetitions."""
    below, wide = x.arg, x.arg.shape
    begin = next((n for n in range(len(wide) + 1) if prod(wide[:n]) == prod(x.shape[:axis])), None)
    ends = (n for n in reversed(range(len(wide) + 1)) if prod(wide[n:]) == prod(x.shape[axis + 1 :]))
    end = next(ends, None)
    if begin is None or end is None or prod(wide[begin:end]) != x.shape[axis]:
        return x, 1
    times: Any = 1
    for place in reversed(range(begin, end)):
        below, own = unrepeated(a, below, place)
        times = times * own
        if below.shape[place] != 1:
            break
    return (a.reshape(below, _sized(x, axis, prod(below.shape[begin:end]))), times) if below is not x.arg else (x, 1)
