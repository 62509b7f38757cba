"""Linear layers of floats with int8 weights: x ((weight + offset) · scale)ᵀ (+ bias).

A scale is one of each output channel or of each group of inputs of a channel; one of each channel, or of all, may also
stand behind the product. The model may keep the weight [N, K], [K, N], in rows of one group each, or by heads.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from fusion import reader, word
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.nodes import are_read_by, is_computed
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import must, proof, proven
from patterns.linear.read import linear

INT8_WEIGHT_LINEAR = word(
    "int8_weight_linear",
    "x ((weight + offset) · scale)ᵀ (+ bias) of floats x",
    x="[*B, K]", weight="[N, K] in int8", scale="[1], [N], or [G, N] for G groups of inputs", offset="as scale",
    bias="[N]", heads="how many heads the result is seen in [*B, H, D], absent for [*B, N]",
    dtype="in which the model holds (weight + offset) · scale, float32 where a scale stands behind the product",
)  # fmt: skip

_KEPT = (torch.int8, torch.uint8)
"""Dtypes in which such weights are kept."""
_ALONG = (
    "the int8 weight has a scale or an offset that is neither one of each output channel nor of each group of inputs"
)
_LISTED = "scales of the int8 weight are looked up by a list, which is not proven to name the group of each input"
_WHOLE = frozenset({torch.int16, torch.int32, torch.int64})
_UNSIGNED = (
    "the weight is kept in uint8, and the operator takes int8; subtract 128 from the "
    "weight and from its zero point once"
)
_NUMBER = "a number is added to the int8 weight, where the operator adds a tensor of channels or groups"
_WIDE = "what is added to the int8 weight in whole numbers is not proven to be int8: floats may not hold the sum"
_BEHIND = "an offset is added to the int8 weight behind its scale, where the operator adds it before"


@dataclass(frozen=True)
class _Weight:
    """(base + offset) · scale · number: a weight [N, K], or in groups [N, G, K / G].

    Its factors are [N | 1, 1 | G], in groups [N | 1, G | 1, 1].
    """

    base: Value
    scale: Value | None = None
    offset: Value | None = None
    number: float = 1.0
    odd: str = ""


@proof
def _weight(a: Algebra, value: Value) -> _Weight | None:
    """The int8 weight that `value`, of floats, is computed from; None where it is none."""
    match value.op:
        case "cast" if value.arg.dtype == torch.int8:
            return _Weight(value.arg)
        case "cast" if value.arg.dtype == torch.uint8:
            return _Weight(value.arg, odd=_UNSIGNED)
        case "cast" if is_rounding(value):
            return _weight(a, value.arg)
        case "cast" if is_float(value) and value.arg.dtype in _WHOLE:
            return _whole(a, value)
        case "permute":
            return _weight(a, proven(_turned_below(a, value)))
        case "reshape":
            return _regrouped(a, proven(_weight(a, value.arg)), value)
        case "scale":
            found = proven(_weight(a, value.arg))
            return replace(found, number=found.number * value.attrs[0])
        case "shift":
            found = proven(_weight(a, value.arg))
            return replace(found, odd=found.odd or _NUMBER)
        case "mul":
            return _multiplied(a, value, *value.args) or _multiplied(a, value, *value.args[::-1])
        case "add":
            return _added(a, value, *value.args) or _added(a, value, *value.args[::-1])
        case _:
            return None


@proof
def _whole(a: Algebra, value: Value) -> _Weight | None:
    """The same of a sum or a difference of int8, in whole numbers that hold it, which every float holds as well."""
    found = proven(_weight(a, value.arg))
    must(found.scale is None and found.number == 1)
    if found.offset is None:
        return found
    inner, sign = unscaled(found.offset)
    held = abs(sign) == 1 and inner.op == "cast" and inner.arg.dtype == torch.int8
    return replace(found, offset=a.cast(found.offset, value.dtype), odd=found.odd or ("" if held else _WIDE))


@proof
def _turned_below(a: Algebra, turned: Value) -> Value:
    """A permuted value as its last step, of one element or of a view, above others.

    Such a view groups inputs [G, K / G, N], or joins the channels of heads [K, H, D].
    """
    value, order = turned.arg, turned.attrs
    if value.op == "reshape" and value.arg.op == "permute":
        last_first = value.arg.attrs == (value.arg.rank - 1, *range(value.arg.rank - 1))
        must(order == (1, 0) and last_first and value.arg.shape[0] == value.shape[0])
        return a.reshape(value.arg.arg, turned.shape)
    if value.op == "reshape":
        must(order == (1, 0) and value.arg.rank == 3 and value.arg.shape[-1] == value.shape[-1])
        return a.make("reshape", (a.permute(value.arg, (2, 0, 1)),), (), turned.shape, turned.dtype)
    must(value.op in ("cast", "scale", "mul", "add"))
    args = [a.permute(a.reshape(each, _aligned(each, value)), order) for each in value.args]
    return a.make(value.op, args, value.attrs, turned.shape, value.dtype)


def _aligned(each: Value, value: Value) -> tuple[Any, ...]:
    """The shape of an operand with as many dims as the result."""
    return (*(1,) * (value.rank - each.rank), *each.shape)


@proof
def _multiplied(a: Algebra, value: Value, inner: Value, factor: Value) -> _Weight | None:
    must(inner.shape == value.shape)
    found, factor = proven(_weight(a, inner)), exact(factor)
    of_rows = _of_rows(a, factor, value)
    if of_rows is None:
        return replace(found, odd=found.odd or _along(factor))
    scale = of_rows if found.scale is None else proven(a.mul(found.scale, a.cast(of_rows, found.scale.dtype)))
    return replace(found, scale=scale)


@proof
def _added(a: Algebra, value: Value, inner: Value, offset: Value) -> _Weight | None:
    must(inner.shape == value.shape)
    found, of_rows = proven(_weight(a, inner)), _of_rows(a, exact(offset), value)
    must(found.offset is None)
    odd = _along(offset) if of_rows is None else "" if found.scale is None and found.number == 1 else _BEHIND
    return replace(found, offset=of_rows, odd=found.odd or odd)


def _along(factor: Value) -> str:
    """Why numbers are none of each channel or group."""
    return _LISTED if factor.below("cast", "scale", "shift", "permute", "reshape").op == "index" else _ALONG


def _of_rows(a: Algebra, factor: Value, value: Value) -> Value | None:
    """A factor as one number for each row of the last dim [.., 1], for all, or for each of its groups [.., G]."""
    step = factor.arg if factor.op == "permute" else factor
    if step.op == "scale" or is_rounding(step):
        inner = step.arg if step is factor else a.permute(step.arg, factor.attrs)
        below = _of_rows(a, inner, value)
        return below and a.scale(below, *step.attrs) if step.op == "scale" else below and a.cast(below, step.dtype)
    shape = _aligned(factor, value)
    if shape[-1:] == (1,):
        return a.reshape(factor, shape)
    if factor.op == "permute":
        return _of_columns(a, factor)
    wide = factor.arg if factor.op == "reshape" else factor
    if wide.op != "expand" or wide.shape[:-2] != value.shape[:-1]:
        return None
    return a.reshape(wide.arg, wide.shape[:-1]) if wide.arg.shape == (*wide.shape[:-1], 1) else None


@proof
def _of_columns(a: Algebra, turned: Value) -> Value | None:
    """Numbers of each group [N, G] of a factor [N, K] that is turned, where [K, N] repeats each row [G, N] in a run."""
    wide = turned.arg.below("reshape")
    must(wide.op == "expand" and wide.rank == 3)
    groups, _, channels = wide.shape
    must(channels == turned.shape[0] and wide.arg.shape == (groups, 1, channels))
    return a.permute(a.reshape(wide.arg, (groups, channels)), (1, 0))


@proof
def _regrouped(a: Algebra, found: _Weight, view: Value) -> _Weight:
    """The weight [N, K] of one in groups, or of rows that are a group each; or any view of one without factors."""
    base = a.reshape(found.base, view.shape)
    if found.scale is None and found.offset is None:
        return replace(found, base=base)
    *rows, run = found.base.shape
    must(view.rank == 2 and view.shape[1] % run == 0)
    groups = (view.shape[0], view.shape[1] // run)
    return replace(found, base=base, **{
        name: a.reshape(a.expand(each, (*rows, 1)), groups)
        for name, each in (("scale", found.scale), ("offset", found.offset)) if each is not None
    })  # fmt: skip


@dataclass(frozen=True)
class _Layer:
    """x weightᵀ (+ bias), perhaps by heads, or with scales behind the product; `made` is the weight in floats."""

    x: Value
    made: Value
    weight: _Weight
    bias: Value | None = None
    behind: Value | None = None
    heads: Any = None


@proof
def _layer(a: Algebra, graph: Graph, value: Value, wide: bool = False) -> _Layer | None:
    """How `value` is such a layer; None where it is none. `wide`: what stands behind it may be in a wider dtype."""
    parts = linear(a, graph.places, value)
    if parts is not None:
        return _Layer(parts[0], parts[1], proven(_weight(a, parts[1])), parts[2])
    if value.op == "permute":
        return _of_heads(a, value)
    if value.op == "reshape" and value.shape[-1:] == value.arg.shape[-1:]:
        below = proven(_layer(a, graph, value.arg, wide))
        must(below.heads is None)
        return replace(below, x=a.reshape(below.x, (*value.shape[:-1], below.x.shape[-1])))
    if is_rounding(value):
        below = proven(_layer(a, graph, value.arg, wide=True))
        must(below.x.dtype == value.dtype)
        return below
    must(value.op in ("mul", "add"))
    for inner, line in (value.args, value.args[::-1]):
        inner = exact(inner) if wide else inner
        below = _layer(a, graph, inner, wide) if _is_line(line, value) and inner.shape == value.shape else None
        if below is None or below.bias is not None or (value.op == "mul" and below.behind is not None) or below.heads:
            continue
        line = a.reshape(exact(line), (math.prod(line.shape),))
        return replace(below, bias=line) if value.op == "add" else replace(below, behind=line)
    return None


@proof
def _of_heads(a: Algebra, turned: Value) -> _Layer | None:
    """The layer of a product by a matrix of each head, turned to [*B, H, D]."""
    product, order = turned.arg, turned.attrs
    must(product.op == "matmul" and is_float(product))
    left, right = product.args
    if order == (2, 0, 1) and right.rank == 2:
        x, made = swapped(a, right), left
    else:
        must(order == (0, 2, 1, 3) and left.shape[1] == right.shape[0] == 1)
        x = a.reshape(left, (left.shape[0], *left.shape[2:]))
        made = swapped(a, a.reshape(right, right.shape[1:]))
    heads, width, inputs = made.shape
    weight = a.reshape(made, (heads * width, inputs))
    return _Layer(x, made, proven(_weight(a, weight)), heads=heads)


def _is_line(line: Value, value: Value) -> bool:
    """One number for each output channel that the model holds, or one that it multiplies by.

    Of a single token, activations are as many. What is added has one dim.
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
    if weight.odd:
        return weight.odd
    scale, offset = (_for_operator(a, each) for each in (weight.scale, weight.offset))
    if layer.behind is not None:
        scale = layer.behind if scale is None else a.mul(scale, layer.behind)
    if scale is None or (offset is not None and scale.shape != offset.shape):
        return "the int8 weight has a scale and an offset of other groups" if scale is not None else None
    dtype = layer.made.dtype if layer.behind is None else torch.float32
    named = {"scale": a.scale(scale, weight.number), "offset": offset, "bias": layer.bias, "heads": layer.heads}
    given = {name: each for name, each in named.items() if each is not None}
    return Reading("int8_weight_linear", {"x": layer.x, "weight": weight.base, "dtype": dtype, **given})


def _for_operator(a: Algebra, factor: Value | None) -> Value | None:
    """A factor [N | 1, 1 | G] as [1] or [N], or [G, N] of one for each group."""
    if factor is not None and factor.shape[-1] != 1:
        return a.permute(factor, (1, 0))
    return factor and a.reshape(factor, (math.prod(factor.shape),))


@reader(gives=(INT8_WEIGHT_LINEAR,))
def int8_weight_linears(graph: Graph) -> Iterator[Found]:
    """All layers with int8 weights, as far as each goes on; why others are none."""
    places = [] if graph.dtypes.isdisjoint(_KEPT) else list(graph.places)
    found = {value: each for value in places if (each := _layer(graph.algebra, graph, value)) is not None}
    held = {node for value in found for node in graph.places[value]}
    for value, each in found.items():
        if not is_computed(graph, value) or are_read_by(graph.places[value], held):
            continue
        made = _reading(graph.algebra, each)
        if isinstance(made, str):
            yield each.made if each.made in graph.places else value, Miss("quantised_linear", made)
        elif made is not None:
            yield value, made
