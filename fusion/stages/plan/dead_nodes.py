"""Dead nodes: the nodes that nothing reads once others are replaced."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch.fx as fx

from fusion.graph import Graph, Value
from fusion.graph.aliasing import memory_of


class _Given(NamedTuple):
    """The places where a value that a plan reads can be found.

    Attributes:
        nodes: the nodes from which the value is read or built.
        memory: the nodes whose memory these are views of.
        places: all nodes with the value, by the node whose memory they are views of.
        copies: replaceable nodes with the same value as one of `nodes`.
    """

    nodes: Sequence[fx.Node]
    memory: Collection[fx.Node]
    places: Mapping[fx.Node, Sequence[fx.Node]]
    copies: Collection[fx.Node]


class DeadNodes:
    """Dead nodes of one graph; `replaceable` are the nodes that some plan replaces."""

    def __init__(self, graph: Graph, replaceable: frozenset[fx.Node]) -> None:
        self._graph, self._replaceable = graph, replaceable
        self._known: dict[Value, _Given] = {}

    def below(self, roots: Sequence[fx.Node], read: Collection[Value]) -> frozenset[fx.Node]:
        """Return `roots` and all nodes that only they need, except those that give the values `read`, which a plan
        reads.
        """
        alive = self._alive(read)
        dying: set[fx.Node] = set(roots)
        waiting = [source for root in roots for source in root.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in dying or node in alive or node.op != "call_function":
                continue
            if all(user in dying for user in node.users):
                dying.add(node)
                waiting.extend(node.all_input_nodes)
        return frozenset(dying)

    def _alive(self, read: Collection[Value]) -> set[fx.Node]:
        """Return the nodes that stay because a plan reads the values `read`.

        These are the nodes that give the values, other views of the same memory, and copies of the values that another
        plan may replace: a write into a slice is such a copy.
        """
        given = [self._given(value) for value in read]
        memory = {each for one in given for each in one.memory}
        alive = {node for one in given for node in (*one.nodes, *one.copies)}
        alive.update(node for one in given for each in memory for node in one.places.get(each, ()))
        return alive

    def _given(self, value: Value) -> _Given:
        if value not in self._known:
            graph, nodes = self._graph, self._graph.reads(value)
            places: dict[fx.Node, list[fx.Node]] = defaultdict(list)
            for node in graph.places.get(value, ()):
                places[memory_of(node)].append(node)
            values = (graph.value_of[node] for node in nodes)
            alike = (node for each in values if isinstance(each, Value) for node in graph.places[each])
            copies = self._replaceable.intersection(alike)
            self._known[value] = _Given(nodes, set(map(memory_of, nodes)), places, copies)
        return self._known[value]
