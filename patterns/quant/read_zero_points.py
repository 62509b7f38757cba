"""Numbers in whole numbers of 8 bits by a scale and a zero point that the model holds: int8(clamp(round(n / s + z))).

    shifted_quantised(x, bias, scale, by, zero, shift)      n = x + bias [D], s = scale [1] · by, z = zero [1] + shift

What is a number alone has no tensor; without a zero point `shift` is 0. The sum is rounded, once, to the nearest.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusion import reader
from fusion.analysis.nodes import is_computed
from fusion.analysis.rounding import exact, rounded, unscaled
from fusion.graph import Algebra, Graph, Miss, Reading, Value
from patterns.quant.read import Found, rounded_to_int8

_LEAST, _MOST = -128, 127
_BEHIND = "the zero point is added to rounded numbers, where the operator rounds the sum"
_CUT = "numbers are cut off toward zero, where the operator rounds to the nearest"
_FLOAT = "the zero point is held in {dtype} and so not proven to be a whole number; the operator takes int8"
_PART = "the zero point {zero:g} is no whole number of 8 bits"
_BOUNDS = "whole numbers are bounded by {low:g} and {high:g}, those of the operator by -128 and 127"
_SEVERAL = "rows with a zero point are not divided by one scale of the whole tensor"
_TIMES = "rows with a zero point are multiplied by a scale, where the operator divides"


@reader(gives=("shifted_quantised",))
def with_zero_point(graph: Graph) -> Iterator[Found]:
    """All numbers that are quantised so; why others, which have a zero point, are not."""
    for value in rounded_to_int8(graph):
        made = _read(graph.algebra, value) if is_computed(graph, value) else None
        if isinstance(made, str):
            yield value, Miss("shifted_quantised", made)
        elif made is not None:
            yield value, Reading("shifted_quantised", made)


def _read(a: Algebra, value: Value) -> Mapping[str, Any] | str | None:
    outer = rounded(value.arg)
    zero = _zero(outer.quotient)
    inner = rounded(zero.rest)
    scaled = _unscaled(a, inner.quotient)
    if scaled is None:
        return _SEVERAL if zero.there and outer.rounded and _divided(inner.quotient) else None
    if not zero.there and inner.rounded:
        return None
    reason = _unproven(zero, outer.rounded, inner.rounded, outer.low, outer.high) if zero.there else ""
    if reason or scaled.times:
        return (reason or _TIMES) if zero.there else None
    if (outer.low, outer.high) != (_LEAST, _MOST) or not outer.rounded:
        return None
    tensors = {"bias": scaled.bias, "scale": scaled.scale, "zero": zero.tensor}
    there = {name: each for name, each in tensors.items() if each is not None}
    return {"x": scaled.x, "by": scaled.by, "shift": zero.number, **there}


def _unproven(zero: _Zero, outside: bool, inside: bool, low: float, high: float) -> str:
    """Why a zero point, and what is done with it, is not what the operator does, "" if it is."""
    if inside:
        return _BEHIND
    if not outside:
        return _CUT
    if (low, high) != (_LEAST, _MOST):
        return _BOUNDS.format(low=low, high=high)
    if zero.tensor is not None and zero.tensor.dtype != torch.int8:
        return _FLOAT.format(dtype=zero.tensor.dtype)
    whole = zero.number == round(zero.number) and _LEAST <= zero.number <= _MOST
    return "" if whole else _PART.format(zero=zero.number)


@dataclass(frozen=True)
class _Zero:
    """What is left without the zero point, a tensor [1] or a number; `there` says whether there is one."""

    rest: Value
    tensor: Value | None = None
    number: float = 0.0
    there: bool = False


def _zero(value: Value) -> _Zero:
    if value.op == "shift":
        return _Zero(value.arg, number=value.attrs[0], there=True)
    for rest, one in (value.args, value.args[::-1]) if value.op == "add" else ():
        if prod(one.shape) == 1 and prod(rest.shape) != 1:
            return _Zero(rest, _single(one), there=True)
    return _Zero(value)


def _single(one: Value) -> Value:
    """A tensor of one number before it was cast from whole numbers, or widened."""
    one = exact(one)
    return one.arg if one.op == "cast" and one.arg.dtype == torch.int8 else one


@dataclass(frozen=True)
class _Scaled:
    """x (+ bias) divided by scale · by; `times` where a tensor multiplies instead."""

    x: Value
    bias: Value | None
    scale: Value | None
    by: float
    times: bool


def _unscaled(a: Algebra, value: Value) -> _Scaled | None:
    """What one scale divides; None where there is no such scale."""
    quotient, number = unscaled(value)
    scale = None
    for x, factor in (quotient.args, quotient.args[::-1]) if quotient.op == "mul" else ():
        if prod(factor.shape) == 1 and prod(x.shape) != 1:
            (x, more), (factor, outside) = unscaled(x), unscaled(factor)
            number *= more * outside
            quotient, scale = x, exact(a.power(exact(factor), -1))
            break
    if (scale is None and number == 1) or not number:
        return None
    x, bias = _biased(a, exact(quotient))
    times = scale is not None and scale.op == "power"
    return _Scaled(x, bias, None if scale is None else a.reshape(scale, (1,)), 1 / number, times)


def _biased(a: Algebra, x: Value) -> tuple[Value, Value | None]:
    """x without a bias of each channel, and that bias."""
    for rest, line in (x.args, x.args[::-1]) if x.op == "add" else ():
        channels = line.rank and line.shape[-1] == x.shape[-1] == prod(line.shape)
        if channels and rest.shape == x.shape and prod(rest.shape) != prod(line.shape):
            return exact(rest), a.reshape(exact(line), x.shape[-1:])
    return x, None


def _divided(value: Value) -> bool:
    """Whether a value is a quotient."""
    factors = [unscaled(each)[0] for each in value.args] if value.op == "mul" else []
    return any(each.op == "power" and each.attrs == (-1.0,) for each in factors)
