"""Stage 5, select: the disjoint set of rewrites that saves most, found within each group of overlapping candidates."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from typing import TYPE_CHECKING

from fusion.graph import Graph
from fusion.records import Candidate

if TYPE_CHECKING:
    import networkx as nx  # half a second to import: only where a model is fused

LEAST = 1e-6  # microseconds; less is the rounding of sums, and the pass would replace a node by its like for ever
TIE = 0.25  # microseconds below which two covers cost the same: the cost model knows no better
EXACT = 10  # candidates in one group up to which every cover is tried


def select(candidates: Sequence[Candidate], graph: Graph, fuel: int | None = None) -> list[Candidate]:
    """Return the chosen candidates in the order of the graph; `fuel` limits how many."""
    useful = [each for each in candidates if each.benefit > LEAST]
    chosen = _best(useful)
    while (waiting := _in_circle(chosen, graph)) is not None:
        useful.remove(waiting)
        chosen = _best(useful)
    return chosen if fuel is None else chosen[:fuel]


def _best(useful: Sequence[Candidate]) -> list[Candidate]:
    import networkx as nx

    overlaps: nx.Graph[int] = nx.Graph()
    overlaps.add_nodes_from(range(len(useful)))
    overlaps.add_edges_from(_overlapping(useful))
    covers = [_cover(group, useful, overlaps) for group in nx.connected_components(overlaps)]
    return [useful[number] for number in sorted(number for cover in covers for number in cover)]


def _in_circle(chosen: Sequence[Candidate], graph: Graph) -> Candidate | None:
    """The least useful of some calls with several results that would wait for each other; None where none do."""
    import networkx as nx

    needs: nx.DiGraph[int] = nx.DiGraph()
    for left, right in _interleaved(chosen, graph):
        if _waits(chosen[left], chosen[right], graph):
            needs.add_edge(left, right)
        if _waits(chosen[right], chosen[left], graph):
            needs.add_edge(right, left)
    circles = [circle for circle in nx.strongly_connected_components(needs) if len(circle) > 1]
    return min((chosen[number] for circle in circles for number in sorted(circle)), key=_benefit, default=None)


def _benefit(candidate: Candidate) -> float:
    return candidate.benefit


def _interleaved(chosen: Sequence[Candidate], graph: Graph) -> list[tuple[int, int]]:
    """Pairs of candidates with several results that overlap in the order of the graph: only they can be a circle."""
    spans = {
        number: sorted(graph.order[node] for makers in each.match.roots for node in makers)
        for number, each in enumerate(chosen)
        if len(each.match.roots) > 1
    }
    ordered = sorted(spans, key=lambda number: spans[number][0])
    pairs: list[tuple[int, int]] = []
    for position, left in enumerate(ordered):
        for right in ordered[position + 1 :]:
            if spans[right][0] > spans[left][-1]:
                break
            pairs.append((left, right))
    return pairs


def _waits(candidate: Candidate, other: Candidate, graph: Graph) -> bool:
    return any(graph.depends(makers[0], first[0]) for makers in candidate.match.roots for first in other.match.roots)


def _overlapping(candidates: Sequence[Candidate]) -> list[tuple[int, int]]:
    """Pairs of which one replaces a node that the other replaces or needs no more."""
    by_node: dict[object, list[int]] = {}
    roots = [{node for makers in each.match.roots for node in makers} for each in candidates]
    for number, each in enumerate(candidates):
        for node in each.dying:
            by_node.setdefault(node, []).append(number)
    pairs: set[tuple[int, int]] = set()
    for number, own in enumerate(roots):
        for node in own:
            pairs |= {(min(number, other), max(number, other)) for other in by_node[node] if other != number}
    return sorted(pairs)


def _worth(cover: Sequence[int], candidates: Sequence[Candidate]) -> float:
    return sum(candidates[number].benefit for number in cover)


def _size(cover: Sequence[int], candidates: Sequence[Candidate]) -> int:
    """How many user's calls each new one stands for: among covers that save the same the larger fusion wins."""
    return sum(len(candidates[number].dying) - 1 for number in cover)


def _cover(group: set[int], candidates: Sequence[Candidate], overlaps: nx.Graph[int]) -> list[int]:
    members = sorted(group)
    if len(members) == 1:
        return members
    if len(members) > EXACT:
        return _greedy(members, candidates, overlaps)
    covers = [
        cover
        for count in range(1, len(members) + 1)
        for cover in combinations(members, count)
        if not any(overlaps.has_edge(*pair) for pair in combinations(cover, 2))
    ]
    best = max(_worth(cover, candidates) for cover in covers)
    good = [cover for cover in covers if _worth(cover, candidates) >= best - TIE]
    return list(max(good, key=lambda cover: (_size(cover, candidates), _worth(cover, candidates))))


def _greedy(members: Sequence[int], candidates: Sequence[Candidate], overlaps: nx.Graph[int]) -> list[int]:
    chosen: list[int] = []
    for number in sorted(members, key=lambda each: candidates[each].benefit, reverse=True):
        if not any(overlaps.has_edge(number, other) for other in chosen):
            chosen.append(number)
    return chosen
