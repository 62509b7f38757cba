"""Rounding and extremes: |x|, round(x), the greatest of a row, bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.abs.default")
def _abs(a: Algebra, out: Out, x: Value) -> Translated:
    return a.unary("abs", x)


@translates("aten.round.default")
def _round(a: Algebra, out: Out, x: Value) -> Translated:
    return a.unary("round", x)


@translates("aten.amax.default")
def _amax(a: Algebra, out: Out, x: Value, dim: Any = (), keepdim: bool = False) -> Translated:
    axes = range(x.rank) if dim in ((), []) else [dim] if isinstance(dim, int) else dim
    return greatest(a, out, x, axes)


@translates("aten.max.default")
def _max(a: Algebra, out: Out, x: Value) -> Translated:
    return greatest(a, out, x, range(x.rank))


@translates("aten.max.dim")
def _max_dim(a: Algebra, out: Out, x: Value, dim: int, keepdim: bool = False) -> Translated:
    shape = [1 if place == dim % x.rank else size for place, size in enumerate(x.shape)]
    kept = [size for place, size in enumerate(x.shape) if place != dim % x.rank]
    return greatest(a, Out(tuple(shape if keepdim else kept), x.dtype), x, [dim]), None


def greatest(a: Algebra, out: Out, x: Value, axes: Sequence[int]) -> Value:
    """The largest element along some axes, which stay as dims of size 1 and go where the result has not kept them."""
    places = tuple(sorted(axis % x.rank - x.rank for axis in axes))
    shape = tuple(1 if place - x.rank in places else size for place, size in enumerate(x.shape))
    return a.reshape(a.make("greatest", (x,), places, shape, x.dtype), out.shape)


@translates("aten._int_mm.default")
def _int_mm(a: Algebra, out: Out, x: Value, y: Value) -> Translated:
    return matmul(a, a.cast(x, torch.int32), a.cast(y, torch.int32))


@translates("aten.view.dtype")
def _bits(a: Algebra, out: Out, x: Value, dtype: torch.dtype) -> Translated:
    x = x.below("bits")
    if x.dtype == out.dtype:
        return a.reshape(x, out.shape)
    return a.make("bits", (x,), (), out.shape, out.dtype)
