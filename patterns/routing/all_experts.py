"""y = Σ_e w[:, e] · f(x; W_e), a loop over all experts with weights that are 0 where an expert was not chosen.

Only the chosen ones count, so the sum is that of their rows: Σ_c w[:, e(c)] · f(x; W_e(c)). An expert that gives no
finite number for a token which did not choose it makes the model's sum NaN, and has no part in this one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import must, proof, proven
from patterns.linear.read import linear
from patterns.routing.list_masks import lists_largest
from patterns.routing.pairs import plain
from patterns.routing.read_kept import Kept, kept
from patterns.routing.weighted_sums import RULE, Total, as_sum, summed, total


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
    scores, shape = lists[-1].arg, (*columns[0][0].shape[:-1], len(columns))
    places = a.make("largest_index", (scores,), (len(columns),), shape, lists[-1].dtype)
    must(all(a.slice(places, places.rank - 1, c, c + 1) is each for c, each in enumerate(starts)))
    return Chosen(proven(a.cat([each for each, _ in columns], len(shape) - 1)), places)


# sums ---------------------------------------------------------------------------------------------------------------


def columns(a: Algebra, inner: Value, factor: float) -> Columns | None:
    """Of what, and by which weights of all experts, a value is the sum."""
    return _of_loop(inner) if inner.op == "add" and factor == 1 else _of_stack(a, inner, factor)


@proof
def _of_loop(inner: Value) -> Columns:
    """One product is added after the other."""
    found: dict[int, Value] = {}
    weights: set[Value] = set()
    for term in _terms(inner):
        product = plain(term)
        must(product.op == "mul")
        x, y = product.args
        cut, given = (x, y) if plain(x).op == "slice" and x.shape[-1] == 1 else (y, x)
        column = plain(cut)
        must(column.op == "slice" and column.attrs[0] == column.rank - 1 and column.shape[-1] == 1)
        must(given.shape == product.shape and column.attrs[1] not in found)
        found[column.attrs[1]] = _unrounded(given)
        weights.add(column.arg)
    must(len(weights) == 1)
    (whole,) = weights
    must(sorted(found) == list(range(len(found))) and whole.shape[-1] == len(found) > 1)
    return Columns(whole, tuple(found[number] for number in range(len(found))))


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
            continue
        chosen = chosen_weights(graph, found.weights)
        if chosen is not None:
            yield from _of_chosen(graph, found, chosen, several)
        elif any(each.op == "largest" for each in found.weights.sources(lambda each: each.args)):
            yield several[0], Miss(RULE, _MAYBE, at=(found.weights,))


def _of_chosen(graph: Graph, found: Columns, chosen: Chosen, several: list[Value]) -> Iterator[Found]:
    rows = _Rows(graph, chosen.places)
    given = proof(rows.of)(found.given)
    if given is None:
        yield several[0], Miss(RULE, _UNLIKE, at=found.given)
        return
    yield from rows.found.items()
    yield as_sum(Total(given, graph.algebra.reshape(chosen.weights, rows.experts.shape)), several)


_MAYBE = "a loop gives every expert its part, and the weights of experts that are not chosen are not proven to be 0"
_UNLIKE = (
    "a loop gives every expert its part, and these are not proven to be one computation with matrices of one size, "
    "from Parameters: lay the matrices of all in one tensor and gather those that a token chose"
)


_OF_NUMBERS = ("sigmoid", "tanh", "exp", "log", "abs", "relu", "clip", "clamp")
"""Further ops of which each number depends on those at the same place alone."""


class _Rows:
    """The same computation with the matrices of all experts, written for the rows of the experts that are chosen."""

    def __init__(self, graph: Graph, places: Value) -> None:
        self.graph, self.a = graph, graph.algebra
        self.experts = self.a.reshape(places, (prod(places.shape[:-1]), places.shape[-1]))
        self.found: dict[Value, Reading] = {}
        self._known: dict[tuple[Value, ...], Value] = {}

    def of(self, values: Sequence[Value]) -> Value:
        """What one of `values`, that of its own expert, is for each row."""
        key = tuple(values)
        if key not in self._known:
            self._known[key] = self._of(values)
        return self._known[key]

    def _of(self, values: Sequence[Value]) -> Value:
        first = values[0]
        if all(each is first for each in values):
            return self._tokens(first)
        layers = [self._layer(each) for each in values]
        if all(layer is not None for layer in layers):
            return self._product([proven(layer) for layer in layers])
        must(len({(each.op, each.attrs, each.dtype, len(each.args)) for each in values}) == 1)
        must(first.args and all(arg.shape == each.shape for each in values for arg in each.args))
        return self._rebuilt(first, [self.of(args) for args in zip(*(each.args for each in values), strict=True)])

    def _layer(self, x: Value) -> tuple[Value, Value, Value | None] | None:
        """Input, weight and bias of a linear layer, or of some of its lanes."""
        if x.op != "slice" or x.attrs[0] != x.rank - 1:
            return linear(self.a, self.graph.places, x)
        layer = self._layer(x.arg)
        if layer is None:
            return None
        inputs, weight, bias = layer
        lanes = x.attrs[1:]
        return inputs, self.a.cut(weight, 0, *lanes), bias and self.a.cut(bias, 0, *lanes)

    def _tokens(self, x: Value) -> Value:
        count, width = self.experts.shape[0], x.shape[-1]
        must(is_float(x) and prod(x.shape[:-1]) == count)
        tokens = self.a.reshape(x, (count, width))
        rows = self.a.expand(self.a.reshape(x, (count, 1, width)), (*self.experts.shape, width))
        self.found[rows] = Reading("routed_rows", {"tokens": tokens, "experts": self.experts})
        return rows

    def _product(self, layers: Sequence[tuple[Value, Value, Value | None]]) -> Value:
        inputs, weights, biases = zip(*layers, strict=True)
        must(len({(weight.shape, bias is None) for _, weight, bias in layers}) == 1)
        must(self.graph.is_fixed(*weights, *biases))
        rows = self.of(inputs)
        width = weights[0].shape[0]
        matrices = [self.a.reshape(swapped(self.a, each), (1, *each.shape[::-1])) for each in weights]
        joined = proven(self.a.cat(matrices, 0))
        product = self.a.make("row_product", (rows, joined), (), (*self.experts.shape, width), rows.dtype)
        said: dict[str, Any] = {"x": rows, "weight": joined, "experts": self.experts}
        if all(biases):
            said["bias"] = proven(self.a.cat([self.a.reshape(each, (1, width)) for each in biases], 0))
        self.found[product] = Reading("expert_product", {**said, "is_sorted": False, "is_parameter_only": True})
        return product

    def _rebuilt(self, like: Value, args: Sequence[Value]) -> Value:
        a, (x, *rest) = self.a, args
        match like.op:
            case "mul":
                return proven(a.mul(x, *rest))
            case "add":
                return proven(a.add(x, *rest))
            case "cast":
                return a.cast(x, like.dtype)
            case "scale":
                return a.scale(x, like.attrs[0])
            case "shift":
                return a.shift(x, like.attrs[0])
            case "power":
                return a.power(x, like.attrs[0])
            case _:
                must(like.op in _OF_NUMBERS)  # others may mix the rows of tokens
                return a.make(like.op, tuple(args), like.attrs, x.shape, like.dtype)
