"""Numbers in int8 by a scale, and perhaps a zero point, that the model holds: int8(clamp(round(n / s + z))).

n = x + bias [D], s = scale · by, z = zero_point [1] + shift: what is a number alone has no tensor. The scale is [1],
or without a zero point one of each channel [C], as the model holds it where that is divided by. Of the rounding and
its bounds it does not matter which stands first; with a zero point the sum is rounded, once, to the nearest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch

from fusion.analysis.rounding import exact, rounded, unscaled
from fusion.graph import Algebra, Reading, Value

_LEAST, _MOST = -128, 127
_BEHIND = "the zero point is added to rounded numbers, where the operator rounds the sum"
_CUT = "numbers are cut off toward zero, where the operator rounds to the nearest"
_FLOAT = "the zero point is held in {dtype} and so not proven to be a whole number; the operator takes int8"
_PART = "the zero point {zero:g} is no whole number of 8 bits"
_BOUNDS = "whole numbers are bounded by {low:g} and {high:g}, those of the operator by -128 and 127"
_SEVERAL = "rows with a zero point are not divided by one scale of the whole tensor"
_TIMES = "rows with a zero point are multiplied by a scale, where the operator divides"


def static(a: Algebra, value: Value, dynamic: bool = False) -> Reading | str | None:
    """`value`, of int8, as numbers that are quantised so; why it is not; None if nothing is like it.

    What is nearly `dynamic` needs no other reason, unless it has a zero point.
    """
    outer = rounded(value.arg)
    zero = _zero(outer.quotient)
    if not zero.there:
        found = _symmetric(a, value)
        return None if dynamic and isinstance(found, str) else found
    inner = rounded(zero.rest)
    scaled = _scaled(a, inner.quotient)
    if scaled is None or (scaled.scale is not None and scaled.scale.shape != (1,)):
        return _SEVERAL if outer.rounded and _divided(inner.quotient) else None
    reason = _unproven(zero, outer.rounded, inner.rounded, outer.low, outer.high)
    if reason or (scaled.scale is not None and scaled.scale.op == "power"):
        return reason or _TIMES
    return scaled.reading(zero)


def _symmetric(a: Algebra, value: Value) -> Reading | str | None:
    below = rounded(value.arg)
    scaled = _scaled(a, below.quotient) if below.rounded else None
    if scaled is None:
        return None
    if (below.low, below.high) != (_LEAST, _MOST):
        return _BOUNDS.format(low=below.low, high=below.high)
    return scaled.reading(_Zero(value))


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
    """x (+ bias) divided by scale · by."""

    x: Value
    bias: Value | None
    scale: Value | None
    by: float

    def reading(self, zero: _Zero) -> Reading:
        """Quantised with this zero point."""
        tensors = {"bias": self.bias, "scale": self.scale, "zero_point": zero.tensor}
        there = {name: each for name, each in tensors.items() if each is not None}
        return Reading("quantise", {"x": self.x, "by": self.by, "shift": zero.number, "scheme": "static", **there})


def _scaled(a: Algebra, value: Value) -> _Scaled | None:
    """What one scale, or one of each channel, divides; None where there is no such scale."""
    quotient, number = unscaled(value)
    parts = _factored(quotient, number)
    scale: Value | None = None
    if parts is not None:
        (quotient, more), (factor, outside) = (unscaled(each) for each in parts)
        number *= more * outside
        scale = exact(a.power(exact(factor), -1))
        if scale.op == "power":
            scale = a.power(a.cast(exact(factor), torch.float32), -1)
        scale = a.reshape(scale, (prod(factor.shape),))
    if quotient.dtype is None or (scale is None and number == 1) or not number:
        return None
    x, bias = _biased(a, exact(quotient))
    return _Scaled(x, bias, scale, 1 / number)


def _factored(quotient: Value, number: float) -> tuple[Value, Value] | None:
    """x and a factor of all of it; where nothing else scales it, one of each channel; None for x itself."""
    pairs = (quotient.args, quotient.args[::-1]) if quotient.op == "mul" else ()
    for x, factor in pairs:
        if prod(factor.shape) == 1 and prod(x.shape) != 1:
            return x, factor
    for x, factor in sorted(pairs, key=lambda pair: not _is_held(pair[1])) if number == 1 else ():
        if factor.rank and factor.shape[-1:] == x.shape[-1:] and prod(factor.shape) == factor.shape[-1]:
            return x, factor
    return None


def _is_held(factor: Value) -> bool:
    """Whether a factor is an input, or a part or a function of one: of a single token's channels x are as many."""
    while len(factor.args) == 1:
        factor = factor.arg
    return not factor.args


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
