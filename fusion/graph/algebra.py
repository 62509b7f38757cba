"""The canonical algebra: smart constructors that bring every ordinary spelling of an expression to one value.

    x·x, x**2, square(x)        → power(x, 2)            x / sqrt(v), x · rsqrt(v)   → mul(x, power(v, -½))
    sum(x) / D, sum(x) · D⁻¹    → mean(x)                1 / (1 + exp(-x))           → sigmoid(x)
    view of view, unsqueeze     → reshape                t, transpose of transpose   → permute
    split, chunk, narrow        → slice                  a - b                       → add(a, scale(b, -1))

Every value is built here, whether it stands for a user's node or for an operand that only a rewrite needs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from fusion.graph.dims import Dim, broadcast, but_ones
from fusion.graph.signs import is_nonnegative
from fusion.graph.value import Value

LARGE = 700.0  # the logarithm of a number that a float still holds
MAX_STOP = 2**62  # aten writes "to the end" as a stop beyond any size
LONGEST = 2**53  # whole numbers below it are exact as floats
_LOSSLESS = {
    torch.bfloat16: {torch.float32, torch.float64},
    torch.float16: {torch.float32, torch.float64},
    torch.float32: {torch.float64},
}


def widens(source: torch.dtype | None, target: torch.dtype | None) -> bool:
    """Whether a cast from `source` to `target` keeps every value exactly."""
    return source == target or (source is not None and target in _LOSSLESS.get(source, ()))


class Algebra:
    """Builds and interns the values of one graph."""

    def __init__(self) -> None:
        self._interned: dict[tuple[Any, ...], Value] = {}

    def make(
        self, op: str, args: Sequence[Value], attrs: Sequence[Any], shape: Sequence[Dim], dtype: torch.dtype | None
    ) -> Value:
        """Return the one value of this definition, without any simplification."""
        key = (op, tuple(args), tuple(attrs), tuple(shape), dtype)
        found = self._interned.get(key)
        if found is None:
            found = self._interned[key] = Value(len(self._interned), op, *key[1:])
        return found

    # shape -----------------------------------------------------------------------------------------------------

    def reshape(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Same elements in the same order, other dims; sinks below functions of single elements and row means."""
        shape = tuple(shape)
        if x.shape == shape:
            return x
        if x.op == "reshape":
            return self.reshape(x.arg, shape)
        if x.op in ("power", "scale", "shift", "cast"):
            return self.make(x.op, (self.reshape(x.arg, shape),), x.attrs, shape, x.dtype)
        if x.op == "permute" and x.arg.op == "reshape" and (order := _opened_order(x, shape)) is not None:
            return self.reshape(self.permute(x.arg.arg, order), shape)
        if x.op == "mean" and x.attrs == (-1,) and shape and shape[-1] == 1:
            return self.mean(self.reshape(x.arg, (*shape[:-1], x.arg.shape[-1])), (-1,))
        if x.op == "slice" and shape and x.attrs[0] == x.rank - 1 and shape[-1] == x.shape[-1]:
            _, *bounds = x.attrs
            return self.cut(self.reshape(x.arg, (*shape[:-1], x.arg.shape[-1])), -1, *bounds)
        if x.op == "slice":
            found = self._below_cut(x, shape) or self._rejoined_split(x, shape) or self._without_last(x, shape)
        else:
            found = self._below_cat(x, shape) if x.op == "cat" else None
        return found or self.make("reshape", (x,), (), shape, x.dtype)

    def _below_cut(self, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
        """Dims of size 1 come or go before others are cut; None where more changes, or one of size 1 is cut."""
        axis, *bounds = cut.attrs
        if cut.shape[axis] == 1 or but_ones(shape) != but_ones(cut.shape):
            return None
        place = [n for n, size in enumerate(shape) if size != 1][len(but_ones(cut.shape[:axis]))]
        opened = self.reshape(cut.arg, (*shape[:place], cut.arg.shape[axis], *shape[place + 1 :]))
        return self.cut(opened, place, *bounds)

    def _without_last(self, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
        """Of what was cut before a last dim of size 1, which goes first; None where it stays."""
        if cut.shape[-1:] != (1,) or shape[-1:] == (1,):
            return None
        squeezed = self._below_cut(cut, cut.shape[:-1])
        return None if squeezed is None else self.reshape(squeezed, shape)

    def _below_cat(self, joined: Value, shape: tuple[Dim, ...]) -> Value | None:
        """Dims of size 1 before the joined one come or go in each piece; a change of later dims stays above."""
        axis = joined.attrs[0]
        before = but_ones(joined.shape[:axis])
        place = next((p for p in range(len(shape) + 1) if but_ones(shape[:p]) == before), None)
        if place is None:
            return None
        while shape[place : place + 1] == (1,) and shape[place:] != joined.shape[axis:]:
            place += 1
        if place == axis and shape[:place] == joined.shape[:axis]:
            return None
        pieces = [self.reshape(each, (*shape[:place], *each.shape[axis:])) for each in joined.args]
        return self.reshape(self.cat(pieces, place), shape)

    def _rejoined_split(self, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
        """Entries of the outer part of a dim that was split in two, joined again: a slice of that dim itself."""
        axis, start, stop, _ = cut.attrs
        if cut.arg.op != "reshape":
            return None
        whole, inner = cut.arg.arg, cut.shape[axis + 1 : axis + 2]
        split = (*whole.shape[:axis], cut.arg.shape[axis], *inner, *whole.shape[axis + 1 :])
        if stop - start != 1 or cut.arg.shape != split or not inner or not isinstance(inner[0], int):
            return None
        return self.reshape(self.cut(whole, axis, start * inner[0], stop * inner[0]), shape)

    def seen_as(self, x: Value, view: Value) -> Value:
        """`x` as `view`, which is a reshape, a permute or an expand, sees its own argument."""
        if view.op == "permute":
            return self.permute(x, view.attrs)
        return self.expand(x, view.shape) if view.op == "expand" else self.reshape(x, view.shape)

    def permute(self, x: Value, order: Sequence[int]) -> Value:
        """Reorder dims; moving only dims of size 1 is a reshape."""
        order = tuple(axis % x.rank for axis in order)
        if x.op == "permute":
            order, x = tuple(x.attrs[axis] for axis in order), x.arg
        shape = tuple(x.shape[axis] for axis in order)
        if x.op == "expand":
            return self.expand(self.permute(x.arg, order), shape)
        kept = [axis for axis in order if x.shape[axis] != 1]
        if kept == sorted(kept):
            return self.reshape(x, shape)
        if x.op == "reshape" and but_ones(x.shape) == but_ones(x.arg.shape):
            moved = self._permute_below(x, kept)
            return self.reshape(moved, shape)
        if any(shape[place] == 1 != x.shape[place] for place in range(x.rank)):
            squeezed = self.reshape(x, but_ones(x.shape))
            return self.reshape(self.permute(squeezed, [sorted(kept).index(axis) for axis in kept]), shape)
        if x.op == "slice":
            cut, *bounds = x.attrs
            return self.cut(self.permute(x.arg, order), order.index(cut), *bounds)
        same = _alike_behind(x.shape, x.arg.shape) if x.op == "reshape" else 0
        if order[: x.rank - same] == tuple(range(x.rank - same)):
            more = x.arg.rank - x.rank
            below = (*range(x.arg.rank - same), *(axis + more for axis in order[x.rank - same :]))
            return self.reshape(self.permute(x.arg, below), shape)
        return self.make("permute", (x,), order, shape, x.dtype)

    def _permute_below(self, opened: Value, kept: Sequence[int]) -> Value:
        """The dims other than 1 in the order `kept`, in the value to which `opened` has given dims of size 1."""
        places = [axis for axis, size in enumerate(opened.shape) if size != 1]
        below = [axis for axis, size in enumerate(opened.arg.shape) if size != 1]
        wanted = iter(below[places.index(axis)] for axis in kept)
        order = [next(wanted) if size != 1 else axis for axis, size in enumerate(opened.arg.shape)]
        return self.permute(opened.arg, order)

    def slice(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value | None:
        """Every `step`-th entry of [start, stop) along `axis`; None where a symbolic size leaves the bounds open."""
        size = x.shape[axis]
        if isinstance(size, int):
            return self.cut(x, axis, start, stop, step)
        if (start, stop, step) == (0, 1, 1) and size.is_positive:
            return self.narrow(x, axis, 0, 1)
        return x if (start == 0 and stop >= MAX_STOP and step == 1) else None

    def narrow(self, x: Value, axis: int, start: Dim, length: Dim) -> Value:
        """So many neighbours, all of which are there, along an axis where sizes are symbolic."""
        axis %= x.rank
        shape = (*x.shape[:axis], length, *x.shape[axis + 1 :])
        return x if length == x.shape[axis] else self.make("narrow", (x,), (axis, start, length), shape, x.dtype)

    def cut(self, x: Value, axis: int, start: int, stop: int, step: int = 1) -> Value:
        """The same along an axis whose size is a number."""
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
            pieces = self._pieces(x, axis, start, stop)
            if len(pieces) == 1:
                return self.cut(pieces[0][0], axis, start - pieces[0][1], stop - pieces[0][1], step)
            if step == 1 and pieces:
                return self.cat([self.cut(each, axis, max(start - at, 0), stop - at) for each, at in pieces], axis)
        if x.op in ("largest", "largest_index") and (axis, start, step) == (x.rank - 1, 0, 1):
            return self.make(x.op, x.args, (stop,), (*x.shape[:-1], stop), x.dtype)
        stop = start + (len(range(start, stop, step)) - 1) * step + 1 if start < stop else start
        shape = (*x.shape[:axis], len(range(start, stop, step)), *x.shape[axis + 1 :])
        return self.make("slice", (x,), (axis, start, stop, step), shape, x.dtype)

    @staticmethod
    def _pieces(cat: Value, axis: int, start: int, stop: int) -> list[tuple[Value, int]]:
        """What of a joined value lies in [start, stop), each piece with its place."""
        found: list[tuple[Value, int]] = []
        offset = 0
        for piece in cat.args:
            size = int(piece.shape[axis])
            if offset < stop and start < offset + size:
                found.append((piece, offset))
            offset += size
        return found

    def expand(self, x: Value, shape: Sequence[Dim]) -> Value:
        """Repeat dims of size 1 (and new leading dims) to `shape`."""
        if x.op == "expand":
            x = x.arg
        x = self.reshape(x, (1,) * (len(shape) - x.rank) + x.shape)
        return x if x.shape == tuple(shape) else self.make("expand", (x,), (), shape, x.dtype)

    def cat(self, pieces: Sequence[Value], axis: int) -> Value:
        """Join along `axis`; empty pieces vanish beside others, neighbours cut from one source are one again."""
        rank = max(piece.rank for piece in pieces)
        axis %= rank
        flat: list[Value] = []
        for piece in [each for each in pieces if 0 not in each.shape] or pieces:
            flat.extend(piece.args if piece.op == "cat" and piece.attrs[0] == axis else (piece,))
        joined: list[Value] = []
        for piece in flat:
            whole = self._rejoin(joined[-1], piece, axis) if joined else None
            if whole is None:
                joined.append(piece)
            else:
                joined[-1] = whole
        if len(joined) <= 1:
            return joined[0] if joined else pieces[0]
        size = sum((piece.shape[axis] for piece in joined), start=0)
        shape = (*joined[0].shape[:axis], size, *joined[0].shape[axis + 1 :])
        return self.make("cat", joined, (axis,), shape, joined[0].dtype)

    def _rejoin(self, left: Value, right: Value, axis: int) -> Value | None:
        if not (left.op == right.op == "slice" and left.arg is right.arg and left.attrs[0] == right.attrs[0] == axis):
            return None
        _, start, stop, step = left.attrs
        if step != 1 or right.attrs[3] != 1 or right.attrs[1] != stop:
            return None
        return self.cut(left.arg, axis, start, right.attrs[2])

    # elements --------------------------------------------------------------------------------------------------

    def cast(self, x: Value, dtype: torch.dtype | None) -> Value:
        """Convert elements; widening before another cast loses nothing, nor do truths in between: both are dropped."""
        while x.op == "cast" and (widens(x.arg.dtype, x.dtype) or {x.arg.dtype, dtype} == {torch.bool}):
            x = x.arg
        if x.op == "expand":
            return self.expand(self.cast(x.arg, dtype), x.shape)
        return x if x.dtype == dtype else self.make("cast", (x,), (), x.shape, dtype)

    def scale(self, x: Value, factor: float) -> Value:
        """x · factor."""
        if x.op == "expand":
            return self.expand(self.scale(x.arg, factor), x.shape)
        if x.op == "scale" and _joins(x, factor * x.attrs[0]):
            x, factor = x.arg, factor * x.attrs[0]
        nearest = round(factor) if math.isfinite(factor) else 0
        factor = float(nearest) if nearest and math.isclose(factor, nearest, rel_tol=1e-12) else float(factor)
        if x.op == "full" and x.attrs[0] == 1 and x.dtype is not None and x.dtype.is_floating_point:
            return self.make("full", (), (factor,), x.shape, x.dtype)  # rounded once, as it is filled in
        return x if factor == 1 else self.make("scale", (x,), (factor,), x.shape, x.dtype)

    def shift(self, x: Value, offset: float) -> Value:
        """x + offset."""
        if x.op == "expand":
            return self.expand(self.shift(x.arg, offset), x.shape)
        if x.op == "shift" and _joins(x, offset + x.attrs[0]):
            x, offset = x.arg, offset + x.attrs[0]
        return x if offset == 0 else self.make("shift", (x,), (float(offset),), x.shape, x.dtype)

    def mul(self, x: Value, y: Value) -> Value | None:
        """x · y, in either order; None where the shapes do not broadcast."""
        if x is y:
            return self.power(x, 2)
        x, y = _unexpanded(x, y)
        softmax = self._softmax(x, y) or self._softmax(y, x)
        return softmax or self._commuted("mul", *(self._normalised(x, y) or self._normalised(y, x) or (x, y)))

    def _commuted(self, op: str, x: Value, y: Value) -> Value | None:
        if x.id > y.id:
            x, y = y, x
        shape = broadcast(x.shape, y.shape)
        return None if shape is None else self.make(op, (x, y), (), shape, x.dtype)

    def _softmax(self, numerator: Value, inverse: Value) -> Value | None:
        """exp(x) / Σ exp(x) over one dim: NaN in a row of -inf, or of numbers so low that each exp(x) is 0."""
        total = inverse.arg if inverse.op == "scale" else inverse
        if numerator.op != "exp" or total.op != "power" or total.arg.op != "mean" or total.arg.arg is not numerator:
            return None
        axes = total.arg.attrs
        summed = self.sum(numerator, axes)
        if len(axes) != 1 or summed is None or inverse is not self.power(summed, -1):
            return None
        return self.make("softmax", (numerator.arg,), (axes[0], "nan", False), numerator.shape, numerator.dtype)

    def _normalised(self, x: Value, root: Value) -> tuple[Value, Value] | None:
        """x = z · s beside (mean(z²) · s² + eps)^e, which is (mean(x²) + eps)^e: the factor stays inside."""
        if x.op != "scale" or root.op != "power" or root.arg.op != "shift" or root.arg.arg.op != "scale":
            return None
        average, factor = root.arg.arg.arg, root.arg.arg.attrs[0]
        if average.op != "mean" or average.arg.op != "power" or average.arg.attrs != (2.0,):
            return None
        if average.arg.arg is not x.arg or not math.isclose(factor, x.attrs[0] ** 2, rel_tol=1e-12):
            return None
        whole = self.make("power", (x,), (2.0,), x.shape, x.dtype)
        return x, self.power(self.shift(self.mean(whole, average.attrs), *root.arg.attrs), *root.attrs)

    def add(self, x: Value, y: Value) -> Value | None:
        """x + y, in either order; x + x·w with one weight per channel becomes x · (1 + w)."""
        if x is y:
            return self.scale(x, 2)
        x, y = _unexpanded(x, y)
        gain = self._gain(x, y) or self._gain(y, x)
        if gain is not None:
            return self.mul(*gain)
        spread = self._variance(x, y) or self._variance(y, x) or self._second_moment(x, y) or self._second_moment(y, x)
        return spread or self._commuted("add", x, y)

    def _variance(self, squares: Value, other: Value) -> Value | None:
        """mean(x²) - mean(x)² is the mean of (x - mean(x))²."""
        if other.op != "scale" or other.attrs != (-1.0,) or other.arg.op != "power" or other.arg.attrs != (2.0,):
            return None
        average = other.arg.arg
        if average.op != "mean" or squares is not self.mean(self.power(average.arg, 2), average.attrs):
            return None
        centred = self.add(average.arg, self.scale(average, -1))
        return centred and self.mean(self.power(centred, 2), average.attrs)

    def _second_moment(self, spread: Value, other: Value) -> Value | None:
        """mean((x - mean(x))²) + mean(x)² is mean(x²)."""
        average = other.arg if other.op == "power" and other.attrs == (2.0,) else other
        if other.op != "power" or average.op != "mean" or spread.op != "mean":
            return None
        centred = self.add(average.arg, self.scale(average, -1))
        alike = centred is not None and spread is self.mean(self.power(centred, 2), average.attrs)
        return self.mean(self.power(average.arg, 2), average.attrs) if alike else None

    def _gain(self, x: Value, product: Value) -> tuple[Value, Value] | None:
        if product.op != "mul" or x not in product.args:
            return None
        weight = product.args[1] if product.args[0] is x else product.args[0]
        per_channel = all(size == 1 for size in weight.shape[:-1])
        return (x, self.shift(weight, 1)) if per_channel else None

    def power(self, x: Value, exponent: float) -> Value:
        """x ** exponent, for real exponents; nested powers join where the sign of x cannot matter."""
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

    def unary(self, op: str, x: Value) -> Value:
        """Any other function of one value, element by element; |x| of what is not negative is x."""
        return x if op == "abs" and is_nonnegative(x) else self.make(op, (x,), (), x.shape, x.dtype)

    # reductions ------------------------------------------------------------------------------------------------

    def reduce(self, op: str, x: Value, axes: Sequence[int]) -> Value:
        """A reduction over `axes`, which stay as dims of size 1. Attributes: the axes, counted from the end."""
        axes = tuple(sorted(axis % x.rank - x.rank for axis in axes))
        shape = tuple(1 if position - x.rank in axes else size for position, size in enumerate(x.shape))
        return self.make(op, (x,), axes, shape, x.dtype)

    def mean(self, x: Value, axes: Sequence[int]) -> Value:
        """Average over `axes`; a factor of powers stands outside, as they put it outside themselves."""
        if x.op == "scale" and x.arg.op == "power" and not of_constants(x):
            return self.scale(self.mean(x.arg, axes), *x.attrs)
        return self.reduce("mean", x, axes)

    def sum(self, x: Value, axes: Sequence[int]) -> Value | None:
        """Total over `axes` as a scaled mean; None where a size is symbolic."""
        sizes = [x.shape[axis % x.rank] for axis in axes]
        if not all(isinstance(size, int) for size in sizes):
            return None
        return self.scale(self.mean(x, axes), math.prod(int(size) for size in sizes))


def of_constants(x: Value) -> bool:
    """Whether `x` may depend on no input, as positions do, so that what a dtype rounds decides what it is."""
    return all(each.args or each.op in ("arange", "constant", "full", "number") for each in x.sources())


def _joins(step: Value, number: float) -> bool:
    """Whether a step and one of its kind after it are one with this number, but for the rounding of data."""
    if step.dtype is None or step.dtype.is_floating_point:
        return not of_constants(step)
    return abs(number) < LONGEST


def _alike_behind(shape: Sequence[Dim], other: Sequence[Dim]) -> int:
    """How many dims are the same, counted from the last one."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def _unexpanded(x: Value, y: Value) -> tuple[Value, Value]:
    """Two operands without the repetition that broadcasting does as well."""
    shape = broadcast(x.shape, y.shape)
    if x.op == "expand" and broadcast(x.arg.shape, y.shape) == shape:
        x = x.arg
    if y.op == "expand" and broadcast(x.shape, y.arg.shape) == shape:
        y = y.arg
    return x, y


def _opened_order(turned: Value, shape: tuple[Dim, ...]) -> list[int] | None:
    """The order in which dims stand that are joined, turned, and opened again to `shape`; None where they stay joined.

    Some of the dims of `shape` may be joined from several that stand beside each other. Dims of one entry or none are
    in no order.
    """
    below = turned.arg.arg.shape
    groups = None if 0 in below or 1 in below else _joined(below, turned.arg.shape)
    if groups is None:
        return None
    order = [axis for group in turned.attrs for axis in groups[group]]
    opened = _joined(tuple(below[axis] for axis in order), shape)
    return order if opened is not None and len(opened) > len(groups) else None


def _joined(dims: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[range] | None:
    """Which dims beside each other each dim of `shape` is joined from; None where one is made otherwise."""
    groups: list[range] = []
    for size in shape:
        start = groups[-1].stop if groups else 0
        stops = range(start + 1, len(dims) + 1)
        stop = next((each for each in stops if math.prod(dims[start:each]) == size), None)
        if stop is None:
            return None
        groups.append(range(start, stop))
    return groups if groups and groups[-1].stop == len(dims) else None
