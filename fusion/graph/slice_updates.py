"""An update of a slice of a computed tensor, as an update of all of it with a neutral element outside the slice.

x[.., a:b] += y               →  x + cat(0, y, 0)
x[.., a:b] = where(c, v, x[.., a:b])   →  where(cat(false, c, false), v, x)

Updates of an input, a buffer or a cache stay as they are: rows of a cache are written, not computed.
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.graph import Algebra, Dim, Value, unviewed
from fusion.graph.algebra import widens
from fusion.graph.comparisons import constant, where
from fusion.graph.proof_steps import must, proof, proven

_WRITTEN = ("input", "full", "write", "write_rows", "slice_scatter", "cat")
"""Ops of buffers and caches, which take rows."""


@proof
def with_part(a: Algebra, x: Value, part: Value, source: Value, axis: int, start: Dim) -> Value | None:
    """Return `x` after its slice `part` [start:..] along `axis` was replaced by `source`, computed from that slice."""
    if source is part:
        return x
    must(unviewed(x).op not in _WRITTEN and proven(x.dtype).is_floating_point and _stems(source, part))
    return _changed(a, x, part, source, (axis, start))


def _changed(a: Algebra, x: Value, part: Value, source: Value, place: tuple[int, Dim]) -> Value | None:
    if source is part:
        return x
    match source.op:
        case "cast":  # elements outside the slice must keep their values
            must(widens(x.dtype, source.dtype))
            return a.cast(proven(_changed(a, x, part, source.arg, place)), source.dtype)
        case "add" | "shift":
            given = constant(a, source.attrs[0], (1,), source.dtype) if source.op == "shift" else source.args[1]
            left, right = source.arg, given
            below, other = (left, right) if _stems(left, part) else (right, left)
            padded = _padded(a, other, x, constant(a, 0, (), other.dtype), place, source.shape)
            return a.add(proven(_changed(a, x, part, below, place)), padded)
        case "where":
            condition, yes, no = source.args
            stem, fill = (no, yes) if _stems(no, part) else (yes, no)
            must(fill.op == "full")
            number = constant(a, fill.attrs[0], (), fill.dtype)
            padded = _padded(a, condition, x, constant(a, stem is yes, (), torch.bool), place, source.shape)
            changed = proven(_changed(a, x, part, stem, place))
            sides = (changed, number) if stem is yes else (number, changed)
            return where(a, padded, *sides, source.dtype)
        case _:
            return None


def _stems(x: Value, part: Value) -> bool:
    """Return True if `x` is `part`, or is computed from it by casts, sums and choices."""
    return x is part or (x.op in ("cast", "add", "shift", "where") and any(_stems(each, part) for each in x.args[-2:]))


def _padded(a: Algebra, other: Value, x: Value, fill: Value, place: tuple[int, Dim], shape: tuple[Any, ...]) -> Value:
    """Expand `other` to `shape`, that of the part at `place`, and pad it by `fill` to the size of `x` on the axis."""
    axis, start = place
    other = a.reshape(other, ((1,) * (len(shape) - other.rank)) + other.shape)
    stop = start + shape[axis]
    other = a.expand(other, (*other.shape[:axis], shape[axis], *other.shape[axis + 1 :]))
    before, after = (
        a.expand(fill, (*other.shape[:axis], size, *other.shape[axis + 1 :])) for size in (start, x.shape[axis] - stop)
    )
    return a.cat([before, other, after], axis)
