"""Origins: what the nodes of a folded graph stand for in the whole one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from enum import IntEnum

import torch.fx as fx

from fusion.records import Candidate, Refusal
from fusion.stages.layers.fold import Folded

ONCE = 0
"""The number under which a node stands that is not repeated: no layer that the second stands for has it."""


class Part(IntEnum):
    """Where a node of a folded graph belongs; a part reads those before it."""

    BEFORE, FIRST, SECOND, LAST, BEHIND = range(5)


class Origins:
    """For the nodes of a folded graph, as it came, the nodes of the whole one that they stand for."""

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.copies = {node: copy for copy, node in folded.origin.items()}
        self.reads = {node: tuple(node.all_input_nodes) for node in folded.graph.nodes}
        self._place = {node: place for layer in folded.layers for place, node in enumerate(layer.all)}
        self._inputs = {node.name: node for node in folded.graph.find_nodes(op="placeholder")}
        self.part = dict(self._parts())

    def _parts(self) -> Iterator[tuple[fx.Node, Part]]:
        layers = self.folded.layers
        of = dict.fromkeys(layers[0].all, Part.FIRST) | dict.fromkeys(layers[1].all, Part.SECOND)
        of |= dict.fromkeys(layers[-1].all, Part.LAST)
        outside, last = Part.BEFORE, layers[-1].nodes[-1]
        for copy, node in self.folded.origin.items():
            yield copy, of.get(node, outside)
            outside = Part.BEHIND if node is last else outside

    def times(self, known: Mapping[fx.Node, int]) -> dict[fx.Node, int]:
        """For how many nodes each one stands, where the nodes of the whole graph stand for so many."""
        return {
            copy: known.get(node, 1) * (len(self.folded.middle) if self.part[copy] == Part.SECOND else 1)
            for copy, node in self.folded.origin.items()
        }

    def three(self) -> list[list[fx.Node]]:
        """The nodes of the first layer, the second and the last, which correspond."""
        first, second, *_, last = self.folded.layers
        return [[self.copies[each] for each in layer.all] for layer in (first, second, last)]

    def at(self, node: fx.Node, layer: int) -> fx.Node:
        """What a node is where the second layer stands for that one; `ONCE` as what is not repeated sees it."""
        layers, origin, part = self.folded.layers, self.folded.origin[node], self.part[node]
        if layer == ONCE:  # it may stand behind the second layer
            layer, away = self.folded.middle[-1], {Part.SECOND: 0}.get(part)
        else:
            away = {Part.FIRST: -1, Part.SECOND: 0, Part.LAST: 1}.get(part)
        return origin if away is None else layers[layer + away].all[self._place[origin]]

    def numbers(self, *nodes: fx.Node) -> Sequence[int]:
        """The layers that something of these nodes stands for, if the second layer holds the last of them."""
        held = max(self.part[each] for each in nodes)
        return self.folded.middle if held == Part.SECOND else (ONCE,)

    def candidates(self, chosen: Candidate) -> Iterator[Candidate]:
        """A candidate, in each layer that it was found for."""
        return (self._candidate(chosen, number) for number in self.numbers(*chosen.match.firsts))

    def _candidate(self, chosen: Candidate, number: int) -> Candidate:
        roots = tuple(tuple(self.at(each, number) for each in makers) for makers in chosen.match.roots)
        dying = frozenset(self.at(each, number) for each in chosen.dying)
        relies = frozenset(self.at(self._inputs[name], number).name for name in chosen.match.relies)
        needs = None if chosen.needs is None else self._candidate(chosen.needs, number)
        match = replace(chosen.match, roots=roots, relies=relies)
        return replace(chosen, match=match, dying=dying, needs=needs)

    def refusals(self, refusal: Refusal) -> Iterator[Refusal]:
        """A refusal, in each layer that it holds for."""
        for number in self.numbers(refusal.node):
            blamed = None if refusal.blamed is None else self.at(refusal.blamed, number)
            yield replace(refusal, node=self.at(refusal.node, number), blamed=blamed)
