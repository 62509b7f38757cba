"""Sharing of costs: matches that read a value which must be built, or that make the same call, divide its price."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.records import Match, Plan, Repeats
from fusion.stages.plan.plan_records import Plans


class Call(NamedTuple):
    """A kernel of a plan with the captures that it depends on: matches for which all of this is equal share one call.

    Attributes:
        rule: name of the rule.
        variant: the form, where forms of the rule vary: the same kernel of another form counts as another call.
        lowering: name of the lowering.
        number: index among the kernels of the plan.
        read: names and values of the captures.
    """

    rule: str
    variant: str
    lowering: str
    number: int
    read: frozenset[tuple[str, Any]]

    @property
    def values(self) -> list[Value]:
        """The tensors among the captures."""
        return [value for _, value in self.read if isinstance(value, Value)]


def _calls_of(match: Match, lowering: str, plan: Plan) -> tuple[Call, ...]:
    """Return a `Call` for each kernel of `plan`."""
    read = (frozenset((name, match.captures[name]) for name in names) for _, names in plan.costs)
    return tuple(Call(match.rule.name, match.variant, lowering, number, each) for number, each in enumerate(read))


def _coexisting(
    graph: Graph,
    readers: Mapping[fx.Node, Sequence[tuple[Match, Plan]]],
    dying: Callable[[Match, Plan], frozenset[fx.Node]],
) -> Sequence[fx.Node]:
    """Return the nodes of `readers` whose matches can all be chosen, from the last node to the first.

    Left out is a node that a match of a node chosen before makes dead. `readers` maps a node to its matches with their
    plans; `dying` gives the nodes that die with a match.
    """
    if len(readers) == 1:
        return list(readers)
    chosen: list[fx.Node] = []
    gone = set[fx.Node]()
    for node in sorted(readers, key=lambda each: graph.order[each], reverse=True):
        if node not in gone:
            chosen.append(node)
            gone.update(*(dying(*each) for each in readers[node]))
    return chosen


class Sharing:
    """Number of matches that read each value which must be built, and the matches that make each call.

    Of two matches one of which makes the other dead only one is ever chosen, so they do not share. `to_build` lists the
    values to build for those that a plan reads; `dying` gives the nodes that die with a match; `repeats` counts the
    nodes of equal layers for which one stands.

    Attributes:
        readers: for each value to build, the number of its readers.
        calls: for each call, the matches that make it, with their plans.
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
        for match, ways in plans.items():
            for name, plan in ways.items():
                if not isinstance(plan, Plan):
                    continue
                for value in to_build(plan.tensors(match).values()):
                    building.setdefault(value, {}).setdefault(match.node, []).append((match, plan))
                for call in self.calls_of(match, name, plan):
                    calling.setdefault(call, {})[match.node] = [(match, plan)]
        self.readers = Counter[Value]()
        for value, readers in building.items():
            for node in _coexisting(graph, readers, dying):
                self.readers[value] += self.alike(readers[node][0][0], [value])
        self.calls = {
            call: tuple(sharer for node in _coexisting(graph, sharers, dying) for sharer in sharers[node])
            for call, sharers in calling.items()
        }

        self.count = cache(self._count)

    def _count(self, call: Call) -> int:
        """Count the matches that share `call`, repeated layers included."""
        return sum(self.alike(match, call.values) for match, _ in self.calls[call])

    def times(self, match: Match) -> int:
        """Count the equal layers of which the layer of `match` is the one that was searched."""
        return self._repeats.of(self._last(match))

    def alike(self, match: Match, values: Iterable[Value]) -> int:
        """Count the layers equal to that of `match` in which `values` are the same: each has a match that reads
        them.
        """
        return self._repeats.alike(self._last(match), [each for value in values for each in self._graph.reads(value)])

    def _last(self, match: Match) -> fx.Node:
        """Return the last result of `match`, which decides on its layer: a match may reach into the layer before."""
        return max(match.firsts, key=self._graph.order.__getitem__)
