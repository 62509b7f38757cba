"""Recurrences over tokens, for which no operator is emitted unless a rule is switched on: each is reported once.

S' = a · S + k uᵀ,  y = S'ᵀ q         linear attention (Katharopoulos, 2020); with a decay a, gated linear attention
u = β (v - (a · S)ᵀ k)                a delta rule (Schlag, 2021; gated by a: Yang, 2024)
a of each entry of S                  a selective state-space recurrence (Gu and Dao, 2023)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fusion import reader
from fusion.graph import Annotation, Graph, Miss, Value
from patterns.recurrent.read_delta_rule import delta_steps
from patterns.recurrent.state_updates import ARRANGED, Update, is_outer, last_dims, state_updates

_NONLINEAR = ("softmax", "log_sum_exp", "exp", "sigmoid", "relu", "tanh")
_UNFUSED = "this package emits no operator that computes it; nothing to change"
_OPT_IN = (
    "state: it takes a step of a {}delta rule, S' = {}S + k (v - Sᵀ k)ᵀ; npu_recurrent_gated_delta_rule requires "
    "queries, keys and beta in bfloat16, which may round those of the model; write opt_in={{'delta_rule'}} to allow it"
)
_CHUNK = (
    "state: it takes a step of a {}delta rule over a chunk of tokens; npu_chunk_gated_delta_rule requires {other}; "
    "nothing to change"
)
_OF_LANES = "decays of heads, and these differ by lane"
_OF_HEADS = "-1 <= g <= 0 for the decays exp(g), which no graph shows"
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


@reader(gives=())
def recurrences(graph: Graph) -> Iterator[Annotation]:
    """Report each update S' = a · S + k uᵀ of a state whose result, decayed state or state is read by products with it.

    All steps of an unrolled loop are reported at the first one. No update is an S' of which a nonlinear function is
    taken.
    """
    updates, steps = state_updates(graph), delta_steps(graph)
    walk = _Walk(graph)
    for value, update in updates.items():
        reads = {each for start in (value, update.decayed, update.state) for each in walk.contractions(start)}
        later = {each for each in reads if each is not update.added}
        is_linear = not any(user.op in _NONLINEAR for user in walk.users.get(value, ()))
        rule = _kind(graph, update, later) if later and is_linear else ""
        if rule:
            covered = frozenset({value, update.decayed, update.added, *later})
            reason = _described(graph, rule, update, steps.get(value))
            yield value, Miss(rule, reason, (value,), _first(updates, value), covers=covered)


def _first(updates: Mapping[Value, Update], value: Value) -> Value:
    """Return the first update of the loop of which `value` is an update: its state is no result of `updates`."""
    while (state := updates[value].state.below(*ARRANGED)) in updates:
        value = state
    return value


def _described(graph: Graph, rule: str, update: Update, step: Mapping[str, Any] | str | None) -> str:
    """Return the reason for `update`, of the recurrence `rule`, by what `delta_steps` has of it."""
    text = _KINDS[rule]
    if rule == "delta_rule" and isinstance(step, str):
        return step
    if rule == "delta_rule" and step is not None:
        text = _OPT_IN
    elif rule == "delta_rule" and not is_outer(graph, update.added):
        text = _CHUNK
    gated = "gated " if update.is_decayed and rule != "state_space" else ""
    is_of_lanes = any(last_dims(each) != (1, 1) for each in update.decays)
    other = _OF_LANES if is_of_lanes else _OF_HEADS
    return text.format(gated, "a · " if update.is_decayed else "", _UNFUSED, other=other)


def _kind(graph: Graph, update: Update, reads: set[Value]) -> str:
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
    is_of_entries = any(1 not in last_dims(each) for each in update.decays)
    return "state_space" if is_of_entries else "linear_attention"


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
                elif user.op in (*ARRANGED, "add") or (user.op == "mul" and not weighed):
                    waiting.append((user, weighed or user.op == "mul"))
