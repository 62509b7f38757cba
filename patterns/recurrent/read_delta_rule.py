"""Steps of a gated delta rule, read from the update of the state (Schlag, 2021; Yang, 2024; Kimi Team, 2025).

    D = exp(g) · exp(gk) · S        S' = D + k (beta · (v - Dᵀ k))ᵀ        y = scale · S'ᵀ q

Products with the state are sums of products, matmuls or einsums, and beta stands beside v and Dᵀ k, their difference,
or the key that is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import isclose
from typing import Any

from fusion import reader
from fusion.analysis.dtypes import unrounded
from fusion.graph import Algebra, Annotation, Dim, Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.recurrent.state_updates import Update, last_dims, state_updates
from patterns.recurrent.unit_vectors import unit_of
from patterns.recurrent.vectors import (
    Scaled,
    contraction,
    descend,
    heads_of,
    lanes_of,
    narrowed,
    plain,
    without,
)
from patterns.recurrent.words import DELTA_RULE, DELTA_STATE

_NO_EXPONENTIAL = (
    "g: the decay of the state is no exponential; npu_recurrent_gated_delta_rule requires its logarithm; write it as "
    "exp(g)"
)
_OTHER_KEY = (
    "key: the state is read by another vector than is written to it; npu_recurrent_gated_delta_rule requires one key; "
    "write S + k (beta (v - Sᵀ k))ᵀ"
)
_DECAY_OF_VALUES = (
    "g: the decay of the state differs by lanes of the values; npu_recurrent_gated_delta_rule requires one number for "
    "a head, or for each lane of its key"
)


@dataclass(frozen=True)
class _Step:
    """A step of a delta rule whose decays are not read yet.

    Attributes:
        update: the update of the state.
        axis: the dim of the key lanes in the state, -2 or -1.
        key: the key [*L, K].
        value: the value [*L, V].
        betas: the factors of the update that have one number for each head [*L].
        number: a further factor of the update.
    """

    update: Update
    axis: int
    key: Value
    value: Value
    betas: tuple[Value, ...]
    number: float


@reader(gives=(DELTA_STATE, DELTA_RULE))
def delta_rules(graph: Graph) -> Iterator[Annotation]:
    """Read the state after each step of a delta rule, and the products of queries with it."""
    a, steps = graph.algebra, delta_steps(graph)
    after = {value: captures for value, captures in steps.items() if not isinstance(captures, str)}
    for value, captures in after.items():
        yield a.cast(value, captures["state"].dtype), Reading("delta_state", captures)
    for value in list(graph.places) if after else ():
        output = _output(a, value, after)
        if output is not None:
            yield value, output


def delta_steps(graph: Graph) -> Mapping[Value, Mapping[str, Any] | str]:
    """Map the state after each step of a delta rule to the captures of `delta_state`, or to the reason why
    npu_recurrent_gated_delta_rule takes no such step.
    """
    steps = {value: _step(graph.algebra, update) for value, update in state_updates(graph).items()}
    read = {value: _captures(graph.algebra, step) if isinstance(step, _Step) else step for value, step in steps.items()}
    return {value: each for value, each in read.items() if each is not None}


@proof
def _step(a: Algebra, update: Update) -> _Step | str | None:
    """Read the addend of `update` as k (beta · (v - Dᵀ k))ᵀ; the reason if it has two keys, None if it is anything
    else.
    """
    added, factors = unrounded(update.added), list[Value]()
    while added.op == "mul" and (small := [each for each in added.args if last_dims(each) == (1, 1)]):
        factors += small[:1]
        added = unrounded(added.args[1] if small[0] is added.args[0] else added.args[0])
    sides = proven(_sides(added))
    lead = update.decayed.shape[:-2]
    betas = [proven(lanes_of(a, each, (*lead, 1, 1), lead)) for each in factors]
    for axis in (-2, -1):
        step = _with_keys_along(a, update, axis, sides[axis], sides[-3 - axis])
        if step is not None:
            return step if isinstance(step, str) else replace(step, betas=(*step.betas, *betas))
    return None


@proof
def _sides(product: Value) -> Mapping[int, Value] | None:
    """Split an outer product [.., X, Y] into its column [.., X, 1], by -2, and its row [.., 1, Y], by -1."""
    is_outer = product.op == "mul" or (product.op == "matmul" and product.arg.shape[-1] == 1)
    must(is_outer)
    sides = {-2 if last_dims(each)[1] == 1 else -1: each for each in product.args if 1 in last_dims(each)}
    must(len(sides) == 2)
    return sides


@proof
def _with_keys_along(a: Algebra, update: Update, axis: int, key: Value, delta: Value) -> _Step | str | None:
    """Read `key` and `delta`, in the frame of the state, as k and beta · (v - Dᵀ k); k lies along `axis`.

    The reason if `key` is not k, None if `delta` is anything else.
    """
    lead, lanes, size = update.decayed.shape[:-2], update.decayed.shape[-3 - axis], update.decayed.shape[axis]
    difference = proven(descend(delta, lambda each: each.op == "add"))
    predicted, value = proven(_addends(a, update, axis, difference.value))
    read = proven(contraction(a, predicted.value))
    k = proven(lanes_of(a, read.vector, _frame(update, axis, size), (*lead, size)))
    written = _written_key(a, key, k)
    if written is None:
        return _OTHER_KEY
    inner, outer, on_key = (_heads(a, each, lead) for each in (predicted, difference, written))
    remaining = proven(without(a, value, proven(inner), lead))
    factor = difference.number * written.number
    number = -factor * predicted.number * read.number
    must(number > 0)
    v = proven(lanes_of(a, remaining.value, difference.value.shape, (*lead, lanes)))
    ratio = factor * remaining.number / number
    betas = (*proven(inner), *proven(outer), *proven(on_key))
    return _Step(update, axis, k, v if isclose(ratio, 1) else a.scale(v, ratio), betas, number)


@proof
def _heads(a: Algebra, scaled: Scaled, lead: Sequence[Dim]) -> tuple[Value, ...] | None:
    """Return the factors of `scaled` as [*lead]; None where one has other dims."""
    pairs = zip(scaled.factors, scaled.frames, strict=True)
    return tuple(proven(heads_of(a, factor, frame, lead)) for factor, frame in pairs)


def _addends(a: Algebra, update: Update, axis: int, difference: Value) -> tuple[Scaled, Value] | None:
    """Split `difference` into the scaled product of the decayed state with a vector along `axis`, and the rest."""

    def is_predicted(each: Value) -> bool:
        read = contraction(a, each)
        return read is not None and read.axis == axis and read.matrix is unrounded(update.decayed)

    for each, other in (difference.args, difference.args[::-1]):
        predicted = descend(each, is_predicted)
        if predicted is not None:
            return predicted, other
    return None


def _written_key(a: Algebra, key: Value, k: Value) -> Scaled | None:
    """Divide the written `key` by `k` [*L, K], which is read: numbers, and factors of one number for each head."""

    def is_read(each: Value) -> bool:
        return lanes_of(a, each, each.shape, k.shape) is k

    written = descend(key, is_read)
    if written is not None or k.op != "scale":
        return written
    below = descend(key, lambda each: lanes_of(a, each, each.shape, k.shape) is narrowed(k.arg))
    return below and Scaled(below.value, below.number / k.attrs[0], below.factors, below.frames)


def _captures(a: Algebra, step: _Step) -> Mapping[str, Any] | str | None:
    """Return the captures of `delta_state`; the reason if the operator takes no such decay."""
    update = step.update
    decays = _decays(a, step)
    if isinstance(decays, str):
        return decays
    beta = _beta(a, step)
    if beta is None and not isclose(step.number, 1):
        return None
    key, eps = unit_of(a, step.key)
    given = {"k": key, "v": step.value, "beta": beta, **decays}
    captured = {name: each for name, each in given.items() if each is not None}
    return {**captured, "k_eps": eps, "state": update.state, "values_first": step.axis == -1}


def _beta(a: Algebra, step: _Step) -> Value | None:
    """Return the product of the factors of each head and the number of `step`; None without such a factor."""
    beta: Value | None = None
    for each in step.betas:
        beta = each if beta is None else a.mul(beta, each)
    return beta if beta is None or isclose(step.number, 1) else a.scale(beta, step.number)


def _frame(update: Update, axis: int, size: Dim) -> tuple[Dim, ...]:
    """Return the shape of a vector along `axis` in the frame of the state."""
    lead = update.decayed.shape[:-2]
    return (*lead, size, 1) if axis == -2 else (*lead, 1, size)


def _decays(a: Algebra, step: _Step) -> Mapping[str, Value] | str:
    """Return the logarithms of the decays: "g" of each head, "gk" of each lane of the key; the reason if they are
    others.
    """
    update, logs = step.update, dict[str, Value]()
    lead, size = update.decayed.shape[:-2], update.decayed.shape[step.axis]
    if _number_of(update.decayed) != 1:
        return _NO_EXPONENTIAL
    for each in update.decays:
        exponential = plain(each)
        if exponential.op != "exp":
            return _NO_EXPONENTIAL
        if last_dims(each)[-3 - step.axis] != 1:
            return _DECAY_OF_VALUES
        is_of_heads = last_dims(each)[step.axis] == 1
        name, shape = ("g", lead) if is_of_heads else ("gk", (*lead, size))
        log = a.reshape(exponential.arg, each.shape)
        log = lanes_of(a, log, _frame(update, step.axis, 1 if is_of_heads else size), shape)
        if log is None:
            return _NO_EXPONENTIAL
        logs[name] = a.add(logs[name], log) or log if name in logs else log
    return logs


def _number_of(decayed: Value) -> float:
    """Return the product of the numbers by which the factors of `decayed` are scaled."""
    if decayed.op in ("cast", "scale"):
        return _number_of(decayed.arg) * (decayed.attrs[0] if decayed.op == "scale" else 1.0)
    return _number_of(decayed.args[0]) * _number_of(decayed.args[1]) if decayed.op == "mul" else 1.0


@proof
def _output(a: Algebra, value: Value, after: Mapping[Value, Mapping[str, Any]]) -> Reading | None:
    """Read `value` as scale · S'ᵀ q of a state S' in `after`; None if it is anything else."""
    must(value.op != "cast")
    below = proven(descend(value, lambda each: contraction(a, each) is not None))
    read = proven(contraction(a, below.value))
    captures = proven(after.get(read.matrix))
    must(not below.factors and read.axis == (-1 if captures["values_first"] else -2))
    q, scale = read.vector, below.number * read.number
    if q.op == "scale":
        q, scale = q.arg, scale * q.attrs[0]
    lead = read.matrix.shape[:-2]
    size = read.matrix.shape[read.axis]
    frame = (*lead, size, 1) if read.axis == -2 else (*lead, 1, size)
    q, eps = unit_of(a, proven(lanes_of(a, q, frame, (*lead, size))))
    view = _view(value)
    must(view and q.shape == captures["k"].shape)
    return Reading("delta_rule_output", {"q": q, "q_eps": eps, "scale": scale, "view": view, **captures})


def _view(value: Value) -> tuple[int, ...]:
    """Return the shape of `value` with -1 for a symbolic size; empty if it has several."""
    sizes = tuple(each if isinstance(each, int) else -1 for each in value.shape)
    return sizes if sizes.count(-1) <= 1 else ()
