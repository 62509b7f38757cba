"""Layout of a graph of launches: rows by the longest path, ordered by the barycentres of their neighbours."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import networkx as nx

from fusion.report.trace import Call

HEIGHT = 22
"""Height of a box in pixels."""
_ROW, _GAP, _PASS = 40, 8, 10  # pixels from row to row, between boxes, and for an edge that passes a row
_LETTER, _MARGIN = 6.5, 58  # pixels of a letter, and around a name with its microseconds
_SWEEPS = 6


@dataclass(frozen=True)
class Box:
    """A launch, the position of its upper left corner, and its width."""

    call: Call
    x: float
    y: float
    width: float


@dataclass(frozen=True)
class Drawing:
    """Boxes of launches, and the SVG paths of the edges between them, with the size of all in pixels."""

    boxes: tuple[Box, ...]
    edges: tuple[str, ...]
    width: float
    height: float


def drawn(calls: Sequence[Call]) -> Drawing:
    """Lay out the launches among `calls`, from top to bottom."""
    launches = {each.name: each for each in calls if each.is_launch}
    graph = _graph(calls, launches)
    rows = _rows(graph, launches)
    _order(graph, rows)
    half = {node: _width(launches[node]) / 2 if isinstance(node, str) else _PASS / 2 for row in rows for node in row}
    x = _columns(graph, rows, half)
    y = {node: _ROW * rank for rank, row in enumerate(rows) for node in row}
    boxes = tuple(Box(call, x[name] - half[name], y[name], 2 * half[name]) for name, call in launches.items())
    edges = tuple(_path(x, y, source, target) for source, target in graph.edges)
    width = max((x[node] + half[node] for node in x), default=0.0)
    return Drawing(boxes, edges, width + _GAP, _ROW * len(rows))


def _graph(calls: Sequence[Call], launches: Mapping[str, Call]) -> nx.DiGraph[Hashable]:
    """Build the graph of `launches` by what they read, directly or through other calls."""
    near: dict[str, list[str]] = {}
    graph: nx.DiGraph[Hashable] = nx.DiGraph()
    for call in calls:
        reads = list(dict.fromkeys(name for each in call.reads for name in near.get(each, ())))
        near[call.name] = [call.name] if call.is_launch else reads
        if call.name in launches:
            graph.add_node(call.name)
            graph.add_edges_from((each, call.name) for each in reads)
    return graph


def _rows(graph: nx.DiGraph[Hashable], launches: Mapping[str, Call]) -> list[list[Hashable]]:
    """Rank the nodes of `graph` by the longest path to them, and split edges at each row that they pass."""
    rank = {node: depth for depth, row in enumerate(nx.topological_generations(graph)) for node in row}
    for node in [each for each in graph if not graph.pred[each] and graph.succ[each]]:
        rank[node] = min(rank[each] for each in graph.succ[node]) - 1
    rows: list[list[Hashable]] = [[] for _ in range(max(rank.values(), default=-1) + 1)]
    for node in launches:
        rows[rank[node]].append(node)
    for source, target in list(graph.edges):
        passed = [(source, target, each) for each in range(rank[source] + 1, rank[target])]
        if passed:
            graph.remove_edge(source, target)
            nx.add_path(graph, [source, *passed, target])
        for each in passed:
            rows[each[2]].append(each)
    return rows


def _order(graph: nx.DiGraph[Hashable], rows: Sequence[list[Hashable]]) -> None:
    """Sort each of `rows` by the mean place of the neighbours of its nodes, downwards and upwards in turn."""
    place = {node: index for row in rows for index, node in enumerate(row)}
    for sweep in range(_SWEEPS):
        downwards = sweep % 2 == 0
        near = graph.pred if downwards else graph.succ
        for row in rows if downwards else reversed(rows):
            row.sort(key=lambda node, near=near: fmean([place[each] for each in near[node]] or [place[node]]))
            place |= {node: index for index, node in enumerate(row)}


def _width(call: Call) -> float:
    return round(_LETTER * len(call.op) + _MARGIN)


def _columns(
    graph: nx.DiGraph[Hashable], rows: Sequence[Sequence[Hashable]], half: Mapping[Hashable, float]
) -> dict[Hashable, float]:
    """Return the centre of each node in pixels: near those that it reads, as far as its row has room.

    `half` has half of the width of each.
    """
    x: dict[Hashable, float] = {}
    for row in rows:
        wanted = [fmean([x[each] for each in graph.pred[node]] or [0.0]) for node in row]
        placed: list[float] = []
        for node, want in zip(row, wanted, strict=True):
            before = row[len(placed) - 1] if placed else None
            room = half[before] + half[node] + _GAP if before is not None else 0.0
            placed.append(max(want, placed[-1] + room) if placed else want)
        shift = fmean(want - got for want, got in zip(wanted, placed, strict=True))
        x |= {node: got + shift for node, got in zip(row, placed, strict=True)}
    left = min((each - half[node] for node, each in x.items()), default=0.0)
    return {node: each - left + _GAP / 2 for node, each in x.items()}


def _path(x: Mapping[Hashable, float], y: Mapping[Hashable, float], source: Hashable, target: Hashable) -> str:
    """Write the SVG path from `source` to `target`, neighbours in rows."""
    start = y[source] + (HEIGHT if isinstance(source, str) else HEIGHT / 2)
    end = y[target] + (0 if isinstance(target, str) else HEIGHT / 2)
    bend = (start + end) / 2
    return (
        f"M{x[source]:.0f} {start:.0f}C{x[source]:.0f} {bend:.0f} {x[target]:.0f} {bend:.0f} {x[target]:.0f} {end:.0f}"
    )
