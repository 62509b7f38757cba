"""Floats that int8 stand for: (n + offset) · scale, in whatever order casts, views and factors are written.

k8.float() * s        (k8 - z) * s        k8.to(bf16) * 0.05        (k8[table] * s).view(..)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value


@dataclass(frozen=True)
class Grid:
    """(base + Σ offsets + shift) · Π factors · number, base in int8; offsets and factors broadcast to it."""

    base: Value
    factors: tuple[Value, ...] = ()
    offsets: tuple[Value, ...] = ()
    number: float = 1.0
    shift: float = 0.0

    @property
    def is_scaled(self) -> bool:
        """Whether anything multiplies the sum: what is added behind is no offset."""
        return bool(self.factors) or self.number != 1


def grid_of(a: Algebra, value: Value) -> Grid | None:
    """What `value` is computed from, but for roundings between floats; None where that is no int8."""
    known: dict[Value, Grid | None] = {}  # a value may be reached in as many ways as 2 to the length of a chain

    def of(x: Value) -> Grid | None:
        if x not in known:
            known[x] = _read(a, x, of)
        return known[x]

    return of(value)


def _read(a: Algebra, value: Value, of: Callable[[Value], Grid | None]) -> Grid | None:
    """The same by what `of` says of its arguments."""
    match value.op:
        case "cast" if value.arg.dtype == torch.int8:
            return Grid(value.arg) if is_float(value) else None
        case "cast" if is_rounding(value):
            return of(value.arg)
        case "scale" | "shift" if is_float(value):
            return _by_number(of(value.arg), value)
        case "mul" | "add":
            sides = (value.args, value.args[::-1])
            found = (_joined(of(x), x, other, value) for x, other in sides)
            return next((each for each in found if each is not None), None)
        case "reshape" | "permute" | "expand" | "slice" if is_float(value):
            found = of(value.arg)
            return found and _viewed(a, found, value)
        case "cat" if is_float(value) and value.attrs[0] < value.rank - 1:
            found = [of(each) for each in value.args]
            return _beside(a, [each for each in found if each is not None], value)
        case _:
            return None


def _beside(a: Algebra, parts: Sequence[Grid], joined: Value) -> Grid | None:
    """Of what is joined along a dim that is not the last, if every piece is made alike."""
    (axis,) = joined.attrs
    alike = {(len(each.factors), len(each.offsets), each.number, each.shift) for each in parts}
    if len(parts) != len(joined.args) or len(alike) != 1:
        return None

    def along(*values: Value) -> Value:
        lifted = [a.reshape(x, (*(1,) * (joined.rank - x.rank), *x.shape)) for x in values]
        if all(x is lifted[0] for x in lifted) and lifted[0].shape[axis] == 1:
            return lifted[0]
        pairs = zip(lifted, parts, strict=True)
        return a.cat([a.expand(x, (*part.base.shape[:-1], x.shape[-1])) for x, part in pairs], axis)

    base = a.cat([each.base for each in parts], axis)
    factors, offsets = (
        tuple(along(*column) for column in zip(*columns, strict=True))
        for columns in ([each.factors for each in parts], [each.offsets for each in parts])
    )
    return replace(parts[0], base=base, factors=factors, offsets=offsets)


def _by_number(found: Grid | None, value: Value) -> Grid | None:
    """Times a number, or with one that is added before anything multiplies it."""
    if found is None or value.op == "scale":
        return found and replace(found, number=found.number * value.attrs[0])
    return None if found.is_scaled else replace(found, shift=found.shift + value.attrs[0])


def _joined(found: Grid | None, x: Value, other: Value, value: Value) -> Grid | None:
    """With one more factor or offset, which `x` is not broadcast to."""
    if found is None or x.shape != value.shape:
        return None
    if value.op == "mul":
        return replace(found, factors=(*found.factors, other))
    return None if found.is_scaled else replace(found, offsets=(*found.offsets, other))


def _viewed(a: Algebra, found: Grid, view: Value) -> Grid:
    """The same seen through a view."""

    def seen(x: Value) -> Value:
        if prod(x.shape) == 1:
            return x
        alike = view.shape[-1:] == view.arg.shape[-1:] and (view.op != "permute" or view.attrs[-1] == view.rank - 1)
        wide = (*found.base.shape[:-1], x.shape[-1] if alike else found.base.shape[-1])
        x = a.expand(x, wide)
        if view.op == "slice":
            return a.cut(x, view.attrs[0] - view.rank, *view.attrs[1:])
        return a.permute(x, view.attrs) if view.op == "permute" else _shaped(a, x, view, alike)

    parts = {name: tuple(map(seen, getattr(found, name))) for name in ("factors", "offsets")}
    return replace(found, base=seen(found.base), **parts)


def _shaped(a: Algebra, x: Value, view: Value, alike: bool) -> Value:
    """As a reshape or an expand shows it, but for a last dim of its own."""
    shape = (*view.shape[:-1], x.shape[-1] if alike else view.shape[-1])
    return a.expand(x, shape) if view.op == "expand" else a.reshape(x, shape)
