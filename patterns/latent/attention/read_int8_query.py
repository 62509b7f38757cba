"""Reader of the layers of latent queries: W8A8 layers, and layers of queries that are quantised to int8."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from fusion import reader
from fusion.graph import Algebra, Annotation, Graph, Readings, Value
from fusion.graph.proof_steps import proof, proven
from patterns.kit.lanes import sources
from patterns.latent.read.absorption import absorption, query_sources, rotations
from patterns.latent.read.head_lanes import HeadLanes, opened_heads, placed, unscaled_lanes
from patterns.latent.words import LAYER_LANES, LAYER_QUERY

_INT8 = ("int8_latent_attention", "int8_probability_attention")


@reader(
    gives=(LAYER_QUERY, LAYER_LANES),
    refines=("absorbed_query", "head_lanes"),
    needs=("latent_queries", *_INT8, "folded_query", "int8_matmul", "quantise", "rotation"),
)
def int8_queries(graph: Graph) -> Iterator[Annotation]:
    """Read absorbed queries of a latent and their lanes before quantisation: of a W8A8 layer as layer_query and
    layer_lanes, of another tensor as absorbed_query and head_lanes.
    """
    layers = {value.below("cast", "reshape"): value for value, _ in graph.readings.all("int8_matmul")}
    a = graph.algebra
    for absorbed, rotated in _queries(graph.readings):
        factors = absorption(a, absorbed)
        if factors is None:
            continue
        query = (a, factors, absorbed, rotations(a, graph.readings, rotated))
        read = query_sources(*query, partial(_lanes, layers)) or query_sources(*query)
        yield from read.items()


def _queries(readings: Readings) -> list[tuple[Value, Value]]:
    """List (absorbed, rotated) queries of every attention over a latent in `readings`.

    Int8 ones are those before quantisation, and before the scales were folded into the rotated lanes.
    """
    queries = [each.captures for _, each in readings.all("latent_queries")]
    pairs = [(each["absorbed"], each["rope"]) for each in queries]
    for _, attention in readings.all(*_INT8):
        query, rope = attention.captures["query"], attention.captures["rope"]
        folded = readings.one(rope, "folded_query")
        rope = rope if folded is None else folded.captures["rope"]
        pairs += [(each.captures["x"], rope) for each in readings.of(query, "quantise")]
    return pairs


@proof
def _lanes(layers: Mapping[Value, Value], a: Algebra, value: Value, heads: Any, rows: Any) -> HeadLanes | None:
    """Return the W8A8 layer of which `value` [B, N, S, D], [B, S, N, D] or [T, N, D] is lanes of each of N = `heads`
    heads.

    `rows` is S. `layers` maps the result of each W8A8 layer, below casts and reshapes, to the result. None if there is
    none.
    """
    value, rows, number = unscaled_lanes(a, value, rows)
    below = (each.below("cast", "reshape") for each in sources(value))
    layer = proven(next((layers[each] for each in below if each in layers), None))
    opened = opened_heads(a, layer, value.shape[0], heads, rows)
    place = proven(placed(a, value, opened))
    return HeadLanes({"layer": a.scale(layer, number)}, ("layer_query", "layer_lanes"), opened.shape[-1], *place)
