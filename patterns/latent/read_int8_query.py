"""Queries of attention over a latent that come from a W8A8 layer, or in floats before they are quantised themselves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from math import prod
from typing import Any

from fusion import reader
from fusion.graph import Algebra, Found, Graph, Reading, Readings, Value
from patterns.latent import read as floats
from patterns.latent.words import LAYER_LANES, LAYER_QUERY

_QUERIES = ("latent_queries", "int8_latent_attention", "int8_probability_attention", "folded_query")


@reader(
    gives=(LAYER_QUERY, LAYER_LANES),
    refines=("absorbed_query", "head_lanes"),
    needs=(*_QUERIES, "int8_matmul", "quantise", "rotation"),
)
def int8_queries(graph: Graph) -> Iterator[Found]:
    """Where the parts of latent queries come from, of a W8A8 layer or of one in floats that is not read yet."""
    layers = {value.below("cast", "reshape"): value for value, _ in graph.readings.all("int8_matmul")}
    known = {each.captures["absorbed"] for _, each in graph.readings.all("latent_queries")}
    a = graph.algebra
    for absorbed, rotated in _queries(graph.readings):
        factors = floats.absorption(a, absorbed)
        if factors is None:
            continue
        turned = floats.rotations(a, graph.readings, rotated)
        query = (a, factors, absorbed, turned)
        of_layer = floats.query_sources(*query, partial(_lanes, layers)) if layers else {}
        in_floats = {} if of_layer or absorbed in known else floats.query_sources(*query)
        yield from (of_layer or in_floats).items()


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


def _lanes(layers: Mapping[Value, Value], a: Algebra, value: Value, heads: Any, rows: Any) -> floats.HeadLanes | None:
    """The layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] holds some lanes of every head."""
    value, rows = floats.opened_tokens(a, value, rows)
    value, number = floats.pulled(a, value)
    below = (each.below("cast", "reshape") for each in floats.sources(value))
    layer = next((layers[each] for each in below if each in layers), None)
    known = layer is not None and value.rank == 4 and isinstance(value.shape[-1], int)
    if layer is None or not known or prod(layer.shape[:-1]) != value.shape[0] * rows:
        return None
    opened = floats.opened_heads(a, layer, value.shape[0], heads, rows)
    place = None if opened is None else floats.placed(a, value, opened)
    if opened is None or place is None:
        return None
    return floats.HeadLanes({"layer": a.scale(layer, number)}, ("layer_query", "layer_lanes"), opened.shape[-1], *place)
