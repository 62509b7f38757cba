"""The k largest of a row: values "largest" and places "largest_index", which share x and k; and masks made of places.

Sorted or not: where a model asks for no order, descending is one of those that it may get. Which of equal values are
chosen, and in what order they stand, torch leaves open as well.

    x.scatter(-1, places, value)    → where(chosen(places), value, x)      chosen: true at the places that a row lists
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Value, unviewed
from fusion.graph.dims import INDEX_DTYPES
from fusion.graph.logic import constant, where
from fusion.stages.canonicalise.translate import Out, Translated, is_number, translates


@translates("aten.topk.default")
def _topk(
    a: Algebra, out: Out, x: Value, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True
) -> Translated:
    if isinstance(k, Value) or not largest or not x.rank or dim % x.rank != x.rank - 1:
        return None
    shape = (*x.shape[:-1], k)
    return a.make("largest", (x,), (k,), shape, x.dtype), a.make("largest_index", (x,), (k,), shape, torch.int64)


@translates("aten.sort.default")
def _sort(a: Algebra, out: Out, x: Value, dim: int = -1, descending: bool = False) -> Translated:
    """In descending order, all are the largest."""
    return _topk(a, out, x, x.shape[dim], dim) if descending and x.rank else None


@translates("aten.scatter.value")
def _scatter_value(a: Algebra, out: Out, x: Value, dim: int, places: Value, number: Any) -> Translated:
    if not is_number(number) and not isinstance(number, bool):
        return None
    return marked(a, x, dim, places, constant(a, number, (), x.dtype))


def marked(a: Algebra, x: Value, dim: int, places: Value, number: Value) -> Value | None:
    """`x`, which the graph computes, with another number (a value full of it) at the places that each row lists."""
    rows = x.rank and places.rank == x.rank and places.shape[:-1] == x.shape[:-1] and places.dtype in INDEX_DTYPES
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input":
        return None
    chosen = a.make("chosen", (uncast(places),), (), x.shape, torch.bool)
    return where(a, chosen, constant(a, number.attrs[0], (), x.dtype), x, x.dtype)
