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


def _beside_each_other(
    graph: Graph,
    readers: Mapping[fx.Node, Sequence[tuple[Match, Plan]]],
    dying: Callable[[Match, Plan], frozenset[fx.Node]],
) -> Sequence[fx.Node]:
    """Of the nodes whose matches read a value, or make a call, those that no later one of them makes needless."""
    if len(readers) == 1:
        return list(readers)
    found: list[fx.Node] = []
    gone = set[fx.Node]()
    for node in sorted(readers, key=lambda each: graph.order[each], reverse=True):
        if node not in gone:
            found.append(node)
            gone.update(*(dying(*each) for each in readers[node]))
    return found


class Sharing:
    """How many matches would read a value that must be built; and which would make the same call, with their plans.

    Of matches one of which makes the other needless only one is ever chosen, and it pays alone.

    `to_build` gives what is built for what a plan reads, `dying` what a match makes needless; `times` says for how many
    nodes of equal layers one stands.
    """

    def __init__(
        self,
        graph: Graph,
        plans: Mapping[Match, Plans],
        to_build: Callable[[Iterable[Value]], Sequence[Value]],
        dying: Callable[[Match, Plan], frozenset[fx.Node]],
        times: Mapping[fx.Node, int],
    ) -> None:
        self._graph, self._times = graph, times
        self.calls_of = cache(_calls_of)
        building: dict[Value, dict[fx.Node, list[tuple[Match, Plan]]]] = {}
        calling: dict[Call, dict[fx.Node, list[tuple[Match, Plan]]]] = {}
        for match, found in plans.items():
            for name, plan in found.items():
                if not isinstance(plan, Plan):
                    continue
                for value in to_build(plan.tensors(match).values()):
                    building.setdefault(value, {}).setdefault(match.node, []).append((match, plan))
                for call in self.calls_of(match, name, plan):
                    calling.setdefault(call, {})[match.node] = [(match, plan)]
        self.readers = Counter[Value]()
        for value, readers in building.items():
            for node in _beside_each_other(graph, readers, dying):
                self.readers[value] += self._times_of(node, [value])
        self.calls = {
            call: tuple(sharer for node in _beside_each_other(graph, sharers, dying) for sharer in sharers[node])
            for call, sharers in calling.items()
        }

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
