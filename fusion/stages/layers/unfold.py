"""Unfold: what came of a folded graph, written into the whole one; the second layer for all that it stands for.

A node of the first layer that the second reads is, for each copy of the second, the corresponding node of the copy
before; what all layers share is one node for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch.fx as fx
from torch.fx.node import map_arg

from fusion.graph.overlay import Held
from fusion.mutation import outputs, sort
from fusion.origin import PROVENANCE, inherit
from fusion.records import Rewritten
from fusion.stages.layers.correspondence import Correspondence, NotRepeatedError
from fusion.stages.layers.origins import ONCE, Origins, Part


def unfold(
    origins: Origins, held: Mapping[fx.Node, Held], done: Sequence[Rewritten], copies: Sequence[fx.Node]
) -> tuple[list[Rewritten], list[fx.Node]]:
    """Rewrite the whole graph as the folded one was rewritten.

    Args:
        origins: of the nodes of the folded graph.
        held: what its nodes held before.
        done: what was rewritten in it.
        copies: nodes of it to be told of.

    Returns:
        What was rewritten in the whole graph, and what those nodes are there.

    Raises:
        NotRepeatedError: the first layer and the second do not correspond where they meet; the graph is as it came.
    """
    if not done:
        return [], []
    unfolding = _Unfolding(origins, Correspondence(origins, held, done), done)
    return unfolding.written(), unfolding.standing_for(copies)


class _Unfolding:
    """The state of one whole graph while it is written."""

    def __init__(self, origins: Origins, between: Correspondence, done: Sequence[Rewritten]) -> None:
        self._origins, self._folded, self._between, self._done = origins, origins.folded, between, done
        self._whole, self._rewritten = origins.folded.whole, origins.folded.graph
        self._part, self._alive = between.part, set(self._rewritten.nodes)
        self._now: dict[tuple[fx.Node, int], fx.Node] = {}

    def written(self) -> list[Rewritten]:
        """Write the whole graph, once it is known that every copy finds what it reads."""
        instances = list(self._instances())
        read = {
            (node, layer): {each: self._read(each, self._part[node], layer) for each in node.all_input_nodes}
            for node, layer in instances
        }
        results = dict(self._results())
        self._now = dict(self._inputs())
        self._place(instances)
        for (node, layer), found in read.items():
            now = self._now[node, layer]
            now.args, now.kwargs = map_arg((node.args, node.kwargs), lambda each, of=found: self._now[of[each]])
        self._return({place: self._now[each] for place, each in results.items()})
        self._drop()
        sort(self._whole)
        return [each for made in self._done for each in self._repeated(made)]

    def standing_for(self, nodes: Sequence[fx.Node]) -> list[fx.Node]:
        """The nodes of the whole graph that these are there."""
        return [self._now[node, number] for node in nodes for number in self._numbers(node)]

    def _instances(self) -> Iterator[tuple[fx.Node, int]]:
        """Each node, and each of the second layer for every layer that this stands for."""
        for node in self._rewritten.nodes:
            if node.op not in ("placeholder", "output"):
                yield from ((node, number) for number in self._numbers(node))

    def _numbers(self, node: fx.Node) -> Sequence[int]:
        return self._folded.middle if self._part[node] == Part.SECOND else (ONCE,)

    def _read(self, node: fx.Node, reader: Part, layer: int) -> tuple[fx.Node, int]:
        """What something of the part `reader` reads as `node`, for the layer of that number if it is of the second.

        Raises:
            NotRepeatedError: what is behind it, or of another layer without anything that corresponds.
        """
        part = self._part[node]
        if part > reader and Part.SECOND in (part, reader):
            raise NotRepeatedError(f"{node} is made by a layer behind the one that reads it")
        if part == Part.SECOND:
            return node, self._folded.middle[-1] if layer == ONCE else layer
        if layer == ONCE or self._between.is_shared(node) or (part == Part.FIRST and layer == 1):
            return node, ONCE
        following = self._between.next.get(node)
        if following is None or following not in self._alive or part != Part.FIRST:
            raise NotRepeatedError(f"{node} of another layer is read, to which nothing corresponds")
        return following, layer - 1

    def _results(self) -> Iterator[tuple[int, tuple[fx.Node, int]]]:
        """For each place among the results of the whole graph, what stands there."""
        layers = self._folded.layers
        given = dict(zip(self._folded.results, outputs(self._rewritten), strict=True))
        of = dict.fromkeys(layers[0].results, Part.FIRST) | dict.fromkeys(layers[-1].results, Part.LAST)
        for number in self._folded.middle:
            for place, same in zip(layers[number].results, layers[1].results, strict=True):
                yield place, self._read(given[same], Part.SECOND, number)
        for place in given.keys() - set(layers[1].results):
            yield place, self._read(given[place], of.get(place, Part.BEHIND), ONCE)

    def _inputs(self) -> Iterator[tuple[tuple[fx.Node, int], fx.Node]]:
        for node in self._rewritten.find_nodes(op="placeholder"):
            yield from (((node, number), self._origins.at(node, number)) for number in self._numbers(node))

    def _place(self, instances: Sequence[tuple[fx.Node, int]]) -> None:
        """Find or make the node of each instance, behind the one before it of the same layer."""
        inputs = self._whole.find_nodes(op="placeholder")
        behind = {number: self._folded.layers[number].nodes[0].prev for number in self._folded.middle}
        behind[ONCE] = inputs[-1] if inputs else next(iter(self._whole.nodes))
        for node, layer in instances:
            known = node in self._origins.part
            now = self._origins.at(node, layer) if known else self._made(node, layer, behind[layer])
            now.meta.update((key, each) for key, each in node.meta.items() if key not in PROVENANCE)
            self._now[node, layer] = behind[layer] = now

    def _made(self, node: fx.Node, layer: int, behind: fx.Node) -> fx.Node:
        with self._whole.inserting_after(behind):
            made = self._whole.create_node(node.op, node.target, name=node.name)
        if layer == ONCE:
            made.meta.update(node.meta)
        elif node in self._between.owner:
            inherit(made, self._origins.at(self._between.owner[node].match.node, layer))
        return made

    def _return(self, results: Mapping[int, fx.Node]) -> None:
        """Put the results into their places, between what the graph returns that is no node."""
        returned = self._whole.output_node()
        numbers = iter(range(len(results)))
        returned.args = (map_arg(returned.args[0], lambda _: results[next(numbers)]),)

    def _drop(self) -> None:
        """Erase what nothing needs any more."""
        kept = set(self._now.values())
        copies = {now for (_, layer), now in self._now.items() if layer != ONCE}
        for node in reversed(self._whole.nodes):
            is_dead = node not in kept or (node in copies and not node.users and not node.is_impure())
            if is_dead and node.op not in ("placeholder", "output"):
                self._whole.erase_node(node)

    def _repeated(self, made: Rewritten) -> Iterator[Rewritten]:
        for number, candidate in zip(self._numbers_of(made), self._origins.candidates(made.candidate), strict=True):
            yield Rewritten(candidate, tuple(self._added(made, number)))

    def _numbers_of(self, made: Rewritten) -> Sequence[int]:
        return self._origins.numbers(*made.candidate.match.firsts)

    def _added(self, made: Rewritten, number: int) -> Iterator[fx.Node]:
        """The nodes that stand for those that were added, and still do."""
        for node in made.added:
            found = self._now.get((node, number)) or (self._now.get((node, ONCE)) if number == 1 else None)
            if found is not None and not found._erased:
                yield found
