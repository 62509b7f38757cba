"""Unfold: write what came of a folded graph into the graph as it was, each layer for all that it stands for.

What a layer reads of the one before is, for each layer that it stands for, what corresponds in the layer before that
one; what all layers share is one node for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph.aliasing import outputs, sort
from fusion.graph.origin import PROVENANCE, inherit
from fusion.graph.overlay import Held
from fusion.records import Candidate, Rewritten
from fusion.stages.layers.correspondence import Correspondence, NotRepeatedError
from fusion.stages.layers.origins import BEFORE, Origins

Instance = tuple[fx.Node, int]
"""A node of the folded graph, and the number of the layer that its own stands for."""


def unfold(
    origins: Origins, held: Mapping[fx.Node, Held], done: Sequence[Rewritten], copies: Sequence[fx.Node]
) -> tuple[list[Rewritten], list[fx.Node]]:
    """Rewrite the graph as it was as the folded one was rewritten.

    Args:
        origins: of the nodes of the folded graph.
        held: the values of its nodes before.
        done: what was rewritten in it.
        copies: some of its nodes.

    Returns:
        What was rewritten in the graph as it was, and what those nodes are there.

    Raises:
        NotRepeatedError: layers do not correspond where they meet; the graph is as it came.
    """
    if not done:
        return [], []
    unfolding = _Unfolding(origins, Correspondence(origins, held, done))
    repeated = [tuple(origins.candidates(made.candidate)) for made in done]
    _require_disjoint(chain.from_iterable(repeated))
    unfolding.write()
    rewritten = (each for pair in zip(done, repeated, strict=True) for each in unfolding.repeated(*pair))
    return list(rewritten), unfolding.standing_for(copies)


def _require_disjoint(candidates: Iterable[Candidate]) -> None:
    """Require that no node is replaced twice, as where a rewrite joins results of several layers.

    Raises:
        NotRepeatedError: one is.
    """
    replaced = set[fx.Node]()
    for each in candidates:
        if not replaced.isdisjoint(each.match.makers):
            raise NotRepeatedError(f"{each.match.rule.name} takes results of several layers together")
        replaced.update(each.match.makers)


class _Unfolding:
    """The state of one graph while it is written."""

    def __init__(self, origins: Origins, between: Correspondence) -> None:
        self._origins, self._between = origins, between
        self._source, self._rewritten = origins.folded.source, origins.folded.graph
        self._calls = [node for node in self._rewritten.nodes if node.op not in ("placeholder", "output")]
        self._changed = {node: None for node in self._calls if origins.is_changed(node)}
        self._made: dict[Instance, fx.Node] = {}

    def write(self) -> None:
        """Write the graph, once it is known that every layer finds what it reads."""
        reads = {
            (node, instance): {each: self._between.read(each, node, instance) for each in node.all_input_nodes}
            for node in self._changed
            for instance in self._origins.instances[self._between.number[node]]
        }
        self._check_others()
        results = dict(self._results())
        unused = {node for node in self._source.nodes if not node.users}
        self._place()
        for at, found in reads.items():
            now, (node, _) = self._now(*at), at
            now.args, now.kwargs = map_arg((node.args, node.kwargs), lambda each, of=found: self._now(*of[each]))
        self._return({place: self._now(*each) for place, each in results.items()})
        self._drop(unused)
        sort(self._source)

    def repeated(self, made: Rewritten, candidates: Sequence[Candidate]) -> Iterator[Rewritten]:
        """Yield a rewrite in each layer that its own stands for, where its candidate is one of `candidates`."""
        number = self._between.layer_of(made)
        for instance, candidate in zip(self._origins.instances[number], candidates, strict=True):
            yield Rewritten(candidate, tuple(self._added(made, number, instance)))

    def standing_for(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of the graph as it was that some of the folded one are there."""
        return [self._now(node, each) for node in nodes for each in self._origins.instances[self._between.number[node]]]

    def _added(self, made: Rewritten, number: int, instance: int) -> Iterator[fx.Node]:
        """Yield the nodes that a rewrite added to a layer; what several layers share belongs to the first of them."""
        for node in made.added:
            own = self._between.number.get(node, number)
            if own == number or instance == number:
                now = self._made.get((node, instance if own == number else own))
                if now is not None and not now._erased:
                    yield now

    def _now(self, node: fx.Node, instance: int) -> fx.Node:
        """The node of the graph as it was that a node of the folded one is in the layer `instance`."""
        return self._made.get((node, instance)) or self._origins.node_at(node, instance)

    def _check_others(self) -> None:
        """Require of calls that are as they came that what they read of other layers corresponds in each instance."""
        number = self._between.number
        apart = {
            (each, number[node]): node
            for node in self._calls
            if node not in self._changed
            for each in node.all_input_nodes
            if number[each] != number[node]
        }
        for (each, reader), node in apart.items():
            for instance in self._origins.instances[reader]:
                self._between.read(each, node, instance)

    def _results(self) -> Iterator[tuple[int, Instance]]:
        """Yield for each place among the results of the graph as it was what stands there."""
        given = dict(zip(self._origins.folded.results, outputs(self._rewritten), strict=True))
        for number, instances in self._origins.instances.items():
            for instance in instances:
                layers = self._origins.layer(instance), self._origins.layer(number)
                for place, same in zip(*(each.results for each in layers), strict=True):
                    yield place, self._between.located(given[same], number, instance)

    def _place(self) -> None:
        """Make the nodes that were added, each behind the one before it in its layer, and bring others up to date."""
        last: dict[int, fx.Node] = {}
        for node in self._calls:
            number = self._between.number[node]
            for instance in self._origins.instances[number] if node in self._changed else ():
                now = (
                    self._origins.node_at(node, instance)
                    if node in self._origins.number
                    else self._make(node, instance, last.get(number))
                )
                now.meta.update((key, each) for key, each in node.meta.items() if key not in PROVENANCE)
            last[number] = node

    def _make(self, node: fx.Node, instance: int, before: fx.Node | None) -> fx.Node:
        behind = self._start(instance) if before is None else self._now(before, instance)
        with self._source.inserting_after(behind):
            made = self._made[node, instance] = self._source.create_node(node.op, node.target, name=node.name)
        own = self._between.owner.get(node)
        if instance == self._between.number[node]:
            made.meta.update(node.meta)
        elif own is not None:
            inherit(made, self._origins.at(own.candidate.match.node, self._between.layer_of(own), instance))
        return made

    def _start(self, instance: int) -> fx.Node:
        """The node behind which a layer begins."""
        if instance == BEFORE:
            inputs = self._source.find_nodes(op="placeholder")
            return inputs[-1] if inputs else next(iter(self._source.nodes)).prev
        layers = self._origins.folded.layers[instance:]
        return next((node for layer in layers for node in layer.nodes), self._source.output_node()).prev

    def _return(self, results: Mapping[int, fx.Node]) -> None:
        """Put the results into their places, between what the graph returns that is no node."""
        returned = self._source.output_node()
        numbers = iter(range(len(results)))
        returned.args = (map_arg(returned.args[0], lambda _: results[next(numbers)]),)

    def _drop(self, unused: Set[fx.Node]) -> None:
        """Erase what nothing needs any more; what nothing has ever read stays."""
        alive = set(self._rewritten.nodes)
        gone = {
            self._origins.node_at(node, instance)
            for node, number in self._origins.number.items()
            if node not in alive
            for instance in self._origins.instances[number]
        }
        for node in reversed(self._source.nodes):
            is_dead = node in gone or (not node.users and node not in unused and not node.is_impure())
            if is_dead and node.op not in ("placeholder", "output"):
                self._source.erase_node(node)
