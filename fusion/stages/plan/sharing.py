"""Sharing: matches that read what must be built once, or that make the same call, pay for it together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.records import Match, Plan, Repeats
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

    @property
    def values(self) -> list[Value]:
        """The tensors on which it depends."""
        return [value for _, value in self.read if isinstance(value, Value)]


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

    `to_build` gives what is built for what a plan reads, `dying` what a match makes needless; `repeats` counts for how
    many nodes of equal layers one stands.
    """

    def __init__(
        self,
        graph: Graph,
        plans: Mapping[Match, Plans],
        to_build: Callable[[Iterable[Value]], Sequence[Value]],
        dying: Callable[[Match, Plan], frozenset[fx.Node]],
        repeats: Repeats,
    ) -> None:
        self._graph, self._repeats = graph, repeats
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
                self.readers[value] += self.alike(readers[node][0][0], [value])
        self.calls = {
            call: tuple(sharer for node in _beside_each_other(graph, sharers, dying) for sharer in sharers[node])
            for call, sharers in calling.items()
        }

        self.count = cache(self._count)

    def _count(self, call: Call) -> int:
        """Count the matches that share `call`."""
        return sum(self.alike(match, call.values) for match, _ in self.calls[call])

    def times(self, match: Match) -> int:
        """Count the matches in equal layers for which one stands."""
        return self._repeats.of(self._last(match))

    def alike(self, match: Match, values: Iterable[Value]) -> int:
        """Count the matches for which one stands that read the same `values`."""
        return self._repeats.alike(self._last(match), [each for value in values for each in self._graph.reads(value)])

    def _last(self, match: Match) -> fx.Node:
        """The result whose layer a match belongs to: it may take one of the layer before too."""
        return max(match.firsts, key=self._graph.order.__getitem__)
