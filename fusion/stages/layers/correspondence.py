"""Correspondence: find the nodes that correspond in layers of one kind, and check that rewrites may be repeated."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence

import torch
import torch.fx as fx

from fusion.errors import FusionError
from fusion.graph.aliasing import memory_of, outputs, reserves
from fusion.graph.node_values import NodeValue
from fusion.records import Rewritten
from fusion.stages.layers.fold_origins import BEFORE, Origins
from fusion.stages.layers.signatures import described


class NotRepeatedError(FusionError):
    """A rewrite of a layer cannot be repeated in the layers for which it stands: more of these must be searched."""


class Correspondence:
    """Correspondence between the layers of a folded graph that was rewritten.

    Attributes:
        number: for each node, original or added, the number of its layer.
        owner: for each added node, the rewrite that added it.

    Raises:
        NotRepeatedError: a rewrite depends on a layer beyond the previous one that is not its neighbour in the full
            graph.
    """

    def __init__(self, origins: Origins, value_of: Mapping[fx.Node, NodeValue], done: Sequence[Rewritten]) -> None:
        self._origins, self._rewritten = origins, origins.folded.graph
        self._alive = set(self._rewritten.nodes)
        self.owner = {node: each for each in done for node in each.added}
        self._shared = self._same_for_all(value_of)
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
            self._stay_near(each, value_of)

    def layer_of(self, made: Rewritten) -> int:
        """Return the number of the layer of the rewrite `made`: that of the last of its results."""
        return max(self.number[each] for each in made.candidate.match.firsts)

    def is_shared(self, node: fx.Node) -> bool:
        """Return True if `node` is the same for every layer that reads it; every symbolic size is."""
        return node in self._shared or isinstance(node.meta.get("val"), torch.SymInt)

    def _same_for_all(self, value_of: Mapping[fx.Node, NodeValue]) -> set[fx.Node]:
        """Collect the nodes that are the same for all layers, and those before all layers that have the value of such a
        node.
        """
        common, numbers = self._origins.common, self._origins.number
        values = {value_of.get(node) for node in common if numbers[node] != BEFORE} - {None}
        return {*common, *(node for node, value in value_of.items() if value in values and numbers[node] == BEFORE)}

    def _memory_of_results(self) -> Iterator[tuple[fx.Node, int]]:
        """Yield the nodes whose memory a layer returns, each with the number of the layer."""
        results = self._origins.folded.results
        number = {place: each for each in self._origins.instances for place in self._origins.layer(each).results}
        given = zip(results, outputs(self._rewritten), strict=True)
        return ((memory_of(node), number[place]) for place, node in given if number.get(place, BEFORE) != BEFORE)

    def _number_of(self, node: fx.Node) -> int:
        """Return the number of the layer of an added node.

        That is the layer which returns its memory, or the last one that its rewrite or its operands belong to. A node
        that reads shared nodes alone is shared itself and gets `BEFORE`, unless it is uninitialised memory or returned.
        """
        returned = self._returned.get(node)
        if not returned and not reserves(node.target) and all(map(self.is_shared, node.all_input_nodes)):
            self._shared.add(node)
            return BEFORE
        own = self.owner.get(node)
        within = [self.number[each] for each in own.candidate.match.firsts] if own else []
        return max(returned or BEFORE, *within, *(self.number[each] for each in node.all_input_nodes))

    # reach of a rewrite ----------------------------------------------------------------------------------------------

    def _stay_near(self, made: Rewritten, value_of: Mapping[fx.Node, NodeValue]) -> None:
        """Require that the rewrite `made` reads nodes of its own layer and of the one before alone.

        What layers accumulate, as a factor 2 in each, depends on their number. Several layers back are allowed where
        the folded graph has the same neighbours as the full one. `value_of` has the values of the nodes.

        Raises:
            NotRepeatedError: it depends on a layer further back.
        """
        number = self.layer_of(made)
        lowest = min(self._seen_by(made, value_of), key=self._origins.order.__getitem__, default=number)
        before = self._origins.order[number] - self._origins.order[lowest]
        if before > 1 and not self._origins.is_real(lowest, number):
            raise NotRepeatedError(f"{made.candidate.match.rule.name} is of what a layer computes before the last one")

    def _seen_by(self, made: Rewritten, value_of: Mapping[fx.Node, NodeValue]) -> Iterator[int]:
        """Yield the layer of each node between the results of the rewrite `made` and the nodes that it reads, these
        included.

        `value_of` has the values of the nodes: a node with the value of one that is read is an end as well.
        """
        read = self._read_by(made)
        values = {value_of[each] for each in read if each in value_of}
        waiting = list(made.candidate.match.makers)
        seen = set(waiting)
        while waiting:
            node = waiting.pop()
            below = [each for each in self._origins.reads[node] if not self.is_shared(each)]
            yield from (self.number[each] for each in below)
            fresh = {each for each in below if value_of.get(each) not in values} - seen - read
            waiting.extend(fresh)
            seen |= fresh

    def _read_by(self, made: Rewritten) -> set[fx.Node]:
        """Collect the original nodes whose values the rewrite `made` reads."""
        original, seen = set[fx.Node](), set(made.added)
        waiting = [each for node in made.added for each in node.all_input_nodes]
        while waiting:
            node = waiting.pop()
            if node in seen:
                continue
            seen.add(node)
            if node in self._origins.number:
                original.add(node)
            elif self._is_result(node):
                original.update(self.owner[node].candidate.match.makers)
            else:
                waiting.extend(node.all_input_nodes)
        return original

    def _is_result(self, node: fx.Node) -> bool:
        """Return True if the added `node` is a result of its rewrite, rather than an operand of its calls.

        Rewrites share operands that are built for their calls, as experts a view of their common input.
        """
        return node in self.owner and set(self.owner[node].added).isdisjoint(node.users)

    # counterparts ----------------------------------------------------------------------------------------------------

    def read(self, node: fx.Node, by: fx.Node, instance: int) -> tuple[fx.Node, int]:
        """Return the node that the copy of the call `by` in the layer `instance` reads instead of `node`, and the layer
        of the returned node.

        `by` is a call in the searched layer that stands for `instance`. A shared node is returned itself.

        Raises:
            NotRepeatedError: the layer next to `instance` has no counterpart.
        """
        as_it_came = node in self._origins.reads.get(by, ())
        if node in self._origins.shared or (self.is_shared(node) and not as_it_came):
            return node, self.number[node]
        return self.located(node, self.number[by], instance)

    def located(self, node: fx.Node, reader: int, instance: int) -> tuple[fx.Node, int]:
        """Return the counterpart of `node` that `instance` reads, and its layer, where the layer `reader` stands for
        `instance`.

        It is as many layers from `instance`, one at most, as `node` is from `reader` in the folded graph.

        Raises:
            NotRepeatedError: the layer next to `instance` has no counterpart.
        """
        number = self.number[node]
        away = self._origins.order[number] - self._origins.order[reader]
        if away == 0:
            return node, instance
        if abs(away) == 1:
            other = self.counterpart(node, self._origins.folded.stand_in[instance + away])
            if other is not None and other in self._alive:
                return other, instance + away
        elif self._origins.is_real(min(number, reader), max(number, reader)):
            return node, number
        raise NotRepeatedError(f"{node} of layer {number} is read by layer {reader}, and nothing corresponds to it")

    def counterpart(self, node: fx.Node, number: int) -> fx.Node | None:
        """Return the node of layer `number` that corresponds to `node`; None if there is none."""
        if self.number[node] == number:
            return node
        if (node, number) not in self._known:
            self._known[node, number] = self._search(node, number)
        return self._known[node, number]

    def _search(self, node: fx.Node, number: int) -> fx.Node | None:
        layers = self._origins.folded.layers
        if layers[self.number[node]].kind != layers[number].kind:
            return None
        if node in self._origins.number:
            return self._origins.same_place(node, number)
        own = self.owner.get(node)
        made = own and next((each for each in self._rewrites[number] if self._is_made_as(own, each)), None)
        return made and next((each for each in made.added if self._does_same(node, each, number)), None)

    def _is_made_as(self, one: Rewritten, other: Rewritten) -> bool:
        """Return True if two rewrites run the same plan at corresponding places."""
        return one.candidate.plan is other.candidate.plan and self._places(one) == self._places(other)

    def _places(self, made: Rewritten) -> list[Hashable]:
        number = self.layer_of(made)
        return [self._origins.relative(each, number) for each in made.candidate.match.firsts]

    def _does_same(self, one: fx.Node, other: fx.Node, number: int) -> bool:
        """Return True if `one` and `other`, nodes added to two layers of one kind, run one call on corresponding
        operands.

        `other` is in layer `number`. Operands in other layers correspond if neither is shared.
        """
        (does, reads), (does_too, reads_too) = described(one), described(other)
        return does == does_too and all(
            each is too or self._is_read_alike(each, too, self.number[one], number)
            for each, too in zip(reads, reads_too, strict=True)
        )

    def _is_read_alike(self, one: fx.Node, other: fx.Node, reader: int, number: int) -> bool:
        if self.number[one] == reader:
            return self.counterpart(one, number) is other
        return not self.is_shared(one) and not self.is_shared(other)
