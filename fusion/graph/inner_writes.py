"""Writes into a part of a cache that is put back, as writes into the cache itself, of which the part stays a slice.

cache[i][slots] = rows                 rows of all parts, one part behind the other: at slots + i · (rows of a part)
cache[:, i][block, place] = rows       pages of all parts in turn: at block · (number of parts) + i
cache[i][.., positions, ..] = rows     sequences of all parts: those from i · (sequences of a part) on
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof

_WRITES = ("write", "write_rows", "write_within")
_CACHES = ("reshape", "slice", "slice_scatter", *_WRITES)
"""Ops through which an input stays the cache that was passed in."""


@proof
def within(a: Algebra, x: Value, source: Value, axis: int, start: int, stop: int) -> Value | None:
    """Return the input `x` after a write into its slice x[start:stop] along `axis`, as one write into `x` itself.

    `source` is the slice after the write; None where it is anything else, or where the write has no such form.
    """
    written = source.below("reshape")
    must(written.op in (*_WRITES, "slice_scatter") and x.below(*_CACHES).op == "input")
    must(all(isinstance(size, int) for size in (*x.shape, *written.shape)))
    must(a.reshape(a.cut(x, axis, start, stop), written.shape) is written.arg)
    to_rows = written.attrs[0] == 0
    shape: Any = x.shape
    if axis == 0 and to_rows and written.op in ("write", "slice_scatter") and written.shape == shape[1:]:
        return _write_sequences(a, x, written, start, opened=True)
    if axis == 0:  # the parts are contiguous, one behind the other
        row: Any = math.prod(written.shape[1:])
        elements = math.prod(shape[1:])
        must(start * elements % row == shape[0] * elements % row == 0)
        first, step, count = start * elements // row, 1, shape[0] * elements // row
    else:
        must(stop - start == 1 and shape[:axis] == written.shape[:1] and to_rows)
        first, step, count = start, shape[axis], math.prod(shape[: axis + 1])
    cache = a.reshape(x, (count, *written.shape[1:]))
    made = _write_rows(a, cache, written, step, first) if to_rows else _write_sequences(a, cache, written, first)
    return a.reshape(made, x.shape) if made is not None else None


@proof
def _write_rows(a: Algebra, cache: Value, written: Value, step: int, first: int) -> Value | None:
    """Repeat `written`, a write of rows (or pages) into a part of `cache` [count, ..], as a write into `cache` itself.

    Row n of the part is row `first` + n·`step` of `cache`.
    """
    must(written.op == "write_rows" or (written.op == "write" and step == 1))
    _, rows, index, *inner = written.args
    index = index if int(cache.shape[0]) < 2**31 else a.cast(index, torch.int64)
    index = a.shift(a.scale(index, step), first)
    return a.make(written.op, (cache, rows, index, *inner), (0,), cache.shape, cache.dtype)


@proof
def _write_sequences(a: Algebra, cache: Value, written: Value, first: int, opened: bool = False) -> Value | None:
    """Repeat `written`, a write into sequences of a part of `cache` [count, ..], as a write into `cache` itself.

    Sequence n of the part is sequence `first` + n of `cache`; `opened` is True if the part is one sequence [..].
    """
    _, rows, *index = written.args
    rows = a.opened(rows, 0) if opened else rows
    axis = written.attrs[0] + opened
    if written.op == "slice_scatter":
        _, start, _, step = written.attrs
        must(step == 1)
        how: tuple[Any, ...] = (axis, first, "number", start)
    elif written.op == "write_within":
        _, before, *place = written.attrs
        how = (axis, first + before, *place)
    else:
        how = (axis, first, "start" if written.op == "write" else "index")
    return a.make("write_within", (cache, rows, *index), how, cache.shape, cache.dtype)
