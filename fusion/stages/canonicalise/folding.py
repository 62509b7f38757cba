"""Folding: the numbers of a value that depends on no input, so that masks of any spelling can be looked at.

numpy, not torch: the pass also runs where every tensor of torch is fake.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import numpy as np
import torch

from fusion.graph import Value

MOST = 2**22  # elements of a value that is folded

Array = np.ndarray[Any, Any]
_KINDS = {torch.bool: np.bool_, torch.int32: np.int64, torch.int64: np.int64}


def _kind(value: Value) -> Any:
    return np.float64 if value.dtype is None or value.dtype.is_floating_point else _KINDS.get(value.dtype, np.int64)


def _index(value: Value, x: Array, *indices: Array) -> Array | None:
    if value.attrs == tuple(range(x.ndim)):
        return x[tuple(indices)]
    return np.take(x, indices[0], value.attrs[0]) if len(indices) == 1 else None


def _exact(value: Value, x: Array) -> bool:
    """Whether the dtype of a value holds these numbers as they are, so that nothing was rounded."""
    if value.dtype is torch.float16:
        return bool((x.astype(np.float16) == x).all())
    narrow = x.astype(np.float32)
    if value.dtype is torch.bfloat16 and (narrow.view(np.int32) & 0xFFFF).any():
        return False
    return value.dtype is torch.float64 or bool((narrow == x).all())


def _slice(value: Value, x: Array) -> Array:
    axis, start, stop, step = value.attrs
    return x[(slice(None),) * axis + (slice(start, stop, step),)]


_COMPARE: Mapping[str, Callable[[Array, Array], Any]] = {
    "le": np.less_equal, "lt": np.less, "eq": np.equal, "ne": np.not_equal,
}  # fmt: skip

_FOLDS: Mapping[str, Callable[..., Any]] = {
    "arange": lambda value: value.attrs[0] + value.attrs[1] * np.arange(value.shape[0]),
    "constant": lambda value: np.array(value.attrs[0]).reshape(value.shape),
    "full": lambda value: np.full(value.shape, value.attrs[0]),
    "reshape": lambda value, x: x.reshape(value.shape),
    "expand": lambda value, x: np.broadcast_to(x, value.shape),
    "permute": lambda value, x: x.transpose(value.attrs),
    "slice": _slice,
    "cat": lambda value, *pieces: np.concatenate(pieces, value.attrs[0]),
    "cast": lambda value, x: x,
    "scale": lambda value, x: x * value.attrs[0],
    "shift": lambda value, x: x + value.attrs[0],
    "mul": lambda value, x, y: x * y,
    "add": lambda value, x, y: x + y,
    "compare": lambda value, x, y: _COMPARE[value.attrs[0]](x, y),
    "and": lambda value, x, y: x & y,
    "or": lambda value, x, y: x | y,
    "not": lambda value, x: ~x,
    "where": lambda value, c, x, y: np.where(c, x, y),
    "cumsum": lambda value, x: x.cumsum(value.attrs[0]),
    "index": _index,
    "floor_divide": lambda value, x: x // value.attrs[0],
    "remainder": lambda value, x: x % value.attrs[0],
}


class Folder:
    """Folds the values of one graph, each once."""

    def __init__(self) -> None:
        self._known: dict[Value, Array | None] = {}

    def fold(self, value: Value) -> Array | None:
        """The numbers of `value`, None where an input, an unknown op or a symbolic size stands in its way."""
        if value not in self._known:
            self._known[value] = self._folded(value)
        return self._known[value]

    def _folded(self, value: Value) -> Array | None:
        sizes = [each for each in value.shape if isinstance(each, int)]
        if value.op not in _FOLDS or len(sizes) < value.rank or math.prod(sizes) > MOST:
            return None
        args = [self.fold(each) for each in value.args]
        if any(each is None for each in args):
            return None
        with np.errstate(all="ignore"):
            found = _FOLDS[value.op](value, *args)
            if found is None:
                return None
            numbers = np.asarray(found).astype(_kind(value))
            return numbers if numbers.dtype != np.float64 or _exact(value, numbers) else None

    def steps(self, value: Value) -> tuple[int, tuple[int, ...]] | None:
        """First number and step per dim of whole numbers that grow evenly along every dim."""
        numbers = self.fold(value)
        if numbers is None or not numbers.size or numbers.dtype.kind not in "ib":
            return None
        first = int(numbers.flat[0])
        second = [numbers.take(min(1, size - 1), axis).flat[0] for axis, size in enumerate(numbers.shape)]
        steps = tuple(int(each) - first for each in second)
        lines = [
            step * np.arange(size).reshape(-1, *(1,) * (numbers.ndim - axis - 1))
            for axis, (step, size) in enumerate(zip(steps, numbers.shape, strict=True))
        ]
        even = reduce(np.add, lines, np.int64(first))
        return (first, steps) if (np.broadcast_to(even, numbers.shape) == numbers).all() else None


def band(table: Array) -> tuple[int, int] | None:
    """Low and high, where a table [S, T] is true exactly for low <= j - i <= high; None where it is not so."""
    ahead = np.arange(table.shape[1]) - np.arange(table.shape[0])[:, None]
    low, high = int(ahead[table].min()), int(ahead[table].max())
    return (low, high) if (((ahead >= low) & (ahead <= high)) == table).all() else None
