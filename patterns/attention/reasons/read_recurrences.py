"""Recurrences over tokens, for which this package emits no operator: each is reported once, with its formula.

S' = a · S + k uᵀ,  y = S'ᵀ q         linear attention (Katharopoulos, 2020); with a decay a, gated linear attention
u = β (v - (a · S)ᵀ k)                a delta rule (Schlag, 2021; gated by a: Yang, 2024)
a of each entry of S                  a selective state-space recurrence (Gu and Dao, 2023)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fusion import reader
from fusion.analysis.rounding import is_float
from fusion.graph import Annotation, Graph, Miss, Value

_ARRANGED = ("cast", "permute", "reshape", "scale")
_NONLINEAR = ("softmax", "log_sum_exp", "exp", "sigmoid", "relu", "tanh")
_CUT = ("reshape", "slice")
_UNFUSED = "this package emits no operator that computes it; nothing to change"
_KINDS = {
    "delta_rule": (
        "state: it takes a step of a {}delta rule, S' = {}S + k (v - Sᵀ k)ᵀ; {} (CANN has "
        "npu_recurrent_gated_delta_rule)"
    ),
    "state_space": (
        "state: it takes a step of a {}state-space recurrence, S' = {}S + k vᵀ, whose decay differs by entry; {}"
    ),
    "linear_attention": "state: it takes a step of {}linear attention, S' = {}S + k vᵀ; {}",
}


@dataclass(frozen=True)
class _Update:
    """An outer product that is added to a decayed state.

    Attributes:
        decayed: the decayed state [.., K, V].
        state: the state before its decay [.., K, V].
        decays: the factors of the state, which broadcast to it.
        added: the outer product [.., K, V].
    """

    decayed: Value
    state: Value
    decays: tuple[Value, ...]
    added: Value

    @property
    def is_decayed(self) -> bool:
        """Return True if the state is multiplied by tensors or a number."""
        return self.decayed.below("cast") is not self.state


@reader(gives=())
def recurrences(graph: Graph) -> Iterator[Annotation]:
    """Report each update S' = a · S + k uᵀ of a state whose result, decayed state or state is read by products with it.

    All steps of an unrolled loop are reported at the first one. No update is an S' of which a nonlinear function is
    taken.
    """
    updates = {value: each for value in graph.places for each in [_update(graph, value)] if each is not None}
    walk = _Walk(graph)
    for value, update in updates.items():
        reads = {each for start in (value, update.decayed, update.state) for each in walk.contractions(start)}
        later = {each for each in reads if each is not update.added}
        is_linear = not any(user.op in _NONLINEAR for user in walk.users.get(value, ()))
        rule = _kind(graph, update, later) if later and is_linear else ""
        if rule:
            covered = frozenset({value, update.decayed, update.added, *later})
            yield value, Miss(rule, _described(rule, update), (value,), _first(updates, value), covers=covered)


def _first(updates: Mapping[Value, _Update], value: Value) -> Value:
    """Return the first update of the loop of which `value` is an update: its state is no result of `updates`."""
    while (state := updates[value].state.below(*_ARRANGED)) in updates:
        value = state
    return value


def _described(rule: str, update: _Update) -> str:
    gated = "gated " if update.is_decayed and rule != "state_space" else ""
    return _KINDS[rule].format(gated, "a · " if update.is_decayed else "", _UNFUSED)


def _kind(graph: Graph, update: _Update, reads: set[Value]) -> str:
    """Name the recurrence that `update` is a step of: "delta_rule", "state_space" or "linear_attention".

    A delta rule adds what is computed from `reads`, the products with the state; a state-space recurrence has a decay
    of each entry of the state. "" if a product with Parameters is on the way from `reads` to the addend: then layers of
    a model are between them, and `update` is no recurrence.
    """
    first = update.state.id  # users of the state have larger ids

    def computed(value: Value) -> list[Value]:
        return [each for each in value.args if each.id > first]

    def without_layers(value: Value) -> list[Value]:
        return [] if value.op == "matmul" and any(map(graph.is_fixed, value.args)) else computed(value)

    if not reads.isdisjoint(update.added.sources(without_layers)):
        return "delta_rule"
    if not reads.isdisjoint(update.added.sources(computed)):
        return ""  # streams that hyper-connections mix
    is_of_entries = any(1 not in _last(each) for each in update.decays)
    return "state_space" if is_of_entries else "linear_attention"


def _update(graph: Graph, value: Value) -> _Update | None:
    """Read `value` [.., K, V] as the sum of a state and an outer product of computed tensors; None for others."""
    if value.op != "add" or value.rank < 3 or 1 in value.shape[-2:] or not is_float(value):
        return None
    for decayed, added in (value.args, value.args[::-1]):
        states, decays = _decayed(decayed, value.rank)
        if len(states) != 1 or decayed.shape != value.shape or not _is_state(graph, states[0]):
            continue
        update = _Update(decayed, states[0], tuple(decays), added)
        if _is_outer(graph, added) or (update.is_decayed and _is_product(graph, added)):
            return update
    return None


def _is_state(graph: Graph, x: Value) -> bool:
    """Return True if `x` may come from another token: it is neither a Parameter nor a matmul."""
    return not graph.is_fixed(x) and x.below(*_ARRANGED).op != "matmul"


def _decayed(x: Value, rank: int) -> tuple[list[Value], list[Value]]:
    """Split the factors of `x` into states, which have all its `rank` dims, and decays: exponentials, and factors that
    broadcast.
    """
    factors = _factors(x)
    decays = [each for each in factors if each.below("cast", *_CUT).op == "exp" or _broadcasts(each, rank)]
    return [each for each in factors if each not in decays], decays


def _broadcasts(x: Value, rank: int) -> bool:
    return x.rank < rank or 1 in x.shape[-2:]


def _factors(x: Value) -> list[Value]:
    """Return the factors of a product of any association, without casts and numbers."""
    x = x.below("cast", "scale")
    return [each for arg in x.args for each in _factors(arg)] if x.op == "mul" else [x]


def _is_outer(graph: Graph, x: Value) -> bool:
    """Return True if `x` [.., K, V] is the outer product of computed columns [.., K, 1] and rows [.., 1, V].

    `x` may be sliced from a product for all tokens, if every factor of that product broadcasts.
    """
    product = x.below("cast", "scale", *_CUT)
    if product.op == "matmul":
        return product.arg.shape[-1] == 1 and _is_product(graph, product)
    factors = _factors(product)
    if any(map(graph.is_fixed, factors)):
        return False
    if product.shape != x.shape:
        return len(factors) > 1 and all(each.shape != product.shape for each in factors)
    sides = [_last(each) for each in factors]
    columns, rows = (any(side[axis] == 1 != side[1 - axis] for side in sides) for axis in (1, 0))
    return columns and rows and all(1 in side for side in sides)


def _last(x: Value) -> Sequence[object]:
    return (1, 1, *x.shape)[-2:]


def _is_product(graph: Graph, x: Value) -> bool:
    """Return True if `x` [.., K, V] is a matmul kᵀ u of computed matrices of each head, as of a chunk of tokens."""
    product = x.below(*_ARRANGED)
    return product.op == "matmul" and product.rank > 2 and not any(map(graph.is_fixed, product.args))


@dataclass(frozen=True)
class _Walk:
    """Searches in `graph` from values to the values that are computed from them."""

    graph: Graph

    @cached_property
    def users(self) -> Mapping[Value, list[Value]]:
        """The values that are computed from each value."""
        users: dict[Value, list[Value]] = defaultdict(list)
        for value in self.graph.owners:
            for each in value.args:
                users[each].append(value)
        return users

    def contractions(self, state: Value) -> Iterator[Value]:
        """Yield the products of `state` with a computed tensor that sum over a dim, such as Sᵀ q.

        They may be matmuls, or a "mul" followed by a mean; views of the state and additions to it may come before.
        """
        waiting, seen = [(state, False)], set[Value]()
        while waiting:
            x, weighed = waiting.pop()
            for user in self.users.get(x, ()):
                if user in seen or any(map(self.graph.is_fixed, user.args)):
                    continue
                seen.add(user)
                if user.op == "matmul" or (user.op == "mean" and weighed):
                    yield user
                elif user.op in (*_ARRANGED, "add") or (user.op == "mul" and not weighed):
                    waiting.append((user, weighed or user.op == "mul"))
