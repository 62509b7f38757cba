"""Origins: what the nodes of a folded graph stand for in the graph as it was."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import pairwise

import torch.fx as fx

from fusion.graph.aliasing import is_returned
from fusion.records import Candidate, Refusal, Repeats
from fusion.stages.layers.fold import Folded
from fusion.stages.layers.layer import Layer

BEFORE = 0
"""The number of what stands before all layers."""


class Origins:
    """For the nodes of a folded graph, before anything is rewritten there, what they stand for.

    Attributes:
        folded: the folded graph.
        number: for each of its nodes the number of its layer.
        reads: for each of its nodes those that it reads.
        copies: for each node of the graph as it was that is not left out, the node of the folded graph.
        instances: for each layer that is not left out the numbers of those that it stands for, its own among them.
    """

    def __init__(self, folded: Folded) -> None:
        self.folded = folded
        self.copies = {node: copy for copy, node in folded.origin.items()}
        self.reads = {node: tuple(node.all_input_nodes) for node in folded.graph.nodes}
        self.instances: dict[int, list[int]] = defaultdict(list)
        for number, other in enumerate(folded.stand_in):
            self.instances[other].append(number)
        self.number = dict.fromkeys(folded.graph.nodes, BEFORE)
        self.number |= {self.copies[node]: number for number in self.instances for node in folded.layers[number].all}
        self.number[folded.graph.output_node()] = len(folded.layers) - 1
        self._place = {node: place for number in self.instances for place, node in enumerate(folded.layers[number].all)}
        self._inputs = {node.name: node for node in folded.graph.find_nodes(op="placeholder")}
        self._came = {node: (node.args, node.kwargs, node.meta.get("val")) for node in folded.graph.nodes}

    @cached_property
    def order(self) -> Mapping[int, int]:
        """For each layer that is not left out its place among these."""
        return {number: place for place, number in enumerate(sorted(self.instances))}

    def layer(self, number: int) -> Layer:
        """The layer of that number."""
        return self.folded.layers[number]

    def is_real(self, first: int, last: int) -> bool:
        """True if none of the layers `first` to `last` is left out, and `last` stands for itself alone."""
        follow = self.order[last] - self.order[first] == last - first
        return follow and len(self.instances[last]) == 1

    @cached_property
    def _streams(self) -> frozenset[fx.Node]:
        """What one layer reads of another and is not the same for all."""
        same = {self.copies[each] for each in self.folded.division.shared}
        return frozenset(
            read
            for node, reads in self.reads.items()
            for read in reads
            if self.number[read] != self.number[node] and read not in same
        )

    @cached_property
    def shared(self) -> frozenset[fx.Node]:
        """What several layers read, and all in the same layer, or before them all, that it is computed from."""
        found = set[fx.Node]()
        waiting = [self.copies[each] for each in self.folded.division.shared]
        while waiting:
            node = waiting.pop()
            if node not in found and node not in self._streams:
                found.add(node)
                waiting.extend(each for each in self.reads[node] if self.number[each] in (BEFORE, self.number[node]))
        return frozenset(found)

    @cached_property
    def common(self) -> frozenset[fx.Node]:
        """What is shared, and what each layer computes from that alone.

        A constant that each layer makes is its own, and so is what each returns: it may be written to.
        """
        found = set(self.shared)
        for node, reads in self.reads.items():
            own = [each for each in reads if each not in self.shared]
            is_computed = bool(reads) and all(each in found and self.number[each] == self.number[node] for each in own)
            is_inside = self.number[node] != BEFORE and node.op == "call_function" and node not in self._streams
            if is_inside and is_computed and not node.is_impure() and not is_returned(node):
                found.add(node)
        return frozenset(found)

    def repeats(self, outer: Repeats) -> Repeats:
        """Count how often the nodes of the folded graph stand in the graph as it was, itself repeated as `outer`."""

        def count(copy: fx.Node) -> int | None:
            number = self.number[copy]
            return None if number == BEFORE or copy in self.common else len(self.instances[number])

        return Repeats({copy: (*outer.counts.get(node, ()), count(copy)) for copy, node in self.folded.origin.items()})

    def walls(self, outer: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """Nodes of the folded graph at which layers begin, of this graph or of those that it was folded from."""
        begins = (self.folded.layers[number].nodes[:1] for number in self.instances if number != BEFORE)
        nodes = (*(node for nodes in begins for node in nodes), *outer)
        return frozenset(self.copies[node] for node in nodes if node in self.copies)

    def is_changed(self, node: fx.Node) -> bool:
        """True unless `node` is still called with what it was, and looks as it did."""
        now = node.args, node.kwargs, node.meta.get("val")
        return node not in self._came or any(one is not other for one, other in zip(now, self._came[node], strict=True))

    def node_at(self, node: fx.Node, instance: int) -> fx.Node:
        """The node of the graph as it was that `node` is where its layer stands for `instance`."""
        origin = self.folded.origin[node]
        return origin if self.number[node] == BEFORE else self.folded.layers[instance].all[self._place[origin]]

    def at(self, node: fx.Node, seen_from: int, instance: int) -> fx.Node:
        """The node of the graph as it was that `node` is to the layer `seen_from`, where that stands for `instance`."""
        number, layers = self.number[node], self.folded.layers
        near = instance + self.order[number] - self.order[seen_from]
        is_repeated = abs(near - instance) <= 1 and layers[near].kind == layers[number].kind
        return self.node_at(node, near if is_repeated else number)

    def same_place(self, node: fx.Node, number: int) -> fx.Node:
        """The node of layer `number` of the folded graph at the place that `node` has in a layer of the same kind."""
        return self.copies[self.folded.layers[number].all[self._place[self.folded.origin[node]]]]

    def relative(self, node: fx.Node, number: int) -> Hashable:
        """Describe where `node` stands to the layer `number`: equal for layers of one kind where that corresponds."""
        own = self.number[node]
        away = self.order[number] - self.order[own]
        if away == 1 and node in self._ports[number]:
            return away, self._ports[number].index(node)
        if own == BEFORE or node in self.shared or away > 1:
            return node
        return away, self.layer(own).kind, self._place[self.folded.origin[node]]

    @cached_property
    def _ports(self) -> Mapping[int, Sequence[fx.Node]]:
        """For each layer that is not left out what it reads of the one before it, which may stand for another."""
        folded, ports = self.folded, dict[int, Sequence[fx.Node]]()
        for before, number in pairwise((BEFORE, *sorted(self.instances))):
            place = {node: place for place, node in enumerate(folded.layers[max(number - 1, 0)].all)}
            now = folded.layers[before].all
            ports[number] = [self.copies[now[place[each]]] for each in folded.layers[number].ports]
        return ports

    def numbers(self, nodes: Iterable[fx.Node]) -> tuple[int, Sequence[int]]:
        """The layer of the last of some nodes, and the layers that it stands for."""
        last = max((self.number[each] for each in nodes), default=BEFORE)
        return last, self.instances[last]

    def candidates(self, chosen: Candidate) -> Iterator[Candidate]:
        """Yield a candidate in each layer that it was found for."""
        number, instances = self.numbers(chosen.match.firsts)
        return (self._candidate(chosen, number, instance) for instance in instances)

    def _candidate(self, chosen: Candidate, number: int, instance: int) -> Candidate:
        roots = tuple(tuple(self.at(each, number, instance) for each in makers) for makers in chosen.match.roots)
        dying = frozenset(self.at(each, number, instance) for each in chosen.dying)
        relies = frozenset(self.at(self._inputs[name], number, instance).name for name in chosen.match.relies)
        needs = None if chosen.needs is None else self._candidate(chosen.needs, number, instance)
        match = replace(chosen.match, roots=roots, relies=relies)
        return replace(chosen, match=match, dying=dying, needs=needs)

    def refusals(self, refusal: Refusal) -> Iterator[Refusal]:
        """Yield a refusal in each layer for which it holds."""
        number, instances = self.numbers([refusal.node])
        for instance in instances:
            blamed = None if refusal.blamed is None else self.at(refusal.blamed, number, instance)
            yield replace(refusal, node=self.at(refusal.node, number, instance), blamed=blamed)
