"""What a rewrite leaves needless: nodes that nothing reads once others are replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.graph.aliasing import memory_of


class _Given(NamedTuple):
    """The nodes that give a value, their memory, by memory all nodes that hold it, and copies that could go too."""

    nodes: Sequence[fx.Node]
    memory: Collection[fx.Node]
    places: Mapping[fx.Node, Sequence[fx.Node]]
    copies: Collection[fx.Node]


class Needless:
    """What nothing needs any more once nodes are replaced; `replaceable` are those that some plan replaces."""

    def __init__(self, graph: Graph, replaceable: frozenset[fx.Node]) -> None:
        self._graph, self._replaceable = graph, replaceable
        self._known: dict[Value, _Given] = {}

    def of(self, roots: Sequence[fx.Node], read: Collection[Value]) -> frozenset[fx.Node]:
        """These roots and the nodes below that only they need, without what gives the values `read`."""
        kept = self._kept(read)
        dying: set[fx.Node] = set(roots)
        waiting = [source for root in roots for source in root.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in dying or node in kept or node.op != "call_function":
                continue
            if all(user in dying for user in node.users):
                dying.add(node)
                waiting.extend(node.all_input_nodes)
        return frozenset(dying)

    def _kept(self, read: Collection[Value]) -> set[fx.Node]:
        """What gives these values: nodes, other views of their memory, and copies that could be replaced as well.

        Copies go with the value, as that of a write into a slice.
        """
        given = [self._given(value) for value in read]
        memory = {each for one in given for each in one.memory}
        kept = {node for one in given for node in (*one.nodes, *one.copies)}
        kept.update(node for one in given for each in memory for node in one.places.get(each, ()))
        return kept

    def _given(self, value: Value) -> _Given:
        if value not in self._known:
            graph, nodes = self._graph, self._graph.reads(value)
            places: dict[fx.Node, list[fx.Node]] = defaultdict(list)
            for node in graph.places.get(value, ()):
                places[memory_of(node)].append(node)
            held = (graph.held[node] for node in nodes)
            alike = (node for each in held if isinstance(each, Value) for node in graph.places[each])
            copies = self._replaceable.intersection(alike)
            self._known[value] = _Given(nodes, set(map(memory_of, nodes)), places, copies)
        return self._known[value]
