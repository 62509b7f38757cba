"""Entries of a dim that are repeated consecutively, such as the heads of keys in grouped-query attention.

x.repeat_interleave(n, d)    x[:, :, None].expand(..).reshape(..)    x.expand(..)        every entry n times: removed
x.repeat(1, n, 1)                                                                       the sequence n times: kept
"""

from __future__ import annotations

from math import gcd, prod
from typing import Any

from fusion.graph import Algebra, Value


def unrepeated(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Keep one of each run of entries along `axis` that are proven equal, as of key heads repeated for query heads.

    Returns the remaining value, and the length of the runs; `x` and 1 if nothing is repeated.
    """
    match x.op:
        case "cast" | "scale":
            below, times = unrepeated(a, x.arg, axis)
            once = a.cast(below, x.dtype) if x.op == "cast" else a.scale(below, *x.attrs)
            return (once, times) if below is not x.arg else (x, 1)
        case "slice" if x.attrs[0] != axis:
            below, times = unrepeated(a, x.arg, axis)
            return (a.cut(below, *x.attrs), times) if below is not x.arg else (x, 1)
        case "permute":
            below, times = unrepeated(a, x.arg, x.attrs[axis])
            return (a.permute(below, x.attrs), times) if below is not x.arg else (x, 1)
        case "expand":
            return _expanded(a, x, axis)
        case "cat" if x.attrs != (axis,):
            return _concatenated(a, x, axis)
        case "reshape":
            return _reshaped(a, x, axis)
        case _:
            return x, 1


def _resized(x: Value, axis: int, size: Any) -> tuple[Any, ...]:
    """Return the shape of `x` with `size` along `axis`."""
    return (*x.shape[:axis], size, *x.shape[axis + 1 :])


def _expanded(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Remove the repetitions of the expand `x` along `axis`, or those of its argument if it expands other dims alone.

    Returns the remaining value and the length of the runs, as `unrepeated` does.
    """
    if x.arg.shape[axis] == 1:
        size = x.shape[axis]
        return (a.expand(x.arg, _resized(x, axis, 1)), size) if size != 1 else (x, 1)
    below, times = unrepeated(a, x.arg, axis)
    return (a.expand(below, _resized(x, axis, below.shape[axis])), times) if below is not x.arg else (x, 1)


def _concatenated(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Remove the repetitions along `axis` that all pieces of `x`, a cat along another dim, have: their number is the
    gcd of those of the pieces.

    Returns the remaining value and the length of the runs, as `unrepeated` does.
    """
    size: Any = x.shape[axis]
    parts = [unrepeated(a, each, axis) for each in x.args]
    often = [times for _, times in parts]
    times = gcd(*often) if all(isinstance(each, int) for each in (size, *often)) else 1
    if times == 1:
        return x, 1
    pieces = [_repeated(a, below, axis, size // times) for below, _ in parts]
    return a.cat(pieces, *x.attrs), times


def _repeated(a: Algebra, x: Value, axis: int, size: int) -> Value:
    """Repeat each entry along `axis` consecutively, up to `size` entries in all."""
    own, rest = x.shape[: axis + 1], x.shape[axis + 1 :]
    wide = a.expand(a.reshape(x, (*own, 1, *rest)), (*own, size // int(x.shape[axis]), *rest))
    return a.reshape(wide, _resized(x, axis, size))


def _reshaped(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Remove the repetitions along `axis` of the reshape `x`.

    If `x` merges several dims into `axis`, those of the last of them; if it splits a dim, those of a dim whose entries
    are all equal. Returns the remaining value and the length of the runs, as `unrepeated` does.
    """
    below, wide = x.arg, x.arg.shape
    begin = next((n for n in range(len(wide) + 1) if prod(wide[:n]) == prod(x.shape[:axis])), None)
    ends = (n for n in reversed(range(len(wide) + 1)) if prod(wide[n:]) == prod(x.shape[axis + 1 :]))
    end = next(ends, None)
    if begin is None or end is None or prod(wide[begin:end]) != x.shape[axis]:
        return _split(a, x, axis)
    times: Any = 1
    for place in reversed(range(begin, end)):
        below, own = unrepeated(a, below, place)
        times = times * own
        if below.shape[place] != 1:
            break
    return (a.reshape(below, _resized(x, axis, prod(below.shape[begin:end]))), times) if below is not x.arg else (x, 1)


def _split(a: Algebra, x: Value, axis: int) -> tuple[Value, Any]:
    """Remove all entries but one along `axis` of the reshape `x`, one of the dims that a dim of equal entries is split
    into.

    Returns the remaining value and the number of entries; `x` and 1 if the entries are not proven to be equal.
    """
    wide, shape = x.arg.shape, x.shape
    for place, size in enumerate(wide if 0 not in wide else ()):
        begin = next((n for n in range(axis + 1) if prod(shape[:n]) == prod(wide[:place])), None)
        ends = (n for n in range(axis + 1, x.rank + 1) if prod(shape[n:]) == prod(wide[place + 1 :]))
        end = next(ends, None)
        if begin is None or end is None or prod(shape[begin:end]) != size or shape[axis] == 1:
            continue
        below, _ = unrepeated(a, x.arg, place)
        if below.shape[place] == 1:
            once = a.reshape(below, (*shape[:begin], *(1,) * (end - begin), *shape[end:]))
            return a.expand(once, _resized(x, axis, 1)), shape[axis]
    return x, 1
