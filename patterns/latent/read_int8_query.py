"""Queries of attention over a latent that come from a W8A8 layer, or in floats before they are quantised themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from fusion import reader
from fusion.analysis.row_layout import uncast
from fusion.graph import Algebra, Found, Graph, Reading, Readings, Value
from patterns.latent.read import absorption, as_turned, placed, pulled, query_sources, rotations, sources
from patterns.latent.words import LAYER_LANES, LAYER_QUERY


@reader(
    gives=(LAYER_QUERY, LAYER_LANES),
    refines=("absorbed_query", "head_lanes"),
    needs=(
        "int8_matmul",
        "latent_queries",
        "int8_latent_attention",
        "int8_probability_attention",
        "folded_query",
        "quantise",
        "rotation",
    ),
)
def int8_queries(graph: Graph) -> Iterator[Found]:
    """Where the parts of latent queries come from, of a W8A8 layer or of one in floats that is not read yet."""
    layers = {value.below("cast", "reshape"): value for value, _ in graph.readings.all("int8_matmul")}
    known = {each.captures["absorbed"] for _, each in graph.readings.all("latent_queries")}
    a = graph.algebra
    for absorbed, rotated in _queries(graph.readings):
        factors = absorption(a, absorbed)
        if factors is None:
            continue
        turned = rotations(a, graph.readings, rotated)
        of_layer = list(_of_query(a, layers, absorbed, factors, turned)) if layers else []
        in_floats = {} if absorbed in known else query_sources(a, *factors, absorbed, turned)
        yield from of_layer or in_floats.items()


def _queries(found: Readings) -> list[tuple[Value, Value]]:
    """Absorbed and rotated queries of every attention over a latent, in floats or before they were quantised."""
    queries = [each.captures for _, each in found.all("latent_queries")]
    pairs = [(each["absorbed"], each["rope"]) for each in queries]
    for _, attention in found.all("int8_latent_attention"):
        quantised = _quantised(found, attention.captures["query"], "dynamic")
        folded = found.one(attention.captures["rope"], "folded_query")
        if quantised is not None and folded is not None:
            pairs.append((quantised.captures["x"], folded.captures["rope"]))
    for _, attention in found.all("int8_probability_attention"):
        quantised = _quantised(found, attention.captures["query"], "head")
        if quantised is not None:
            pairs.append((quantised.captures["x"], attention.captures["rope"]))
    return pairs


def _quantised(found: Readings, query: Value, scheme: str) -> Reading | None:
    return next((each for each in found.of(query, "quantise") if each.captures["scheme"] == scheme), None)


def _of_query(
    a: Algebra, layers: Mapping[Value, Value], absorbed: Value, factors: tuple[Value, Value], turned: Sequence[Reading]
) -> Iterator[tuple[Value, Reading]]:
    """Where both parts come from; lanes that are multiplied by a number are those of the layer times that number."""
    (nope, up), heads, rows = factors, absorbed.shape[1], absorbed.shape[2]
    of = _lanes(a, nope, heads, rows, layers)
    if of is not None and (of.pop("heads_first") or rows == 1):
        yield as_turned(a, absorbed, turned), Reading("layer_query", {**of, "up": up})
    for rotation in turned:
        x = uncast(a, rotation.captures["x"], nope.dtype)
        lanes = _lanes(a, x, heads, rows, layers)
        if lanes is not None:
            yield x, Reading("layer_lanes", lanes)


def _lanes(a: Algebra, value: Value, heads: Any, rows: Any, layers: Mapping[Value, Value]) -> dict[str, Any] | None:
    """The layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] holds some lanes of every head."""
    if value.rank == 3:
        found = _lanes(a, a.reshape(value, (value.shape[0], 1, *value.shape[1:])), heads, 1, layers)
        return None if found is None else {**found, "heads_first": False}
    value, number = pulled(a, value)
    count = value.shape[-1] if value.rank == 4 else None
    if not isinstance(count, int) or not isinstance(heads, int):
        return None
    below = (each.below("cast", "reshape") for each in sources(value))
    layer = next((layers[each] for each in below if each in layers), None)
    size = None if layer is None else layer.shape[-1]
    if layer is None or not isinstance(size, int) or size % heads or prod(layer.shape[:-1]) != value.shape[0] * rows:
        return None
    width = size // heads
    place = placed(a, value, a.reshape(layer, (value.shape[0], rows, heads, width)))
    if place is None:
        return None
    start, heads_first = place
    return {"layer": a.scale(layer, number), "width": width, "start": start, "heads_first": heads_first}
