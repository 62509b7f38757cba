"""The reader of attention over int8 keys and values that the model dequantises (C8 caches).

k = (x + offset) · scale        x [B, M, T, D] in int8, a scale and an offset of each channel, of each head or of all
k = x · scale                   a scale of each token, or of each token and head
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from fusion import reader, word
from fusion.analysis.int8_grids import Grid, grid_of
from fusion.analysis.repetition import unrepeated
from fusion.analysis.rounding import exact, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value

_SCALE = {
    "x": "[B, M, T, D] in int8",
    "scale": "[1, M or 1, 1, D or 1] or [B, M or 1, T, 1]; absent for 1",
    "by": "a number",
}
INT8_KEYS = word(
    "int8_keys",
    "(x + offset) · scale · by",
    **_SCALE, shifted="True if there is an offset, which adds one number to all scores of a query",
)  # fmt: skip
INT8_VALUES = word(
    "int8_values",
    "(x + offset · offset_by + shift) · scale · by",
    **_SCALE, offset="[1, M or 1, 1, D or 1]; absent for 0", offset_by="a number", shift="a number",
)  # fmt: skip
_TOKENS = (
    "int8 {of}: they have a scale or an offset of each token and channel, or of each sequence; "
    "npu_fused_infer_attention_score requires one for all, of each head, of each channel of a head, or of each "
    "token"
)
_SHIFTED = (
    "int8 {of}: they have a scale of each token and an offset; npu_fused_infer_attention_score requires scales "
    "of tokens without an offset; quantise symmetrically"
)
_UNLIKE = (
    "int8 keys, values: one of both alone has a scale of each token, or of each token and head; "
    "npu_fused_infer_attention_score requires such scales of both; quantise keys and values alike"
)
_SEVERAL = (
    "int8 {of}: they have several scales or offsets, whose product or sum may be rounded; "
    "npu_fused_infer_attention_score requires one scale and one offset; multiply the scales once, in float32"
)
_ONE = (
    "keys, values: the {of} alone are int8; npu_fused_infer_attention_score requires both in int8, or both in "
    "floats; quantise keys and values alike"
)


@reader(gives=(INT8_KEYS, INT8_VALUES), needs=("softmax_attention",))
def int8_cache(graph: Graph) -> Iterator[Annotation]:
    """Read keys and values of every attention that dequantises both from int8: `int8_keys` and `int8_values`."""
    a = graph.algebra
    for root, attention in graph.readings.all("softmax_attention"):
        k, v = (attention.captures[name] for name in ("k", "v"))
        grids = {"keys": grid_of(a, k), "values": grid_of(a, v)}
        scales = {name: _scales(a, grid, name) for name, grid in grids.items() if grid is not None}
        if not scales or (len(scales) == 1 and _is_latent(k, v)):
            continue
        reasons = [each for each in scales.values() if isinstance(each, str)]
        reasons += [_ONE.format(of=name) for name in scales if len(scales) == 1]
        reasons += [_UNLIKE] if len(scales) == 2 and not reasons and not _alike(*scales.values()) else []
        keys, values = scales.get("keys"), scales.get("values")
        if reasons or not isinstance(keys, dict) or not isinstance(values, dict):
            yield next(iter(_dequantised(graph, k, v)), k), Miss("attention", reasons[0], of=root)
            continue
        shifted = keys.pop("offset", None) is not None or keys.pop("shift") != 0
        captures = {name: each for name, each in keys.items() if name in ("x", "scale", "by")}
        yield k, Reading("int8_keys", captures | {"shifted": shifted})
        yield v, Reading("int8_values", values)


def _is_latent(k: Value, v: Value) -> bool:
    """Return True if keys `k` and values `v` are both computed from an int8 tensor.

    A latent may be such, even if its rotated lanes are floats.
    """
    return all(any(source.dtype == torch.int8 for source in each.sources()) for each in (k, v))


def _alike(keys: Any, values: Any) -> bool:
    """Return True if the scales in the captures `keys` and `values` suit one call of the operator.

    They do if both are per token with equally many heads, or neither is per token.
    """
    scales = [each.get("scale") for each in (keys, values)]
    tokens = [scale is not None and _is_per_token(scale) and scale.shape[1] for scale in scales]
    return tokens[0] == tokens[1]


def _dequantised(graph: Graph, *values: Value) -> list[Value]:
    """Return those of `values`, below their views, that a node of the graph computes from int8 by a scale and an
    offset.
    """
    below = [x.below("reshape", "permute", "expand", "slice") for x in values]
    return [x for x in below if x in graph.places and grid_of(graph.algebra, x) is not None]


def _scales(a: Algebra, grid: Grid, name: str) -> dict[str, Any] | str:
    """Return the captures of an int8 operand with `grid`, or why the operator does not take the operand `name`."""
    captures: dict[str, Any] = {"x": grid.base, "by": grid.number, "offset_by": 1.0, "shift": grid.shift}
    for kind, by, parts in (("scale", "by", grid.factors), ("offset", "offset_by", grid.offsets)):
        if len(parts) > 1:
            return _SEVERAL.format(of=name)
        for part in parts:
            below, number = unscaled(exact(_shared(a, part, grid.base.shape)))
            captures |= {kind: exact(below), by: captures[by] * number}
    scale, offset = captures.get("scale"), captures.get("offset")
    if scale is not None and _is_per_token(scale) and (offset is not None or grid.shift):
        return _SHIFTED.format(of=name)
    if scale is not None and _is_per_token(scale) and scale.shape[3] == 1 and scale.shape[2] == grid.base.shape[2]:
        return captures | {"scale": a.expand(scale, (grid.base.shape[0], *scale.shape[1:]))}
    by_token = [each for each in (scale, offset) if each is not None and _is_per_token(each)]
    return _TOKENS.format(of=name) if by_token else captures


def _is_per_token(x: Value) -> bool:
    """Return True if `x` [B or 1, M or 1, T or 1, D or 1] differs between sequences or tokens."""
    return x.shape[0] != 1 or x.shape[2] != 1


def _shared(a: Algebra, x: Value, shape: Sequence[Any]) -> Value:
    """Undo the expansion of `x`, which broadcasts to [B, M, T, D], over sequences, heads and tokens.

    A scale of each page is expanded to its tokens.
    """
    x = a.reshape(x, (*(1,) * (len(shape) - x.rank), *x.shape))
    for axis in (0, 1, 2):
        once = unrepeated(a, x, axis)[0]
        x = once if once.shape[axis] == 1 else x
    return x


def are_int8(a: Algebra, *values: Value) -> bool:
    """Return True if all `values` are floats that are dequantised from int8."""
    return all(x.dtype != torch.int8 and grid_of(a, x) is not None for x in values)
