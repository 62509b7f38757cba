"""Lists: where the positions stand that a row names.

x.scatter(-1, places, value)            → where(chosen(places), value, x)   chosen: true at the places that a row lists
x.scatter(-1, places, values)           → placed(x, places, values)
zeros.scatter_add(-1, places, ones)     → where(chosen(places), 1, 0)       of places that differ; scatter_reduce of the
                                                                            greatest does so of any
(places == arange).any(-1)              → chosen(places)                    `fusion.analysis.lists`
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Value, unviewed
from fusion.graph.logic import constant, where
from fusion.graph.proof import must, proven
from fusion.stages.canonicalise.translate import Out, Translated, translates


@translates("aten.scatter.value")
def _scatter_value(a: Algebra, out: Out, x: Value, dim: int, places: Value, number: Any) -> Translated:
    must(isinstance(number, (int, float)))
    return marked(a, x, dim, places, constant(a, number, (), x.dtype))


def marked(a: Algebra, x: Value, dim: int, places: Value, number: Value) -> Value | None:
    """`x`, which the graph computes, with another number (a value full of it) at the places that each row lists."""
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1]
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input":
        return None
    own = uncast(places)
    if own.op == "expand" and own.arg.shape[-1] == own.shape[-1]:  # one list for all of several rows
        own = own.arg
    chosen = a.make("chosen", (own,), (), (*own.shape[:-1], x.shape[-1]), torch.bool)
    other = constant(a, x.attrs[0], chosen.shape, x.dtype) if x.op == "full" else x
    marks = proven(where(a, chosen, constant(a, number.attrs[0], (), x.dtype), other, x.dtype))
    return a.expand(marks, x.shape)


def counted(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """`x` of zeros with a number, of which `numbers` is full, added at the places of rows that name none twice."""
    zeros = x.op == numbers.op == "full" and x.attrs[0] == 0
    return marked(a, x, dim, places, numbers) if zeros and uncast(places).op == "largest_index" else None


@translates("aten.scatter_reduce.two")
def _scatter_greatest(
    a: Algebra, out: Out, x: Value, dim: int, places: Value, numbers: Value, reduce: str, include_self: bool = True
) -> Translated:
    """The greater of two numbers, of which `x` and `numbers` are full."""
    must(x.op == numbers.op == "full" and reduce == "amax" and numbers.attrs[0] >= x.attrs[0])
    return marked(a, x, dim, places, numbers)


def placed(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """`x`, which the graph computes, with a number of its own at each of the places that a row lists."""
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1] and numbers.shape == places.shape
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input" or numbers.dtype != x.dtype:
        return None
    return a.make("placed", (x, uncast(places), numbers), (), x.shape, x.dtype)
