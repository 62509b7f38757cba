"""The reader of attention over stored keys and values that the model dequantises (C8 caches).

k = (x + offset) · scale        x [B, M, T, D] stored, a scale and an offset of each channel, of each head or of all
k = x · scale                   a scale of each token, or of each token and head
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fusion import encodings, reader, word
from fusion.analysis.dequantised import Grid, grid_of
from fusion.analysis.repeated_entries import unrepeated
from fusion.analysis.rounding import exact, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value

_SCALE = {
    "x": "[B, M, T, D], the stored numbers",
    "encoding": "the Encoding of x; its granularity is that of the scale",
    "scale": "[1, M or 1, 1, D or 1] or [B, M or 1, T, 1]; absent for 1",
    "by": "a number",
}
ENCODED_KEYS = word(
    "encoded_keys",
    "(x + offset) · scale · by",
    **_SCALE, shifted="True if there is an offset, which adds one number to all scores of a query",
)  # fmt: skip
ENCODED_VALUES = word(
    "encoded_values",
    "(x + offset · offset_by + shift) · scale · by",
    **_SCALE, offset="[1, M or 1, 1, D or 1]; absent for 0", offset_by="a number", shift="a number",
)  # fmt: skip
_TOKENS = (
    "{name} {of}: they have a scale or an offset of each token and channel, or of each sequence; "
    "npu_fused_infer_attention_score requires one for all, of each head, of each channel of a head, or of each "
    "token"
)
_SHIFTED = (
    "{name} {of}: they have a scale of each token and an offset; npu_fused_infer_attention_score requires scales "
    "of tokens without an offset; quantise symmetrically"
)
_UNLIKE = (
    "keys, values: one of both alone has a scale of each token, or of each token and head; "
    "npu_fused_infer_attention_score requires such scales of both; quantise keys and values alike"
)
_SEVERAL = (
    "{name} {of}: they have several scales or offsets, whose product or sum may be rounded; "
    "npu_fused_infer_attention_score requires one scale and one offset; multiply the scales once, in float32"
)
_ONE = (
    "keys, values: the {of} alone are {name}; npu_fused_infer_attention_score requires both in {name}, or both in "
    "floats; quantise keys and values alike"
)
_OTHER = (
    "keys, values: keys are {keys}, values {values}; npu_fused_infer_attention_score requires one dtype of both; "
    "quantise keys and values alike"
)


@reader(gives=(ENCODED_KEYS, ENCODED_VALUES), needs=("softmax_attention",))
def encoded_cache(graph: Graph) -> Iterator[Annotation]:
    """Read keys and values of every attention that dequantises both: `encoded_keys` and `encoded_values`."""
    a = graph.algebra
    for root, attention in graph.readings.all("softmax_attention"):
        k, v = (attention.captures[name] for name in ("k", "v"))
        grids = {name: grid for name, x in (("keys", k), ("values", v)) if (grid := grid_of(a, x)) is not None}
        if not grids or (len(grids) == 1 and _is_latent(k, v)):
            continue
        outcome = _operands(a, grids)
        if isinstance(outcome, str):
            yield next(iter(_dequantised(graph, k, v)), k), Miss("attention", outcome, of=root)
            continue
        keys, values = outcome
        shifted = keys.get("offset") is not None or keys["shift"] != 0
        keys = {name: each for name, each in keys.items() if name in _SCALE}
        yield k, Reading("encoded_keys", keys | {"shifted": shifted})
        yield v, Reading("encoded_values", values)


def _operands(a: Algebra, grids: Mapping[str, Grid]) -> tuple[dict[str, Any], dict[str, Any]] | str:
    """Return the captures of keys and of values with `grids`, or why the operator does not take the pair."""
    scales = {name: _scales(a, grid, name) for name, grid in grids.items()}
    reasons = [each for each in scales.values() if isinstance(each, str)]
    if len(grids) == 1:
        reasons += [_ONE.format(of=name, name=grid.encoding.name) for name, grid in grids.items()]
    if reasons:
        return reasons[0]
    keys, values = (dict(each) for each in scales.values() if not isinstance(each, str))
    first, second = keys["encoding"], values["encoding"]
    if first.torch_dtype != second.torch_dtype:
        return _OTHER.format(keys=first.name, values=second.name)
    return (keys, values) if first == second else _UNLIKE


def _is_latent(k: Value, v: Value) -> bool:
    """Return True if keys `k` and values `v` are both computed from stored numbers.

    A latent may be such, even if its rotated lanes are floats.
    """
    return all(any(encodings.encoding_of(source.dtype) is not None for source in each.sources()) for each in (k, v))


def _dequantised(graph: Graph, *values: Value) -> list[Value]:
    """Return those of `values`, below their views, that a node of the graph dequantises."""
    below = [x.below("reshape", "permute", "expand", "slice") for x in values]
    return [x for x in below if x in graph.places and grid_of(graph.algebra, x) is not None]


def _scales(a: Algebra, grid: Grid, name: str) -> dict[str, Any] | str:
    """Return the captures of an operand with `grid`, or why the operator does not take the operand `name`."""
    encoding, names = grid.encoding, {"of": name, "name": grid.encoding.name}
    captures: dict[str, Any] = {"x": grid.base, "by": grid.number, "offset_by": 1.0, "shift": grid.shift}
    for kind, by, parts in (("scale", "by", grid.factors), ("offset", "offset_by", grid.offsets)):
        if len(parts) > 1:
            return _SEVERAL.format(**names)
        for part in parts:
            below, number = unscaled(exact(_shared(a, part, grid.base.shape)))
            captures |= {kind: exact(below), by: captures[by] * number}
    scale, offset = captures.get("scale"), captures.get("offset")
    if scale is not None and _is_per_token(scale) and (offset is not None or grid.shift):
        return _SHIFTED.format(**names)
    if scale is not None and _is_per_token(scale) and scale.shape[3] == 1 and scale.shape[2] == grid.base.shape[2]:
        shared = encoding.per("token" if scale.shape[1] == 1 else "token and head")
        return captures | {"encoding": shared, "scale": a.expand(scale, (grid.base.shape[0], *scale.shape[1:]))}
    by_token = [each for each in (scale, offset) if each is not None and _is_per_token(each)]
    return _TOKENS.format(**names) if by_token else captures | {"encoding": encoding.per("channel")}


def _is_per_token(x: Value) -> bool:
    """Return True if `x` [B or 1, M or 1, T or 1, D or 1] differs between sequences or tokens."""
    return x.shape[0] != 1 or x.shape[2] != 1


def _shared(a: Algebra, x: Value, shape: Sequence[Any]) -> Value:
    """Undo the expansion of `x`, which broadcasts to [B, M, T, D], along each dim.

    A scale of each page is expanded to its tokens.
    """
    x = a.reshape(x, (*(1,) * (len(shape) - x.rank), *x.shape))
    for axis in range(len(shape)):
        once = unrepeated(a, x, axis)[0]
        x = once if once.shape[axis] == 1 else x
    return x


def are_encoded(a: Algebra, *values: Value) -> bool:
    """Return True if all `values` are floats that are dequantised from stored numbers."""
    return all(encodings.encoding_of(x.dtype) is None and grid_of(a, x) is not None for x in values)
