"""Unfold: what came of a folded graph, written into the whole one; the second layer for all that it stands for.

The first layer shows what the second reads of the layer before it. A node of the first that the second reads is, for
each copy of the second, the corresponding node of the copy before; what all layers share is one node for all of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.fx as fx
from torch.fx.node import map_arg

from fusion.errors import FusionError
from fusion.graph.overlay import Held
from fusion.mutation import memory_of, outputs, reserves, sort
from fusion.origin import PROVENANCE, inherit
from fusion.records import Candidate, Rewritten
from fusion.stages.layers.origins import ONCE, Origins, Part
from fusion.stages.layers.run import described


class NotRepeatedError(FusionError):
    """What came of the second layer cannot be said of those behind it: the whole graph has to be searched."""


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
    unfolding = _Unfolding(origins, held, done)
    return unfolding.written(), unfolding.standing_for(copies)


class _Unfolding:
    """The state of one whole graph while it is written."""

    def __init__(self, origins: Origins, held: Mapping[fx.Node, Held], done: Sequence[Rewritten]) -> None:
        self._origins, self._folded, self._done = origins, origins.folded, done
        self._whole, self._rewritten = origins.folded.whole, origins.folded.graph
        self._owner = {node: each.candidate for each in done for node in each.added}
        self._next = self._following()
        self._shared = self._same_for_all(held)
        self._returned = dict(self._memory_of_results())
        self._part, self._alive = dict(origins.part), set(self._rewritten.nodes)
        for node in self._rewritten.nodes:
            if node not in self._part:
                self._part[node] = self._part_of(node)
        self._correspond()
        self._stay_near(held)
        self._now: dict[tuple[fx.Node, int], fx.Node] = {}

    # what corresponds --------------------------------------------------------------------------------------------

    def _following(self) -> dict[fx.Node, fx.Node]:
        """For nodes of a layer those of the next; for as many before the first layer those of the first."""
        origins, first = self._origins, self._folded.layers[0].nodes
        calls = [each for each in self._whole.nodes if each.op in ("call_function", "get_attr")]
        begin = calls.index(first[0])
        before = calls[max(begin - len(first), 0) : begin]
        pairs = zip(reversed(before), reversed(first), strict=False)
        known = {origins.copies[one]: origins.copies[other] for one, other in pairs}
        return known | {one: other for pair in pairwise(origins.three()) for one, other in zip(*pair, strict=True)}

    def _same_for_all(self, held: Mapping[fx.Node, Held]) -> set[fx.Node]:
        """What all layers read alike, what that is computed from, and what holds a value that each layer computes too.

        What the first layer reads as the result of one before it is not, whoever else reads it.
        """
        copies = self._origins.copies
        first, second = (layer.nodes for layer in self._folded.layers[:2])
        pairs = [
            pair
            for one, other in zip(first, second, strict=True)
            for pair in zip(described(one)[1], described(other)[1], strict=True)
        ]
        found = self._below(copies[one] for one, other in pairs if one is other)
        of_each = [{held.get(each) for each in layer} for layer in self._origins.three()]
        values = set.intersection(*of_each) - {None}
        outer = (node for node, value in held.items() if value in values and self._origins.part[node] == Part.BEFORE)
        return found.union(outer) - {copies[one] for one, other in pairs if one is not other}

    def _below(self, nodes: Iterable[fx.Node]) -> set[fx.Node]:
        """These nodes and all that they are computed from, as the graph came."""
        found: set[fx.Node] = set()
        waiting = list(nodes)
        while waiting:
            node = waiting.pop()
            if node not in found:
                found.add(node)
                waiting += [self._origins.copies[each] for each in self._folded.origin[node].all_input_nodes]
        return found

    def _part_of(self, node: fx.Node) -> Part:
        """Where a new node belongs: to the layer that returns its memory, or whose rewrite added it.

        What reads only what all layers share is shared itself, if nobody can tell its memory from another's.
        """
        returned = self._returned.get(node)
        if not returned and not reserves(node.target) and all(map(self._is_shared, node.all_input_nodes)):
            self._shared.add(node)
            return Part.BEFORE
        own = self._owner.get(node)
        within = [self._part[each] for each in own.match.firsts] if own else []
        return max(returned or Part.BEFORE, *within, *(self._part[each] for each in node.all_input_nodes), Part.BEFORE)

    def _memory_of_results(self) -> Iterator[tuple[fx.Node, Part]]:
        """The nodes whose memory the layers return."""
        layers = self._folded.layers
        parts = ((layers[0], Part.FIRST), (layers[1], Part.SECOND), (layers[-1], Part.LAST))
        of = {place: part for layer, part in parts for place in layer.results}
        given = zip(self._folded.results, outputs(self._rewritten), strict=True)
        return ((memory_of(node), of[place]) for place, node in given if place in of)

    def _is_shared(self, node: fx.Node) -> bool:
        """Whether a node is the same for every layer; a symbolic size is, whoever computes it."""
        return node in self._shared or isinstance(node.meta.get("val"), torch.SymInt)

    def _correspond(self) -> None:
        """Note which nodes that the first layer's rewrites added correspond to which of the second's.

        Raises:
            NotRepeatedError: a rewrite of the second layer is none of the last.
        """
        of = {part: [each for each in self._done if self._layer(each) == part] for part in Part}
        for one in of[Part.SECOND]:
            if not any(self._is_made_as(one.candidate, each.candidate) for each in of[Part.LAST]):
                raise NotRepeatedError(f"{one.candidate.match.rule.name} is applied otherwise in the last layer")
        for one in of[Part.FIRST]:
            for other in of[Part.SECOND]:
                if self._is_made_as(one.candidate, other.candidate):
                    self._pair(one.added, other.added)

    def _stay_near(self, held: Mapping[fx.Node, Held]) -> None:
        """Refuse a rewrite of what a whole layer before its own computes: what layers add up to, a factor 2 in each,
        depends on how many there are.

        Raises:
            NotRepeatedError: there is one.
        """
        for each in self._done:
            own = self._layer(each)
            through = Part.FIRST if own == Part.SECOND else Part.SECOND
            if own > through and self._looks_through(each, through, held):
                raise NotRepeatedError(f"{each.candidate.match.rule.name} is of what a whole layer computes")

    def _looks_through(self, made: Rewritten, through: Part, held: Mapping[fx.Node, Held]) -> bool:
        """Whether, between its results and what it reads, there is what a layer reads of the one before it."""
        read = self._read_by(made)
        values = {held[each] for each in read if each in held}
        waiting = [each for makers in made.candidate.match.roots for each in makers]
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            below = [each for each in self._origins.reads[node] if not self._is_shared(each)]
            if self._part[node] == through and any(self._part[each] < through for each in below):
                return True
            fresh = {each for each in below if self._part[each] >= through and held.get(each) not in values}
            waiting += fresh - seen - read
            seen |= fresh
        return False

    def _read_by(self, made: Rewritten) -> set[fx.Node]:
        """The nodes, as the graph came, whose values a rewrite reads."""
        found, seen = set[fx.Node](), set(made.added)
        waiting = [each for node in made.added for each in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._origins.part:
                found.add(node)
            elif node in self._owner:
                found.update(each for makers in self._owner[node].match.roots for each in makers)
            else:
                waiting += node.all_input_nodes
        return found

    def _layer(self, made: Rewritten) -> Part:
        return max(self._part[each] for each in made.candidate.match.firsts)

    def _is_made_as(self, one: Candidate, other: Candidate) -> bool:
        """Whether two candidates run the same in places that correspond."""
        places, others = one.match.firsts, other.match.firsts
        return one.plan is other.plan and [self._next.get(each) for each in places] == list(others)

    def _pair(self, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> None:
        waiting = list(other)
        for node in one:
            found = next((each for each in waiting if self._does_same(node, each)), None)
            if found is not None:
                self._next[node] = found
                waiting.remove(found)

    def _does_same(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether nodes of corresponding rewrites do; what they read of the layer before is known to correspond."""
        (does, reads), (does_too, reads_too) = described(one), described(other)
        return does == does_too and all(map(self._is_next, reads, reads_too))

    def _is_next(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether the second layer reads `other` where the first reads `one`; before the first may be anything."""
        before = self._part[one], self._part[other]
        corresponds = self._next.get(one) is other or before == (Part.BEFORE, Part.FIRST)
        return corresponds or (one is other and self._is_shared(one))

    # writing -----------------------------------------------------------------------------------------------------

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
        if layer == ONCE or self._is_shared(node) or (part == Part.FIRST and layer == 1):
            return node, ONCE
        following = self._next.get(node)
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
        elif node in self._owner:
            inherit(made, self._origins.at(self._owner[node].match.node, layer))
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
