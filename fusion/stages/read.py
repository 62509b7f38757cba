"""Stage read: add to a canonical graph the readings that the readers of the library find."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from fusion.errors import Failure
from fusion.graph import Annotation, Graph, Reading
from fusion.language import Reader, ordered
from fusion.report.failures import culprit, failure


def read(graph: Graph, readers: Sequence[Reader]) -> tuple[Graph, list[Failure]]:
    """Run `readers`, each behind those that it depends on; return `graph` with all readings, and the failures.

    A reader that raises adds no reading; its error becomes a `Failure`.
    """
    failures: list[Failure] = []
    for each in ordered(readers):
        try:
            graph = replace(graph, readings=graph.readings.joined(_checked(each, each.read(graph)), each.supersedes))
        except Exception as error:
            node = culprit(error) or graph.source.output_node()
            failures.append(failure("read", error, each.name, node))
    return graph, failures


def _checked(reader: Reader, results: Iterable[Annotation]) -> Iterator[Annotation]:
    """Yield the pairs (value, reading or miss) of `results`.

    Raise where a reading has other captures than the word of `reader` for it declares.
    """
    words = {each.name: each for each in reader.words}
    for value, reading in results:
        if isinstance(reading, Reading) and reading.op in words:
            words[reading.op].require(lambda: f"reader {reader.name} gives", reading.captures)
        yield value, reading
