"""Stage select: choose the disjoint rewrites that save most, exactly within each group of overlapping ones."""

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
    import networkx as nx  # imported where it is used: that takes half a second

Overlaps = Mapping[int, Set[int]]
"""By the index of each option, the indices of the options that it excludes."""
MOST = 1024
"""Greatest number of partial covers that `_swept` keeps: with more of them the result may not be the best."""
_UNIT = 1e-9  # microseconds; benefits are summed as integers, which is exact in any order


@dataclass(frozen=True, eq=False)
class _Option:
    """Candidates that are chosen jointly: one alone, or one with the candidates that it needs in turn."""

    members: tuple[Candidate, ...]
    roots: frozenset[fx.Node]
    dying: frozenset[fx.Node]
    benefit: float


def select(candidates: Sequence[Candidate], graph: Graph, fuel: int | None = None) -> list[Candidate]:
    """Return the chosen candidates in the order of the graph, at most `fuel`, each behind the one that it needs.

    The cost model prices torch's own attention and complex arithmetic as the kernels that they decompose into, although
    a machine may run each as one kernel, and its figures are estimates. So where the best cover makes more launches
    than the model, it competes, by launches saved, with the best cover of the candidates that pay even without that
    surplus.
    """
    options = [_option(each) for each in candidates]
    useful = [each for each in options if all(member.benefit > LEAST_BENEFIT for member in each.members)]
    chosen = _settled(useful, graph)
    if _saved(chosen) < 0:
        sure = [each for each in useful if all(map(_is_sure, each.members))]
        chosen = max(chosen, _settled(sure, graph), key=_saved)
    return chosen[:fuel]  # a needed candidate comes right before the one that needs it


def _saved(cover: Sequence[Candidate]) -> int:
    """Count the launches that the candidates of `cover` save, times the equal layers for which each stands.

    A call that several candidates share is made once, but counted as made by each of them: the difference is added
    back.
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
    """Return True if `candidate` pays without its surplus and with its further launches priced twice."""
    return candidate.benefit - candidate.surplus - candidate.further > LEAST_BENEFIT


def _settled(useful: Sequence[_Option], graph: Graph) -> list[Candidate]:
    """Return the best cover without a cycle of calls that depend on each other.

    While the best cover has cycles, the least useful member of each is excluded.
    """
    chosen = _best(useful, graph)
    while waiting := _in_cycles(chosen, graph):
        useful = [each for each in useful if not any(member in waiting for member in each.members)]
        chosen = _best(useful, graph)
    return chosen


def _option(candidate: Candidate) -> _Option:
    members = (candidate,)
    while members[0].needs is not None:
        members = (members[0].needs, *members)
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


def _in_cycles(chosen: Sequence[Candidate], graph: Graph) -> list[Candidate]:
    """List for each cycle of calls that would depend on each other the candidate of least benefit."""
    import networkx as nx

    needs: nx.DiGraph[int] = nx.DiGraph()
    late = [_read_later(each, graph) for each in chosen]
    for pair in _interleaved(chosen, late, graph):
        needs.add_edges_from(
            (one, other) for one, other in permutations(pair) if _waits(chosen[one], late[one], chosen[other], graph)
        )
    cycles = [cycle for cycle in nx.strongly_connected_components(needs) if len(cycle) > 1]
    return [chosen[min(cycle, key=lambda number: (chosen[number].benefit, number))] for cycle in cycles]


def _read_later(candidate: Candidate, graph: Graph) -> list[fx.Node]:
    """List the nodes that `candidate` reads and that are behind its first result in graph order."""
    first = min(graph.order[node] for node in candidate.match.firsts)
    values = candidate.plan.tensors(candidate.match).values()
    return [node for value in values for node in graph.reads(value) if graph.order[node] > first]


def _interleaved(chosen: Sequence[Candidate], late: Sequence[Sequence[fx.Node]], graph: Graph) -> list[tuple[int, int]]:
    """List the pairs of indices of candidates whose spans in graph order overlap: only they can form a cycle.

    A span reaches from the first to the last node among the results and the nodes of `late`, which are read behind the
    first result. Candidates with one result and no such nodes are skipped.
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
    """Return True if `candidate`, with the nodes `late` that it reads, depends on a result of `other`."""
    waiting = (*candidate.match.firsts, *late)
    return any(graph.depends(one, another) for one in waiting for another in other.match.firsts)


def _overlapping(options: Sequence[_Option]) -> Overlaps:
    """Map each option to those that it excludes.

    Two options exclude each other if one replaces a node that the other replaces or makes dead.
    """
    by_node: dict[object, list[int]] = defaultdict(list)
    for number, each in enumerate(options):
        for node in each.dying:
            by_node[node].append(number)
    excluded: dict[int, set[int]] = {number: set() for number in range(len(options))}
    for number, each in enumerate(options):
        for other in {other for node in each.roots for other in by_node[node]} - {number}:
            excluded[number].add(other)
            excluded[other].add(number)
    return excluded


def _parts(overlaps: Overlaps) -> list[frozenset[int]]:
    """Split the options into connected components of `overlaps`, ordered by their first member."""
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
    """Choose from `group` the disjoint options that save most in sum.

    Among covers that save the same larger fusions win: each call of the user that dies adds a fraction of `TIE`.
    """
    if len(group) == 1:
        return list(group)
    sizes = {number: len(options[number].dying) - 1 for number in group}
    every = sum(sizes.values()) or 1
    worth = {number: round((options[number].benefit + TIE * size / every) / _UNIT) for number, size in sizes.items()}
    start = {number: min(graph.order[node] for node in options[number].dying) for number in group}
    return _swept(sorted(group, key=lambda number: (start[number], number)), worth, overlaps)


class _Way(NamedTuple):
    """A partial cover: its worth, and its options as a linked list, the last one first."""

    worth: int = 0
    cover: tuple[int, Any] | None = None


def _swept(numbers: Sequence[int], worth: Mapping[int, int], overlaps: Overlaps) -> list[int]:
    """Choose the disjoint options of greatest worth by dynamic programming over `numbers`, which are in graph order.

    The state is the set of chosen options that still exclude later ones; per state the best partial cover survives.
    However long a group is, only a few of its options overlap at once. Of partial covers with equal worth the first
    wins.
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
    cover, chosen_numbers = ways[frozenset()].cover, list[int]()
    while cover is not None:
        number, cover = cover
        chosen_numbers.append(number)
    return chosen_numbers
