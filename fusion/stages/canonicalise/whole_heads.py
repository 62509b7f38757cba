"""Queries of attention over a latent that come from a linear layer in whole numbers of 8 bits.

    layer_query(layer, width, start, up)            lanes start … of each head of the layer, absorbed by up [N, D, C]
    layer_lanes(layer, width, start, heads_first)   lanes that are rotated

`layer` is a value that reads as whole_linear, with heads of `width` lanes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from fusion.graph import Algebra, Reading, Value
from fusion.stages.canonicalise.arrangement import uncast
from fusion.stages.canonicalise.latents import lane_forms, rotations, sources

Found = dict[Value, Reading]


def readings(a: Algebra, found: Mapping[Value, Reading]) -> Found:
    """Where the parts of latent queries come from, if a layer in whole numbers gives them."""
    layers = [value for value, reading in found.items() if reading.op == "whole_linear"]
    queries = [reading for reading in found.values() if reading.op == "latent_queries"] if layers else []
    made: Found = {}
    for each in queries:
        for value, reading in _of_query(a, found, layers, each):
            made[value] = reading
    return made


def _of_query(
    a: Algebra, found: Mapping[Value, Reading], layers: list[Value], query: Reading
) -> Iterator[tuple[Value, Reading]]:
    absorbed, rotated = query.captures["absorbed"], query.captures["rope"]
    up = absorbed.args[1] if absorbed.op == "matmul" and absorbed.arg.rank == 4 else None
    if up is None or prod(up.shape[:-3]) != 1 or up.shape[-3:-2] != absorbed.shape[1:2]:
        return
    nope, heads = absorbed.arg, absorbed.shape[1]
    of = _lanes(a, nope, heads, nope.shape[2], layers)
    if of is not None:
        yield absorbed, Reading("layer_query", {**of, "up": a.reshape(up, up.shape[-3:])})
    for rotation in rotations(a, found, rotated):
        x = uncast(a, rotation.captures["x"], nope.dtype)
        lanes = _lanes(a, x, heads, nope.shape[2], layers)
        if lanes is not None:
            first = x.shape[1:3] == (heads, nope.shape[2]) and not _is_behind(a, x, lanes, heads)
            yield x, Reading("layer_lanes", {**lanes, "heads_first": first})


def _opened(a: Algebra, value: Value, layer: Value, heads: Any, rows: Any) -> Value:
    return a.reshape(layer, (value.shape[0], rows, heads, layer.shape[-1] // heads))


def _lanes(a: Algebra, value: Value, heads: Any, rows: Any, layers: list[Value]) -> dict[str, Any] | None:
    """The layer of which `value` [B, N, S, D] or [B, S, N, D] holds some lanes of every head."""
    count = value.shape[-1] if value.rank == 4 else None
    if not isinstance(count, int) or not isinstance(heads, int):
        return None
    starts = sorted({0, *(each.attrs[1] for each in sources(value) if each.op == "slice")})
    for layer in layers:
        size = layer.shape[-1]
        if not isinstance(size, int) or size % heads or prod(layer.shape[:-1]) != value.shape[0] * rows:
            continue
        opened = _opened(a, value, layer, heads, rows)
        for start in (each for each in starts if each + count <= size // heads):
            if value in lane_forms(a, opened, start, count):
                return {"layer": layer, "width": size // heads, "start": start}
    return None


def _is_behind(a: Algebra, value: Value, lanes: Mapping[str, Any], heads: Any) -> bool:
    """Whether `value` has its heads behind positions: [B, S, N, D]."""
    rows = value.shape[1]
    if prod(lanes["layer"].shape[:-1]) != value.shape[0] * rows:
        return False
    opened = _opened(a, value, lanes["layer"], heads, rows)
    return value is lane_forms(a, opened, lanes["start"], value.shape[-1])[0]
