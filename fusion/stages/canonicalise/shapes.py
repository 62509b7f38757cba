"""Shape operators: reshapes, permutes, slices, concatenations and casts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.algebra import MAX_STOP
from fusion.graph.comparisons import constant
from fusion.graph.proof_steps import must, proven
from fusion.stages.canonicalise import listed_positions
from fusion.stages.canonicalise.translators import Out, Translated, translates, translations

arranges = partial(translates, complex_mode="parts")


def _reshape(a: Algebra, out: Out, x: Value, *args: Any, **kwargs: Any) -> Translated:
    return a.reshape(x, out.shape)


def _same(a: Algebra, out: Out, x: Value, *args: Any, **kwargs: Any) -> Translated:
    dropping = len(args) == 2 and args[0] != 0 and args[1]  # dropout(x, p, train)
    return None if dropping else x


@arranges("aten._to_copy.default", "aten.to.dtype", "prims.convert_element_type.default")
def _cast(a: Algebra, out: Out, x: Value, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Translated:
    unproven = device is not None and not x.rank  # a 0-d tensor may come from another device
    named = listed_positions.any_named(a, "ne", x, constant(a, 0, (), x.dtype)) if out.dtype is torch.bool else None
    return None if unproven else named or a.cast(x, out.dtype)


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
    known = all(isinstance(each, int) for each in (start, end, x.shape[dim]))
    return a.slice(x, dim, start, end, step) if known else _narrowed(a, x, dim % x.rank, start, end, out.shape)


def _narrowed(a: Algebra, x: Value, axis: int, start: Any, end: Any, shape: Sequence[Any]) -> Value | None:
    """Slice along an axis with symbolic sizes, where no bound is clipped.

    None for a start that may count from the end, and for a step: the result is shorter than end - start.
    """
    size, length = x.shape[axis], shape[axis]
    first = first_of(size, length, start, end)
    if first is None:
        return None
    return a.narrow(x, axis, first, length)


def first_of(size: Any, length: Any, start: Any, end: Any) -> Any:
    """Return the index at which a slice of `length` out of `size` begins.

    None where the slice may be clipped, or `start` may count from the end.
    """
    if start == -length:  # the last `length` entries
        return size - length
    if isinstance(end, int):
        end = size if end >= MAX_STOP else size + end if end < 0 else end
    inside = isinstance(start, int) and start >= 0 and end - start == length
    return start if inside else None


@arranges("aten.narrow.default")
def _narrow(a: Algebra, out: Out, x: Value, dim: int, start: Any, length: Any) -> Translated:
    return _slice(a, out, x, dim, start, start + length)


def _entry(a: Algebra, x: Value, axis: int, index: int) -> Value:
    """Select entry `index` along `axis`, without the dim."""
    taken = proven(a.slice(x, axis, index, index + 1))
    return a.reshape(taken, [size for place, size in enumerate(x.shape) if place != axis % x.rank])


@arranges("aten.select.int")
def _select(a: Algebra, out: Out, x: Value, dim: int, index: Any) -> Translated:
    if not isinstance(index, int):
        return None
    size = x.shape[dim]
    if isinstance(size, int):
        return _entry(a, x, dim, index % _static(size))
    return a.reshape(a.narrow(x, dim, index if index >= 0 else size + index, 1), out.shape)


def _static(size: Any) -> int:
    """Return `size`, an int other than 0; unproven for other sizes."""
    must(isinstance(size, int) and size)
    return size


@arranges("aten.split_with_sizes.default", "aten.split_with_sizes_copy.default", "aten.split.sizes")
def _cut(a: Algebra, out: Out, x: Value, sizes: Sequence[Any], dim: int = 0) -> Translated:
    must(all(isinstance(size, int) for size in sizes))
    stops = list(accumulate(sizes))
    return tuple(a.slice(x, dim, stop - size, stop) for size, stop in zip(sizes, stops, strict=True))


@arranges("aten.split.Tensor")
def _split(a: Algebra, out: Out, x: Value, size: Any, dim: int = 0) -> Translated:
    total = _static(x.shape[dim])
    return _cut(a, out, x, [min(size, total - start) for start in range(0, total, _static(size))], dim)


@arranges("aten.chunk.default")
def _chunk(a: Algebra, out: Out, x: Value, chunks: int, dim: int = 0) -> Translated:
    return _split(a, out, x, math.ceil(_static(x.shape[dim]) / chunks), dim)


@arranges("aten.unbind.int")
def _unbind(a: Algebra, out: Out, x: Value, dim: int = 0) -> Translated:
    return tuple(_entry(a, x, dim, index) for index in range(_static(x.shape[dim])))


@arranges("aten.cat.default")
def _cat(a: Algebra, out: Out, tensors: Sequence[Value], dim: int = 0) -> Translated:
    full = [each for each in tensors if each.shape != (0,)]
    return a.cat([a.cast(each, out.dtype) for each in full], dim) if full else None


@arranges("aten.stack.default", any_rank=True)
def _stack(a: Algebra, out: Out, tensors: Sequence[Value], dim: int = 0) -> Translated:
    dim %= len(out.shape)
    return a.cat([a.opened(each, dim) for each in tensors], dim)


@arranges("aten.repeat_interleave.self_int")
def _repeat_interleave(
    a: Algebra, out: Out, x: Value, repeats: Any, dim: int | None = None, **kwargs: Any
) -> Translated:
    must(isinstance(repeats, int))
    if dim is None:
        x, dim = a.reshape(x, (math.prod(x.shape),)), 0
    behind = dim % x.rank + 1
    wide = a.expand(a.opened(x, behind), (*x.shape[:behind], repeats, *x.shape[behind:]))
    return a.reshape(wide, out.shape)


@arranges("aten.repeat.default")
def _repeat(a: Algebra, out: Out, x: Value, repeats: Sequence[Any]) -> Translated:
    x = a.reshape(x, (1,) * (len(repeats) - x.rank) + x.shape)
    for axis, count in enumerate(repeats):
        if isinstance(count, int):
            x = a.cat([x] * count, axis) if count > 1 and x.shape[axis] != 1 else x
        elif x.shape[axis] != 1:
            before, size, behind = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
            opened = a.reshape(x, (*before, 1, size, *behind))
            x = a.reshape(a.expand(opened, (*before, count, size, *behind)), (*before, count * size, *behind))
    return a.expand(x, out.shape)


@arranges("aten.roll.default")
def _roll(a: Algebra, out: Out, x: Value, shifts: Sequence[Any], dims: Sequence[int] = ()) -> Translated:
    must(len(dims) == 1 and isinstance(x.shape[dims[0]], int) and isinstance(shifts[0], int) and 0 not in x.shape)
    return rolled(a, x, dims[0], -shifts[0] % int(x.shape[dims[0]]))


def rolled(a: Algebra, x: Value, axis: int, first: int) -> Value:
    """Build `x` rolled along `axis` so that position `first` comes first."""
    return a.cat([proven(a.slice(x, axis, first, int(x.shape[axis]))), proven(a.slice(x, axis, 0, first))], axis)


@arranges("aten.constant_pad_nd.default", "aten.pad.default")
def _pad(a: Algebra, out: Out, x: Value, sizes: Sequence[Any], *how: Any) -> Translated:
    """Translate constant padding to `pad`; of a value that is computed without inputs, as a mask, to `cat`.

    `sizes` has two numbers per dim, before and behind, beginning with the last dim.
    """
    mode, fill, *_ = (*how, None) if how and isinstance(how[0], str) else ("constant", *how, None)
    must(mode == "constant" and all(isinstance(each, int) and each >= 0 for each in sizes))
    must(isinstance(fill or 0, (int, float)))
    if not _is_constant(x):
        return a.make("pad", (x,), (tuple(sizes), fill or 0), out.shape, out.dtype)
    for place, count in enumerate(sizes):
        if count:
            axis = x.rank - 1 - place // 2
            padding = constant(a, fill or 0, (*x.shape[:axis], count, *x.shape[axis + 1 :]), x.dtype)
            x = a.cat([x, padding] if place % 2 else [padding, x], axis)
    return x


def _is_constant(x: Value) -> bool:
    """Return True if `x` is computed without inputs, by canonical ops alone."""
    return x.op != "input" and not x.op.startswith("aten.") and all(map(_is_constant, x.args))


@arranges("aten.flip.default")
def _flip(a: Algebra, out: Out, x: Value, dims: Sequence[int]) -> Translated:
    return a.make("flip", (x,), (dims[0] % x.rank,), x.shape, x.dtype) if len(dims) == 1 else None


@translates("aten.view.dtype")
def _bits(a: Algebra, out: Out, x: Value, dtype: torch.dtype) -> Translated:
    x = x.below("bits")
    return a.reshape(x, out.shape) if x.dtype == out.dtype else a.make("bits", (x,), (), out.shape, out.dtype)


translations(
    {
        "aten.view.default aten._unsafe_view.default aten.reshape.default aten._reshape_alias.default": _reshape,
        "aten.unsqueeze.default aten.squeeze.default aten.squeeze.dim aten.squeeze.dims": _reshape,
        "aten.flatten.using_ints aten.unflatten.int aten.view_as.default": _reshape,
    },
    any_rank=True,
    complex_mode="parts",
)
translations(
    {
        "aten.alias.default aten.detach.default aten.clone.default aten.contiguous.default": _same,
        "aten.lift_fresh_copy.default aten.dropout.default": _same,
        "aten.expand.default aten.broadcast_to.default aten.expand_as.default": lambda a, out, x, *args, **how: (
            a.expand(x, out.shape)
        ),
        "aten.copy.default": lambda a, out, x, source, *args, **how: a.expand(a.cast(source, out.dtype), out.shape),
    },
    complex_mode="parts",
)
