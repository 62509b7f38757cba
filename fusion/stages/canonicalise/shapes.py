"""Shape ops: everything that only renames, reorders, cuts or joins elements."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.algebra import MAX_STOP
from fusion.stages.canonicalise.translate import Out, Translated, translates

arranges = partial(translates, of_complex="parts")


@arranges(
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.reshape.default",
    "aten.unsqueeze.default",
    "aten.squeeze.default",
    "aten.squeeze.dim",
    "aten.squeeze.dims",
    "aten._reshape_alias.default",
    "aten.flatten.using_ints",
    "aten.unflatten.int",
    "aten.view_as.default",
    any_rank=True,
)
def _reshape(a: Algebra, out: Out, x: Value, *args: Any, **kwargs: Any) -> Translated:
    return a.reshape(x, out.shape)


@arranges(
    "aten.alias.default",
    "aten.detach.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.lift_fresh_copy.default",
    "aten.dropout.default",
)
def _same(a: Algebra, out: Out, x: Value, *args: Any, **kwargs: Any) -> Translated:
    dropping = len(args) == 2 and args[0] != 0 and args[1]  # dropout(x, p, train)
    return None if dropping else x


@arranges("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default")
def _cast(a: Algebra, out: Out, x: Value, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Translated:
    unproven = device is not None and not x.rank  # a number may come from another device
    return None if unproven else a.cast(x, out.dtype)


@arranges("aten.t.default", "aten.transpose.int", "aten.permute.default", "aten.swapaxes.default")
def _permute(a: Algebra, out: Out, x: Value, *args: Any) -> Translated:
    if not args:  # t
        return a.permute(x, range(x.rank)[::-1])
    if len(args) == 1:
        return a.permute(x, args[0])
    order = list(range(x.rank))
    first, second = args[0], args[1]
    order[first], order[second] = order[second], order[first]
    return a.permute(x, order)


@arranges("aten.movedim.int")
def _movedim(a: Algebra, out: Out, x: Value, source: int, destination: int) -> Translated:
    order = [axis for axis in range(x.rank) if axis != source % x.rank]
    order.insert(destination % x.rank, source % x.rank)
    return a.permute(x, order)


@arranges("aten.slice.Tensor")
def _slice(
    a: Algebra, out: Out, x: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Translated:
    start, end = 0 if start is None else start, MAX_STOP if end is None else end
    if not (isinstance(start, int) and isinstance(end, int)):
        return None
    return a.slice(x, dim, start, end, step)


@arranges("aten.narrow.default")
def _narrow(a: Algebra, out: Out, x: Value, dim: int, start: Any, length: Any) -> Translated:
    known = isinstance(start, int) and isinstance(length, int)
    return a.slice(x, dim, start, start + length) if known else None


@arranges("aten.select.int")
def _select(a: Algebra, out: Out, x: Value, dim: int, index: Any) -> Translated:
    size = x.shape[dim]
    if not (isinstance(index, int) and isinstance(size, int) and size):
        return None
    taken = a.slice(x, dim, index % size, index % size + 1)
    return None if taken is None else a.reshape(taken, out.shape)


def _cut(a: Algebra, x: Value, sizes: Sequence[Any], dim: int) -> Translated:
    pieces: list[Value | None] = []
    start = 0
    for size in sizes:
        if not isinstance(size, int):
            return None
        pieces.append(a.slice(x, dim, start, start + size))
        start += size
    return tuple(pieces)


@arranges("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.split.sizes")
def _split_sizes(a: Algebra, out: Out, x: Value, sizes: Sequence[Any], dim: int = 0) -> Translated:
    return _cut(a, x, sizes, dim)


@arranges("aten.split.Tensor")
def _split(a: Algebra, out: Out, x: Value, size: Any, dim: int = 0) -> Translated:
    total = x.shape[dim]
    if not (isinstance(total, int) and isinstance(size, int) and total and size):
        return None
    return _cut(a, x, [min(size, total - start) for start in range(0, total, size)], dim)


@arranges("aten.chunk.default")
def _chunk(a: Algebra, out: Out, x: Value, chunks: int, dim: int = 0) -> Translated:
    total = x.shape[dim]
    return _split(a, out, x, math.ceil(total / chunks), dim) if isinstance(total, int) else None


@arranges("aten.unbind.int")
def _unbind(a: Algebra, out: Out, x: Value, dim: int = 0) -> Translated:
    size = x.shape[dim]
    if not isinstance(size, int):
        return None
    kept = tuple(each for axis, each in enumerate(x.shape) if axis != dim % x.rank)
    pieces = [a.slice(x, dim, index, index + 1) for index in range(size)]
    return tuple(None if piece is None else a.reshape(piece, kept) for piece in pieces)


@arranges("aten.expand.default", "aten.broadcast_to.default", "aten.expand_as.default")
def _expand(a: Algebra, out: Out, x: Value, *args: Any, **kwargs: Any) -> Translated:
    return a.expand(x, out.shape)


@arranges("aten.cat.default")
def _cat(a: Algebra, out: Out, tensors: Sequence[Value], dim: int = 0) -> Translated:
    full = [each for each in tensors if each.shape != (0,)]
    same = all(each.rank == len(out.shape) for each in full)
    return a.cat([a.cast(each, out.dtype) for each in full], dim) if full and same else None


@arranges("aten.stack.default", any_rank=True)
def _stack(a: Algebra, out: Out, tensors: Sequence[Value], dim: int = 0) -> Translated:
    dim %= len(out.shape)
    opened = [a.reshape(each, (*each.shape[:dim], 1, *each.shape[dim:])) for each in tensors]
    return a.cat(opened, dim)


@arranges("aten.repeat_interleave.self_int")
def _repeat_interleave(
    a: Algebra, out: Out, x: Value, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Translated:
    if dim is None or not isinstance(repeats, int):
        return None
    dim %= x.rank
    opened = a.reshape(x, (*x.shape[: dim + 1], 1, *x.shape[dim + 1 :]))
    wide = a.expand(opened, (*x.shape[: dim + 1], repeats, *x.shape[dim + 1 :]))
    return a.reshape(wide, out.shape)


@arranges("aten.repeat.default")
def _repeat(a: Algebra, out: Out, x: Value, repeats: Sequence[Any]) -> Translated:
    if not all(isinstance(count, int) for count in repeats):
        return None
    x = a.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape)
    for axis, count in enumerate(repeats):
        if count > 1 and x.shape[axis] != 1:
            x = a.cat([x] * count, axis)
    return a.expand(x, out.shape)


@arranges("aten.roll.default")
def _roll(a: Algebra, out: Out, x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Translated:
    if len(dims) != 1 or not isinstance(x.shape[dims[0]], int) or not isinstance(shifts[0], int) or 0 in x.shape:
        return None
    return rolled(a, x, dims[0], -shifts[0] % int(x.shape[dims[0]]))


def rolled(a: Algebra, x: Value, axis: int, first: int) -> Value | None:
    """`x` from its position `first` on, and then what stands before."""
    tail, head = a.slice(x, axis, first, int(x.shape[axis])), a.slice(x, axis, 0, first)
    return None if tail is None or head is None else a.cat([tail, head], axis)


@arranges("aten.flip.default")
def _flip(a: Algebra, out: Out, x: Value, dims: Sequence[int]) -> Translated:
    return a.make("flip", (x,), (dims[0] % x.rank,), x.shape, x.dtype) if len(dims) == 1 else None


@arranges("aten.copy.default")
def _copy(a: Algebra, out: Out, x: Value, source: Value, non_blocking: bool = False) -> Translated:
    return a.expand(a.cast(source, out.dtype), out.shape)


@arranges("aten.slice_scatter.default")
def _slice_scatter(
    a: Algebra, out: Out, x: Value, source: Value, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Translated:
    """A buffer filled slice by slice: values keep the slices; where they cover the buffer it is their join."""
    if source.dtype != x.dtype:
        return None  # what is written is cast on its way
    size = out.shape[dim]
    start, end = 0 if start is None else start, MAX_STOP if end is None else end
    if not all(isinstance(each, int) for each in (size, start, end)):
        return _placed(a, x, source, dim % x.rank, start, end) if step == 1 else None
    start, stop, step = slice(start, end, step).indices(int(size))
    if len(range(start, stop, step)) == size:
        return source
    if step == 1:
        return sliced(a, x, source, dim % x.rank, start, stop)
    written = a.make("slice_scatter", (x, source), (dim % x.rank, start, stop, step), out.shape, out.dtype)
    return _covered(a, written) or written


def _placed(a: Algebra, x: Value, source: Value, axis: int, start: Any, end: Any) -> Value | None:
    """A slice where sizes are symbolic; with as many rows as `end` - `start` says, neither was cut off."""
    size = x.shape[axis]
    if start == 0 and (end == size or (isinstance(end, int) and end >= MAX_STOP)):
        return source
    if end - start != source.shape[axis]:
        return None
    place = number(a, start, x)
    known = isinstance(start, int) and start >= 0
    place = place if known else a.make("wrap", (place,), (size,), (), place.dtype)
    return a.make("write", (x, source, place), (axis,), x.shape, x.dtype)


def number(a: Algebra, size: Any, beside: Value) -> Value:
    """A size, symbolic or not, as a tensor [] of int64 on the device of another."""
    return a.make("number", (beside,), (size,), (), torch.int64)


def sliced(a: Algebra, x: Value, source: Value, axis: int, start: int, stop: int) -> Value:
    """`x` with `source` at [start, stop) along `axis`, a known place; a join of pieces stays one."""
    size = int(x.shape[axis])
    if stop - start == size:
        return source
    first = _first_sequences(a, x, source, stop) if axis == start == 0 else None
    if first is not None:
        return first
    around = [a.slice(x, axis, *bounds) for bounds in ((0, start), (stop, size)) if bounds[0] < bounds[1]]
    if x.op == "cat" and all(each is not None and not (each.op == "slice" and each.arg is x) for each in around):
        before = [each for each in around[: 1 if start else 0] if each is not None]
        after = [each for each in around[1 if start else 0 :] if each is not None]
        return a.cat([*before, source, *after], axis)
    written = a.make("slice_scatter", (x, source), (axis, start, stop, 1), x.shape, x.dtype)
    return _covered(a, written) or written


def _first_sequences(a: Algebra, x: Value, source: Value, stop: int) -> Value | None:
    """x[:b][.., start:stop] = rows: one write of as many sequences as there are rows for."""
    if source.op not in ("write", "slice_scatter") or source.arg is not a.slice(x, 0, 0, stop):
        return None
    axis, placed = source.attrs[0], source.op == "slice_scatter"
    if axis == 0 or (placed and source.attrs[3] != 1):
        return None
    start = number(a, source.attrs[1], x) if placed else source.args[2]
    return a.make("write", (x, source.args[1], start), (axis,), x.shape, x.dtype)


def _covered(a: Algebra, last: Value) -> Value | None:
    """The join of the slices of a chain of `slice_scatter` that leaves nothing of its buffer, oldest write below."""
    axis, _, _, stride = last.attrs
    size = int(last.shape[axis])
    writes: dict[int, Value] = {}
    lanes: set[int] = set()
    value = last
    while value.op == "slice_scatter" and value.attrs[0] == axis and value.attrs[3] == stride:
        _, start, stop, _ = value.attrs
        here = set(range(start, stop, stride))
        if here & lanes:
            return None
        writes[start] = value.args[1]
        lanes |= here
        value = value.arg
    if len(lanes) < size:
        return None
    pieces = [writes[start] for start in sorted(writes)]
    if stride == 1:
        return a.cat(pieces, axis)
    if size % stride or sorted(writes) != list(range(stride)):
        return None
    opened = [a.reshape(each, (*each.shape[: axis + 1], 1, *each.shape[axis + 1 :])) for each in pieces]
    return a.reshape(a.cat(opened, axis + 1), last.shape)
