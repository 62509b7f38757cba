"""Fold: build a graph in which a few layers stand for all of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass, replace
from itertools import accumulate, islice, pairwise

import torch.fx as fx

from fusion._torch.nested import leaves
from fusion.facts import Facts
from fusion.graph.aliasing import outputs
from fusion.stages.layers.cuts import Cut, crossing, cuts
from fusion.stages.layers.layer import Division, Layer, divided
from fusion.stages.layers.searched_layers import contexts, retained, stand_ins
from fusion.stages.layers.signatures import Calls, calls_of

_CUTS = 3
"""Greatest number of divisions that are compared in full."""
_STEPS = (1, 2, 3, 4)
"""Numbers of layers, as labels show them, that are tried as one layer: pairs of layers may share weights."""
_GAIN = 0.1
"""Least share of calls that folding must save."""


@dataclass(frozen=True)
class Folded:
    """A shorter graph with the origins of its nodes.

    Attributes:
        source: the full graph.
        division: the layers of the full graph.
        stand_in: for each layer, the number of the layer that is searched for it, its own if it is searched itself.
        graph: the shorter graph.
        facts: facts about the inputs of the shorter graph.
        origin: for each node of the shorter graph, its node in `source`.
        results: for each output of the shorter graph, its index among the outputs of `source`.
    """

    source: fx.Graph
    division: Division
    stand_in: tuple[int, ...]
    graph: fx.Graph
    facts: Facts
    origin: Mapping[fx.Node, fx.Node]
    results: tuple[int, ...]

    @property
    def layers(self) -> tuple[Layer, ...]:
        """All layers of `source`; the first and the last are the calls before and behind the others."""
        return self.division.layers


def divide(source: fx.Graph, facts: Facts, walls: Set[fx.Node] = frozenset()) -> Division | None:
    """Divide `source` into the layers that leave the fewest calls to search; None if this saves less than `_GAIN`.

    A layer with one of the `walls`, or right before one, is of a kind of its own.
    """
    calls = calls_of(source, facts)
    best: tuple[int, Division] | None = None
    ordered = cuts(calls.labels, crossing(_last_reads(calls)), calls.reading)
    for cut in islice(ordered, _CUTS):
        for division in _exact(calls, cut, walls):
            to_search = _calls_to_search(division)
            if best is None or to_search < best[0]:
                best = to_search, division
            if 2 * to_search <= len(calls.nodes) + cut.to_search:  # at least half of the gain that labels promise
                return _worth(best, len(calls.nodes))
    return _worth(best, len(calls.nodes))


def paired(source: fx.Graph, facts: Facts, division: Division, walls: Set[fx.Node] = frozenset()) -> Division:
    """Divide `source` into layers of two layers of `division` each."""
    ends = list(accumulate(len(each.nodes) for each in division.layers[:-1]))
    return divided(calls_of(source, facts), sorted({*ends[:-1:2], ends[-1]}), walls)


def _worth(best: tuple[int, Division] | None, every: int) -> Division | None:
    """Return the division of `best`, a pair of calls left to search and a division, if it leaves out enough of `every`,
    the number of all calls.

    Else None.
    """
    return best[1] if best is not None and every - best[0] >= _GAIN * every else None


def _exact(calls: Calls, cut: Cut, walls: Set[fx.Node]) -> Iterator[Division]:
    """Yield divisions of `calls` with layers of one piece of `cut` each, of two pieces, and so on by `_STEPS`.

    Kinds are compared exactly, not by labels as in `cut`; `walls` are as in `divide`.
    """
    for step in _STEPS:
        yield divided(calls, sorted({*cut.starts[:-1:step], cut.starts[-1]}), walls)


def _last_reads(calls: Calls) -> list[int]:
    """Return for each call the index of the last call that reads its result, its own index if none does."""
    last = list(range(len(calls.nodes)))
    for place, reads in enumerate(calls.reads):
        for each in reads:
            if each in calls.place:
                last[calls.place[each]] = place
    return last


def _calls_to_search(division: Division) -> int:
    """Count the calls of `division` that are left to search."""
    layers = division.layers
    return sum(len(layers[number].nodes) for number in retained(contexts([each.kind for each in layers])))


def fold(source: fx.Graph, facts: Facts, division: Division) -> Folded | None:
    """Copy `source` without the layers for which another layer stands; None if no layer can be left out.

    A layer stands for those of its kind between neighbours of the same kinds.
    """
    around = contexts([each.kind for each in division.layers])
    places = retained(around)
    if len(places) == len(division.layers):
        return None
    stand_in = tuple(stand_ins(around, places))
    layers = division.layers
    gone = {node for number, other in enumerate(stand_in) if number != other for node in layers[number].all}
    before = [(layers[two - 1], layers[one]) for one, two in pairwise(places) if two != one + 1]
    moved = {old: new for last, now in before for old, new in zip(last.nodes, now.nodes, strict=True)}
    folded = fx.Graph(source.owning_module)
    now: dict[fx.Node, fx.Node] = {}
    for node in source.nodes:
        if node not in gone and node.op != "output":
            now[node] = folded.node_copy(node, lambda each: now[moved.get(each, each)])
    returned = source.output_node()
    remaining = [each for each in leaves(returned.args) if each not in gone]
    copied = folded.output(tuple(now[each] if isinstance(each, fx.Node) else each for each in remaining))
    copied.meta = dict(returned.meta)
    results = tuple(place for place, each in enumerate(outputs(source)) if each not in gone)
    strides = tuple(facts.strides[place] for place in results if place < len(facts.strides))
    origin = {new: old for old, new in now.items()} | {copied: returned}
    return Folded(source, division, stand_in, folded, replace(facts, strides=strides), origin, results)
