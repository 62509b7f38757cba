"""Stage 3, read: what the values of a canonical graph mean, as the readers of the library find it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fusion.errors import Failure
from fusion.graph import Found, Graph, Reading
from fusion.language import Reader, ordered
from fusion.report.failures import culprit, failure


def read(graph: Graph, readers: Sequence[Reader]) -> tuple[Graph, list[Failure]]:
    """The graph with its readings; a reader that raises is left out, and what it raised is told."""
    failures: list[Failure] = []
    for each in ordered(readers):
        try:
            graph = replace(graph, readings=graph.readings.joined(_checked(each, each.read(graph))))
        except Exception as error:
            node = culprit(error) or graph.source.output_node()
            failures.append(failure("read", error, each.name, node))
    return graph, failures


def _checked(reader: Reader, found: Iterable[Found]) -> Iterator[Found]:
    """Pass on what a reader gives, if it is applied to what its words declare."""
    words = {each.name: each for each in reader.words}
    for value, reading in found:
        if isinstance(reading, Reading) and reading.op in words:
            words[reading.op].require(lambda: f"reader {reader.name} gives", reading.captures)
        yield value, reading
