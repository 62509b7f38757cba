"""Readings of writes: which values are a cache with new rows, in the words of rules.

write(cache, rows, start; axis)    write_rows(cache, rows, index; axis)    write_slice(cache, rows; start, axis)
write_places(cache, rows, index, inner; axis)    write_pages(cache, rows, slots)    slide(cache, rows; axis)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from fusion.graph import Algebra, Reading, Value


def reading(a: Algebra, value: Value) -> Reading | None:
    """The write that a value is, in the words of rules; None for anything else."""
    match value.op:
        case "write":
            cache, rows, start = value.args
            return Reading("write", {"cache": cache, "rows": rows, "start": start, "axis": value.attrs[0]})
        case "write_rows":
            return _rows(value)
        case "slice_scatter":
            axis, start, _, step = value.attrs
            if step != 1 or axis in (0, value.rank - 1):
                return None
            return Reading("write_slice", {"cache": value.arg, "rows": value.args[1], "start": start, "axis": axis})
        case "cat":
            return _slide(value)
        case "reshape":
            return _pages(value)
        case _:
            return None


def _rows(value: Value) -> Reading:
    names = ("cache", "rows", "index", "inner")
    captures: dict[str, Any] = dict(zip(names, value.args, strict=False))
    return Reading("write_places" if "inner" in captures else "write_rows", captures | {"axis": value.attrs[0]})


def _pages(value: Value) -> Reading | None:
    """cache.view(-1, N, D)[slots] = rows, viewed as [Block, Size, N, D] again."""
    flat = value.arg
    if flat.op not in ("write_rows", "write") or flat.attrs != (0,) or len(flat.args) != 3:
        return None
    cache, rows, slots = flat.args
    merged = cache.op == "reshape" and cache.arg.shape == value.shape and cache.shape[1:] == value.shape[2:]
    slots = slots if flat.op == "write_rows" else None
    return Reading("write_pages", {"pages": cache.arg, "rows": rows, "slots": slots}) if merged and slots else None


def _slide(value: Value) -> Reading | None:
    """The last T - S positions of a cache of T, then S new ones."""
    if len(value.args) != 2 or value.args[0].op != "slice":
        return None
    (kept, rows), axis = value.args, value.attrs[0]
    cache, size = kept.arg, value.shape[axis]
    slid = kept.attrs == (axis, rows.shape[axis], size, 1) and cache.shape == value.shape
    return Reading("slide", {"cache": cache, "rows": rows, "axis": axis}) if slid and axis < value.rank - 1 else None


READ = ("write", "write_rows", "slice_scatter", "cat", "reshape")
"""Ops of values that `reading` may read."""


def readings(a: Algebra, values: Sequence[Value]) -> Mapping[Value, Reading]:
    """The writes among `values`."""
    found = ((value, reading(a, value)) for value in values if value.op in READ)
    return {value: each for value, each in found if each is not None}
