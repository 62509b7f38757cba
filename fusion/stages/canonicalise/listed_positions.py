"""Lists of positions: writes at the positions that each row lists, and tests whether a position is listed.

x.scatter(-1, places, value)            → where(chosen(places), value, x)   chosen: true at the positions of the row
x.scatter(-1, places, values)           → placed(x, places, values)
zeros.scatter_add(-1, places, ones)     → where(chosen(places), 1, 0)       of distinct positions; a scatter_reduce by
                                                                            amax gives the same of any positions
(places == arange).any(-1)              → chosen(places)                    see `fusion.analysis.list_masks`
counts > 0                              → chosen(places)                    of counts of entries, all or masked ones
"""

from __future__ import annotations

from typing import Any

import torch

from fusion.analysis.constant_folding import COMPARE
from fusion.analysis.intervals import uncast
from fusion.analysis.list_masks import listed, named_by
from fusion.graph import Algebra, Value, unviewed
from fusion.graph.comparisons import constant, negated, where
from fusion.graph.proof_steps import must, proof, proven
from fusion.stages.canonicalise.translators import Out, Translated, translates


@translates("aten.scatter.value")
def _scatter_value(a: Algebra, out: Out, x: Value, dim: int, places: Value, number: Any) -> Translated:
    must(isinstance(number, (int, float)))
    return marked(a, x, dim, places, constant(a, number, (), x.dtype))


def marked(a: Algebra, x: Value, dim: int, places: Value, number: Value) -> Value | None:
    """Build `x` with one number at the positions `places` of the last dim of each row.

    `number` is a `full` value. None for another `dim`, for rows of `places` that are not those of `x`, and for an input
    `x`.
    """
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1]
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input":
        return None
    own = named_by(places)
    if own.op == "expand" and own.arg.shape[-1] == own.shape[-1]:  # several rows share one list
        own = own.arg
    chosen = a.make("chosen", (own,), (), (*own.shape[:-1], x.shape[-1]), torch.bool)
    other = constant(a, x.attrs[0], chosen.shape, x.dtype) if x.op == "full" else x
    marks = proven(where(a, chosen, constant(a, number.attrs[0], (), x.dtype), other, x.dtype))
    return a.expand(marks, x.shape)


def counted(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """Translate the scatter_add of `numbers` into zeros `x` at the positions `places` of each row.

    Constant numbers at distinct positions become a choice. Where positions may repeat, the result is "counts": how
    often each position is listed [.., T]; `numbers` must then be ones, or booleans that select the entries to count.
    """
    if x.op != "full" or x.attrs[0] != 0:
        return None
    if numbers.op == "full" and uncast(places).op == "largest_index":
        return marked(a, x, dim, places, numbers)
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1] and numbers.shape == places.shape
    ones = numbers.attrs == (1,) if numbers.op == "full" else numbers.op == "cast" and numbers.arg.dtype is torch.bool
    if not (rows and ones and x.rank > 1 and dim % x.rank == x.rank - 1 and _can_count(x.dtype, places.shape[-1])):
        return None
    truths = constant(a, True, (), torch.bool) if numbers.op == "full" else numbers.arg
    return a.make(
        "counts", (named_by(places) if numbers.op == "full" else uncast(places), truths), (), x.shape, x.dtype
    )


def _can_count(dtype: torch.dtype | None, count: Any) -> bool:
    """Return True if no sum of up to `count` ones is 0 in `dtype`.

    An integer must not wrap round; a float that is too large to grow stays as it is.
    """
    if dtype is None or dtype is torch.bool or not isinstance(count, int) or count == 0:
        return False
    return dtype.is_floating_point or count <= torch.iinfo(dtype).max


@proof
def any_named(a: Algebra, op: str, x: Value, y: Value) -> Value | None:
    """Translate `x` op `y`, counts of list entries and a number, to where a list names a position, or names none.

    None unless the comparison separates a count of 0 from every other possible count.
    """
    counts, number = (x, y) if y.op == "full" else (y, x)
    must(number.op == "full" and number.shape in ((), counts.shape))
    count, truth = proven(_any_of(a, counts))
    bound = number.attrs[0]
    none, one, all_of_them = (COMPARE[op](*((n, bound) if counts is x else (bound, n))) for n in (0, 1, count))
    must(one == all_of_them != none and not (op in ("eq", "ne") and 1 < bound < count))
    return truth if one else negated(a, truth)


@proof
def _any_of(a: Algebra, counts: Value) -> tuple[Any, Value] | None:
    """Return the greatest possible number in `counts`, and booleans that are True where `counts` is not 0."""
    if counts.op == "counts":
        places, truths = counts.args
        size, rows = counts.shape[-1], places.shape[:-1]
        if truths.op == "full":
            return places.shape[-1], a.make("chosen", (places,), (), counts.shape, torch.bool)
        must(isinstance(size, int))
        shown = proven(where(a, truths, a.shift(places, 1), constant(a, 0, (), places.dtype), places.dtype))
        wide = a.make("chosen", (shown,), (), (*rows, size + 1), torch.bool)
        return places.shape[-1], proven(a.slice(wide, len(rows), 1, int(size) + 1))
    total = (counts.arg if counts.op == "scale" else counts).below("reshape")
    must(total.op == "mean" and len(total.attrs) == 1 and total.arg.op == "cast" and total.arg.arg.dtype is torch.bool)
    count = total.arg.shape[total.attrs[0]]
    must(_can_count(counts.dtype, count) and count == (counts.attrs[0] if counts.op == "scale" else 1))
    return count, a.reshape(proven(listed(a, total.arg.arg, total.attrs[0])), counts.shape)


def placed(a: Algebra, x: Value, dim: int, places: Value, numbers: Value) -> Value | None:
    """Build `x` with `numbers` at the positions `places` of the last dim of each row.

    None for another `dim`, for rows of `places` that are not those of `x`, and for an input `x`.
    """
    rows = places.rank == x.rank and places.shape[:-1] == x.shape[:-1] and numbers.shape == places.shape
    if not rows or dim % x.rank != x.rank - 1 or unviewed(x).op == "input" or numbers.dtype != x.dtype:
        return None
    return a.make("placed", (x, uncast(places), numbers), (), x.shape, x.dtype)
