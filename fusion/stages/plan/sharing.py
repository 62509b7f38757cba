"""Sharing: matches that read what must be built once, or that make the same call, pay for it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.records import Match, Plan
from fusion.stages.plan.recorded import Plans


class Call(NamedTuple):
    """A step of a plan and what it depends on: matches for which that is the same share one call.

    The same step of another variant may be another call.
    """

    rule: str
    variant: str
    lowering: str
    number: int
    read: frozenset[tuple[str, Any]]


def _calls_of(match: Match, lowering: str, plan: Plan) -> tuple[Call, ...]:
    """The steps of a plan that cost."""
    read = (frozenset((name, match.captures[name]) for name in names) for _, names in plan.costs)
    return tuple(Call(match.rule.name, match.variant, lowering, number, each) for number, each in enumerate(read))


class Sharing:
    """How many matches would read a value that must be built; and which would make the same call, with their plans.

    `to_build` gives what is built for what a plan reads; `times` says for how many nodes of equal layers one stands.
    """

    def __init__(
        self,
        graph: Graph,
        plans: Mapping[Match, Plans],
        to_build: Callable[[Iterable[Value]], Sequence[Value]],
        times: Mapping[fx.Node, int],
    ) -> None:
        self._graph, self._times = graph, times
        self.calls_of = cache(_calls_of)
        building: set[tuple[fx.Node, Value]] = set()
        calling: dict[Call, dict[fx.Node, tuple[Match, Plan]]] = {}
        for match, found in plans.items():
            for name, plan in found.items():
                if not isinstance(plan, Plan):
                    continue
                building.update((match.node, value) for value in to_build(plan.tensors(match).values()))
                for call in self.calls_of(match, name, plan):
                    calling.setdefault(call, {})[match.node] = match, plan
        self.readers = Counter[Value]()
        for node, value in building:
            self.readers[value] += self._times_of(node, [value])
        self.calls = {call: tuple(sharers.values()) for call, sharers in calling.items()}

    def count(self, call: Call) -> int:
        """How many matches share a call."""
        read = [value for _, value in call.read if isinstance(value, Value)]
        return sum(self._times_of(match.node, read) for match, _ in self.calls[call])

    def _times_of(self, node: fx.Node, read: Iterable[Value]) -> int:
        """How many of the nodes that `node` stands for read the same values."""
        if node not in self._times:
            return 1
        own = (self._times.get(each, 1) for value in read for each in self._graph.reads(value))
        return max(self._times[node] // max(own, default=1), 1)
