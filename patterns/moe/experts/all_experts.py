"""y = Σ_e w[:, e] · f(x; W_e), a loop over all experts with weights that are 0 where an expert was not chosen.

Only the chosen ones count, so the sum is that of their rows: Σ_c w[:, e(c)] · f(x; W_e(c)). An expert that gives no
finite number for a token which did not choose it makes the model's sum NaN, and has no part in this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Found, Graph, Miss, Value
from fusion.graph.proof import must, proof, proven
from patterns.moe.experts.expert_rows import Rows
from patterns.moe.experts.pairs import plain
from patterns.moe.experts.stacked_experts import Stack, StackedRows, weighed_stack
from patterns.moe.experts.weighted_sums import RULE, Total, sum_of_products, summed, total
from patterns.moe.router.list_masks import lists_largest
from patterns.moe.router.read_weights import Kept, kept


class Chosen(NamedTuple):
    """Weights [.., K] of the experts [.., K] that are listed: those of all others are 0."""

    weights: Value
    places: Value


class Columns(NamedTuple):
    """What every expert gives, and the weights of all [.., E] by which these are multiplied before they are added."""

    weights: Value
    given: tuple[Value, ...]


# weights ------------------------------------------------------------------------------------------------------------


def chosen_weights(graph: Graph, x: Value) -> Chosen | None:
    """Which of the weights of all experts [.., E] are not 0."""
    a, inner = graph.algebra, plain(x)
    one_hot = _by_one_hot(a, x)
    if one_hot is not None:
        return one_hot
    if inner.op in ("placed", "write"):
        return _placed(inner) or _by_columns(a, inner)
    if inner.op == "softmax":
        below = kept(a, plain(inner.arg))
        return _softmax_of(graph, x, below) if below is not None and below.fill == -math.inf else None
    parts = (inner, *(each for each in inner.args if inner.op == "mul" and each.shape == inner.shape))
    found = next(filter(None, (kept(a, each) for each in parts)), None)
    return None if found is None or found.fill != 0 else Chosen(_gathered(a, x, found.places), found.places)


def _placed(inner: Value) -> Chosen | None:
    """Numbers that are put among zeros, at the places of a list."""
    if inner.op != "placed" or (inner.arg.op, inner.arg.attrs) != ("full", (0,)):
        return None
    return Chosen(inner.args[2], inner.args[1]) if inner.args[1].op == "largest_index" else None


@proof
def _by_one_hot(a: Algebra, x: Value) -> Chosen:
    """Read Σ_c weights[.., c] · (list[.., c] = e), by a product or a matrix product with the one-hot list."""
    inner, factor = unscaled(plain(x))
    inner = plain(inner)
    if inner.op == "mean":
        must(inner.attrs == (-2,) and inner.arg.shape[-2] == factor)
        product = plain(inner.arg)
        must(product.op == "mul")
        weights, flags = product.args if product.args[1].below("cast").op == "compare" else product.args[::-1]
        lies_along = weights.shape == (*flags.shape[:-1], 1)
    else:
        must(inner.op == "matmul" and factor == 1)
        weights, flags = inner.args
        lies_along = weights.shape == (*flags.shape[:-2], 1, flags.shape[-2])
    places = proven(_one_hot(flags.below("cast")))
    must(lies_along and flags.shape == (*places.shape, x.shape[-1]))
    return Chosen(a.reshape(weights, places.shape), places)


def _one_hot(flags: Value) -> Value | None:
    """Return the list [.., K] of the largest that `flags` [.., K, E] compares with 0 … E - 1."""
    for listed, numbers in (flags.args, flags.args[::-1]) if (flags.op, flags.attrs) == ("compare", ("eq",)) else ():
        places, line = uncast(listed, "reshape"), uncast(numbers, "reshape")
        along = listed.shape[-1:] == (1,) and numbers.shape[-1:] == line.shape == flags.shape[-1:]
        if along and (line.op, line.attrs) == ("arange", (0, 1)) and places.op == "largest_index":
            return places
    return None


def _softmax_of(graph: Graph, x: Value, found: Kept) -> Chosen:
    """A softmax over the largest alone, where the model has them at hand."""
    a = graph.algebra
    largest = a.make("largest", (found.x,), found.places.attrs, found.places.shape, found.x.dtype)
    if largest not in graph.places:
        return Chosen(_gathered(a, x, found.places), found.places)
    inner = plain(x)
    wide = a.cast(largest, inner.dtype)
    return Chosen(a.cast(a.make("softmax", (wide,), inner.attrs, wide.shape, wide.dtype), x.dtype), found.places)


def _gathered(a: Algebra, x: Value, places: Value) -> Value:
    return a.make("gathered", (x, places), (), places.shape, x.dtype)


@proof
def _by_columns(a: Algebra, inner: Value) -> Chosen:
    """Numbers [.., 1] that are put one after the other among zeros, at the first, second … place of a list."""
    columns: list[tuple[Value, Value]] = []
    while inner.op in ("placed", "write"):
        number, start = inner.args[1:] if inner.op == "write" else inner.args[:0:-1]
        columns.insert(0, (number, start))
        inner = inner.arg
    must((inner.op, inner.attrs) == ("full", (0,)) and len(columns) < inner.shape[-1])
    starts = [each.below("reshape") for _, each in columns]
    lists = [each.arg if each.op == "slice" else each for each in starts]
    must(lists[-1].op == "largest_index")
    scores, shape = lists[-1].arg, (*columns[0][0].shape[:-1], len(columns))
    places = a.make("largest_index", (scores,), (len(columns),), shape, lists[-1].dtype)
    must(all(a.slice(places, places.rank - 1, c, c + 1) is each for c, each in enumerate(starts)))
    return Chosen(proven(a.cat([each for each, _ in columns], len(shape) - 1)), places)


# sums ---------------------------------------------------------------------------------------------------------------


def columns(a: Algebra, inner: Value, factor: float) -> Columns | None:
    """Of what, and by which weights of all experts, a value is the sum."""
    return _of_loop(a, inner) if inner.op == "add" and factor == 1 else _of_stack(a, inner, factor)


@proof
def _of_loop(a: Algebra, inner: Value) -> Columns:
    """One product is added after the other."""
    found: dict[int, Value] = {}
    weights: set[Value] = set()
    for term in _terms(inner):
        product = plain(term)
        must(product.op == "mul")
        x, y = product.args
        of_x = _column(a, x)
        (number, all_weights), given = (of_x, y) if of_x is not None else (proven(_column(a, y)), x)
        must(given.shape == product.shape and number not in found)
        found[number] = _unrounded(given)
        weights.add(all_weights)
    must(len(weights) == 1)
    (whole,) = weights
    must(sorted(found) == list(range(len(found))) and whole.shape[-1] == len(found) > 1)
    return Columns(whole, tuple(found[number] for number in range(len(found))))


def _column(a: Algebra, x: Value) -> tuple[int, Value] | None:
    """The number of an expert and the weights of all [.., E], of which [.., 1] is that of the expert."""
    if not x.rank or x.shape[-1] != 1:
        return None
    column = plain(x)
    if column.op == "slice":
        whole = column.attrs[0] == column.rank - 1 and column.shape[-1] == 1
        return (column.attrs[1], column.arg) if whole else None
    return _listed(a, column)


@proof
def _listed(a: Algebra, column: Value) -> tuple[int, Value]:
    """The same of Σ_c w[:, c] (e(c) = e): weights that are put among zeros at the places of the list."""
    mean, count = unscaled(column)
    mean = plain(mean)
    must(mean.op == "mean" and mean.attrs == (-1,) and mean.arg.shape[-1] == count)
    weights, chosen = proven(_where_listed(plain(mean.arg)))
    must((chosen.op, chosen.attrs) == ("compare", ("eq",)))
    listed, number = chosen.args if chosen.args[1].op == "full" else chosen.args[::-1]
    places = uncast(listed, "reshape")
    must(
        number.op == "full"
        and float(number.attrs[0]).is_integer()
        and places.op == "largest_index"
        and weights.shape == listed.shape == places.shape
    )
    shape = (*places.shape[:-1], places.arg.shape[-1])
    zeros = a.make("full", (), (0,), shape, weights.dtype)
    return int(number.attrs[0]), a.make("placed", (zeros, places, weights), (), shape, weights.dtype)


def _where_listed(parts: Value) -> tuple[Value, Value] | None:
    """Weights [.., K], and where they count."""
    if parts.op == "where" and (parts.args[2].op, parts.args[2].attrs) == ("full", (0,)):
        return parts.args[1], parts.args[0]
    if parts.op != "mul":
        return None
    weights, chosen = parts.args if parts.args[1].below("cast").op == "compare" else parts.args[::-1]
    return weights, chosen.below("cast")


def _unrounded(x: Value) -> Value:
    """Rows before they were rounded, or listed otherwise."""
    while plain(x) is not x and (x.op != "reshape" or x.shape[-1] == x.arg.shape[-1]):
        x = x.arg
    return x


def _terms(x: Value) -> Iterator[Value]:
    """What is added, without zeros to begin with."""
    inner = plain(x)
    if inner.op == "add":
        yield from (each for arg in inner.args for each in _terms(arg))
    elif (inner.op, inner.attrs) != ("full", (0,)):
        yield x


@proof
def _of_stack(a: Algebra, inner: Value, factor: float) -> Columns:
    """What all give is joined in a dim of experts, which a product or a mean sums over."""
    found = proven(total(a, inner, factor))
    joined = plain(found.rows)
    count, width = found.weights.shape[-1], found.rows.shape[-1]
    must(found.order is None and joined.op == "cat" and len(joined.args) == count)
    (axis,), rank = joined.attrs, joined.rank
    apart = axis == rank - 2 and joined.shape[-2:] == (count, width)
    must(apart or (axis == rank - 1 and joined.shape[-1] == count * width))
    must(len({each.shape for each in joined.args}) == 1)
    shape = (*joined.shape[: rank - 2 if apart else rank - 1], width)
    return Columns(found.weights, tuple(_unrounded(a.reshape(each, shape)) for each in joined.args))


# experts ------------------------------------------------------------------------------------------------------------


def all_experts(graph: Graph) -> Iterator[Found]:
    """Sums over all experts, with what they are of the rows of those that are chosen; why others are none."""
    if not lists_largest(graph):
        return
    for (inner, factor), several in summed(graph).items():
        found = columns(graph.algebra, inner, factor)
        if found is None:
            yield from _stacked(graph, inner, factor, several)
            continue
        chosen = chosen_weights(graph, found.weights)
        if chosen is not None:
            yield from _of_chosen(graph, found, chosen, several)
        elif any(each.op == "largest" for each in found.weights.sources(lambda each: each.args)):
            yield several[0], Miss(RULE, _MAYBE, at=(found.weights,))


def _stacked(graph: Graph, inner: Value, factor: float, several: list[Value]) -> Iterator[Found]:
    """Yield the same of products of stacked matrices, which give what all experts do of every token."""
    gathered = _gathered_rows(graph.algebra, inner, factor)
    found = weighed_stack(graph.algebra, inner, factor) if gathered is None else None
    if found is not None and _computes(found.given.value):
        chosen = chosen_weights(graph, found.weights)
        gathered = None if chosen is None else (chosen, found.given)
    if gathered is not None:
        chosen, stack = gathered
        rows = StackedRows(graph, chosen.places)
        given = proof(rows.of_stack)(stack)
        yield from _of_rows(rows, given, chosen, several, Miss(RULE, _DENSE, at=(stack.value,)))


def _gathered_rows(a: Algebra, inner: Value, factor: float) -> tuple[Chosen, Stack] | None:
    """Return weights, the list, and what all experts give [T, E, H], of which the rows of the list are gathered."""
    found = total(a, inner, factor)
    rows = inner if found is None else plain(found.rows)
    if found is None or rows.op != "take" or rows.arg.rank != 3 or rows.shape[:-1] != found.weights.shape:
        return None
    places = uncast(rows.args[1])
    return (Chosen(found.weights, places), Stack(rows.arg, 1, 2)) if places.op == "largest_index" else None


def _computes(x: Value) -> bool:
    """True if `x` is a product, or rows of one that are arranged otherwise, perhaps with something added."""
    below = x.below("reshape", "permute", "cast")
    return any(each.below("reshape", "permute", "cast").op == "matmul" for each in (below, *below.args))


_DENSE = (
    "experts: all of them are computed for every token, by products of stacked matrices that are not proven to be one "
    "computation of each expert; npu_grouped_matmul requires rows of the experts that a token chose; gather the "
    'matrices that it chose, or sort rows by expert (transformers\' option experts_implementation takes "grouped_mm" '
    'and "batched_mm")'
)


def _of_chosen(graph: Graph, found: Columns, chosen: Chosen, several: list[Value]) -> Iterator[Found]:
    rows = Rows(graph, chosen.places)
    given = proof(rows.of)(found.given)
    yield from _of_rows(rows, given, chosen, several, Miss(RULE, _UNLIKE, at=found.given))


def _of_rows(rows: Rows, given: Value | None, chosen: Chosen, several: list[Value], otherwise: Miss) -> Iterator[Found]:
    """Yield the sum of what chosen experts give, with the readings of its rows; `otherwise` if they are unproven."""
    if given is None:
        yield several[0], otherwise
        return
    yield from rows.found.items()
    weighed = Total(given, rows.a.reshape(chosen.weights, rows.experts.shape))
    yield from sum_of_products(rows.a, weighed, rows.found.get(given), several)


_MAYBE = "a loop gives every expert its part, and the weights of experts that are not chosen are not proven to be 0"
_UNLIKE = (
    "a loop gives every expert its part, and these are not proven to be one computation with matrices of one size, "
    "from Parameters: lay the matrices of all in one tensor and gather those that a token chose"
)
