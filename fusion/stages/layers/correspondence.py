"""Correspondence: which nodes of rewritten layers of one kind correspond, and whether each stands for the others."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from fusion.errors import FusionError
from fusion.graph.aliasing import memory_of, outputs, reserves
from fusion.graph.overlay import Held
from fusion.records import Rewritten
from fusion.stages.layers.origins import BEFORE, Origins
from fusion.stages.layers.signatures import described


class NotRepeatedError(FusionError):
    """A rewrite of one layer does not hold in those that it stands for: more of them have to be searched."""


class Correspondence:
    """Of the nodes of a folded graph that was rewritten.

    Attributes:
        number: for each node, as the graph came and as it is now, the number of its layer.
        owner: for each node that was added the rewrite that added it.

    Raises:
        NotRepeatedError: a rewrite looks through a layer whose neighbours are others in the graph as it was.
    """

    def __init__(self, origins: Origins, held: Mapping[fx.Node, Held], done: Sequence[Rewritten]) -> None:
        self._origins, self._rewritten = origins, origins.folded.graph
        self._alive = set(self._rewritten.nodes)
        self.owner = {node: each for each in done for node in each.added}
        self._shared = self._same_for_all(held)
        self._returned = dict(self._memory_of_results())
        self.number = dict(origins.number)
        for node in self._rewritten.nodes:
            if node not in self.number:
                self.number[node] = self._number_of(node)
        self._rewrites: dict[int, list[Rewritten]] = defaultdict(list)
        for each in done:
            self._rewrites[self.layer_of(each)].append(each)
        self._known: dict[tuple[fx.Node, int], fx.Node | None] = {}
        for each in done:
            self._stay_near(each, held)

    def layer_of(self, made: Rewritten) -> int:
        """The number of the layer of a rewrite: that of the last of its results."""
        return max(self.number[each] for each in made.candidate.match.firsts)

    def is_shared(self, node: fx.Node) -> bool:
        """True if `node` is the same for every layer that reads it; a symbolic size is, whoever computes it."""
        return node in self._shared or isinstance(node.meta.get("val"), torch.SymInt)

    def _same_for_all(self, held: Mapping[fx.Node, Held]) -> set[fx.Node]:
        """Collect what is the same for all layers, with what holds the same values before them."""
        common, numbers = self._origins.common, self._origins.number
        values = {held.get(node) for node in common if numbers[node] != BEFORE} - {None}
        return {*common, *(node for node, value in held.items() if value in values and numbers[node] == BEFORE)}

    def _memory_of_results(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes whose memory layers return, each with the number of its layer."""
        results = self._origins.folded.results
        number = {place: each for each in self._origins.instances for place in self._origins.layer(each).results}
        given = zip(results, outputs(self._rewritten), strict=True)
        return ((memory_of(node), number[place]) for place, node in given if number.get(place, BEFORE) != BEFORE)

    def _number_of(self, node: fx.Node) -> int:
        """Number a new node as the layer that returns its memory, or whose rewrite added it.

        A node that reads only what all layers share is shared itself, if nobody can tell its memory from another's.
        """
        returned = self._returned.get(node)
        if not returned and not reserves(node.target) and all(map(self.is_shared, node.all_input_nodes)):
            self._shared.add(node)
            return BEFORE
        own = self.owner.get(node)
        within = [self.number[each] for each in own.candidate.match.firsts] if own else []
        return max(returned or BEFORE, *within, *(self.number[each] for each in node.all_input_nodes))

    # what a rewrite may look at --------------------------------------------------------------------------------------

    def _stay_near(self, made: Rewritten, held: Mapping[fx.Node, Held]) -> None:
        """Require that between its results and what it reads a rewrite sees its own layer and the one before alone.

        What layers add up to, a factor 2 in each, depends on how many there are.
        """
        number = self.layer_of(made)
        lowest = min(self._seen_by(made, held), key=self._origins.order.__getitem__, default=number)
        before = self._origins.order[number] - self._origins.order[lowest]
        if before > 1 and not self._origins.is_real(lowest, number):
            raise NotRepeatedError(f"{made.candidate.match.rule.name} is of what a layer computes before the last one")

    def _seen_by(self, made: Rewritten, held: Mapping[fx.Node, Held]) -> Iterator[int]:
        """Yield the layers of what stands between the results of a rewrite and what it reads, that included."""
        read = self._read_by(made)
        values = {held[each] for each in read if each in held}
        waiting = list(made.candidate.match.makers)
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            below = [each for each in self._origins.reads[node] if not self.is_shared(each)]
            yield from (self.number[each] for each in below)
            fresh = {each for each in below if held.get(each) not in values} - seen - read
            waiting.extend(fresh)
            seen |= fresh

    def _read_by(self, made: Rewritten) -> set[fx.Node]:
        """Collect the nodes, as the graph came, whose values a rewrite reads."""
        found, seen = set[fx.Node](), set(made.added)
        waiting = [each for node in made.added for each in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._origins.number:
                found.add(node)
            elif self._is_result(node):
                found.update(self.owner[node].candidate.match.makers)
            else:
                waiting.extend(node.all_input_nodes)
        return found

    def _is_result(self, node: fx.Node) -> bool:
        """True if `node` stands for a result of the rewrite that added it, and is not what its call reads.

        Rewrites share what is built for their calls: experts a view of what all of them read.
        """
        return node in self.owner and set(self.owner[node].added).isdisjoint(node.users)

    # what corresponds ------------------------------------------------------------------------------------------------

    def read(self, node: fx.Node, by: fx.Node, instance: int) -> tuple[fx.Node, int]:
        """Return what `by`, where its layer stands for the layer `instance`, reads as `node`, and in which layer.

        Raises:
            NotRepeatedError: nothing corresponds to it in the layer next to `instance`.
        """
        as_it_came = node in self._origins.reads.get(by, ())
        if node in self._origins.shared or (self.is_shared(node) and not as_it_came):
            return node, self.number[node]
        return self.located(node, self.number[by], instance)

    def located(self, node: fx.Node, reader: int, instance: int) -> tuple[fx.Node, int]:
        """Return the counterpart of `node`, and its layer, where the layer `reader` stands for the layer `instance`.

        Raises:
            NotRepeatedError: nothing corresponds to it in the layer next to `instance`.
        """
        number = self.number[node]
        away = self._origins.order[number] - self._origins.order[reader]
        if away == 0:
            return node, instance
        if abs(away) == 1:
            found = self.counterpart(node, self._origins.folded.stand_in[instance + away])
            if found is not None and found in self._alive:
                return found, instance + away
        elif self._origins.is_real(min(number, reader), max(number, reader)):
            return node, number
        raise NotRepeatedError(f"{node} of layer {number} is read by layer {reader}, and nothing corresponds to it")

    def counterpart(self, node: fx.Node, number: int) -> fx.Node | None:
        """Return the node of layer `number` that corresponds to `node`, of a layer of the same kind, or None."""
        if self.number[node] == number:
            return node
        if (node, number) not in self._known:
            self._known[node, number] = self._found(node, number)
        return self._known[node, number]

    def _found(self, node: fx.Node, number: int) -> fx.Node | None:
        layers = self._origins.folded.layers
        if layers[self.number[node]].kind != layers[number].kind:
            return None
        if node in self._origins.number:
            return self._origins.same_place(node, number)
        own = self.owner.get(node)
        made = own and next((each for each in self._rewrites[number] if self._is_made_as(own, each)), None)
        return made and next((each for each in made.added if self._does_same(node, each, number)), None)

    def _is_made_as(self, one: Rewritten, other: Rewritten) -> bool:
        """True if two rewrites run the same in places that correspond."""
        return one.candidate.plan is other.candidate.plan and self._places(one) == self._places(other)

    def _places(self, made: Rewritten) -> list[Hashable]:
        number = self.layer_of(made)
        return [self._origins.relative(each, number) for each in made.candidate.match.firsts]

    def _does_same(self, one: fx.Node, other: fx.Node, number: int) -> bool:
        """True if nodes added to layers of one kind do the same; what they read of the layers before is known to."""
        (does, reads), (does_too, reads_too) = described(one), described(other)
        return does == does_too and all(
            each is too or self._is_read_alike(each, too, self.number[one], number)
            for each, too in zip(reads, reads_too, strict=True)
        )

    def _is_read_alike(self, one: fx.Node, other: fx.Node, reader: int, number: int) -> bool:
        if self.number[one] == reader:
            return self.counterpart(one, number) is other
        return not self.is_shared(one) and not self.is_shared(other)
