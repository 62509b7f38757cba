"""Signatures: integer labels of calls, equal for calls that differ only in the tensors that they read."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.fx as fx

from fusion._torch.tensors import attribute_of
from fusion.facts import Facts
from fusion.graph.aliasing import closing_writes
from fusion.planning.plan_json import frozen

_NODE = object()
_SMALL = 16  # greatest number of elements of a constant that is compared by value


@dataclass(frozen=True)
class Calls:
    """The calls of one graph, in order, without the writes that close it.

    Attributes:
        source: the graph.
        facts: facts about its inputs.
        nodes: the calls.
        writes: the closing writes, in order.
        labels: for each call, an integer for its operator, its arguments except tensors, and the metadata of its
            result.
        reads: for each call, the nodes that it reads, in the order of its arguments, with repetitions.
    """

    source: fx.Graph
    facts: Facts
    nodes: Sequence[fx.Node]
    writes: Sequence[fx.Node]
    labels: Sequence[int]
    reads: Sequence[tuple[fx.Node, ...]]

    @cached_property
    def place(self) -> Mapping[fx.Node, int]:
        """For each call, its index among `nodes`."""
        return {node: place for place, node in enumerate(self.nodes)}

    @property
    def reading(self) -> Sequence[bool]:
        """For each call, True if it reads a tensor that no call computes: an input or a constant."""
        return [
            any(each not in self.place and isinstance(each.meta.get("val"), torch.Tensor) for each in reads)
            for reads in self.reads
        ]

    def look(self, given: fx.Node) -> Hashable:
        """Return a key of all that the search can know of the input or constant `given`, except its name."""
        if given.op == "get_attr":
            return _constant(given), frozen(given.meta.get("val"))
        facts, name = self.facts, given.name
        known = name in facts.parameters, facts.assumed.get(name), facts.fractal.get(name), facts.bands.get(name)
        return frozen(given.meta.get("val")), *known


def calls_of(source: fx.Graph, facts: Facts) -> Calls:
    """List the calls of `source` with their labels and the nodes that they read."""
    closing = closing_writes(source)
    nodes = [each for each in source.nodes if each.op == "call_function" and each not in closing]
    numbers: dict[Hashable, int] = {}
    labels: list[int] = []
    reads: list[tuple[fx.Node, ...]] = []
    for node in nodes:
        does, read = described(node)
        labels.append(numbers.setdefault((does, frozen(node.meta.get("val"))), len(numbers)))
        reads.append(read)
    return Calls(source, facts, nodes, [each for each in source.nodes if each in closing], labels, reads)


def described(node: fx.Node) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """Split the call `node` into a key of its operator and arguments, nodes left out, and the nodes that it reads."""
    reads: list[fx.Node] = []
    given = _without_nodes((node.args, node.kwargs), reads)
    return (node.op, node.target, given), tuple(reads)


def _without_nodes(argument: Any, reads: list[fx.Node]) -> Hashable:
    """Freeze `argument` with one mark for every node, and append these nodes to `reads`."""
    if isinstance(argument, fx.Node):
        reads.append(argument)
        return _NODE
    if isinstance(argument, (list, tuple)):
        return tuple([_without_nodes(each, reads) for each in argument])
    if isinstance(argument, dict):
        return tuple([(name, _without_nodes(each, reads)) for name, each in sorted(argument.items())])
    return frozen(argument)


def _constant(node: fx.Node) -> Hashable:
    """Return a key of the attribute `node`: its elements for a small constant, else its name."""
    value = attribute_of(node)
    if type(value) is torch.Tensor and not value.is_meta and value.numel() <= _SMALL:  # a fake tensor has no elements
        return value.dtype, tuple(value.shape), repr(value.tolist())
    return node.target
