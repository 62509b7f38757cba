"""Rows quantised by a dynamic scale: s = max|x| / bound, q = round(x / s) in int8 or another encoding.

The order of factors, casts, a lower bound and the replacement of zeros in s does not matter; neither does the side of
the rounding on which q is clipped: |x| / s is never above the bound. A lower bound of s changes only faint rows
(`FAINT`), which then have fewer distinct integers. The scale that a reading gives is the one that the model uses
elsewhere: with or without the bound and the last dim, or another multiple of max|x|.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion import Encoding
from fusion.analysis.rounding import Rounded, exact, is_float, unscaled
from fusion.graph import Graph, Reading, Value, but_ones
from fusion.graph.nonnegative import is_nonnegative

_NARROW = (torch.float16, torch.bfloat16)
_SCALED = ("reshape", "expand", "cast", "scale", "clip", "shift")
FLOATS = (
    "rows: they are rounded by a scale of each and stay floats; npu_dynamic_quant gives int8 and requires a "
    "cast; write .to(torch.int8) behind torch.round"
)
OF_DTYPE = (
    "rows: they are rounded by a scale of each and cast to {dtype}; npu_dynamic_quant gives int8 and requires that; "
    "write .to(torch.int8), without a zero point"
)
ASYMMETRIC = (
    "zero point: one is added to the int8; npu_dynamic_quant requires symmetric int8, round(x / scale); leave the "
    "zero point out"
)
UNSCALED = (
    "scale: it is not the largest of each row; npu_dynamic_quant requires amax(|row|) / 127; write "
    "x.abs().amax(-1, keepdim=True) / 127"
)
_JOINED = (
    "scales: they are joined, or repeated, before they divide rows, and not proven to be of the same rows; "
    "npu_dynamic_quant requires the scale of each row; divide each tensor by its scale before both are joined"
)
FAINT = 1e-5
"""A scale up to which a row counts as zeros: the usual lower bound of scales in quantisation code."""
FAINTEST = 2.0**-24
"""The smallest positive float16: a row in float16 whose maximum is below consists of zeros."""


@dataclass(frozen=True)
class _Scale:
    """The scale max(factor · max|x|, least) of rows.

    Attributes:
        largest: the value max|x|.
        axes: the dims of x of a row.
        narrow: True if the scale is in 16 bits.
        reason: why npu_dynamic_quant does not compute this scale; "" if it may.
    """

    x: Value
    largest: Value
    axes: tuple[int, ...] = (-1,)
    factor: float = 1.0
    least: float = 0.0
    narrow: bool = False
    reason: str = ""

    def times(self, factor: float) -> _Scale:
        """Return the scale multiplied by `factor`."""
        return replace(self, factor=self.factor * factor, least=self.least * factor)


_SHARED = (
    "scale: several tokens share one; npu_dynamic_quant requires a scale of each token; take the largest "
    "over the last dim alone"
)


def _scale(value: Value) -> _Scale | None:
    """Read `value` as a scale of rows; None if it is no multiple of a maximum."""
    if _is_greatest(value) and is_nonnegative(value.arg):
        x = exact(value.arg.arg if value.arg.op == "abs" else value.arg)
        axes = (-1,) if value.op == "largest" else value.attrs
        is_per_token = (axes[-1] + 1) % x.rank == 0 and (len(axes) == 1 or len(axes) < x.rank)
        return _Scale(x, value, axes, narrow=value.dtype in _NARROW, reason="" if is_per_token else _SHARED)
    if value.op == "where":
        return _without_zero(value)
    if value.op == "cat":
        first = _scale(value.arg)
        return first and replace(first, reason=_JOINED)
    scale = _scale(value.arg) if value.op in _SCALED and is_float(value) else None
    if scale is None:
        return None
    scale = replace(scale, narrow=value.dtype in _NARROW)
    match value.op:
        case "scale":
            return scale.times(value.attrs[0])
        case "clip" if math.isinf(value.attrs[1]) and scale.factor > 0:
            return replace(scale, least=max(scale.least, value.attrs[0]))
        case "clip":
            return replace(
                scale,
                reason=(
                    "scale: it is clamped from above; npu_dynamic_quant requires it without an upper bound; clamp "
                    "it from below alone"
                ),
            )
        case "shift":
            return replace(
                scale,
                reason=(
                    "scale: a number is added to it; npu_dynamic_quant requires it as it is; clamp the scale "
                    "from below instead"
                ),
            )
        case _:
            return scale


def _without_zero(value: Value) -> _Scale | None:
    """Read where(tested == 0, constant, scale), of the same maximum: rows of zeros quantise to zeros anyway."""
    tested, nonzero = _nonzero_side(value)
    scale = _scale(nonzero)
    return scale if tested is not None and scale is not None and scale.largest is tested.largest else None


def _nonzero_side(choice: Value) -> tuple[_Scale | None, Value]:
    """Split `choice`, where(scale != 0, x, constant) in any spelling, into the tested scale, or None, and x."""
    condition, *sides = choice.args
    order = {("eq",): -1, ("ne",): 1, ("lt",): 1}.get(condition.attrs, 0) if condition.op == "compare" else 0
    nonzero, other = sides[:: order or 1]
    if not order or other.op != "full" or nonzero.shape != choice.shape:
        return None, nonzero
    zero, compared = condition.args if condition.attrs == ("lt",) else condition.args[::-1]
    tested = _scale(compared)
    proven = tested is not None and not tested.reason and tested.factor > 0 and (zero.op, zero.attrs) == ("full", (0,))
    return (tested if proven else None), nonzero


def _divisor(factor: Value) -> tuple[Value, float] | None:
    """Split `factor` = n / s, also with a constant in place of n / 0, into (s, n); None for other factors."""
    inverse, number = unscaled(factor)
    if inverse.op == "power" and inverse.attrs == (-1.0,):
        return inverse.arg, number
    tested, nonzero = _nonzero_side(inverse) if inverse.op == "where" else (None, inverse)
    below = _divisor(nonzero) if tested is not None else None
    scale = None if below is None else _scale(below[0])
    if tested is None or below is None or scale is None or scale.largest is not tested.largest:
        return None
    return below[0], below[1] * number


def _is_greatest(value: Value) -> bool:
    """Return True if `value` is a maximum over dims, or a top-k with k = 1."""
    return value.op == "greatest" or (value.op == "largest" and value.attrs == (1,))


Largest = Mapping[Value, Sequence[Value]]
"""The values of a graph that are maxima, each with its reshapes in the graph."""


def largest_of(graph: Graph) -> Largest:
    """Return every maximum in `graph` with its reshapes."""
    largest: dict[Value, list[Value]] = {}
    for value in graph.places:
        below = value.below("reshape")
        if _is_greatest(below):
            largest.setdefault(below, []).append(value)
    return largest


def dynamic(
    graph: Graph, stored: Value, encoding: Encoding, below: Rounded, largest: Largest
) -> tuple[Reading, Value, Reading] | str | None:
    """Read `stored`, numbers of `encoding` rounded from `below`, as rows with a dynamic scale.

    Returns the reading of the rows, the value of the scale, and the reading of the scale; a reason where a scale is
    not that of the operator; None where no scale is near. `largest` are the maxima of the graph.
    """
    if below.quotient.op in ("add", "shift") and any(each.op == "round" for each in below.quotient.args):
        return ASYMMETRIC
    quotient, outside = unscaled(below.quotient)
    if quotient.op != "mul" or (not below.rounded and not _has_scale(quotient)):
        return None
    for factor, dividend in quotient.operands():
        divisor, number = _divisor(factor) or (factor, 0.0)
        scale = _scale(divisor) if number else None
        if scale is None:
            continue
        x, more = unscaled(dividend)
        times = outside * number * more
        if not times or not scale.factor:
            return "rows: they are multiplied or divided by 0; npu_dynamic_quant requires another factor"
        scale, x = scale.times(1 / times), exact(x)
        scale, x = _broadcast_alike(graph, scale, x)
        base, number = unscaled(scale.x)
        if number and base is x:  # the scale is of x · number, the quotient of x is multiplied by it later
            scale, x, times = scale.times(number), scale.x, _snapped(times / number)
        reason = _unproven(below, encoding, scale, x, divisor.below("expand").shape)
        if reason:
            return reason
        s = graph.algebra.scale(divisor, 1 / times)
        shape = _scale_shape(x, scale.axes)
        s = graph.algebra.reshape(s, shape) if prod(s.shape) == prod(shape) else s
        multiples = _multiples(graph, largest.get(scale.largest, ()))
        used = [each for each in multiples if _is_read(graph, each, multiples, stored)]
        return _readings(graph, x, encoding, _Scales(s, scale, multiples), used)
    return UNSCALED


def _scale_shape(x: Value, axes: Sequence[int]) -> tuple[Any, ...]:
    """Return the shape of `x` with 1 in place of the dims `axes`."""
    shared = {each % x.rank for each in axes}
    return tuple(1 if dim in shared else size for dim, size in enumerate(x.shape))


def _broadcast_alike(graph: Graph, scale: _Scale, x: Value) -> tuple[_Scale, Value]:
    """Return `scale` and `x` as divided by broadcasting: `x` expanded to the rows of `scale`, if these are its expand.

    A model may expand x before it takes the maximum, and divide the x from before. Other arguments are returned as they
    are.
    """
    a, rows = graph.algebra, scale.x
    if rows.op != "expand" or rows.shape == x.shape:
        return scale, x
    expanded = a.expand(exact(rows.arg), rows.shape)
    return (replace(scale, x=expanded), expanded) if a.expand(x, rows.shape) is expanded else (scale, x)


@dataclass(frozen=True)
class _Scales:
    """The scale `s` of rows, and the values of the graph that are multiples of the same maximum."""

    s: Value
    scale: _Scale
    multiples: Mapping[Value, _Scale]

    def times(self, multiple: Value) -> float:
        """Return the factor n of `multiple` = n · s; 1 for a value that is no known multiple."""
        other = self.multiples.get(multiple)
        return 1.0 if other is None else _snapped(other.factor / self.scale.factor)

    def is_multiple(self, multiple: Value) -> bool:
        """Return True if `multiple` is a number times s, entry by entry, for all but faint rows."""
        other = self.multiples[multiple]
        faint = other.least * self.scale.factor <= FAINT * (1 + 1e-6) * other.factor
        return faint and but_ones(multiple.shape) == but_ones(self.s.shape)


def _readings(
    graph: Graph, x: Value, encoding: Encoding, scales: _Scales, read: Sequence[Value]
) -> tuple[Reading, Value, Reading]:
    """Return the reading of rows of `encoding`, the value of their scale, and its reading.

    The scale is the multiple of s among `read`, the multiples that the model uses elsewhere, s itself if possible.
    Views and casts of that value are left to the graph: another rewrite may use the value before them.
    """
    a, s = graph.algebra, scales.s
    sources = [each.below("cast", "reshape") for each in read]
    if not any(prod(each.shape) == prod(s.shape) and a.reshape(each, s.shape) is s for each in sources):
        s = min(filter(scales.is_multiple, read), key=lambda each: scales.times(each) != 1, default=s)
    same_size = (each for each in scales.multiples if but_ones(each.shape) == but_ones(s.shape))
    s = next((each for each in same_size if a.reshape(each, s.shape) is s), s)
    times = scales.times(s)
    axes = tuple(sorted(each % x.rank for each in scales.scale.axes))
    how: dict[str, Any] = {"x": x, "encoding": encoding, "dtype": s.dtype, **({} if times == 1 else {"times": times})}
    scheme = "dynamic"
    if axes != (x.rank - 1,):
        how, scheme = how | {"axes": axes}, "several dims"
    return Reading("quantise", {**how, "scale": s, "scheme": scheme}), s, Reading("token_scale", how)


def _multiples(graph: Graph, roots: Sequence[Value]) -> dict[Value, _Scale]:
    """Return every value computed in `graph` from `roots`, the reshapes of a maximum, that is a scale of it."""
    multiples: dict[Value, _Scale] = {}
    waiting = list(roots)
    while waiting:
        value = waiting.pop()
        scale = None if value in multiples else _scale(value)
        if scale is not None and not scale.reason:
            multiples[value] = scale
            users = (user for node in graph.places.get(value, ()) for user in node.users)
            waiting.extend(made for user in users if isinstance(made := graph.value_of.get(user), Value))
    return multiples


def _is_read(graph: Graph, multiple: Value, others: Container[object], stored: Value) -> bool:
    """Return True if `multiple` is used for more than `others`, and for more than the computation of `stored`."""
    users = (user for node in graph.places.get(multiple, ()) for user in node.users)
    return any(
        graph.value_of.get(user) not in others and not any(graph.depends(node, user) for node in graph.places[stored])
        for user in users
    )


def _snapped(number: float) -> float:
    """Round `number` to the nearest integer if it differs only by the rounding of a quotient."""
    nearest = round(number)
    return float(nearest) if math.isclose(number, nearest, rel_tol=1e-12) else number


def _has_scale(quotient: Value) -> bool:
    factors = [unscaled(each)[0] for each in quotient.args]
    return any(each.op == "power" and _scale(each.arg) is not None for each in factors)


def is_rounded_by_row(value: Value) -> bool:
    """Return True if `value` is round(x / s), with s a scale of each row."""
    return value.op == "round" and has_scale_of_rows(value.arg)


def has_scale_of_rows(value: Value) -> bool:
    """Return True if `value` is x / s, perhaps clipped or multiplied by a number, with s a scale of each row."""
    quotient, _ = unscaled(value.below("clip"))
    return quotient.op == "mul" and _has_scale(quotient)


def _unproven(below: Rounded, encoding: Encoding, scale: _Scale, x: Value, divisor: Sequence[Any]) -> str:
    """Return why rounding `x` / `scale`, a divisor of shape `divisor`, to `encoding` as in `below` is not
    npu_dynamic_quant; "" if it is.
    """
    others = (
        "scale: rows are divided by that of others; npu_dynamic_quant requires that of each row itself; "
        "write x / (x.abs().amax(-1, keepdim=True) / 127)"
    )
    if scale.reason == _JOINED:
        return _JOINED
    if scale.x.below("reshape") is not x.below("reshape") or scale.x.shape[-1:] != x.shape[-1:]:
        return others
    if len(scale.axes) > 1 and scale.x.shape != x.shape:
        return others
    if scale.reason:
        return scale.reason
    if (1,) * (x.rank - len(divisor)) + tuple(divisor) != _scale_shape(x, scale.axes):
        return others
    largest = encoding.bound
    if not math.isclose(scale.factor * largest, 1, rel_tol=1e-6):
        return (
            f"scale: by it the largest number of a row becomes {1 / scale.factor:g}; npu_dynamic_quant requires "
            f"{largest:g}; write x.abs().amax(-1, keepdim=True) / {largest:g}"
        )
    if not encoding.is_integer and (below.rounded or below.cut):
        return (
            f"{encoding.name}: numbers are rounded to integers before the cast; npu_dynamic_quant requires the cast "
            f"alone; write (x / scale).to({encoding.torch_dtype})"
        )
    if encoding.is_integer and not below.rounded:
        return (
            "int8: numbers are cut off toward zero; npu_dynamic_quant requires rounding to the nearest; "
            "write torch.round(x) before the cast"
        )
    if below.low > -largest or below.high < largest:
        return (
            f"{encoding.name}: numbers are clamped to {below.low:g} and {below.high:g}; npu_dynamic_quant requires "
            f"bounds of -{largest:g} and {largest:g}, or wider ones; clamp to these"
        )
    if scale.narrow and below.high > largest:
        return (
            f"scale: it is in 16 bits and may be rounded down, so that a row leaves {encoding.name}; npu_dynamic_quant "
            f"requires a clamp or float32; write .clamp(-{largest:g}, {largest:g}), or scales in float32"
        )
    if scale.least > FAINT * (1 + 1e-6):
        return (
            f"scale: it is clamped from below at {scale.least:g}, which changes rows that are no zeros; "
            "npu_dynamic_quant requires no bound, or one of 1e-5 at most; clamp at 1e-5"
        )
    if x.dtype == torch.float16 and scale.least * largest > FAINTEST:
        return (
            f"scale: it is clamped from below at {scale.least:g}, and rows of float16 may be smaller; "
            "npu_dynamic_quant requires no bound; leave it out"
        )
    return ""
