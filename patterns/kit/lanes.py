"""Lanes of concatenations, and the sources of slices, below views of the rows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from fusion.graph import Algebra, Value


def sources(value: Value) -> Iterator[Value]:
    """Yield `value` and the arguments of the slices, permutes and reshapes that it results from."""
    yield value
    while value.op in ("slice", "permute", "reshape"):
        value = value.arg
        yield value


def joined_parts(a: Algebra, k: Value) -> list[tuple[int, Value]]:
    """List (first lane, part) for each part that `k` concatenates along the lanes; (0, k) if it is no concatenation."""
    joined, axis = k, k.rank - 1
    while joined.op == "permute" or (joined.op == "reshape" and axis == joined.rank - 1 and _keeps_lanes(joined)):
        axis = joined.attrs[axis] if joined.op == "permute" else joined.arg.rank - 1
        joined = joined.arg
    if joined.op != "cat" or joined.attrs != (axis,) or not isinstance(k.shape[-1], int):
        return [(0, k)]
    widths: list[Any] = [each.shape[axis] for each in joined.args]
    ends = accumulate(widths)
    starts = [end - width for end, width in zip(ends, widths, strict=True)]
    parts = [(start, lanes(a, k, start, width)) for start, width in zip(starts, widths, strict=True)]
    known = [(start, each) for start, each in parts if each is not None]
    return known if len(known) == len(parts) else [(0, k)]


def lanes(a: Algebra, x: Value, start: int, count: Any) -> Value | None:
    """Slice the lanes `start` … `start + count` - 1 of `x`; None if there are no such lanes.

    If `x` is a view of the rows of a concatenation, the concatenation is sliced, and the view applied to the slice.
    """
    views, joined = [], x
    while joined.op in ("reshape", "permute") and _keeps_lanes(joined):
        views.append(joined)
        joined = joined.arg
    if not views or joined.op != "cat" or joined.attrs != (joined.rank - 1,):
        return a.slice(x, -1, start, start + count)
    part = a.cut(joined, -1, start, start + count)
    for view in reversed(views):
        is_turned = view.op == "permute"
        part = a.permute(part, view.attrs) if is_turned else a.reshape(part, (*view.shape[:-1], count))
    return part


def _keeps_lanes(view: Value) -> bool:
    """Return True if the reshape or permute `view` leaves the last dim unchanged."""
    return view.attrs[-1] == view.rank - 1 if view.op == "permute" else view.shape[-1:] == view.arg.shape[-1:]
