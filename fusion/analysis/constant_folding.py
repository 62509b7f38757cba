"""Constant folding with numpy, so that masks that depend on no input can be inspected however they are written.

Integers wrap round as in their dtypes. A value with a float that would be rounded is not folded, as the canonical form
may round in another place. numpy, as the pass also runs in modes in which every torch tensor is fake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from operator import eq, le, lt, ne
from typing import Any

import numpy as np
import torch

from fusion.analysis.dtypes import INTEGERS, KINDS, Array, is_exact, is_integer, rounded_number, rounded_to
from fusion.graph import Value

MOST = 2**22
"""The largest number of elements of a value that is folded."""


def _index(value: Value, x: Array, *indices: Array) -> Array | None:
    sizes = [x.shape[place] for place in value.attrs]
    if any((each < -size).any() or (each >= size).any() for each, size in zip(indices, sizes, strict=True)):
        return None
    if value.attrs == tuple(range(x.ndim)):
        return x[tuple(indices)]
    return np.take(x, indices[0], value.attrs[0]) if len(indices) == 1 else None


def _scale(value: Value, x: Array) -> Array | None:
    factor = value.attrs[0]
    if value.dtype in INTEGERS:
        return x * np.asarray(int(factor)).astype(x.dtype)
    return x * factor if is_exact(factor, torch.float32) else None  # any other may stand for a division in the model


def _shift(value: Value, x: Array) -> Array:
    offset = value.attrs[0]
    return x + (np.asarray(int(offset)).astype(x.dtype) if is_integer(value) else offset)


def _power(value: Value, x: Array) -> Array | None:
    """Compute x ** exponent; None unless all bases and results are powers of 2, so that nothing is rounded."""
    return _if_powers_of_two(x ** value.attrs[0]) if _if_powers_of_two(x) is not None else None


def _power_of(value: Value, x: Array) -> Array | None:
    """Compute base ** x; None unless the base and all results are powers of 2, so that nothing is rounded."""
    base = np.asarray(value.attrs[0])
    return _if_powers_of_two(base**x) if _if_powers_of_two(base) is not None else None


def _if_powers_of_two(x: Array) -> Array | None:
    return x if x.dtype.kind == "f" and (np.frexp(x)[0] == 0.5).all() else None


def _slice(value: Value, x: Array) -> Array:
    axis, start, stop, step = value.attrs
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


COMPARE: Mapping[str, Callable[[Any, Any], Any]] = {"le": le, "lt": lt, "eq": eq, "ne": ne}
"""The comparison of two numbers or arrays for each attribute of the canonical op "compare"."""


def _slice_scatter(value: Value, x: Array, written: Array) -> Array:
    axis, start, stop, step = value.attrs
    made = x.copy()
    made[(slice(None),) * axis + (slice(start, stop, step),)] = written
    return made


def _write(value: Value, x: Array, rows: Array, start: Array) -> Array | None:
    """Copy `rows` into `x` along the axis of `value` from `start`; None unless `start` is one position in range."""
    (axis,) = value.attrs
    if start.size != 1 or not 0 <= (first := int(start.item())) <= x.shape[axis] - rows.shape[axis]:
        return None
    made = x.copy()
    places = [slice(size) for size in rows.shape]
    places[axis] = slice(first, first + rows.shape[axis])
    made[tuple(places)] = rows
    return made


_FOLDS: Mapping[str, Callable[..., Any]] = {
    "arange": lambda value: value.attrs[0] + value.attrs[1] * np.arange(value.shape[0]),
    "constant": lambda value: np.array(value.attrs[0]).reshape(value.shape),
    "full": lambda value: np.full(value.shape, value.attrs[0]),
    "number": lambda value, _: np.array(value.attrs[0]) if isinstance(value.attrs[0], int) else None,
    "reshape": lambda value, x: x.reshape(value.shape),
    "expand": lambda value, x: np.broadcast_to(x, value.shape),
    "permute": lambda value, x: x.transpose(value.attrs),
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "write": _write,
    "cat": lambda value, *pieces: np.concatenate(pieces, value.attrs[0]),
    "cast": lambda value, x: x,
    "scale": _scale,
    "shift": _shift,
    "power": _power,
    "power_of": _power_of,
    "mul": lambda value, x, y: x * y,
    "add": lambda value, x, y: x + y,
    "below": lambda value, x: x < value.attrs[0],
    "compare": lambda value, x, y: COMPARE[value.attrs[0]](x, y),
    "and": lambda value, x, y: x & y,
    "or": lambda value, x, y: x | y,
    "not": lambda value, x: ~x,
    "where": lambda value, c, x, y: np.where(c, x, y),
    "cumsum": lambda value, x: x.cumsum(value.attrs[0]),
    "index": _index,
    "floor_divide": lambda value, x: x // value.attrs[0],
    "remainder": lambda value, x: x % value.attrs[0] if isinstance(value.attrs[0], int) else None,
    "clamp": lambda value, x: np.clip(x, *value.attrs),
}


class Folder:
    """Memoised constant folding of the values of one graph."""

    def __init__(self) -> None:
        self._known: dict[Value, Array | None] = {}

    def fold(self, value: Value) -> Array | None:
        """Compute the elements of `value`.

        None if it depends on an input, an op that is not folded or a symbolic size, has more than `MOST` elements, or
        would be rounded.
        """
        if value not in self._known:
            self._known[value] = self._folded(value)
        return self._known[value]

    def _folded(self, value: Value) -> Array | None:
        sizes = [each for each in value.shape if isinstance(each, int)]
        known = value.op in _FOLDS and value.dtype in KINDS
        if not known or len(sizes) < value.rank or math.prod(sizes) > MOST:
            return None
        args = [self.fold(each) for each in value.args]
        if any(each is None for each in args):
            return None
        with np.errstate(all="ignore"):
            return _converted(_FOLDS[value.op](value, *args), value.dtype)

    def steps(self, value: Value) -> tuple[int, tuple[int, ...]] | None:
        """Return the first element of the integer constant `value`, and by how much elements grow along each dim.

        None if they do not grow evenly, if `value` is empty, or if `fold` does not compute it.
        """
        numbers = self.fold(value)
        if numbers is None or not numbers.size or numbers.dtype.kind == "f":
            return None
        numbers = numbers.astype(np.int64)
        first = int(numbers.flat[0])
        second = [numbers.take(min(1, size - 1), axis).flat[0] for axis, size in enumerate(numbers.shape)]
        steps = tuple(int(each) - first for each in second)
        lines = [
            step * np.arange(size).reshape(-1, *(1,) * (numbers.ndim - axis - 1))
            for axis, (step, size) in enumerate(zip(steps, numbers.shape, strict=True))
        ]
        even = reduce(np.add, lines, np.int64(first))
        return (first, steps) if (np.broadcast_to(even, numbers.shape) == numbers).all() else None


def _converted(computed: Any, dtype: torch.dtype | None) -> Array | None:
    """Convert `computed` to `dtype`; None if it is None, if torch leaves the result open, or if a float is rounded."""
    if computed is None:
        return None
    numbers = np.asarray(computed)
    converted = rounded_to(numbers, dtype)
    if converted is None or converted.dtype.kind != "f":
        return converted
    back = converted if numbers.dtype.kind == "f" else converted.astype(np.int64)
    return converted if (back == numbers).all() else None


NUMBER_STEPS = ("cast", "scale", "shift")
"""Ops that `number_after` computes."""


def number_after(number: float, steps: Sequence[Value]) -> float | None:
    """Apply the casts, sums and products with numbers among `steps` to `number`, rounding to the dtype of each.

    None where torch leaves a conversion open.
    """
    result: float | None = number
    for each in steps:
        if each.op in NUMBER_STEPS and result is not None:
            change = 0.0 if each.op == "cast" else each.attrs[0]
            result = rounded_number(result * change if each.op == "scale" else result + change, each.dtype)
    return result


def band(table: Array) -> tuple[int, int] | None:
    """Return (low, high) if `table` [S, T], of booleans, is True at [i, j] exactly for low <= j - i <= high; else None.

    `table` must have an entry that is True.
    """
    ahead = np.arange(table.shape[1]) - np.arange(table.shape[0])[:, None]
    low, high = int(ahead[table].min()), int(ahead[table].max())
    return (low, high) if (((ahead >= low) & (ahead <= high)) == table).all() else None
