"""Layers: division of the calls of a graph into layers, with inputs, writes, outputs and the kind of each."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import chain, pairwise
from typing import cast

import torch.fx as fx

from fusion.graph.aliasing import outputs
from fusion.stages.layers.signatures import Calls


@dataclass(frozen=True)
class Layer:
    """Consecutive calls of a graph; in layers of one kind all fields correspond, index by index.

    Attributes:
        nodes: the calls, in the order of the graph.
        inputs: the placeholders and constants that no other layer reads, in the order of their first use.
        writes: the closing writes of its results or over its inputs, in the order of the graph.
        results: indices among the outputs of the graph of those that the layer computes.
        ports: the calls of the previous layer that this one, and no later one, reads, in the order of their first use.
        kind: equal for layers that do the same with their own inputs, their ports and shared nodes, and of which the
            next
            layer reads corresponding calls.
    """

    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...] = ()
    writes: tuple[fx.Node, ...] = ()
    results: tuple[int, ...] = ()
    ports: tuple[fx.Node, ...] = ()
    kind: int = -1

    @property
    def all(self) -> tuple[fx.Node, ...]:
        """Inputs, calls and closing writes."""
        return (*self.inputs, *self.nodes, *self.writes)


@dataclass(frozen=True)
class Division:
    """All calls of a graph, divided into layers.

    Attributes:
        layers: the layers; the first has the calls before all layers, the last those behind them.
        shared: nodes that are the same for each layer that reads them: inputs and constants that several layers read,
            and calls that are read beyond the next layer.
    """

    layers: tuple[Layer, ...]
    shared: Set[fx.Node]


def divided(calls: Calls, starts: Sequence[int], walls: Set[fx.Node]) -> Division:
    """Divide `calls` at the indices `starts`.

    A layer with one of the `walls`, or right before one, is of a kind of its own.
    """
    edges = [0, *starts, len(calls.nodes)]
    return _Divider(calls, edges, walls).division()


class _Divider:
    """Builder of one division.

    The kind of a layer is made of the labels of its calls, each with a code for every operand: its index for a call or
    an input of the layer, the order of first use for a port. Any other operand stands for itself, and is equal only to
    itself.
    """

    def __init__(self, calls: Calls, edges: Sequence[int], walls: Set[fx.Node]) -> None:
        self._calls, self._walls = calls, walls
        self._spans = list(pairwise(edges))
        layers = (number for number, (start, stop) in enumerate(self._spans) for _ in range(start, stop))
        self._layer = dict(zip(calls.nodes, layers, strict=True))
        self._exported = {
            read
            for node, reads in zip(calls.nodes, calls.reads, strict=True)
            for read in reads
            if self._layer[node] - self._layer.get(read, self._layer[node]) > 1
        }
        self._readers = self._layers_of_inputs()
        self._owner = {each: next(iter(layers)) for each, layers in self._readers.items() if len(layers) == 1}
        self._outputs = outputs(calls.source)

    def _layers_of_inputs(self) -> dict[fx.Node, set[int]]:
        """Collect for each input and constant the layers that read it, or write over it."""
        readers: dict[fx.Node, set[int]] = defaultdict(set)
        for node, reads in zip(self._calls.nodes, self._calls.reads, strict=True):
            for each in reads:
                if each not in self._layer:
                    readers[each].add(self._layer[node])
        for write in self._calls.writes:
            within = {self._layer[each] for each in write.all_input_nodes if each in self._layer}
            for each in write.all_input_nodes:
                if each not in self._layer:
                    readers[each] |= within
        return readers

    def division(self) -> Division:
        """Divide calls, inputs, writes and outputs into the layers of `_spans`, and derive the kind of each layer."""
        last = len(self._spans) - 1
        writes: dict[int, list[fx.Node]] = defaultdict(list)
        for write in self._calls.writes:
            writes[max((self._number(each, 0) for each in write.all_input_nodes), default=last)].append(write)
        results: dict[int, list[int]] = defaultdict(list)
        for place, node in enumerate(self._outputs):
            results[self._number(node, last)].append(place)
        layers = [
            Layer(
                tuple(self._calls.nodes[start:stop]),
                self._inputs(number, writes[number]),
                tuple(writes[number]),
                tuple(results[number]),
            )
            for number, (start, stop) in enumerate(self._spans)
        ]
        inputs = self._readers.keys() - self._owner.keys()
        return Division(tuple(self._with_kinds(layers)), self._exported | inputs)

    def _number(self, node: fx.Node, otherwise: int) -> int:
        """Return the number of the layer that computes `node`, or that alone reads it; else `otherwise`."""
        return self._layer.get(node, self._owner.get(node, otherwise))

    def _inputs(self, number: int, writes: Iterable[fx.Node]) -> tuple[fx.Node, ...]:
        """List the inputs and constants that only layer `number`, or its closing `writes`, use, in the order of their
        first use.
        """
        start, stop = self._spans[number]
        read = chain(*self._calls.reads[start:stop], *(each.all_input_nodes for each in writes))
        return tuple({each: None for each in read if self._owner.get(each) == number})

    def _with_kinds(self, layers: Sequence[Layer]) -> Iterator[Layer]:
        """Yield each layer with its ports and its kind.

        The first and the last layer have kinds of their own. The last but one is of the kind of the first layer with
        equal calls, whatever the last layer reads of it.
        """
        bodies, ports = zip(*(self._body(number, each) for number, each in enumerate(layers)), strict=True)
        last = len(layers) - 1
        first: dict[Hashable, Hashable] = {}
        numbers: dict[Hashable, int] = {}  # equal kinds get one number: the keys are slow to compare
        for number, layer in enumerate(layers):
            body, kind = bodies[number], cast(Hashable, object())
            if 0 < number < last and not self._is_single(layer, layers[number + 1]):
                place = {each: place for place, each in enumerate(layer.nodes)}
                kind = body, tuple(place[each] for each in ports[number + 1])
                if number == last - 1:
                    kind = first.get(body, kind)
                first.setdefault(body, kind)
            yield replace(layer, ports=ports[number], kind=numbers.setdefault(kind, len(numbers)))

    def _is_single(self, layer: Layer, behind: Layer) -> bool:
        """Return True if `layer` is of a kind of its own: it is read beyond the next layer, `behind`, or either meets a
        wall.
        """
        is_read_far = not self._exported.isdisjoint(layer.nodes)
        return is_read_far or not self._walls.isdisjoint((*layer.nodes, *behind.nodes[:1]))

    def _body(self, number: int, layer: Layer) -> tuple[Hashable, tuple[fx.Node, ...]]:
        """Describe the calls, inputs, writes and results of a layer by labels and codes; and list its ports."""
        codes: dict[fx.Node, Hashable] = {each: (place,) for place, each in enumerate(layer.inputs)}
        codes.update((each, place) for place, each in enumerate(layer.nodes))
        ports: list[fx.Node] = []
        start, stop = self._spans[number]
        body: list[Hashable] = []
        for label, reads in zip(self._calls.labels[start:stop], self._calls.reads[start:stop], strict=True):
            body.append(label)
            for each in reads:
                if each not in codes and self._layer.get(each) == number - 1 and each not in self._exported:
                    codes[each] = -1 - len(ports)
                    ports.append(each)
                body.append(codes.get(each, each))
        body.extend(map(self._calls.look, layer.inputs))
        body.extend(
            (each.target, *(codes.get(operand, operand) for operand in each.all_input_nodes)) for each in layer.writes
        )
        strides, is_last = self._calls.facts.strides, number == len(self._spans) - 2
        results = () if is_last else layer.results  # only the last layer may return the output of the model
        body.extend((codes.get(self._outputs[each]), *strides[each : each + 1]) for each in results)
        return tuple(body), tuple(ports)
