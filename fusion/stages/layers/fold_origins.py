"""Origins: map the nodes of a folded graph to nodes of the full graph."""

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
"""Number of the pseudo-layer of all nodes before the layers."""


class Origins:
    """Map from the nodes of a folded graph, before it is rewritten, to the nodes of the full graph.

    Attributes:
        folded: the folded graph.
        number: for each of its nodes, the number of its layer.
        reads: for each of its nodes, the nodes that it reads.
        copies: for each node of the full graph that is not left out, its node in the folded graph.
        instances: for each layer that is not left out, the numbers of the layers for which it stands, its own included.
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
        """For each layer that is not left out, its index among these."""
        return {number: place for place, number in enumerate(sorted(self.instances))}

    def layer(self, number: int) -> Layer:
        """Return layer `number`."""
        return self.folded.layers[number]

    def is_real(self, first: int, last: int) -> bool:
        """Return True if no layer from `first` to `last` is left out, and `last` stands for itself alone."""
        follow = self.order[last] - self.order[first] == last - first
        return follow and len(self.instances[last]) == 1

    @cached_property
    def _streams(self) -> frozenset[fx.Node]:
        """Nodes that one layer reads of another and that differ from layer to layer, such as hidden states."""
        same = {self.copies[each] for each in self.folded.division.shared}
        return frozenset(
            read
            for node, reads in self.reads.items()
            for read in reads
            if self.number[read] != self.number[node] and read not in same
        )

    @cached_property
    def shared(self) -> frozenset[fx.Node]:
        """Nodes that several layers read.

        With them are the nodes that they are computed from, in the same layer as the node that reads these, or before
        all layers; not those of `_streams`.
        """
        shared = set[fx.Node]()
        waiting = [self.copies[each] for each in self.folded.division.shared]
        while waiting:
            node = waiting.pop()
            if node not in shared and node not in self._streams:
                shared.add(node)
                waiting.extend(each for each in self.reads[node] if self.number[each] in (BEFORE, self.number[node]))
        return frozenset(shared)

    @cached_property
    def common(self) -> frozenset[fx.Node]:
        """Shared nodes, and the nodes that a layer computes from these alone.

        Calls without operands and returned nodes are not common: their memory may be written to.
        """
        common = set(self.shared)
        for node, reads in self.reads.items():
            own = [each for each in reads if each not in self.shared]
            is_computed = bool(reads) and all(each in common and self.number[each] == self.number[node] for each in own)
            is_inside = self.number[node] != BEFORE and node.op == "call_function" and node not in self._streams
            if is_inside and is_computed and not node.is_impure() and not is_returned(node):
                common.add(node)
        return frozenset(common)

    def repeats(self, outer: Repeats) -> Repeats:
        """Return for each node of the folded graph how many layers its layer stands for, None for a node common to all
        layers.

        `outer` has these counts for the nodes of the full graph, if that is folded itself; the new count comes behind
        them.
        """

        def count(copy: fx.Node) -> int | None:
            number = self.number[copy]
            return None if number == BEFORE or copy in self.common else len(self.instances[number])

        return Repeats({copy: (*outer.counts.get(node, ()), count(copy)) for copy, node in self.folded.origin.items()})

    def walls(self, outer: Iterable[fx.Node]) -> frozenset[fx.Node]:
        """Return the nodes of the folded graph at which its layers begin, with those of `outer`.

        `outer` are nodes of the full graph at which layers of an outer folding begin.
        """
        begins = (self.folded.layers[number].nodes[:1] for number in self.instances if number != BEFORE)
        nodes = (*(node for nodes in begins for node in nodes), *outer)
        return frozenset(self.copies[node] for node in nodes if node in self.copies)

    def is_changed(self, node: fx.Node) -> bool:
        """Return True if `node` was added, or its arguments or its fake tensor are others than when the graph was
        folded.
        """
        now = node.args, node.kwargs, node.meta.get("val")
        return node not in self._came or any(one is not other for one, other in zip(now, self._came[node], strict=True))

    def node_at(self, node: fx.Node, instance: int) -> fx.Node:
        """Return the node of the full graph that `node` is where its layer stands for the layer `instance`."""
        origin = self.folded.origin[node]
        return origin if self.number[node] == BEFORE else self.folded.layers[instance].all[self._place[origin]]

    def at(self, node: fx.Node, seen_from: int, instance: int) -> fx.Node:
        """Return the node of the full graph that `node` is, seen from the layer `seen_from` where that stands for
        `instance`.

        A node one layer away is taken from the neighbour of `instance`, if that is of the same kind.
        """
        number, layers = self.number[node], self.folded.layers
        near = instance + self.order[number] - self.order[seen_from]
        is_repeated = abs(near - instance) <= 1 and layers[near].kind == layers[number].kind
        return self.node_at(node, near if is_repeated else number)

    def same_place(self, node: fx.Node, number: int) -> fx.Node:
        """Return the node of layer `number` at the index that `node` has in its own layer, of the same kind."""
        return self.copies[self.folded.layers[number].all[self._place[self.folded.origin[node]]]]

    def relative(self, node: fx.Node, number: int) -> Hashable:
        """Describe the place of `node` relative to layer `number`, so that corresponding places are equal."""
        own = self.number[node]
        away = self.order[number] - self.order[own]
        if away == 1 and node in self._ports[number]:
            return away, self._ports[number].index(node)
        if own == BEFORE or node in self.shared or away > 1:
            return node
        return away, self.layer(own).kind, self._place[self.folded.origin[node]]

    @cached_property
    def _ports(self) -> Mapping[int, Sequence[fx.Node]]:
        """For each layer that is not left out, its ports, as nodes of the layer before it in the folded graph."""
        folded, ports = self.folded, dict[int, Sequence[fx.Node]]()
        for before, number in pairwise((BEFORE, *sorted(self.instances))):
            place = {node: place for place, node in enumerate(folded.layers[max(number - 1, 0)].all)}
            now = folded.layers[before].all
            ports[number] = [self.copies[now[place[each]]] for each in folded.layers[number].ports]
        return ports

    def numbers(self, nodes: Iterable[fx.Node]) -> tuple[int, Sequence[int]]:
        """Return the number of the last layer that has one of `nodes`, and the numbers of the layers for which it
        stands.
        """
        last = max((self.number[each] for each in nodes), default=BEFORE)
        return last, self.instances[last]

    def candidates(self, chosen: Candidate) -> Iterator[Candidate]:
        """Yield the candidate `chosen` once for each layer for which its layer stands."""
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
        """Yield `refusal` once for each layer for which its layer stands."""
        number, instances = self.numbers([refusal.node])
        for instance in instances:
            blamed = None if refusal.blamed is None else self.at(refusal.blamed, number, instance)
            yield replace(refusal, node=self.at(refusal.node, number, instance), blamed=blamed)
