"""Linear layers of floats with int8 weights: x ((weight + offset) · scale)ᵀ (+ bias).

There is a scale of each output channel, or of each group of inputs of a channel; one of each channel or of all may also
multiply the product. The model stores the weight as [N, K], [K, N], with one row for each group, or by heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion import reader, word
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.node_predicates import are_read_by, is_computed
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof_steps import must, proof, proven
from patterns.kit.linear_layers import linear

INT8_WEIGHT_LINEAR = word(
    "int8_weight_linear",
    "x ((weight + offset) · scale)ᵀ (+ bias) of floats x",
    x="[*B, K]", weight="[N, K] in int8", scale="[1], [N], or [G, N] for G groups of inputs", offset="as scale",
    bias="[N]", heads="H of a result viewed as [*B, H, D], absent for [*B, N]",
    dtype="of (weight + offset) · scale in the model, float32 if a scale multiplies the product",
)  # fmt: skip

_STORED = (torch.int8, torch.uint8)
"""Dtypes in which weights of 8 bits are stored."""
_ALONG = (
    "scale: the int8 weight has a scale or an offset that is neither one of each output channel nor of "
    "each group of inputs; npu_weight_quant_batchmatmul requires [1], [N] or [G, N]; store it so"
)
_LISTED = (
    "scale: groups of inputs look theirs up by a list (g_idx), which is not proven to be sorted; "
    "npu_weight_quant_batchmatmul requires consecutive inputs in a group; permute the inputs once, and store "
    "the weight in that order"
)
_INTEGERS = frozenset({torch.int16, torch.int32, torch.int64})
_UNSIGNED = (
    "weight: it is uint8; npu_weight_quant_batchmatmul requires int8; subtract 128 from the weight and "
    "from its zero point once"
)
_NUMBER = (
    "zero point: it is a number; npu_weight_quant_batchmatmul requires a tensor of each channel or group; "
    "register it as a tensor [N] or [G, N]"
)
_WIDE = (
    "zero point: it is added in an integer dtype, and the sum is not proven to be int8; "
    "npu_weight_quant_batchmatmul requires (weight + zero point) in floats; cast both to the dtype of the "
    "model before the sum"
)
_BEHIND = (
    "zero point: it is added to the int8 weight behind its scale; npu_weight_quant_batchmatmul requires "
    "(weight + offset) * scale; divide the zero point by the scale once"
)


@dataclass(frozen=True)
class _Weight:
    """A dequantised weight (base + offset) · scale · number [N, K], or in groups [N, G, K / G].

    Attributes:
        base: the stored weight, in int8 or uint8.
        scale: the scale [N | 1, 1 | G], in groups [N | 1, G | 1, 1].
        offset: the offset, with shapes as for the scale.
        reason: why the operator does not take the weight; "" if it may.
    """

    base: Value
    scale: Value | None = None
    offset: Value | None = None
    number: float = 1.0
    reason: str = ""


@proof
def _weight(a: Algebra, value: Value) -> _Weight | None:
    """Read `value`, in floats, as a weight dequantised from int8; None for other values."""
    match value.op:
        case "cast" if value.arg.dtype == torch.int8:
            return _Weight(value.arg)
        case "cast" if value.arg.dtype == torch.uint8:
            return _Weight(value.arg, reason=_UNSIGNED)
        case "cast" if is_rounding(value):
            return _weight(a, value.arg)
        case "cast" if is_float(value) and value.arg.dtype in _INTEGERS:
            return _integer_sum(a, value)
        case "permute":
            return _weight(a, proven(_permuted_below(a, value)))
        case "reshape":
            return _regrouped(a, proven(_weight(a, value.arg)), value)
        case "scale":
            weight = proven(_weight(a, value.arg))
            return replace(weight, number=weight.number * value.attrs[0])
        case "shift":
            weight = proven(_weight(a, value.arg))
            return replace(weight, reason=weight.reason or _NUMBER)
        case "mul":
            return _multiplied(a, value, *value.args) or _multiplied(a, value, *value.args[::-1])
        case "add":
            return _added(a, value, *value.args) or _added(a, value, *value.args[::-1])
        case _:
            return None


@proof
def _integer_sum(a: Algebra, value: Value) -> _Weight | None:
    """Read the cast to floats of int8 + offset, a sum in a wider integer dtype.

    The offset must be int8 too, or the floats might not represent the sum exactly.
    """
    weight = proven(_weight(a, value.arg))
    must(weight.scale is None and weight.number == 1)
    if weight.offset is None:
        return weight
    inner, sign = unscaled(weight.offset)
    is_int8 = abs(sign) == 1 and inner.op == "cast" and inner.arg.dtype == torch.int8
    return replace(
        weight, offset=a.cast(weight.offset, value.dtype), reason=weight.reason or ("" if is_int8 else _WIDE)
    )


@proof
def _permuted_below(a: Algebra, permuted: Value) -> Value:
    """Return `permuted`, the permutation of an elementwise op or a view, as an op of permuted operands.

    The views are those that group inputs, [G, K / G, N], and those that join the channels of heads, [K, H, D].
    """
    value, order = permuted.arg, permuted.attrs
    if value.op == "reshape" and value.arg.op == "permute":
        last_first = value.arg.attrs == (value.arg.rank - 1, *range(value.arg.rank - 1))
        must(order == (1, 0) and last_first and value.arg.shape[0] == value.shape[0])
        return a.reshape(value.arg.arg, permuted.shape)
    if value.op == "reshape":
        must(order == (1, 0) and value.arg.rank == 3 and value.arg.shape[-1] == value.shape[-1])
        return a.make("reshape", (a.permute(value.arg, (2, 0, 1)),), (), permuted.shape, permuted.dtype)
    must(value.op in ("cast", "scale", "mul", "add"))
    args = [a.permute(a.reshape(each, _aligned(each, value)), order) for each in value.args]
    return a.make(value.op, args, value.attrs, permuted.shape, value.dtype)


def _aligned(each: Value, value: Value) -> tuple[Any, ...]:
    """Return the shape of the operand `each` with leading 1s, as many dims as `value` has."""
    return (*(1,) * (value.rank - each.rank), *each.shape)


@proof
def _multiplied(a: Algebra, value: Value, inner: Value, factor: Value) -> _Weight | None:
    must(inner.shape == value.shape)
    weight, factor = proven(_weight(a, inner)), exact(factor)
    by_row = _by_row(a, factor, value)
    if by_row is None:
        return replace(weight, reason=weight.reason or _scale_reason(factor))
    scale = by_row if weight.scale is None else proven(a.mul(weight.scale, a.cast(by_row, weight.scale.dtype)))
    return replace(weight, scale=scale)


@proof
def _added(a: Algebra, value: Value, inner: Value, offset: Value) -> _Weight | None:
    must(inner.shape == value.shape)
    weight, by_row = proven(_weight(a, inner)), _by_row(a, exact(offset), value)
    must(weight.offset is None)
    reason = _scale_reason(offset) if by_row is None else "" if weight.scale is None and weight.number == 1 else _BEHIND
    return replace(weight, offset=by_row, reason=weight.reason or reason)


def _scale_reason(factor: Value) -> str:
    """Return the reason to refuse a scale or an offset `factor` that is not one of each channel or group.

    It is gathered by an index, or varies along other dims.
    """
    return _LISTED if factor.below("cast", "scale", "shift", "permute", "reshape").op == "index" else _ALONG


def _by_row(a: Algebra, factor: Value, value: Value) -> Value | None:
    """Return `factor`, an operand of `value`, with one entry for each row [.., 1], or for each group of a row [.., G].

    None if it varies otherwise.
    """
    step = factor.arg if factor.op == "permute" else factor
    if step.op == "scale" or is_rounding(step):
        inner = step.arg if step is factor else a.permute(step.arg, factor.attrs)
        below = _by_row(a, inner, value)
        return below and a.scale(below, *step.attrs) if step.op == "scale" else below and a.cast(below, step.dtype)
    shape = _aligned(factor, value)
    if shape[-1:] == (1,):
        return a.reshape(factor, shape)
    if factor.op == "permute":
        return _by_row_transposed(a, factor)
    wide = factor.arg if factor.op == "reshape" else factor
    if wide.op != "expand" or wide.shape[:-2] != value.shape[:-1]:
        return None
    return a.reshape(wide.arg, wide.shape[:-1]) if wide.arg.shape == (*wide.shape[:-1], 1) else None


@proof
def _by_row_transposed(a: Algebra, transposed: Value) -> Value | None:
    """Return the entries [N, G] of the groups of `transposed` [N, K], of [G, N] with each row repeated."""
    wide = transposed.arg.below("reshape")
    must(wide.op == "expand" and wide.rank == 3)
    groups, _, channels = wide.shape
    must(channels == transposed.shape[0] and wide.arg.shape == (groups, 1, channels))
    return a.permute(a.reshape(wide.arg, (groups, channels)), (1, 0))


@proof
def _regrouped(a: Algebra, weight: _Weight, view: Value) -> _Weight:
    """View `weight` in the shape of `view`: any shape if it has no factors, else only [N, K].

    The groups of a weight [N, G, K / G], or [N · G, K / G], become those of rows.
    """
    base = a.reshape(weight.base, view.shape)
    if weight.scale is None and weight.offset is None:
        return replace(weight, base=base)
    *rows, run = weight.base.shape
    must(view.rank == 2 and view.shape[1] % run == 0)
    groups = (view.shape[0], view.shape[1] // run)
    return replace(weight, base=base, **{
        name: a.reshape(a.expand(each, (*rows, 1)), groups)
        for name, each in (("scale", weight.scale), ("offset", weight.offset)) if each is not None
    })  # fmt: skip


@dataclass(frozen=True)
class _Layer:
    """A linear layer x weightᵀ · behind (+ bias).

    Attributes:
        dequantised: the weight in floats, as the model computes it.
        behind: a scale that multiplies the product, [1] or [N].
        heads: H if the result is viewed as [*B, H, D].
    """

    x: Value
    dequantised: Value
    weight: _Weight
    bias: Value | None = None
    behind: Value | None = None
    heads: Any = None


@proof
def _layer(a: Algebra, graph: Graph, value: Value, wide: bool = False) -> _Layer | None:
    """Read `value` as a linear layer with an int8 weight; None for other values.

    With `wide`, the scale and the bias after the product may be applied in a wider dtype, if a cast back follows.
    """
    parts = linear(a, graph.places, value)
    if parts is not None:
        return _Layer(parts[0], parts[1], proven(_weight(a, parts[1])), parts[2])
    if value.op == "permute":
        return _by_head(a, value)
    if value.op == "reshape" and value.shape[-1:] == value.arg.shape[-1:]:
        below = proven(_layer(a, graph, value.arg, wide))
        must(below.heads is None)
        return replace(below, x=a.reshape(below.x, (*value.shape[:-1], below.x.shape[-1])))
    if is_rounding(value):
        below = proven(_layer(a, graph, value.arg, wide=True))
        must(below.x.dtype == value.dtype)
        return below
    must(value.op in ("mul", "add"))
    for inner, line in value.operands():
        inner = exact(inner) if wide else inner
        below = (
            _layer(a, graph, inner, wide) if _is_channel_factor(line, value) and inner.shape == value.shape else None
        )
        if below is None or below.bias is not None or (value.op == "mul" and below.behind is not None) or below.heads:
            continue
        line = a.reshape(exact(line), (math.prod(line.shape),))
        return replace(below, bias=line) if value.op == "add" else replace(below, behind=line)
    return None


@proof
def _by_head(a: Algebra, permuted: Value) -> _Layer | None:
    """Read `permuted` [*B, H, D], the permuted product of x and one matrix of each head."""
    product, order = permuted.arg, permuted.attrs
    must(product.op == "matmul" and is_float(product))
    left, right = product.args
    if order == (2, 0, 1) and right.rank == 2:
        x, weights = swapped(a, right), left
    else:
        must(order == (0, 2, 1, 3) and left.shape[1] == right.shape[0] == 1)
        x = a.reshape(left, (left.shape[0], *left.shape[2:]))
        weights = swapped(a, a.reshape(right, right.shape[1:]))
    heads, width, inputs = weights.shape
    weight = a.reshape(weights, (heads * width, inputs))
    return _Layer(x, weights, proven(_weight(a, weight)), heads=heads)


def _is_channel_factor(line: Value, value: Value) -> bool:
    """Return True if `line`, an operand of `value`, is an input with one entry, or with one of each output channel.

    Computed operands are excluded: the activations of a single token have the same shape. What is added has one dim and
    one entry of each channel.
    """
    channels = bool(line.shape) and line.shape[-1:] == value.shape[-1:] and math.prod(line.shape) == line.shape[-1]
    if value.op == "add":
        return channels and line.rank == 1
    one = math.prod(line.shape) == 1
    while len(line.args) == 1:
        line = line.arg
    return (channels or one) and not line.args


def _reading(a: Algebra, layer: _Layer) -> Reading | str | None:
    weight = layer.weight
    if weight.reason:
        return weight.reason
    scale, offset = (_for_operator(a, each) for each in (weight.scale, weight.offset))
    if layer.behind is not None:
        scale = layer.behind if scale is None else a.mul(scale, layer.behind)
    if scale is None or (offset is not None and scale.shape != offset.shape):
        return (
            (
                "zero point: its groups differ from those of the scale; npu_weight_quant_batchmatmul requires the "
                "same groups; store both as [G, N]"
            )
            if scale is not None
            else None
        )
    dtype = layer.dequantised.dtype if layer.behind is None else torch.float32
    named = {"scale": a.scale(scale, weight.number), "offset": offset, "bias": layer.bias, "heads": layer.heads}
    given = {name: each for name, each in named.items() if each is not None}
    return Reading("int8_weight_linear", {"x": layer.x, "weight": weight.base, "dtype": dtype, **given})


def _for_operator(a: Algebra, factor: Value | None) -> Value | None:
    """Reshape `factor` [N | 1, 1 | G] to [1] or [N], or to [G, N] if there are groups."""
    if factor is not None and factor.shape[-1] != 1:
        return a.permute(factor, (1, 0))
    return factor and a.reshape(factor, (math.prod(factor.shape),))


@reader(gives=(INT8_WEIGHT_LINEAR,))
def int8_weight_linears(graph: Graph) -> Iterator[Annotation]:
    """Read every linear layer with an int8 weight, its scale and bias included; report why others are not."""
    places = [] if graph.dtypes.isdisjoint(_STORED) else list(graph.places)
    layers = {value: each for value in places if (each := _layer(graph.algebra, graph, value)) is not None}
    read = {node for value in layers for node in graph.places[value]}
    for value, each in layers.items():
        if not is_computed(graph, value) or are_read_by(graph.places[value], read):
            continue
        outcome = _reading(graph.algebra, each)
        if isinstance(outcome, str):
            yield each.dequantised if each.dequantised in graph.places else value, Miss("quantised_linear", outcome)
        elif outcome is not None:
            yield value, outcome
