"""y = Σ_e w[:, e] · f(x; W_e), a loop over all experts with weights that are 0 where an expert was not chosen.

The same sum over the chosen experts alone is Σ_c w[:, e(c)] · f(x; W_e(c)). The two differ where an expert returns inf
or NaN for a token that did not choose the expert: 0 · inf makes the sum of the model NaN, and not the rewritten one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from math import prod
from typing import NamedTuple

from fusion.analysis.dtypes import elements_below, rows_below
from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.moe.experts.assigned import CHOICES, assigned
from patterns.moe.experts.chosen_rows import ChosenRows
from patterns.moe.experts.expert_lists import Active
from patterns.moe.experts.group_ends import are_indices
from patterns.moe.experts.stacked_experts import Stack, StackedRows, weighed_stack
from patterns.moe.experts.weighted_sums import RULE, Total, sum_of_products, summed, total
from patterns.moe.one_hot import one_hot_places
from patterns.moe.router.read_weights import MaskedRows, masked_rows
from patterns.moe.router.selection_masks import has_topk


class Chosen(NamedTuple):
    """Weights [.., K] of the experts `places` [.., K] that each token chose; the weights of all other experts are 0."""

    weights: Value
    places: Value


class Columns(NamedTuple):
    """The operands of a weighted sum over experts: weights [.., E] of all, and the outputs [.., W] of `experts`."""

    weights: Value
    outputs: tuple[Value, ...]
    experts: tuple[int, ...]

    @property
    def active(self) -> Active | None:
        """The experts that have an output, which follow on each other; None if one between them has none."""
        first, count, total = self.experts[0], len(self.experts), self.weights.shape[-1]
        follow = self.experts == tuple(range(first, first + count)) and first + count <= total
        return Active(first, count, total) if follow else None


# weights ------------------------------------------------------------------------------------------------------------


def chosen_weights(graph: Graph, x: Value) -> Chosen | None:
    """Return the experts [.., K] that each token chose, and their weights, from weights `x` [.., E] of all experts.

    None unless `x` is proven to be 0 at every expert that was not chosen.
    """
    a, inner = graph.algebra, elements_below(x)
    one_hot = _by_one_hot(a, x)
    if one_hot is not None:
        return one_hot
    if inner.op in ("placed", "write"):
        return _placed(inner) or _by_columns(a, inner)
    if inner.op == "softmax":
        below = masked_rows(a, elements_below(inner.arg))
        return _softmax_of_largest(graph, x, below) if below is not None and below.fill == -math.inf else None
    parts = (inner, *(each for each in inner.args if inner.op == "mul" and each.shape == inner.shape))
    masked = next(filter(None, (masked_rows(a, each) for each in parts)), None)
    return None if masked is None or masked.fill != 0 else Chosen(_gathered(a, x, masked.places), masked.places)


def _placed(inner: Value) -> Chosen | None:
    """Read `inner` [.., E] as weights [.., K] that are scattered into zeros at the indices of a top-k; None if it is
    not.
    """
    if inner.op != "placed" or (inner.arg.op, inner.arg.attrs) != ("full", (0,)):
        return None
    places = inner.args[1]
    chosen = places.below("reshape") if places.shape[-1] == 1 else places
    return Chosen(inner.args[2], places) if chosen.op in CHOICES else None


@proof
def _by_one_hot(a: Algebra, x: Value) -> Chosen:
    """Read `x`[.., e] = Σ_k weights[.., k] · (places[.., k] = e), as a sum of products or as a matmul."""
    inner, factor = unscaled(elements_below(x))
    inner = elements_below(inner)
    if inner.op == "mean":
        must(inner.attrs == (-2,) and inner.arg.shape[-2] == factor)
        product = elements_below(inner.arg)
        must(product.op == "mul")
        weights, flags = product.args if product.args[1].below("cast").op == "compare" else product.args[::-1]
        is_per_choice = weights.shape == (*flags.shape[:-1], 1)
    else:
        must(inner.op == "matmul" and factor == 1)
        weights, flags = inner.args
        is_per_choice = weights.shape == (*flags.shape[:-2], 1, flags.shape[-2])
    places = proven(one_hot_places(flags.below("cast")))
    must(places.op in CHOICES)
    places = a.reshape(places, flags.shape[:-1]) if places.op == "first_greatest" else places
    must(is_per_choice and flags.shape == (*places.shape, x.shape[-1]) and are_indices(places, x.shape[-1]))
    return Chosen(a.reshape(weights, places.shape), places)


def _softmax_of_largest(graph: Graph, x: Value, masked: MaskedRows) -> Chosen:
    """Return the weights of the softmax `x` [.., E] over `masked`, which is -inf but for the K largest of each row.

    A softmax over the K largest gives them without a gather; it needs a node of the model that has the K largest.
    """
    a = graph.algebra
    largest = a.make("largest", (masked.x,), masked.places.attrs, masked.places.shape, masked.x.dtype)
    if largest not in graph.places:
        return Chosen(_gathered(a, x, masked.places), masked.places)
    inner = elements_below(x)
    wide = a.cast(largest, inner.dtype)
    return Chosen(a.cast(a.make("softmax", (wide,), inner.attrs, wide.shape, wide.dtype), x.dtype), masked.places)


def _gathered(a: Algebra, x: Value, places: Value) -> Value:
    return a.make("gathered", (x, places), (), places.shape, x.dtype)


@proof
def _by_columns(a: Algebra, inner: Value) -> Chosen:
    """Read `inner` [.., E] as zeros into which K weights [.., 1] were written, the k-th at the k-th index of a top-k.

    One weight may be at the index of the greatest.

    Unproven if it is anything else.
    """
    columns: list[tuple[Value, Value]] = []
    while inner.op in ("placed", "write"):
        number, start = inner.args[1:] if inner.op == "write" else inner.args[:0:-1]
        columns.insert(0, (number, start))
        inner = inner.arg
    must((inner.op, inner.attrs) == ("full", (0,)) and len(columns) < inner.shape[-1])
    starts = [each.below("reshape") for _, each in columns]
    lists = [each.arg if each.op == "slice" else each for each in starts]
    if len(lists) == 1 and starts[0].op == "first_greatest":
        return Chosen(columns[0][0], a.reshape(starts[0], columns[0][0].shape))
    must(lists[-1].op == "largest_index")
    scores, shape = lists[-1].arg, (*columns[0][0].shape[:-1], len(columns))
    places = a.make("largest_index", (scores,), (len(columns),), shape, lists[-1].dtype)
    must(all(a.slice(places, places.rank - 1, c, c + 1) is each for c, each in enumerate(starts)))
    return Chosen(proven(a.cat([each for each, _ in columns], len(shape) - 1)), places)


# sums ---------------------------------------------------------------------------------------------------------------


def columns(a: Algebra, inner: Value, factor: float) -> Columns | None:
    """Read `inner` · `factor` as Σ_e weights[.., e] · (output of expert e), added one by one or reduced from a stack.

    None if it is no such sum.
    """
    return _loop_columns(a, inner) if inner.op == "add" and factor == 1 else _stacked_columns(a, inner, factor)


@proof
def _loop_columns(a: Algebra, inner: Value) -> Columns:
    """Read `inner` as a chain of additions of weights[.., e : e + 1] · (output of expert e), for several e of 0 … E -
    1.
    """
    outputs: dict[int, Value] = {}
    weights: set[Value] = set()
    for term in _terms(inner):
        product = elements_below(term)
        must(product.op == "mul")
        x, y = product.args
        column = _column(a, x)
        (expert, all_weights), output = (column, y) if column is not None else (proven(_column(a, y)), x)
        must(output.shape == product.shape and expert not in outputs)
        outputs[expert] = rows_below(output)
        weights.add(all_weights)
    must(len(weights) == 1)
    (joint,) = weights
    must(len(outputs) > 1 and isinstance(joint.shape[-1], int))
    return Columns(joint, tuple(outputs[expert] for expert in sorted(outputs)), tuple(sorted(outputs)))


def _column(a: Algebra, x: Value) -> tuple[int, Value] | None:
    """Return e and weights [.., E] if `x` [.., 1] is the column weights[.., e : e + 1]; else None."""
    if not x.rank or x.shape[-1] != 1:
        return None
    column = elements_below(x)
    if column.op == "slice":
        is_column = column.attrs[0] == column.rank - 1 and column.shape[-1] == 1
        return (column.attrs[1], column.arg) if is_column else None
    return _listed(a, column)


@proof
def _listed(a: Algebra, column: Value) -> tuple[int, Value]:
    """Return (e, weights [.., E]) if `column` is Σ_k w[.., k] · (places[.., k] = e), a loop over experts.

    The weights are w [.., K] scattered into zeros at the top-k indices `places` [.., K]. The mask may be written in any
    way that is True at one expert: places - 4 = 0, or map[places] = 0 with a constant map.
    """
    mean, count = unscaled(column)
    mean = elements_below(mean)
    must(mean.op == "mean" and mean.attrs == (-1,) and mean.arg.shape[-1] == count)
    weights, flags = proven(_where_listed(elements_below(mean.arg)))
    own = proven(assigned(a, flags))
    must(own.order is None and not own.by_choice and sum(own.numbers) == 1 and weights.shape == flags.shape)
    chosen, places = own.experts, a.reshape(own.experts, flags.shape)
    shape = (*places.shape[:-1], chosen.arg.shape[-1])
    zeros = a.make("full", (), (0,), shape, weights.dtype)
    return own.numbers.index(1), a.make("placed", (zeros, places, weights), (), shape, weights.dtype)


def _where_listed(parts: Value) -> tuple[Value, Value] | None:
    """Split `parts` = where(flags, weights, 0), or weights · flags, into weights [.., K] and the boolean `flags`.

    None if it is neither.
    """
    if parts.op == "where" and (parts.args[2].op, parts.args[2].attrs) == ("full", (0,)):
        return parts.args[1], parts.args[0]
    if parts.op != "mul":
        return None
    weights, flags = parts.args if parts.args[1].below("cast").op == "compare" else parts.args[::-1]
    return weights, flags.below("cast")


def _terms(x: Value) -> Iterator[Value]:
    """Yield the summands of the additions of which `x` is the root, except tensors of zeros."""
    inner = elements_below(x)
    if inner.op == "add":
        yield from (each for arg in inner.args for each in _terms(arg))
    elif (inner.op, inner.attrs) != ("full", (0,)):
        yield x


@proof
def _stacked_columns(a: Algebra, inner: Value, factor: float) -> Columns:
    """Read `inner` · `factor` as a weighted sum over a stack, or a concatenation along the lanes, of the outputs of all
    experts.

    Unproven if it is anything else.
    """
    weighted = proven(total(a, inner, factor))
    joined = elements_below(weighted.rows)
    count, width = weighted.weights.shape[-1], weighted.rows.shape[-1]
    must(weighted.order is None and joined.op == "cat" and len(joined.args) == count)
    (axis,), rank = joined.attrs, joined.rank
    is_stack = axis == rank - 2 and joined.shape[-2:] == (count, width)
    must(is_stack or (axis == rank - 1 and joined.shape[-1] == count * width))
    must(len({each.shape for each in joined.args}) == 1)
    shape = (*joined.shape[: rank - 2 if is_stack else rank - 1], width)
    outputs = tuple(rows_below(a.reshape(each, shape)) for each in joined.args)
    return Columns(weighted.weights, outputs, tuple(range(len(outputs))))


# experts ------------------------------------------------------------------------------------------------------------


def all_experts(graph: Graph) -> Iterator[Annotation]:
    """Yield the readings of every weighted sum over all experts as one over the chosen experts.

    A sum gives a `Miss` if its weights come from a top-k but are not proven to be 0 at the experts that were not
    chosen, or if the experts are not proven to be one computation with different weights.
    """
    if not has_topk(graph):
        return
    added = summed(graph)
    sums = {key: columns(graph.algebra, *key) for key in added}
    most = {(each.weights, len(each.experts)) for each in sums.values() if each is not None}
    for (inner, factor), several in added.items():
        summands = sums[inner, factor]
        if summands is None:
            yield from _stacked(graph, inner, factor, several)
            continue
        if any(weights is summands.weights and count > len(summands.experts) for weights, count in most):
            continue  # a part of the sum over more experts
        chosen = chosen_weights(graph, summands.weights)
        if summands.active is None:
            have, there = len(summands.outputs), summands.weights.shape[-1]
            if chosen is not None and have < there:
                yield several[0], Miss(RULE, _SOME.format(have=have, there=there), at=summands.outputs)
            continue
        if chosen is not None:
            rows = ChosenRows(graph, chosen.places, summands.active)
            output = proof(rows.rewrite)(summands.outputs)
            yield from _sum_of_chosen(rows, output, chosen, several, Miss(RULE, _DIFFERENT, at=summands.outputs))
        elif any(each.op == "largest" for each in summands.weights.sources(lambda each: each.args)):
            yield several[0], Miss(RULE, _MAYBE, at=(summands.weights,))


def _stacked(graph: Graph, inner: Value, factor: float, several: list[Value]) -> Iterator[Annotation]:
    """Yield the readings of `several`, equal values `inner` · `factor`, as a sum over the dim of experts of batched
    products.

    Nothing is yielded if it is no such sum, a `Miss` if what is summed cannot be rewritten for the chosen experts.
    """
    gathered = _gathered_rows(graph.algebra, inner, factor)
    weighed = weighed_stack(graph.algebra, inner, factor) if gathered is None else None
    if weighed is not None and _computes(weighed.outputs.value):
        chosen = _active_weights(graph, weighed.weights)
        gathered = None if chosen is None else (*chosen, weighed.outputs)
    if gathered is not None:
        chosen, active, stack = gathered
        rows = StackedRows(graph, chosen.places, active)
        output = proof(rows.rewrite_stack)(stack)
        yield from _sum_of_chosen(rows, output, chosen, several, Miss(RULE, _DENSE, at=(stack.value,)))


def _active_weights(graph: Graph, weights: Value) -> tuple[Chosen, Active] | None:
    """Return the chosen experts with their weights, and those of them that `weights` [T, N] are of: all, or N that
    follow on each other, as a slice of the weights of all; None if weights of others are not proven to be 0.
    """
    chosen, (tokens, count) = chosen_weights(graph, weights), weights.shape
    if chosen is not None:
        return chosen, Active(0, count, count)
    part = elements_below(weights)
    if part.op != "slice" or part.attrs[3] != 1 or prod(part.shape[part.attrs[0] + 1 :]) != 1 or count == 1:
        return None
    total, first = part.arg.shape[part.attrs[0]], part.attrs[1]
    chosen = chosen_weights(graph, graph.algebra.reshape(part.arg, (tokens, total)))
    return None if chosen is None else (chosen, Active(first, count, total))


def _gathered_rows(a: Algebra, inner: Value, factor: float) -> tuple[Chosen, Active, Stack] | None:
    """Read `inner` · `factor` as a weighted sum of rows of [T, E, H], the outputs of all experts, gathered at [T, K].

    Returns the chosen experts with their weights, those that have outputs, and the outputs; None if it is no such sum.
    """
    weighted = total(a, inner, factor)
    rows = inner if weighted is None else elements_below(weighted.rows)
    if weighted is None or rows.op != "take" or rows.arg.rank != 3 or rows.shape[:-1] != weighted.weights.shape:
        return None
    places, count = uncast(rows.args[1]), rows.arg.shape[1]
    active = Active(0, count, count)
    return (Chosen(weighted.weights, places), active, Stack(rows.arg, 1, 2)) if places.op in CHOICES else None


def _computes(x: Value) -> bool:
    """Return True if `x` or one of its operands is a matmul below reshapes, permutes and casts."""
    below = x.below("reshape", "permute", "cast")
    return any(each.below("reshape", "permute", "cast").op == "matmul" for each in (below, *below.args))


_DENSE = (
    "experts: all of them are computed for every token, by products of stacked matrices that are not "
    "proven to be one computation of each expert; npu_grouped_matmul requires rows of the experts that a "
    "token chose; gather the matrices that it chose, or sort rows by expert (transformers' option "
    'experts_implementation takes "grouped_mm" and "batched_mm")'
)


def _sum_of_chosen(
    rows: ChosenRows, output: Value | None, chosen: Chosen, several: list[Value], otherwise: Miss
) -> Iterator[Annotation]:
    """Yield the readings of `several`, equal values, as the sum of the outputs of the chosen experts.

    Args:
        rows: the rewriter that built `output`, with the readings of what it built.
        output: the outputs [T, K, H] of the chosen experts; None if they could not be built.
        chosen: the chosen experts and their weights.
        several: the values that are equal to the sum.
        otherwise: the `Miss` that is yielded in place of the readings if `output` is None.
    """
    if output is None:
        yield several[0], otherwise
        return
    yield from rows.readings.items()
    weighed = Total(output, rows.a.reshape(chosen.weights, rows.experts.shape))
    yield from sum_of_products(rows.a, weighed, rows.readings.get(output), rows.active, several)


_SOME = (
    "experts: a loop computes {have} of the {there} experts that tokens choose from, and leaves out one between them; "
    "npu_moe_init_routing_v2 requires experts that follow on each other, active_expert_range; compute these"
)
_MAYBE = (
    "experts: a loop computes each, and the weights of experts that a token did not choose are not proven to "
    "be 0; npu_grouped_matmul requires that; write zeros.scatter(-1, topk_indices, topk_weights)"
)
_DIFFERENT = (
    "experts: a loop computes each, and these are not proven to be one computation with Parameters of one "
    "size; npu_grouped_matmul requires stacked matrices [E, K, N]; stack the matrices in one Parameter, "
    "and index it by the experts that a token chose"
)
