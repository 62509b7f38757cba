"""Rows in int8 with a scale of their own: s = max|x| / 127, q = int8(round(x / s)).

Of s it does not matter where factors, casts, a bound below or the replacement of zeros stand; of q, on which side of
the rounding the bounds of int8 are: |x| / s is never above 127. A bound below the scale changes rows alone that are as
good as zeros (`FAINT`), where fewer whole numbers are told apart than could be. Of the scale, what the model reads
besides is what is given: with or without the bound and the last dim, or another multiple of max|x|.
"""

from __future__ import annotations

import math
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion.analysis.rounding import Rounded, exact, is_float, unscaled
from fusion.graph import Graph, Reading, Value, but_ones
from fusion.graph.signs import is_nonnegative

LARGEST = 127
_NARROW = (torch.float16, torch.bfloat16)
_SCALED = ("reshape", "expand", "cast", "scale", "clip", "shift")
FLOATS = "rows are rounded by a scale of their own and stay floats, where the operator gives int8"
UNSCALED = (
    "numbers are rounded to int8 without a scale that is the largest of their row; "
    "npu_dynamic_quant requires amax(|row|) / 127"
)
_JOINED = "scales are joined, or repeated, before they divide rows, and not proven to be those of the same rows"
FAINT = 1e-5
"""A scale up to which a row counts as zeros: the least that quantisation code keeps scales at."""
FAINTEST = 2.0**-24
"""The least number of float16 above 0: a row of float16 below holds zeros alone."""


@dataclass(frozen=True)
class _Scale:
    """factor · max|x| over the dims `axes`, at least `least`; `odd` says what the operator does not do."""

    x: Value
    largest: Value
    axes: tuple[int, ...] = (-1,)
    factor: float = 1.0
    least: float = 0.0
    narrow: bool = False
    odd: str = ""

    def times(self, factor: float) -> _Scale:
        """The scale · a number."""
        return replace(self, factor=self.factor * factor, least=self.least * factor)


_SHARED = (
    "one scale is shared by several tokens: the operator gives each token its own; take the largest over the last dim "
    "alone"
)


def _scale(value: Value) -> _Scale | None:
    """What scale of rows `value` is; None where it is none at all."""
    if _is_greatest(value) and is_nonnegative(value.arg):
        x = exact(value.arg.arg if value.arg.op == "abs" else value.arg)
        axes = (-1,) if value.op == "largest" else value.attrs
        of_tokens = (axes[-1] + 1) % x.rank == 0 and (len(axes) == 1 or len(axes) < x.rank)
        return _Scale(x, value, axes, narrow=value.dtype in _NARROW, odd="" if of_tokens else _SHARED)
    if value.op == "where":
        return _without_zeros(value)
    if value.op == "cat":
        first = _scale(value.arg)
        return first and replace(first, odd=_JOINED)
    found = _scale(value.arg) if value.op in _SCALED and is_float(value) else None
    if found is None:
        return None
    found = replace(found, narrow=value.dtype in _NARROW)
    match value.op:
        case "scale":
            return found.times(value.attrs[0])
        case "clip" if math.isinf(value.attrs[1]) and found.factor > 0:
            return replace(found, least=max(found.least, value.attrs[0]))
        case "clip":
            return replace(found, odd="the scale has an upper bound, which the operator does not keep")
        case "shift":
            return replace(
                found,
                odd="a number is added to the scale, where the operator divides by the scale itself; clamp "
                "the scale from below instead",
            )
        case _:
            return found


def _without_zeros(value: Value) -> _Scale | None:
    """A scale in which another number stands where it is 0: such a row is quantised to zeros in any case."""
    asked, kept = _where_not_zero(value)
    found = _scale(kept)
    return found if asked is not None and found is not None and found.largest is asked.largest else None


def _where_not_zero(choice: Value) -> tuple[_Scale | None, Value]:
    """The scale that is asked whether it is 0, if a number stands where it is, and what stands where it is not."""
    condition, *sides = choice.args
    order = {("eq",): -1, ("ne",): 1, ("lt",): 1}.get(condition.attrs, 0) if condition.op == "compare" else 0
    kept, other = sides[:: order or 1]
    if not order or other.op != "full" or kept.shape != choice.shape:
        return None, kept
    zero, compared = condition.args if condition.attrs == ("lt",) else condition.args[::-1]
    asked = _scale(compared)
    proven = asked is not None and not asked.odd and asked.factor > 0 and (zero.op, zero.attrs) == ("full", (0,))
    return (asked if proven else None), kept


def _divisor(factor: Value) -> tuple[Value, float] | None:
    """s and n of a factor n / s, which may be a number where s is 0; None for others."""
    inverse, number = unscaled(factor)
    if inverse.op == "power" and inverse.attrs == (-1.0,):
        return inverse.arg, number
    asked, kept = _where_not_zero(inverse) if inverse.op == "where" else (None, inverse)
    below = _divisor(kept) if asked is not None else None
    found = None if below is None else _scale(below[0])
    if asked is None or below is None or found is None or found.largest is not asked.largest:
        return None
    return below[0], below[1] * number


def _is_greatest(value: Value) -> bool:
    """Whether a value is the greatest of rows, or the largest one."""
    return value.op == "greatest" or (value.op == "largest" and value.attrs == (1,))


Largest = Mapping[Value, Sequence[Value]]
"""The largest numbers of rows, and each shape in which nodes hold them."""


def largest_of(graph: Graph) -> Largest:
    """All that a graph holds."""
    found: dict[Value, list[Value]] = {}
    for value in graph.places:
        below = value.below("reshape")
        if _is_greatest(below):
            found.setdefault(below, []).append(value)
    return found


def dynamic(graph: Graph, int8: Value, below: Rounded, largest: Largest) -> tuple[Reading, Value, Reading] | str | None:
    """Rows in whole numbers, with their scale; why what is rounded is not that; None if nothing is like it."""
    if below.quotient.op in ("add", "shift") and any(each.op == "round" for each in below.quotient.args):
        return "a zero point is added to whole numbers, where those of the operator are symmetric"
    quotient, outside = unscaled(below.quotient)
    if quotient.op != "mul" or (not below.rounded and not _scale_in(quotient)):
        return None
    for factor, dividend in (quotient.args, quotient.args[::-1]):
        divisor, number = _divisor(factor) or (factor, 0.0)
        scale = _scale(divisor) if number else None
        if scale is None:
            continue
        x, more = unscaled(dividend)
        times = outside * number * more
        if not times or not scale.factor:
            return "the rows are multiplied by 0, or divided by 0"
        scale, x = scale.times(1 / times), exact(x)
        scale, x = _repeated(graph, scale, x)
        base, number = unscaled(scale.x)
        if number and base is x:  # a number that stands behind the quotient here, and inside its scale
            scale, x, times = scale.times(number), scale.x, _near(times / number)
        reason = _unproven(below, scale, x, divisor.below("expand").shape)
        if reason:
            return reason
        s = graph.algebra.scale(divisor, 1 / times)
        shape = _of_rows(x, scale.axes)
        s = graph.algebra.reshape(s, shape) if prod(s.shape) == prod(shape) else s
        multiples = _multiples(graph, largest.get(scale.largest, ()))
        read = [each for each in multiples if _is_read(graph, each, multiples, int8)]
        return _given(graph, x, _Kept(s, scale, multiples), read)
    return UNSCALED


def _of_rows(x: Value, axes: Sequence[int]) -> tuple[Any, ...]:
    """Give the shape of `x` with 1 in place of the dims `axes`."""
    shared = {each % x.rank for each in axes}
    return tuple(1 if dim in shared else size for dim, size in enumerate(x.shape))


def _repeated(graph: Graph, scale: _Scale, x: Value) -> tuple[_Scale, Value]:
    """Rows that are repeated before their scales are taken, as often as these are, where the quotient repeats them."""
    a, rows = graph.algebra, scale.x
    if rows.op != "expand" or rows.shape == x.shape:
        return scale, x
    seen = a.expand(exact(rows.arg), rows.shape)
    return (replace(scale, x=seen), seen) if a.expand(x, rows.shape) is seen else (scale, x)


@dataclass(frozen=True)
class _Kept:
    """The scale `s` of rows, and what the model has of their largest magnitudes."""

    s: Value
    scale: _Scale
    multiples: Mapping[Value, _Scale]

    def times(self, multiple: Value) -> float:
        """By what the scale is multiplied to be that."""
        found = self.multiples.get(multiple)
        return 1.0 if found is None else _near(found.factor / self.scale.factor)

    def has_as(self, multiple: Value) -> bool:
        """Whether that is the scale times a number, row by row, but for rows of zeros."""
        found = self.multiples[multiple]
        faint = found.least * self.scale.factor <= FAINT * (1 + 1e-6) * found.factor
        return faint and but_ones(multiple.shape) == but_ones(self.s.shape)


def _given(graph: Graph, x: Value, kept: _Kept, read: Sequence[Value]) -> tuple[Reading, Value, Reading]:
    """Rows in int8, and their scale, or a multiple of it that the model reads besides where it reads no scale.

    It is taken as it is before views of it, and before it is cast for others: another rewrite may read it so.
    """
    a, s = graph.algebra, kept.s
    sources = [each.below("cast", "reshape") for each in read]
    if not any(prod(each.shape) == prod(s.shape) and a.reshape(each, s.shape) is s for each in sources):
        s = min(filter(kept.has_as, read), key=lambda each: kept.times(each) != 1, default=s)
    alike = (each for each in kept.multiples if but_ones(each.shape) == but_ones(s.shape))
    s = next((each for each in alike if a.reshape(each, s.shape) is s), s)
    times = kept.times(s)
    axes = tuple(sorted(each % x.rank for each in kept.scale.axes))
    how: dict[str, Any] = {"x": x, "dtype": s.dtype, **({} if times == 1 else {"times": times})}
    scheme = "dynamic"
    if axes != (x.rank - 1,):
        how, scheme = how | {"axes": axes}, "several dims"
    return Reading("quantise", {**how, "scale": s, "scheme": scheme}), s, Reading("token_scale", how)


def _multiples(graph: Graph, held: Sequence[Value]) -> dict[Value, _Scale]:
    """What the model makes of the largest magnitudes of rows, as it holds them, that is a multiple of them."""
    found: dict[Value, _Scale] = {}
    waiting = list(held)
    while waiting:
        value = waiting.pop()
        scale = None if value in found else _scale(value)
        if scale is not None and not scale.odd:
            found[value] = scale
            users = (user for node in graph.places.get(value, ()) for user in node.users)
            waiting.extend(made for user in users if isinstance(made := graph.held.get(user), Value))
    return found


def _is_read(graph: Graph, multiple: Value, others: Container[object], int8: Value) -> bool:
    """Whether something reads a multiple that is no other multiple, and of which the rows in int8 are not made."""
    users = (user for node in graph.places.get(multiple, ()) for user in node.users)
    return any(
        graph.held.get(user) not in others and not any(graph.depends(node, user) for node in graph.places[int8])
        for user in users
    )


def _near(number: float) -> float:
    """The whole number that a quotient of two numbers stands for, if it is one but for its rounding."""
    nearest = round(number)
    return float(nearest) if math.isclose(number, nearest, rel_tol=1e-12) else number


def _scale_in(quotient: Value) -> bool:
    factors = [unscaled(each)[0] for each in quotient.args]
    return any(each.op == "power" and _scale(each.arg) is not None for each in factors)


def is_rounded_by_row(value: Value) -> bool:
    """Whether a value is round(x / s) of a scale s of each row."""
    if value.op != "round":
        return False
    quotient, _ = unscaled(value.arg.below("clip"))
    return quotient.op == "mul" and _scale_in(quotient)


def _unproven(below: Rounded, scale: _Scale, x: Value, divisor: Sequence[Any]) -> str:
    """Why rows divided so, by numbers of that shape, are not what the operator gives, "" if they are."""
    others = "rows are divided by the scale of others"
    if scale.odd == _JOINED:
        return _JOINED
    if scale.x.below("reshape") is not x.below("reshape") or scale.x.shape[-1:] != x.shape[-1:]:
        return others
    if len(scale.axes) > 1 and scale.x.shape != x.shape:
        return others
    if scale.odd:
        return scale.odd
    if (1,) * (x.rank - len(divisor)) + tuple(divisor) != _of_rows(x, scale.axes):
        return others
    if not math.isclose(scale.factor * LARGEST, 1, rel_tol=1e-6):
        return f"the largest number of a row becomes {1 / scale.factor:g}, by the operator {LARGEST}"
    if not below.rounded:
        return (
            "numbers are cut off toward zero, where the operator rounds to the nearest; write "
            "torch.round(x) before the cast"
        )
    if below.low > -LARGEST or below.high < LARGEST:
        return f"whole numbers are bounded by {below.low:g} and {below.high:g}, those of the operator by {LARGEST}"
    if scale.narrow and below.high > LARGEST:
        return "a scale of 16 bits is rounded, so that without a bound a row may leave int8"
    if scale.least > FAINT * (1 + 1e-6):
        return f"scales are at least {scale.least:g}: more rows than those that are as good as zeros would change"
    if x.dtype == torch.float16 and scale.least * LARGEST > FAINTEST:
        return (
            f"the bound {scale.least:g} of scales: rows of float16 may lie below; npu_dynamic_quant requires no bound"
        )
    return ""
