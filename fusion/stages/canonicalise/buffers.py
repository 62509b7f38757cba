"""Buffers filled slice by slice: a chain of `slice_scatter`, which becomes a `cat` once the slices cover the buffer."""

from __future__ import annotations

from typing import Any

from fusion.graph import Algebra, Value, inner_writes, joined_writes, slice_updates
from fusion.graph.algebra import MAX_STOP
from fusion.graph.comparisons import number
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise.shapes import arranges, first_of
from fusion.stages.canonicalise.translators import Out, Translated


@arranges("aten.slice_scatter.default")
def _slice_scatter(
    a: Algebra, out: Out, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Translated:
    """Translate a write of `source` into a slice of `x`; slices that cover the buffer become a `cat`."""
    must(source.dtype == x.dtype)  # torch would cast `source`
    size = out.shape[dim]
    start, end = 0 if start is None else start, MAX_STOP if end is None else end
    if not all(isinstance(each, int) for each in (size, start, end)):
        return _placed(a, x, source, dim % x.rank, start, end)
    start, stop, step = slice(start, end, step).indices(int(size))
    if len(range(start, stop, step)) == size:
        return source
    if step == 1:
        return sliced(a, x, source, dim % x.rank, start, stop)
    written = a.make("slice_scatter", (x, source), (dim % x.rank, start, stop, step), out.shape, out.dtype)
    return _covered(a, written) or written


def _placed(a: Algebra, x: Value, source: Value, axis: int, start: Any, end: Any) -> Value | None:
    """Build a write of `source` into a slice where sizes are symbolic; None where a bound may be clipped."""
    size = x.shape[axis]
    if source.shape[axis] == size:
        return source
    begin = first_of(size, source.shape[axis], start, end)
    if begin is not None:
        part = a.narrow(x, axis, begin, source.shape[axis])
        changed = slice_updates.with_part(a, x, part, source, axis, begin)
        if changed is not None:
            return changed
    if end - start != source.shape[axis]:
        return None
    first = a.narrow(x, 0, 0, source.shape[0]) if (axis, start) == (0, 0) else None
    first = _first_sequences(a, x, source, first)
    if first is not None:
        return first
    place = number(a, start, x)
    known = isinstance(start, int) and start >= 0
    place = place if known else a.make("wrap", (place,), (size,), (), place.dtype)
    return a.make("write", (x, source, place), (axis,), x.shape, x.dtype)


def sliced(a: Algebra, x: Value, source: Value, axis: int, start: int, stop: int) -> Value:
    """Build `x` with `source` at [start, stop) along `axis`; a `cat` of pieces remains a `cat`."""
    size = int(x.shape[axis])
    if stop - start == size:
        return source
    first = _first_sequences(a, x, source, a.slice(x, 0, 0, stop))
    if first is not None:
        return first
    changed = slice_updates.with_part(a, x, a.cut(x, axis, start, stop), source, axis, start)
    changed = changed or inner_writes.within(a, x, source, axis, start, stop)
    if changed is not None:
        return changed
    before = [proven(a.slice(x, axis, 0, start))] if start else []
    after = [proven(a.slice(x, axis, stop, size))] if stop < size else []
    if x.op == "cat" and not any(each.op == "slice" and each.arg is x for each in (*before, *after)):
        return a.cat([*before, source, *after], axis)
    written = a.make("slice_scatter", (x, source), (axis, start, stop, 1), x.shape, x.dtype)
    return _covered(a, written) or written


def _first_sequences(a: Algebra, x: Value, source: Value, first: Value | None) -> Value | None:
    """Build x[:b][.., start:stop] = rows, a write into the first b sequences, as one write into `x`.

    `first` is x[:b], and `source` must be a write into `first`; else None.
    """
    if source.op not in ("write", "slice_scatter") or source.arg is not first:
        return None
    axis, placed = source.attrs[0], source.op == "slice_scatter"
    if axis == 0 or (placed and source.attrs[3] != 1):
        return None
    start = number(a, source.attrs[1], x) if placed else source.args[2]
    return a.make("write", (x, source.args[1], start), (axis,), x.shape, x.dtype)


def _covered(a: Algebra, last: Value) -> Value | None:
    """Concatenate the slices of a chain of `slice_scatter` that ends with `last`; None unless they cover the buffer.

    Slices that are writes at the same positions become one write of their concatenated rows.
    """
    axis, _, _, stride = last.attrs
    size = int(last.shape[axis])
    writes: dict[int, joined_writes.Part] = {}
    lanes: set[int] = set()
    value = last
    while value.op == "slice_scatter" and value.attrs[0] == axis and value.attrs[3] == stride:
        _, start, stop, _ = value.attrs
        here = set(range(start, stop, stride))
        if here & lanes:
            return None
        writes[start] = (start, stop, value.args[0], value.args[1])
        lanes |= here
        value = value.arg
    if len(lanes) < size:
        return None
    slices = [writes[start] for start in sorted(writes)]
    pieces = [source for *_, source in slices]
    if stride == 1:
        return joined_writes.joined(a, value, slices, axis) or a.cat(pieces, axis)
    if size % stride or sorted(writes) != list(range(stride)):
        return None
    return a.reshape(a.cat([a.opened(each, axis + 1) for each in pieces], axis + 1), last.shape)
