"""Dependence: reachability between the nodes of a graph, answered by tables of a few long paths through the graph.

A model is a long path of residuals with short branches. `node` is computed from `on` if the last node of the path from
which `node` is computed is no earlier than the first one that is computed from `on`. Only branches are searched node by
node.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch.fx as fx

_PATHS = 3
_SHORTEST = 32
"""Number of nodes from which on a path is worth its table."""
_NEVER = 1 << 60


@dataclass(frozen=True)
class Path:
    """One path through a graph, where each node is read by the next.

    Attributes:
        nodes: the nodes of the path.
        last: for each node of the graph the position of the last node of the path that it depends on or is; else -1.
        first: for each node of the graph the position of the first node of the path that depends on it or is it; beyond
            the end for none.
    """

    nodes: Set[fx.Node]
    last: Mapping[fx.Node, int]
    first: Mapping[fx.Node, int]

    def joins(self, node: fx.Node, on: fx.Node) -> bool:
        """Return True if some node of the path depends on `on` or is it, and `node` depends on that node or is it."""
        return self.last[node] >= self.first[on]


class Dependence:
    """Answers to "is a node computed from another one?" for the nodes of `source`, of which `order` has the positions.

    Attributes: paths: long paths with tables, by which most answers need no search.
    """

    def __init__(self, source: fx.Graph, order: Mapping[fx.Node, int]) -> None:
        self._order = order
        self.paths: list[Path] = []
        taken: set[fx.Node] = set()
        for _ in range(_PATHS):
            nodes = _longest(source, taken)
            if len(nodes) < _SHORTEST and self.paths:
                break
            self.paths.append(_path(source, nodes))
            taken.update(nodes)
        self._taken = taken

    def depends(self, node: fx.Node, on: fx.Node) -> bool:
        """Return True if `node` is `on`, or is computed from `on` directly or indirectly."""
        start = self._order[on]
        if self._order[node] <= start:
            return node is on
        if any(path.joins(node, on) for path in self.paths):
            return True
        waiting, seen = [node], {node}
        while waiting:
            for each in waiting.pop().all_input_nodes:
                if each is on:
                    return True
                if each not in seen and each not in self._taken and self._order[each] > start:
                    seen.add(each)
                    waiting.append(each)
        return False

    def position(self, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
        """Return for each path the position of the last node that any of `nodes` depends on; -1 for none."""
        return tuple(max((path.last[node] for node in nodes), default=-1) for path in self.paths)


def _longest(source: fx.Graph, without: Set[fx.Node]) -> list[fx.Node]:
    """Find the longest path of calls, each of which reads the one before it, without the nodes `without`."""
    length: dict[fx.Node, int] = {}
    before: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node.op != "call_function" or node in without:
            continue
        below = [each for each in node.all_input_nodes if each in length]
        longest = max(below, key=length.__getitem__, default=None)
        length[node] = 1
        if longest is not None:
            length[node], before[node] = length[longest] + 1, longest
    end = max(length, key=length.__getitem__, default=None)
    nodes: list[fx.Node] = []
    while end is not None:
        nodes.append(end)
        end = before.get(end)
    return nodes[::-1]


def _path(source: fx.Graph, nodes: list[fx.Node]) -> Path:
    place = {node: place for place, node in enumerate(nodes)}
    last: dict[fx.Node, int] = {}
    for node in source.nodes:
        last[node] = max((last[each] for each in node.all_input_nodes), default=-1)
        last[node] = place.get(node, last[node])
    first: dict[fx.Node, int] = {}
    for node in reversed(source.nodes):
        first[node] = min((first[each] for each in node.users), default=_NEVER)
        first[node] = place.get(node, first[node])
    return Path(frozenset(nodes), last, first)
