"""Stage 6, select: the disjoint set of rewrites that saves most, found within each group of overlapping candidates."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import permutations
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.fx as fx

from fusion.graph import Graph
from fusion.records import LEAST_BENEFIT, TIE, Candidate

if TYPE_CHECKING:
    import networkx as nx  # half a second to import: only where a model is fused

Overlaps = Mapping[int, Set[int]]
"""For every option those that it excludes."""
MOST = 1024
"""Ways to cover the graph so far that are followed at once, the best of them: with no more a cover is exact."""
_UNIT = 1e-9  # microseconds: sums of whole numbers are the same in whatever order


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
    """Count the launches that candidates, and those for which they stand, save in all.

    What several of them make is made once, and each of them counts it.
    """
    makers = Counter[Any]()
    alone = dict[Any, int]()
    for each in cover:
        for part, made in each.made.items():
            makers[part] += each.times
            alone[part] = max(each.times // made.alike, alone.get(part, 0))
    launched = {part: made.launches for each in cover for part, made in each.made.items()}
    again = sum((makers[part] - alone[part]) * count for part, count in launched.items())
    return sum(each.launches * each.times for each in cover) + again


def _is_sure(candidate: Candidate) -> bool:
    return candidate.benefit - candidate.surplus - candidate.further > LEAST_BENEFIT


def _settled(useful: Sequence[_Option], graph: Graph) -> list[Candidate]:
    """The best cover in which no calls wait for each other."""
    chosen = _best(useful, graph)
    while waiting := _in_circles(chosen, graph):
        useful = [each for each in useful if not any(member in waiting for member in each.members)]
        chosen = _best(useful, graph)
    return chosen


def _option(candidate: Candidate) -> _Option:
    members = (candidate,) if candidate.needs is None else (candidate.needs, candidate)
    return _Option(
        members,
        frozenset(node for each in members for node in each.match.makers),
        frozenset[fx.Node]().union(*(each.dying for each in members)),
        sum(each.benefit for each in members),
    )


def _best(useful: Sequence[_Option], graph: Graph) -> list[Candidate]:
    overlaps = _overlapping(useful)
    covers = [_cover(group, useful, overlaps, graph) for group in _parts(overlaps)]
    numbers = sorted(number for cover in covers for number in cover)
    return [member for number in numbers for member in useful[number].members]


def _in_circles(chosen: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """List of each circle of calls that would wait for each other the least useful one."""
    import networkx as nx

    needs: nx.DiGraph[int] = nx.DiGraph()
    late = [_read_later(each, graph) for each in chosen]
    for pair in _interleaved(chosen, late, graph):
        needs.add_edges_from(
            (one, other) for one, other in permutations(pair) if _waits(chosen[one], late[one], chosen[other], graph)
        )
    circles = [circle for circle in nx.strongly_connected_components(needs) if len(circle) > 1]
    return [chosen[min(circle, key=lambda number: (chosen[number].benefit, number))] for circle in circles]


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


def _parts(overlaps: Overlaps) -> list[frozenset[int]]:
    """Group the options that overlap, directly or by way of others, in the order of the first of each group."""
    left, parts = set(overlaps), list[frozenset[int]]()
    for first in sorted(overlaps):
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


def _cover(group: frozenset[int], options: Sequence[_Option], overlaps: Overlaps, graph: Graph) -> list[int]:
    """Choose options of a group, no two of which overlap, that save most together.

    Among covers that save the same the larger fusions win: a new call counts a little for each of the user's calls for
    which it stands.
    """
    if len(group) == 1:
        return list(group)
    sizes = {number: len(options[number].dying) - 1 for number in group}
    every = sum(sizes.values()) or 1
    worth = {number: round((options[number].benefit + TIE * size / every) / _UNIT) for number, size in sizes.items()}
    start = {number: min(graph.order[node] for node in options[number].dying) for number in group}
    return _swept(sorted(group, key=lambda number: (start[number], number)), worth, overlaps)


class _Way(NamedTuple):
    """A choice among the options so far: what it saves, and its options, the last with those before it."""

    worth: int = 0
    cover: tuple[int, Any] | None = None


def _swept(numbers: Sequence[int], worth: Mapping[int, int], overlaps: Overlaps) -> list[int]:
    """Choose among options in the order of the graph, by the best way to each set of those that exclude later ones.

    However long a group is, only a few of its options overlap at once. Of ways that save the same the first wins.
    """
    place = {number: place for place, number in enumerate(numbers)}
    last = {number: max(place[each] for each in (number, *overlaps[number])) for number in numbers}
    ways = {frozenset[int](): _Way()}
    for at, number in enumerate(numbers):
        further: dict[frozenset[int], _Way] = {}
        for chosen, way in ways.items():
            left = frozenset(each for each in chosen if last[each] > at)
            offers = [(left, way)]
            if chosen.isdisjoint(overlaps[number]):
                taken = left | {number} if last[number] > at else left
                offers.append((taken, _Way(way.worth + worth[number], (number, way.cover))))
            for key, offer in offers:
                if key not in further or offer.worth > further[key].worth:
                    further[key] = offer
        most = sorted(further.items(), key=lambda each: each[1].worth, reverse=True)[:MOST]
        ways = dict(most)
    cover, found = ways[frozenset()].cover, list[int]()
    while cover is not None:
        number, cover = cover
        found.append(number)
    return found
