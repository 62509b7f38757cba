"""Packed rows of a cache: a latent in int8, its rotated key, and the scales of its tiles, as one row of bytes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod

import torch

from fusion import reader, word
from fusion.analysis.node_predicates import is_computed
from fusion.graph import Algebra, Annotation, Dim, Graph, Miss, Reading, Value

_ORDER = (
    "packed row: its bytes are {what}; npu_mla_prolog_v3 requires int8 of the latent, bfloat16 of the rotated key, "
    "then float32 scales; store the parts in these dtypes and this order"
)
_UNPROVEN = (
    "packed row: its int8 are not tiles of lanes that are divided by the largest of each tile / 127; "
    "npu_mla_prolog_v3 requires that; write x.unflatten(-1, (-1, 128)), and divide by abs().amax(-1, keepdim=True) "
    "/ 127"
)
_SCALES = (
    "packed row: the scales in it are not those that its int8 were divided by; npu_mla_prolog_v3 requires these; "
    "store the same tensor"
)

PACKED_KV_ROW = word(
    "packed_kv_row",
    "[int8(latent / scale) | bits(rope) | bits(scale)], scale in float32: max|latent| / 127 of each `tile` lanes",
    latent="[*B, C]", rope="[*B, Dr] in bfloat16", tile="lanes that share a scale",
)  # fmt: skip


@reader(gives=(PACKED_KV_ROW,), needs=("quantise",))
def packed_rows(graph: Graph) -> Iterator[Annotation]:
    """Read every packed row; report why other concatenations of bytes are not read."""
    for value in [each for each in graph.places if each.op == "cat" and each.dtype == torch.int8]:
        outcome = _packed_row(graph, value) if is_computed(graph, value) else None
        if outcome is not None:
            yield value, Miss("packed_kv_row", outcome) if isinstance(outcome, str) else outcome


def _packed_row(graph: Graph, value: Value) -> Reading | str | None:
    a = graph.algebra
    parts = [_source(each) for each in value.args]
    what = [str(each.dtype).removeprefix("torch.") for each in parts]
    if value.attrs != (value.rank - 1,) or set(what) == {"int8"}:
        return None
    if what != ["int8", "bfloat16", "float32"]:
        return _ORDER.format(what=", ".join(what))
    int8, rope, scales = parts
    rows = graph.readings.all("quantise")
    quantised = next((e for value, e in rows if e.captures["scheme"] == "dynamic" and _is_view(a, int8, value)), None)
    if quantised is None:
        misses = graph.readings.missed("quantisation")
        reason = next((each.reason for value, each in misses if _is_view(a, int8, value)), _UNPROVEN)
        return reason.replace("npu_dynamic_quant", "npu_mla_prolog_v3")  # the same scales, by the operator of the row
    latent, scale = (quantised.captures[name] for name in ("x", "scale"))
    if "times" in quantised.captures or not _is_view(a, scales, scale):
        return _SCALES
    latent, rope = (
        _with_lanes(a, graph.places, each, width)
        for each, width in ((latent, int8.shape[-1]), (rope, value.args[1].shape[-1] // torch.bfloat16.itemsize))
    )
    return Reading("packed_kv_row", {"latent": latent, "rope": rope, "tile": quantised.captures["x"].shape[-1]})


def _source(piece: Value) -> Value:
    """Return the tensor whose bits `piece` views as bytes, or `piece` itself if it is int8."""
    below = piece.below("reshape")
    return below.arg if below.op == "bits" else piece


def _is_view(a: Algebra, value: Value, other: Value) -> bool:
    """Return True if `value` is `other` up to a reshape."""
    same_size = value.dtype == other.dtype and prod(value.shape) == prod(other.shape)
    return same_size and a.reshape(value, other.shape) is other


def _with_lanes(a: Algebra, places: Iterable[Value], value: Value, lanes: Dim) -> Value:
    """Return the reshape of `value` among `places` whose last dim has size `lanes`; `value` if there is none."""
    reshapes = (each for each in places if each.shape[-1:] == (lanes,) and _is_view(a, each, value))
    return next(reshapes, value)
