"""Runs: consecutive layers of a graph that do the same, node by node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion._torch.tensors import held_by
from fusion.facts import Facts
from fusion.mutation import closing_writes, outputs
from fusion.texts import frozen

FEWEST = 4
"""Layers from which on some can be left out: the first, one for those in the middle, and the last stay."""
_DISTANCES = 8
_NODE = object()
_SMALL = 16  # numbers that a constant may hold to be compared


@dataclass(frozen=True)
class Layer:
    """One of several equal layers: number by number, what they hold corresponds.

    Attributes:
        nodes: what it computes, in the order of the graph.
        inputs: the placeholders that it alone reads, in the order in which it reads them first.
        writes: the closing writes over its inputs, in the order of the graph.
        results: where the graph returns something of it, as places among the graph's outputs.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    writes: tuple[fx.Node, ...]
    results: tuple[int, ...]

    @property
    def all(self) -> tuple[fx.Node, ...]:
        """Inputs, nodes and closing writes."""
        return (*self.inputs, *self.nodes, *self.writes)


def longest_run(source: fx.Graph, facts: Facts) -> tuple[Layer, ...]:
    """The equal layers that hold most of a graph; none where there are fewer than `FEWEST`."""
    graph = _Sequence(source, facts)
    stretches = (each for distance in graph.distances() for each in graph.stretches(distance))
    for start, distance, count in sorted(stretches, key=lambda each: (-each[1] * each[2], each)):
        layers = graph.layers(start, distance, count)
        if layers:
            return layers
    return ()


class _Sequence:
    """The calls of a graph in their order, and how each of them reads."""

    def __init__(self, source: fx.Graph, facts: Facts) -> None:
        closing = closing_writes(source)
        self._source, self._facts = source, facts
        self._nodes = [
            each for each in source.nodes if each.op in ("call_function", "get_attr") and each not in closing
        ]
        self._place = {node: place for place, node in enumerate(self._nodes)}
        self._closing = [node for node in source.nodes if node in closing]
        self._reads: list[tuple[fx.Node, ...]] = []
        numbers: dict[Hashable, int] = {}
        self._labels = [numbers.setdefault(self._label(node), len(numbers)) for node in self._nodes]

    def _label(self, node: fx.Node) -> Hashable:
        """What a node does, whatever it reads."""
        given, reads = described(node)
        self._reads.append(reads)
        return given, frozen(node.meta.get("val"))

    def distances(self) -> list[int]:
        """How far nodes stand behind the last that does the same, most frequent first."""
        last: dict[int, int] = {}
        found = Counter[int]()
        for place, label in enumerate(self._labels):
            if label in last:
                found[place - last[label]] += 1
            last[label] = place
        # The distance of a layer is that of its rarest nodes; those of its repeated parts are shorter.
        return [each for each, _ in found.most_common(_DISTANCES) if each * FEWEST <= len(self._labels)]

    def stretches(self, distance: int) -> Iterator[tuple[int, int, int]]:
        """Start, distance and number of the layers of each stretch of nodes that equal those so far on."""
        begin = 0
        for place in range(len(self._labels) - distance + 1):
            if place < len(self._labels) - distance and self._alike(place, place + distance):
                continue
            count = (place - begin) // distance + 1
            if count >= FEWEST:
                yield begin, distance, count
            begin = place + 1

    def _alike(self, place: int, later: int) -> bool:
        if self._labels[place] != self._labels[later]:
            return False
        pairs = zip(self._reads[place], self._reads[later], strict=True)
        return all(one is other or self._corresponds(one, other, place, later) for one, other in pairs)

    def _corresponds(self, one: fx.Node, other: fx.Node, place: int, later: int) -> bool:
        """Whether layers read the same place of theirs, or of the layer before, or inputs that look the same."""
        if one in self._place and other in self._place:
            distance = later - place
            return self._place[other] - self._place[one] == distance >= place - self._place[one]
        return one.op == other.op == "placeholder" and self._input(one) == self._input(other)

    def _input(self, node: fx.Node) -> Hashable:
        facts, name = self._facts, node.name
        known = name in facts.parameters, facts.assumed.get(name), facts.fractal.get(name), facts.bands.get(name)
        return frozen(node.meta.get("val")), *known

    def layers(self, start: int, distance: int, count: int) -> tuple[Layer, ...]:
        """The layers of a stretch that begins behind everything that they share; none if they touch otherwise."""
        shared = self._shared(start, distance, count)
        behind = max((self._place[each] + 1 for each in shared if each in self._place), default=0)
        passed = -(-max(behind - start, 0) // distance)  # layers that begin before
        start, count = start + passed * distance, count - passed
        if count < FEWEST:
            return ()
        nodes = [self._nodes[start + number * distance :][:distance] for number in range(count)]
        own = [self._own(each, set(shared)) for each in nodes]
        layers = tuple(map(self._layer, nodes, own))
        return layers if self._are_equal(layers) and self._stand_alone(layers) else ()

    def _shared(self, start: int, distance: int, count: int) -> dict[fx.Node, None]:
        """What two layers read in the same place."""
        later = range(start + distance, start + distance * count)
        pairs = ((self._reads[place - distance], self._reads[place]) for place in later)
        return {one: None for both in pairs for one, other in zip(*both, strict=True) if one is other}

    def _own(self, nodes: Sequence[fx.Node], shared: set[fx.Node]) -> tuple[fx.Node, ...]:
        read = (each for node in nodes for each in self._reads[self._place[node]])
        return tuple({each: None for each in read if each.op == "placeholder" and each not in shared})

    def _layer(self, nodes: Sequence[fx.Node], inputs: tuple[fx.Node, ...]) -> Layer:
        held = {*inputs, *nodes}
        writes = tuple(each for each in self._closing if not held.isdisjoint(each.all_input_nodes))
        number = _numbers((*inputs, *nodes, *writes))
        results = [place for place, each in enumerate(self._outputs) if each in number]
        return Layer(tuple(nodes), inputs, writes, tuple(sorted(results, key=lambda at: number[self._outputs[at]])))

    @cached_property
    def _outputs(self) -> list[fx.Node]:
        return outputs(self._source)

    def _are_equal(self, layers: Sequence[Layer]) -> bool:
        """Whether inputs, closing writes and results correspond as well; the last layer may give more."""
        reads, writes, results = ([of(each) for each in layers] for of in (self._inputs, self._writes, self._results))
        return all(one == other for of in (reads, writes, results[:-1]) for one, other in pairwise(of))

    def _inputs(self, layer: Layer) -> list[Hashable]:
        """Which input each argument is: by its number, if it is the layer's own."""
        number = _numbers(layer.inputs)
        read = (each for node in layer.nodes for each in self._reads[self._place[node]])
        return [number.get(each, each) for each in read if each.op == "placeholder"]

    def _writes(self, layer: Layer) -> list[Hashable]:
        number = _numbers(layer.all)
        return [(each.target, *(number.get(of, of) for of in each.all_input_nodes)) for each in layer.writes]

    def _results(self, layer: Layer) -> list[Any]:
        number = _numbers(layer.all)
        strides = self._facts.strides
        return [(number[self._outputs[each]], *strides[each : each + 1]) for each in layer.results]

    def _stand_alone(self, layers: Sequence[Layer]) -> bool:
        """Whether a layer's inputs are read by it alone, and what it computes by it, the next, and the graph's end."""
        returned = self._source.output_node()
        within = [{*layer.nodes, *layer.writes, returned} for layer in layers]
        computed = (
            user in users or user in following.nodes
            for layer, users, following in zip(layers, within, layers[1:], strict=False)
            for node in layer.nodes
            for user in node.users
        )
        read = (
            user in users
            for layer, users in zip(layers, within, strict=True)
            for each in layer.inputs
            for user in each.users
        )
        return all(computed) and all(read)


def described(node: fx.Node) -> tuple[Hashable, tuple[fx.Node, ...]]:
    """What a node does, whatever it reads; and what it reads, as often as it does."""
    reads: list[fx.Node] = []

    def unnamed(read: fx.Node) -> Any:
        reads.append(read)
        return _NODE

    given = frozen(map_arg((node.args, node.kwargs), unnamed))
    target = _constant(node) if node.op == "get_attr" else node.target
    return (node.op, target, given), tuple(reads)


def _numbers(nodes: Sequence[fx.Node]) -> dict[fx.Node, int]:
    return {each: place for place, each in enumerate(nodes)}


def _constant(node: fx.Node) -> Hashable:
    """What an attribute is: small constants by their numbers, everything else by its name."""
    found = held_by(node)
    if type(found) is torch.Tensor and not found.is_meta and found.numel() <= _SMALL:  # a fake one holds no numbers
        return found.dtype, tuple(found.shape), repr(found.tolist())
    return node.target
