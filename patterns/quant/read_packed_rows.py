"""Packed rows of a cache: int8 numbers, numbers beside them, and the scales of runs of lanes, as one row of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from fusion import reader, word
from fusion.analysis.nodes import is_computed
from fusion.graph import Algebra, Dim, Found, Graph, Miss, Reading, Value

_ORDER = "a line of bytes holds {what}; that of the operator int8, bfloat16, and float32 for the scales"
_UNREAD = "whole numbers in a line of bytes are not those of runs of lanes by a scale that is the largest of each"
_SCALES = "the scales in a line of bytes are not those that its whole numbers were divided by"

PACKED_KV_ROW = word(
    "packed_kv_row",
    "[int8(latent / scale) | bits(rope) | bits(scale)]: a scale, in float32, is the largest of `tile` lanes over 127",
    latent="[*B, C]", rope="[*B, Dr] in bfloat16", tile="lanes that share a scale",
)  # fmt: skip


@reader(gives=(PACKED_KV_ROW,), needs=("quantise",))
def packed_rows(graph: Graph) -> Iterator[Found]:
    """All lines of bytes; why others are none."""
    for value in [each for each in graph.places if each.op == "cat" and each.dtype == torch.int8]:
        made = _line(graph, value) if is_computed(graph, value) else None
        if made is not None:
            yield value, Miss("packed_kv_row", made) if isinstance(made, str) else made


def _line(graph: Graph, value: Value) -> Reading | str | None:
    a = graph.algebra
    parts = [_source(each) for each in value.args]
    what = [str(each.dtype).removeprefix("torch.") for each in parts]
    if value.attrs != (value.rank - 1,) or set(what) == {"int8"}:
        return None
    if what != ["int8", "bfloat16", "float32"]:
        return _ORDER.format(what=", ".join(what))
    whole, rope, scales = parts
    rows = graph.readings.all("quantise")
    runs = next((e for value, e in rows if e.captures["scheme"] == "dynamic" and _is(a, whole, value)), None)
    if runs is None:
        odd = graph.readings.missed("quantisation")
        return next((each.reason for value, each in odd if _is(a, whole, value)), _UNREAD)
    latent, scale = (runs.captures[name] for name in ("x", "scale"))
    if "times" in runs.captures or not _is(a, scales, scale):
        return _SCALES
    latent, rope = (
        _with_lanes(a, graph.places, each, width)
        for each, width in ((latent, whole.shape[-1]), (rope, value.args[1].shape[-1] // torch.bfloat16.itemsize))
    )
    return Reading("packed_kv_row", {"latent": latent, "rope": rope, "tile": runs.captures["x"].shape[-1]})


def _source(piece: Value) -> Value:
    """What the bytes of a piece are; the piece itself where they are numbers."""
    below = piece.below("reshape")
    return below.arg if below.op == "bits" else piece


def _is(a: Algebra, value: Value, other: Value) -> bool:
    """Whether two values hold the same elements, perhaps with other dims."""
    alike = value.dtype == other.dtype and prod(value.shape) == prod(other.shape)
    return alike and a.reshape(value, other.shape) is other


def _with_lanes(a: Algebra, places: Iterable[Value], value: Value, lanes: Dim) -> Value:
    """`value` with so many lanes in its last dim, as some node holds it if one does."""
    held = (each for each in places if each.shape[-1:] == (lanes,) and _is(a, each, value))
    return next(held, value)
