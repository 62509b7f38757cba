"""Queries of attention over a latent that come from a W8A8 layer, or in floats before they are quantised themselves.

    layer_query(layer, width, start, up)            lanes start … of each head of the layer, absorbed by up [N, D, C]
    layer_lanes(layer, width, start, heads_first)   lanes that are rotated

`layer` is a value that reads as whole_linear, with heads of `width` lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod
from typing import Any

from fusion.graph import Algebra, Reading, Value
from fusion.stages.canonicalise.arrangement import uncast
from fusion.stages.canonicalise.latents import (
    absorption,
    as_turned,
    lane_forms,
    pulled,
    query_sources,
    rotations,
    sources,
)

Found = dict[Value, Reading]

def readings(a: Algebra, found: Mapping[Value, Reading]) -> Found:
    """Where the parts of latent queries come from, of a W8A8 layer or of one in floats that is not read yet."""
    layers = {value.below("cast", "reshape"): value for value, reading in found.items() if reading.op == "whole_linear"}
    known = {reading.captures["absorbed"] for reading in found.values() if reading.op == "latent_queries"}
    made: Found = {}
    for absorbed, rotated in _queries(found):
        factors = absorption(a, absorbed)
        if factors is None:
            continue
        turned = rotations(a, found, rotated)
        of_layer = dict(_of_query(a, layers, absorbed, factors, turned)) if layers else {}
        in_floats = {} if absorbed in known else query_sources(a, *factors, absorbed, turned)
        made |= of_layer or in_floats
    return made


def _queries(found: Mapping[Value, Reading]) -> list[tuple[Value, Value]]:
    """Absorbed and rotated queries of every attention over a latent, in floats or before they were quantised."""
    queries = [each.captures for each in found.values() if each.op == "latent_queries"]
    pairs = [(each["absorbed"], each["rope"]) for each in queries]
    for attention in [each.captures for each in found.values() if each.op == "whole_latent_attention"]:
        quantised, folded = found.get(attention["query"]), found.get(attention["rope"])
        if quantised is not None and quantised.op == "token_quantised" and folded is not None:
            pairs.append((quantised.captures["x"], folded.captures["rope"]))
    for attention in [each.captures for each in found.values() if each.op == "rounded_latent_attention"]:
        quantised = found.get(attention["query"])
        if quantised is not None and quantised.op == "heads_quantised":
            pairs.append((quantised.captures["x"], attention["rope"]))
    return pairs


def _of_query(
    a: Algebra, layers: Mapping[Value, Value], absorbed: Value, factors: tuple[Value, Value], turned: Sequence[Reading]
) -> Iterator[tuple[Value, Reading]]:
    """Where both parts come from; lanes that are multiplied by a number are those of the layer times that number."""
    (nope, up), heads, rows = factors, absorbed.shape[1], absorbed.shape[2]
    of = _lanes(a, nope, heads, rows, layers)
    if of is not None:
        del of["heads_first"]
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
    starts = sorted({0, *(each.attrs[1] for each in sources(value) if each.op == "slice")})
    below = (each.below("cast", "reshape") for each in sources(value))
    layer = next((layers[each] for each in below if each in layers), None)
    size = None if layer is None else layer.shape[-1]
    if layer is None or not isinstance(size, int) or size % heads or prod(layer.shape[:-1]) != value.shape[0] * rows:
        return None
    width = size // heads
    opened = a.reshape(layer, (value.shape[0], rows, heads, width))
    for start in (each for each in starts if each + count <= width):
        forms = lane_forms(a, opened, start, count)
        if value in forms:
            return {"layer": a.scale(layer, number), "width": width, "start": start, "heads_first": value is not forms[0]}
    return None
