"""The canonical algebra: smart constructors that normalise every ordinary spelling of an expression to one value.

    x·x, x**2, square(x)        → power(x, 2)            x / sqrt(v), x · rsqrt(v)   → mul(x, power(v, -½))
    sum(x) / D, sum(x) · D⁻¹    → mean(x)                1 / (1 + exp(-x))           → sigmoid(x)
    view of view, unsqueeze     → reshape                t, transpose of transpose   → permute
    split, chunk, narrow        → slice                  a - b                       → add(a, scale(b, -1))

Every value is built here, whether it stands for a user's node or for an operand that only a rewrite needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import reshapes, simplifications
from fusion.graph.dims import Dim, broadcast, but_ones, equal_trailing
from fusion.graph.nonnegative import is_nonnegative
from fusion.graph.value import Value

LARGE = 700.0  # log of a number within the range of float64
MAX_STOP = 2**62  # aten writes "to the end" as a stop beyond any size
LONGEST = 2**53  # integers below it are exact as float64
_LOSSLESS = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


_LARGEST = frozenset({"largest", "largest_index", "stable_largest", "stable_largest_index"})
"""Ops whose first entries equal those of the same op with a smaller count, as of top-k."""


def widens(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    """Return True if a cast from `source` to `target` represents every value exactly."""
    return source == target or (source is not None and target in _LOSSLESS.get(source, ()))


class Algebra:
    """Constructor of the values of one graph, which hash-conses them."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Any, ...], Value] = {}

    def make(
        self, op: str, args: Sequence[Value], attrs: Sequence[Any], shape: Sequence[Dim], dtype: torch.dtype | None
    ) -> Value:
        """Return the one value with this op, arguments, attributes, shape and dtype, without any simplification."""
        key = (op, tuple(args), tuple(attrs), tuple(shape), dtype)
        value = self._interned.get(key)
        if value is None:
            value = self._interned[key] = Value(len(self._interned), op, *key[1:])
        return value

    # shape -----------------------------------------------------------------------------------------------------

    def opened(self, x: Value, place: int) -> Value:
        """Insert a dim of size 1 into `x` at `place`."""
        return self.reshape(x, (*x.shape[:place], 1, *x.shape[place:]))

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """View `x` as `shape`, in row-major order; moved below elementwise ops, slices, cats and means of rows."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if x.op == "reshape":
            return self.reshape(x.arg, shape)
        if x.op in ("power", "scale", "shift", "cast"):
            return self.make(x.op, (self.reshape(x.arg, shape),), x.attrs, shape, x.dtype)
        if x.op == "permute" and x.arg.op == "reshape" and (order := reshapes.opened_order(x, shape)) is not None:
            return self.reshape(self.permute(x.arg.arg, order), shape)
        if x.op == "mean" and x.attrs == (-1,) and shape and shape[-1] == 1:
            return self.mean(self.reshape(x.arg, (*shape[:-1], x.arg.shape[-1])), (-1,))
        if x.op == "slice" and shape and x.attrs[0] == x.rank - 1 and shape[-1] == x.shape[-1]:
            _, *bounds = x.attrs
            return self.cut(self.reshape(x.arg, (*shape[:-1], x.arg.shape[-1])), -1, *bounds)
        return reshapes.below_parts(self, x, shape) or self.make("reshape", (x,), (), shape, x.dtype)

    def seen_as(self, x: Value, view: Value) -> Value:
        """Apply `view`, a reshape, permute, slice or expand of another value, to `x`."""
        if view.op == "permute":
            return self.permute(x, view.attrs)
        if view.op == "slice":
            return self.cut(x, *view.attrs)
        return self.expand(x, view.shape) if view.op == "expand" else self.reshape(x, view.shape)

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        """Permute the dims of `x`; where only dims of size 1 move, reshape."""
        order = tuple(axis % x.rank for axis in order)
        if x.op == "permute":
            order, x = tuple(x.attrs[axis] for axis in order), x.arg
        shape = tuple(x.shape[axis] for axis in order)
        if x.op == "expand":
            return self.expand(self.permute(x.arg, order), shape)
        axes = [axis for axis in order if x.shape[axis] != 1]
        if axes == sorted(axes):
            return self.reshape(x, shape)
        if x.op == "reshape" and but_ones(x.shape) == but_ones(x.arg.shape):
            moved = reshapes.permute_below(self, x, axes)
            return self.reshape(moved, shape)
        if any(shape[place] == 1 != x.shape[place] for place in range(x.rank)):
            squeezed = self.reshape(x, but_ones(x.shape))
            return self.reshape(self.permute(squeezed, [sorted(axes).index(axis) for axis in axes]), shape)
        if x.op == "slice":
            cut, *bounds = x.attrs
            return self.cut(self.permute(x.arg, order), order.index(cut), *bounds)
        same = equal_trailing(x.shape, x.arg.shape) if x.op == "reshape" else 0
        if order[: x.rank - same] == tuple(range(x.rank - same)):
            more = x.arg.rank - x.rank
            below = (*range(x.arg.rank - same), *(axis + more for axis in order[x.rank - same :]))
            return self.reshape(self.permute(x.arg, below), shape)
        return self.make("permute", (x,), order, shape, x.dtype)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value | None:
        """Slice `x` to [start, stop) with `step` along `axis`, clipping bounds and counting negative ones from the end
        as aten does.

        None where a symbolic size leaves the bounds open.
        """
        size = x.shape[axis]
        if isinstance(size, int):
            return self.cut(x, axis, start, stop, step)
        if (start, stop, step) == (0, 1, 1) and size.is_positive:
            return self.narrow(x, axis, 0, 1)
        return x if (start == 0 and stop >= MAX_STOP and step == 1) else None

    def narrow(self, x: Value, axis: int, start: Dim, length: Dim) -> Value:
        """Slice [start, start + length) along `axis`, where sizes are symbolic; all entries must exist."""
        axis %= x.rank
        shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
        return x if length == x.shape[axis] else self.make("narrow", (x,), (axis, start, length), shape, x.dtype)

    def cut(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """Slice `x` to [start, stop) with `step` along `axis`, whose size is an int; slices of slices and of cats
        merge.
        """
        axis %= x.rank
        size = int(x.shape[axis])
        start, stop, step = slice(start, stop, step).indices(size)
        if (start, stop, step) == (0, size, 1):
            return x
        if x.op == "slice" and x.attrs[0] == axis:
            _, first, _, stride = x.attrs
            stop = first + (start + len(range(start, stop, step)) * step - step) * stride + 1
            return self.cut(x.arg, axis, first + start * stride, stop, stride * step)
        if x.op == "slice_scatter" and x.attrs == (axis, start, stop, step):
            return x.args[1]
        if x.op == "permute" and x.arg.op == "cat" and x.arg.attrs == (x.attrs[axis],) and start < stop:
            return self.permute(self.cut(x.arg, x.attrs[axis], start, stop, step), x.attrs)
        if x.op == "cat" and x.attrs[0] == axis:
            pieces = reshapes.pieces_within(x, axis, start, stop)
            if len(pieces) == 1:
                return self.cut(pieces[0][0], axis, start - pieces[0][1], stop - pieces[0][1], step)
            if step == 1 and pieces:
                return self.cat([self.cut(each, axis, max(start - at, 0), stop - at) for each, at in pieces], axis)
        if x.op in _LARGEST and (axis, start, step) == (x.rank - 1, 0, 1):
            return self.make(x.op, x.args, (stop,), (*x.shape[:-1], stop), x.dtype)
        stop = start + (len(range(start, stop, step)) - 1) * step + 1 if start < stop else start
        shape = (*x.shape[:axis], len(range(start, stop, step)), *x.shape[axis + 1 :])
        return self.make("slice", (x,), (axis, start, stop, step), shape, x.dtype)

    def expand(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Broadcast `x` to `shape`."""
        if x.op == "expand":
            x = x.arg
        x = self.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
        return x if x.shape == tuple(shape) else self.make("expand", (x,), (), shape, x.dtype)

    def cat(self, pieces: Sequence[Value], axis: int) -> Value:
        """Concatenate `pieces` along `axis`, without empty ones; adjacent slices of one value merge."""
        rank = max(piece.rank for piece in pieces)
        axis %= rank
        flat: list[Value] = []
        for piece in [each for each in pieces if 0 not in each.shape] or pieces:
            flat.extend(piece.args if piece.op == "cat" and piece.attrs[0] == axis else (piece,))
        joined: list[Value] = []
        for piece in flat:
            merged = reshapes.rejoined(self, joined[-1], piece, axis) if joined else None
            if merged is None:
                joined.append(piece)
            else:
                joined[-1] = merged
        if len(joined) <= 1:
            return joined[0] if joined else pieces[0]
        size = sum((piece.shape[axis] for piece in joined), start=0)
        shape = (*joined[0].shape[:axis], size, *joined[0].shape[axis + 1 :])
        return self.make("cat", joined, (axis,), shape, joined[0].dtype)

    # elements --------------------------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: torch.dtype | None) -> Value:
        """Convert `x` to `dtype`, without exact widenings before another cast, or a cast to bool and back."""
        while x.op == "cast" and (widens(x.arg.dtype, x.dtype) or {x.arg.dtype, dtype} == {torch.bool}):
            x = x.arg
        if x.op == "expand":
            return self.expand(self.cast(x.arg, dtype), x.shape)
        return x if x.dtype == dtype else self.make("cast", (x,), (), x.shape, dtype)

    def scale(self, x: Value, factor: float) -> Value:
        """Build `x` · `factor`."""
        if x.op == "expand":
            return self.expand(self.scale(x.arg, factor), x.shape)
        if x.op == "scale" and _joins(x, factor * x.attrs[0]):
            x, factor = x.arg, factor * x.attrs[0]
        nearest = round(factor) if math.isfinite(factor) else 0
        factor = float(nearest) if nearest and math.isclose(factor, nearest, rel_tol=1e-12) else float(factor)
        if x.op == "full" and x.attrs[0] == 1 and x.dtype is not None and x.dtype.is_floating_point:
            return self.make("full", (), (factor,), x.shape, x.dtype)  # the factor is rounded once, to the dtype
        return x if factor == 1 else self.make("scale", (x,), (factor,), x.shape, x.dtype)

    def shift(self, x: Value, offset: float) -> Value:
        """Build `x` + `offset`."""
        if x.op == "expand":
            return self.expand(self.shift(x.arg, offset), x.shape)
        if x.op == "shift" and _joins(x, offset + x.attrs[0]):
            x, offset = x.arg, offset + x.attrs[0]
        return x if offset == 0 else self.make("shift", (x,), (float(offset),), x.shape, x.dtype)

    def mul(self, x: Value, y: Value) -> Value | None:
        """Build `x` · `y`, in either order; None where the shapes do not broadcast."""
        if x is y:
            return self.power(x, 2)
        x, y = _unexpanded(x, y)
        softmax = simplifications.softmax(self, x, y) or simplifications.softmax(self, y, x)
        normalised = simplifications.normalised(self, x, y) or simplifications.normalised(self, y, x)
        return softmax or self._commuted("mul", *(normalised or (x, y)))

    def _commuted(self, op: str, x: Value, y: Value) -> Value | None:
        if x.id > y.id:
            x, y = y, x
        shape = broadcast(x.shape, y.shape)
        return None if shape is None else self.make(op, (x, y), (), shape, x.dtype)

    def add(self, x: Value, y: Value) -> Value | None:
        """Build `x` + `y`, in either order; x + x·w with w per channel becomes x · (1 + w); None as for `mul`."""
        if x is y:
            return self.scale(x, 2)
        x, y = _unexpanded(x, y)
        gain = simplifications.gain(self, x, y) or simplifications.gain(self, y, x)
        if gain is not None:
            return self.mul(*gain)
        orders = ((x, y), (y, x))
        simplified = (
            identity(self, *each)
            for identity in (simplifications.variance, simplifications.second_moment)
            for each in orders
        )
        return next(filter(None, simplified), None) or self._commuted("add", x, y)

    def power(self, x: Value, exponent: float) -> Value:
        """Build `x` ** `exponent`; nested powers merge where the sign of x cannot matter."""
        if x.op == "expand":
            return self.expand(self.power(x.arg, exponent), x.shape)
        if x.op == "power" and (x.attrs[0] in (0.5, -0.5, -1.0) or float(exponent).is_integer()):
            inner = x.attrs[0]
            if not (inner in (0.5, -0.5) and float(exponent * inner).is_integer()) or is_nonnegative(x.arg):
                x, exponent = x.arg, exponent * inner
        if x.op == "abs" and exponent % 2 == 0:
            return self.power(x.arg, exponent)
        if x.op == "scale" and x.attrs[0] > 0 and abs(math.log(x.attrs[0]) * exponent) < LARGE:
            return self.scale(self.power(x.arg, exponent), x.attrs[0] ** exponent)
        if exponent == 1:
            return x
        if exponent == -1 and x.op == "shift" and x.attrs[0] == 1 and x.arg.op == "exp":
            logit = self.scale(x.arg.arg, -1)
            return self.unary("sigmoid", logit)
        return self.make("power", (x,), (float(exponent),), x.shape, x.dtype)

    def softmax(self, x: Value, axis: int, empty: str, less: str = "greatest") -> Value:
        """Build exp(x - r) / Σ exp(x - r) along `axis`, where r is one number for each row.

        Attributes of the value: the axis counted from the end, `empty` and `less`, which describe the result of fully
        masked rows: spellings differ in it.

        Args:
            x: the scores.
            axis: the dim of the keys.
            empty: the result of a row of -inf, "nan" or "zero".
            less: r, which decides about rows of one low, but finite number: the "greatest" entry of the row,
                "nothing" (each exp(x) is 0), "log_sum" (log Σ exp x, where the dtype of `x` may lose log of the number
                of keys), "log_of_sum" (the same by exponentials of `x` itself, which are 0) or "unknown".
        """
        if (scores := simplifications.below_greatest(x, axis % x.rank - x.rank)) is not None:
            x, less = scores, "greatest"
        return self.make("softmax", (x,), (axis % x.rank - x.rank, empty, less), x.shape, x.dtype)

    def unary(self, op: str, x: Value) -> Value:
        """Build an elementwise function `op` of `x` that has no constructor of its own; |x| of x >= 0 is x."""
        return x if op == "abs" and is_nonnegative(x) else self.make(op, (x,), (), x.shape, x.dtype)

    # reductions ------------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Value, axes: Sequence[int]) -> Value:
        """Reduce `x` by `op` over `axes`, which stay as dims of size 1. Attributes: the axes, counted from the end."""
        axes = tuple(sorted(axis % x.rank - x.rank for axis in axes))
        shape = tuple(1 if position - x.rank in axes else size for position, size in enumerate(x.shape))
        return self.make(op, (x,), axes, shape, x.dtype)

    def mean(self, x: Value, axes: Sequence[int]) -> Value:
        """Average `x` over `axes`; the factor of a scaled power moves outside, as `power` moves factors."""
        if x.op == "scale" and x.arg.op == "power" and not is_input_free(x):
            return self.scale(self.mean(x.arg, axes), *x.attrs)
        return self.reduce("mean", x, axes)

    def sum(self, x: Value, axes: Sequence[int]) -> Value | None:
        """Sum `x` over `axes`, as a scaled mean; None where a size is symbolic."""
        sizes = [x.shape[axis % x.rank] for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            return None
        return self.scale(self.mean(x, axes), math.prod(int(size) for size in sizes))


def is_input_free(x: Value) -> bool:
    """Return True if `x` may depend on no input, as positions do: then rounding to its dtype is part of its value."""
    return all(each.args or each.op in ("arange", "constant", "full", "number") for each in x.sources())


def _joins(step: Value, number: float) -> bool:
    """Return True if two steps `step`, both a scale or both a shift, may become one with the number `number`.

    Merging rounds once instead of twice: allowed for floats of data, not for positions; integers must not get long.
    """
    if step.dtype is None or step.dtype.is_floating_point:
        return not is_input_free(step)
    return abs(number) < LONGEST


def _unexpanded(x: Value, y: Value) -> tuple[Value, Value]:
    """Strip expands of `x` and `y` that broadcasting between them repeats anyway."""
    shape = broadcast(x.shape, y.shape)
    if x.op == "expand" and broadcast(x.arg.shape, y.shape) == shape:
        x = x.arg
    if y.op == "expand" and broadcast(x.shape, y.arg.shape) == shape:
        y = y.arg
    return x, y
