"""Stage 3, read: what the values of a canonical graph mean, as the readers of the library find it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fusion.errors import Failure
from fusion.failures import culprit, failure
from fusion.graph import Graph
from fusion.language import Reader, ordered


def read(graph: Graph, readers: Sequence[Reader]) -> tuple[Graph, list[Failure]]:
    """The graph with its readings; a reader that raises is left out, and what it raised is told."""
    failures: list[Failure] = []
    for each in ordered(readers):
        try:
            graph = replace(graph, readings=graph.readings.joined(list(each.read(graph))))
        except Exception as error:
            node = culprit(error) or graph.source.output_node()
            failures.append(failure("read", error, each.name, node))
    return graph, failures
