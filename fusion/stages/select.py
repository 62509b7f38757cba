"""Stage 6, select: the disjoint set of rewrites that saves most, found within each group of overlapping candidates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from itertools import permutations
from typing import TYPE_CHECKING

import torch.fx as fx

from fusion.graph import Graph
from fusion.records import LEAST_BENEFIT, TIE, Candidate

if TYPE_CHECKING:
    import networkx as nx  # half a second to import: only where a model is fused

Overlaps = Mapping[int, Set[int]]
"""For every option those that it excludes."""
EXACT = 4096  # parts of one group that are solved exactly; those that are left are covered greedily


@dataclass(frozen=True, eq=False)
class _Option:
    """Candidates that are chosen together: one, or one with the other that it needs."""

    members: tuple[Candidate, ...]
    roots: frozenset[fx.Node]
    dying: frozenset[fx.Node]
    benefit: float


def select(candidates: Sequence[Candidate], graph: Graph, fuel: int | None = None) -> list[Candidate]:
    """Return the chosen candidates in the order of the graph; `fuel` limits how many, none without what it needs.

    Attention of PyTorch's own and arithmetic of complex numbers are priced as the kernels that they are decomposed
    into, and a machine may run each as one; figures of cost are no measurements. So a graph that would make more calls
    than the model does has only those in their place that are worth it even there, and by as much again as the further
    calls cost, if so it makes fewer.
    """
    options = [_option(each) for each in candidates]
    useful = [each for each in options if all(member.benefit > LEAST_BENEFIT for member in each.members)]
    chosen = _settled(useful, graph)
    if _saved(chosen) < 0:
        sure = [each for each in useful if all(map(_is_sure, each.members))]
        chosen = max(chosen, _settled(sure, graph), key=_saved)
    return chosen[:fuel]  # what a candidate needs stands right before it


def _saved(cover: Sequence[Candidate]) -> int:
    """How many launches candidates save together: what several make, each of them counts."""
    makers = Counter(part for each in cover for part in each.made)
    launched = {part: count for each in cover for part, count in each.made.items()}
    shared = sum((makers[part] - 1) * count for part, count in launched.items())
    return sum(each.launches for each in cover) + shared


def _is_sure(candidate: Candidate) -> bool:
    return candidate.benefit - candidate.surplus - candidate.further > LEAST_BENEFIT


def _settled(useful: Sequence[_Option], graph: Graph) -> list[Candidate]:
    """The best cover in which no calls wait for each other."""
    chosen = _best(useful)
    while (waiting := _in_circle(chosen, graph)) is not None:
        useful = [each for each in useful if waiting not in each.members]
        chosen = _best(useful)
    return chosen


def _option(candidate: Candidate) -> _Option:
    members = (candidate,) if candidate.needs is None else (candidate.needs, candidate)
    return _Option(
        members,
        frozenset(node for each in members for node in each.match.makers),
        frozenset[fx.Node]().union(*(each.dying for each in members)),
        sum(each.benefit for each in members),
    )


def _best(useful: Sequence[_Option]) -> list[Candidate]:
    overlaps = _overlapping(useful)
    covers = [_cover(group, useful, overlaps) for group in _parts(overlaps, overlaps)]
    numbers = sorted(number for cover in covers for number in cover)
    return [member for number in numbers for member in useful[number].members]


def _in_circle(chosen: Sequence[Candidate], graph: Graph) -> Candidate | None:
    """The least useful of some calls that would wait for each other; None where none do."""
    import networkx as nx

    needs: nx.DiGraph[int] = nx.DiGraph()
    late = [_read_later(each, graph) for each in chosen]
    for pair in _interleaved(chosen, late, graph):
        needs.add_edges_from(
            (one, other) for one, other in permutations(pair) if _waits(chosen[one], late[one], chosen[other], graph)
        )
    circles = [circle for circle in nx.strongly_connected_components(needs) if len(circle) > 1]
    waiting = (chosen[number] for circle in circles for number in sorted(circle))
    return min(waiting, key=lambda each: each.benefit, default=None)


def _read_later(candidate: Candidate, graph: Graph) -> list[fx.Node]:
    """What a candidate reads where it stands behind the first of its results."""
    first = min(graph.order[node] for node in candidate.match.firsts)
    values = candidate.plan.tensors(candidate.match).values()
    return [node for value in values for node in graph.reads(value) if graph.order[node] > first]


def _interleaved(chosen: Sequence[Candidate], late: Sequence[Sequence[fx.Node]], graph: Graph) -> list[tuple[int, int]]:
    """Pairs of candidates with several results, or that read what stands behind theirs, which overlap in the order of
    the graph: only they can be a circle.
    """
    spans = {
        number: sorted(graph.order[node] for node in (*each.match.makers, *late[number]))
        for number, each in enumerate(chosen)
        if len(each.match.roots) > 1 or late[number]
    }
    ordered = sorted(spans, key=lambda number: spans[number][0])
    pairs: list[tuple[int, int]] = []
    for position, left in enumerate(ordered):
        for right in ordered[position + 1 :]:
            if spans[right][0] > spans[left][-1]:
                break
            pairs.append((left, right))
    return pairs


def _waits(candidate: Candidate, late: Sequence[fx.Node], other: Candidate, graph: Graph) -> bool:
    waiting = (*candidate.match.firsts, *late)
    return any(graph.depends(one, another) for one in waiting for another in other.match.firsts)


def _overlapping(options: Sequence[_Option]) -> Overlaps:
    """For each option those that replace a node which it replaces or needs no more, or the other way round."""
    by_node: dict[object, list[int]] = defaultdict(list)
    for number, each in enumerate(options):
        for node in each.dying:
            by_node[node].append(number)
    found: dict[int, set[int]] = {number: set() for number in range(len(options))}
    for number, each in enumerate(options):
        for other in {other for node in each.roots for other in by_node[node]} - {number}:
            found[number].add(other)
            found[other].add(number)
    return found


def _parts(group: Collection[int], overlaps: Overlaps) -> list[frozenset[int]]:
    """Options of a group that overlap, directly or by way of others of it, in the order of the first of each part."""
    left, parts = set(group), list[frozenset[int]]()
    for first in sorted(group):
        part, waiting = set[int](), [first]
        while waiting:
            number = waiting.pop()
            if number in left:
                left.remove(number)
                part.add(number)
                waiting.extend(overlaps[number])
        if part:
            parts.append(frozenset(part))
    return parts


def _cover(group: frozenset[int], options: Sequence[_Option], overlaps: Overlaps) -> list[int]:
    """Options of a group, no two of which overlap, that save most together."""
    if len(group) == 1:
        return list(group)
    sizes = {number: len(options[number].dying) - 1 for number in group}
    every = sum(sizes.values()) or 1
    worth = {number: options[number].benefit + TIE * size / every for number, size in sizes.items()}
    return _Search(worth, overlaps).best(group)


@dataclass
class _Search:
    """Branches at the option that overlaps most others; what then falls apart is solved part by part, once each.

    Attributes:
        worth: what each option saves, with a little for how many of the user's calls a new one stands for: among
            covers that save the same the larger fusion wins.
        overlaps: the options that exclude each other.
        solved: the parts that were solved.
    """

    worth: Mapping[int, float]
    overlaps: Overlaps
    solved: dict[frozenset[int], list[int]] = field(default_factory=dict[frozenset[int], list[int]])

    def best(self, group: frozenset[int]) -> list[int]:
        """The best cover of a group; once too many parts were tried, a greedy one."""
        return [number for part in _parts(group, self.overlaps) for number in self._of_part(part)]

    def _of_part(self, part: frozenset[int]) -> list[int]:
        if len(part) == 1:
            return list(part)
        if part not in self.solved:
            self.solved[part] = self._greedy(part) if len(self.solved) >= EXACT else self._branched(part)
        return self.solved[part]

    def _branched(self, part: frozenset[int]) -> list[int]:
        others = {number: part.intersection(self.overlaps[number]) for number in part}
        pivot = max(sorted(part), key=lambda number: len(others[number]))
        taken = [pivot, *self.best(part - others[pivot] - {pivot})]
        left = self.best(part - {pivot})
        return taken if self._sum(taken) >= self._sum(left) else left

    def _greedy(self, part: frozenset[int]) -> list[int]:
        chosen: list[int] = []
        for number in sorted(sorted(part), key=lambda each: self.worth[each], reverse=True):
            if self.overlaps[number].isdisjoint(chosen):
                chosen.append(number)
        return chosen

    def _sum(self, cover: Sequence[int]) -> float:
        return sum(self.worth[number] for number in cover)
