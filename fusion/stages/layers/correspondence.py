"""What corresponds in a rewritten folded graph: nodes of its first layer and of its second, and what all share.

The first layer shows what the second reads of the layer before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

import torch
import torch.fx as fx

from fusion.errors import FusionError
from fusion.graph.overlay import Held
from fusion.mutation import memory_of, outputs, reserves
from fusion.records import Candidate, Rewritten
from fusion.stages.layers.origins import Origins, Part
from fusion.stages.layers.run import described


class NotRepeatedError(FusionError):
    """What came of the second layer cannot be said of those behind it: the whole graph has to be searched."""


class Correspondence:
    """Of the nodes of a folded graph, as it came and as it was rewritten.

    Attributes:
        part: where each belongs.
        next: for nodes of a layer those of the next.
        owner: for each node that was added the candidate that it is of.

    Raises:
        NotRepeatedError: what came of the second layer is not what would come of those behind it.
    """

    def __init__(self, origins: Origins, held: Mapping[fx.Node, Held], done: Sequence[Rewritten]) -> None:
        self._origins, self._folded, self._done = origins, origins.folded, done
        self._whole, self._rewritten = origins.folded.whole, origins.folded.graph
        self.owner = {node: each.candidate for each in done for node in each.added}
        self.next = self._following()
        self._shared = self._same_for_all(held)
        self._returned = dict(self._memory_of_results())
        self.part = dict(origins.part)
        for node in self._rewritten.nodes:
            if node not in self.part:
                self.part[node] = self._part_of(node)
        self._correspond()
        self._stay_near(held)

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
        if not returned and not reserves(node.target) and all(map(self.is_shared, node.all_input_nodes)):
            self._shared.add(node)
            return Part.BEFORE
        own = self.owner.get(node)
        within = [self.part[each] for each in own.match.firsts] if own else []
        return max(returned or Part.BEFORE, *within, *(self.part[each] for each in node.all_input_nodes))

    def _memory_of_results(self) -> Iterator[tuple[fx.Node, Part]]:
        """The nodes whose memory the layers return."""
        layers = self._folded.layers
        parts = ((layers[0], Part.FIRST), (layers[1], Part.SECOND), (layers[-1], Part.LAST))
        of = {place: part for layer, part in parts for place in layer.results}
        given = zip(self._folded.results, outputs(self._rewritten), strict=True)
        return ((memory_of(node), of[place]) for place, node in given if place in of)

    def is_shared(self, node: fx.Node) -> bool:
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
        waiting = list(made.candidate.match.makers)
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            below = [each for each in self._origins.reads[node] if not self.is_shared(each)]
            if self.part[node] == through and any(self.part[each] < through for each in below):
                return True
            fresh = {each for each in below if self.part[each] >= through and held.get(each) not in values}
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
            elif node in self.owner:
                found.update(self.owner[node].match.makers)
            else:
                waiting += node.all_input_nodes
        return found

    def _layer(self, made: Rewritten) -> Part:
        return max(self.part[each] for each in made.candidate.match.firsts)

    def _is_made_as(self, one: Candidate, other: Candidate) -> bool:
        """Whether two candidates run the same in places that correspond."""
        places, others = one.match.firsts, other.match.firsts
        return one.plan is other.plan and [self.next.get(each) for each in places] == list(others)

    def _pair(self, one: Sequence[fx.Node], other: Sequence[fx.Node]) -> None:
        waiting = list(other)
        for node in one:
            found = next((each for each in waiting if self._does_same(node, each)), None)
            if found is not None:
                self.next[node] = found
                waiting.remove(found)

    def _does_same(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether nodes of corresponding rewrites do; what they read of the layer before is known to correspond."""
        (does, reads), (does_too, reads_too) = described(one), described(other)
        return does == does_too and all(map(self._is_next, reads, reads_too))

    def _is_next(self, one: fx.Node, other: fx.Node) -> bool:
        """Whether the second layer reads `other` where the first reads `one`; before the first may be anything."""
        before = self.part[one], self.part[other]
        corresponds = self.next.get(one) is other or before == (Part.BEFORE, Part.FIRST)
        return corresponds or (one is other and self.is_shared(one))
