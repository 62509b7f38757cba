"""Unfold: repeat the rewrites of a folded graph in the full graph, each in all layers for which its layer stands.

A node that a layer reads of the one before becomes, for each instance, its counterpart in the layer before that
instance; a node that all layers share is one node for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain

import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph.aliasing import outputs, sort
from fusion.graph.node_values import NodeValue
from fusion.graph.origin import PROVENANCE, inherit
from fusion.records import Candidate, Rewritten
from fusion.stages.layers.correspondence import Correspondence, NotRepeatedError
from fusion.stages.layers.fold_origins import BEFORE, Origins

Instance = tuple[fx.Node, int]
"""A node of the folded graph, and the number of one of the layers for which its layer stands."""


def unfold(
    origins: Origins, value_of: Mapping[fx.Node, NodeValue], done: Sequence[Rewritten], copies: Sequence[fx.Node]
) -> tuple[list[Rewritten], list[fx.Node]]:
    """Rewrite the full graph, in place, as the folded graph was rewritten.

    Args:
        origins: origins of the nodes of the folded graph.
        value_of: values of the nodes of the folded graph before it was rewritten.
        done: the rewrites of the folded graph.
        copies: some nodes of the folded graph.

    Returns:
        The rewrites of the full graph, and the nodes that `copies` are there.

    Raises:
        NotRepeatedError: layers do not correspond where they meet; the full graph is unchanged.
    """
    if not done:
        return [], []
    unfolding = _Unfolding(origins, Correspondence(origins, value_of, done))
    repeated = [tuple(origins.candidates(made.candidate)) for made in done]
    _require_disjoint(chain.from_iterable(repeated))
    unfolding.write()
    rewritten = (each for pair in zip(done, repeated, strict=True) for each in unfolding.repeated(*pair))
    return list(rewritten), unfolding.standing_for(copies)


def _require_disjoint(candidates: Iterable[Candidate]) -> None:
    """Require that no node is replaced twice, as by a rewrite that joins results of several layers.

    Raises:
        NotRepeatedError: a node is.
    """
    replaced = set[fx.Node]()
    for each in candidates:
        if not replaced.isdisjoint(each.match.makers):
            raise NotRepeatedError(f"{each.match.rule.name} takes results of several layers together")
        replaced.update(each.match.makers)


class _Unfolding:
    """Writer of the full graph: repeats the changes of the folded graph in each instance of its layers."""

    def __init__(self, origins: Origins, between: Correspondence) -> None:
        self._origins, self._between = origins, between
        self._source, self._rewritten = origins.folded.source, origins.folded.graph
        self._calls = [node for node in self._rewritten.nodes if node.op not in ("placeholder", "output")]
        self._changed = {node: None for node in self._calls if origins.is_changed(node)}
        self._made: dict[Instance, fx.Node] = {}

    def write(self) -> None:
        """Rewrite the full graph, after checking that every instance finds what it reads.

        Raises:
            NotRepeatedError: an instance does not; the full graph is unchanged.
        """
        reads = {
            (node, instance): {each: self._between.read(each, node, instance) for each in node.all_input_nodes}
            for node in self._changed
            for instance in self._origins.instances[self._between.number[node]]
        }
        self._check_others()
        results = dict(self._results())
        unused = {node for node in self._source.nodes if not node.users}
        self._place()
        for at, operands in reads.items():
            now, (node, _) = self._now(*at), at
            now.args, now.kwargs = map_arg(
                (node.args, node.kwargs), lambda each, now_of=operands: self._now(*now_of[each])
            )
        self._return({place: self._now(*each) for place, each in results.items()})
        self._drop(unused)
        sort(self._source)

    def repeated(self, made: Rewritten, candidates: Sequence[Candidate]) -> Iterator[Rewritten]:
        """Yield the rewrite `made` once for each of its `candidates`, one per layer for which its layer stands."""
        number = self._between.layer_of(made)
        for instance, candidate in zip(self._origins.instances[number], candidates, strict=True):
            yield Rewritten(candidate, tuple(self._added(made, number, instance)))

    def standing_for(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """Return the nodes of the full graph for which `nodes` of the folded graph stand."""
        return [self._now(node, each) for node in nodes for each in self._origins.instances[self._between.number[node]]]

    def _added(self, made: Rewritten, number: int, instance: int) -> Iterator[fx.Node]:
        """Yield the nodes that the rewrite `made`, of layer `number`, adds to the layer `instance` for which that
        stands.

        Shared nodes are yielded for `instance` = `number` alone.
        """
        for node in made.added:
            own = self._between.number.get(node, number)
            if own == number or instance == number:
                now = self._made.get((node, instance if own == number else own))
                if now is not None and not now._erased:
                    yield now

    def _now(self, node: fx.Node, instance: int) -> fx.Node:
        """Return the node of the full graph that `node` of the folded graph is in the layer `instance`."""
        return self._made.get((node, instance)) or self._origins.node_at(node, instance)

    def _check_others(self) -> None:
        """Require that unchanged calls find in each instance what they read of other layers.

        Raises:
            NotRepeatedError: a call does not.
        """
        number = self._between.number
        read_across = {
            (each, number[node]): node
            for node in self._calls
            if node not in self._changed
            for each in node.all_input_nodes
            if number[each] != number[node]
        }
        for (each, reader), node in read_across.items():
            for instance in self._origins.instances[reader]:
                self._between.read(each, node, instance)

    def _results(self) -> Iterator[tuple[int, Instance]]:
        """Yield the index of each output of the full graph with the instance that it returns."""
        given = dict(zip(self._origins.folded.results, outputs(self._rewritten), strict=True))
        for number, instances in self._origins.instances.items():
            for instance in instances:
                layers = self._origins.layer(instance), self._origins.layer(number)
                for place, same in zip(*(each.results for each in layers), strict=True):
                    yield place, self._between.located(given[same], number, instance)

    def _place(self) -> None:
        """Insert added nodes, each behind its predecessor in the layer, and update the metadata of changed ones."""
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
        """Return the node behind which the layer `instance` begins."""
        if instance == BEFORE:
            inputs = self._source.find_nodes(op="placeholder")
            return inputs[-1] if inputs else next(iter(self._source.nodes)).prev
        layers = self._origins.folded.layers[instance:]
        return next((node for layer in layers for node in layer.nodes), self._source.output_node()).prev

    def _return(self, results: Mapping[int, fx.Node]) -> None:
        """Let the full graph return `results`, by index among the nodes that it returns."""
        returned = self._source.output_node()
        numbers = iter(range(len(results)))
        returned.args = (map_arg(returned.args[0], lambda _: results[next(numbers)]),)

    def _drop(self, unused: Set[fx.Node]) -> None:
        """Erase nodes that the folded graph has lost, and nodes without users, except `unused`, which never had any."""
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
