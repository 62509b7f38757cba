"""Fold: a graph in which the first, the second and the last of its equal layers stand for all of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch.fx as fx

from fusion.facts import Facts
from fusion.mutation import outputs
from fusion.stages.layers.run import Layer, longest_run


@dataclass(frozen=True)
class Folded:
    """A shorter graph, and where its nodes come from.

    Attributes:
        whole: the graph as it was.
        layers: its equal layers; those between the second and the last are left out.
        graph: the shorter graph.
        facts: what is known of its inputs.
        origin: for each of its nodes the one of the whole graph.
        results: for each of its outputs the place of that output in the whole graph.
    """

    whole: fx.Graph
    layers: tuple[Layer, ...]
    graph: fx.Graph
    facts: Facts
    origin: Mapping[fx.Node, fx.Node]
    results: tuple[int, ...]

    @property
    def middle(self) -> range:
        """The layers that the second stands for, by number: itself, and those that are left out."""
        return range(1, len(self.layers) - 1)


def fold(source: fx.Graph, facts: Facts) -> Folded | None:
    """The graph without all but three of its equal layers; None where there are none to leave out."""
    layers = longest_run(source, facts)
    return _without(source, facts, layers, layers[2:-1]) if layers else None


def _without(source: fx.Graph, facts: Facts, layers: Sequence[Layer], left: Sequence[Layer]) -> Folded:
    """What read the last layer that is left out reads the second layer."""
    gone = {node for each in left for node in each.all}
    folded = fx.Graph(source.owning_module)
    now: dict[fx.Node, fx.Node] = {}
    stands_for = dict(zip(left[-1].nodes, layers[1].nodes, strict=True))
    for node in source.nodes:
        if node not in gone and node.op != "output":
            now[node] = folded.node_copy(node, lambda each: now[stands_for.get(each, each)])
    returned = source.output_node()
    kept = [each for each in _listed(returned) if each not in gone]
    copied = folded.output(tuple(now[each] if isinstance(each, fx.Node) else each for each in kept))
    copied.meta = dict(returned.meta)
    places = [place for place, each in enumerate(outputs(source)) if each not in gone]
    strides = tuple(facts.strides[place] for place in places if place < len(facts.strides))
    origin = {new: old for old, new in now.items()} | {copied: returned}
    return Folded(source, tuple(layers), folded, replace(facts, strides=strides), origin, tuple(places))


def _listed(returned: fx.Node) -> Sequence[Any]:
    given: Any = returned.args[0]
    return given if isinstance(given, (tuple, list)) else (given,)
