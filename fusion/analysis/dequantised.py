"""Dequantised numbers: floats (n + offset) · scale of stored n, in whatever order casts, views and factors are written.

k8.float() * s        (k8 - z) * s        k8.to(bf16) * 0.05        (k8[table] * s).view(..)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value
from fusion.operators.encodings import Encoding, encoding_of


@dataclass(frozen=True)
class Grid:
    """(base + Σ offsets + shift) · Π factors · number; offsets and factors broadcast to the stored numbers `base`."""

    base: Value
    encoding: Encoding
    factors: tuple[Value, ...] = ()
    offsets: tuple[Value, ...] = ()
    number: float = 1.0
    shift: float = 0.0

    @property
    def is_scaled(self) -> bool:
        """Return True if the sum is multiplied by anything: what is added afterwards is then no part of the sum."""
        return bool(self.factors) or self.number != 1


def grid_of(a: Algebra, value: Value) -> Grid | None:
    """Return the grid that `value` is computed from, ignoring casts between floats; None if no numbers of an
    encoding are below."""
    known: dict[Value, Grid | None] = {}  # without a memo the work is exponential in the length of a chain

    def inner(x: Value) -> Grid | None:
        if x not in known:
            known[x] = _read(a, x, inner)
        return known[x]

    return inner(value)


def _read(a: Algebra, value: Value, inner: Callable[[Value], Grid | None]) -> Grid | None:
    """Return the grid of `value` by the grids of its arguments, which `inner` gives; None if it has none."""
    match value.op:
        case "cast" if (encoding := encoding_of(value.arg.dtype)) is not None:
            return Grid(value.arg, encoding) if is_float(value) else None
        case "cast" if is_rounding(value):
            return inner(value.arg)
        case "scale" | "shift" if is_float(value):
            return _with_number(inner(value.arg), value)
        case "mul" | "add":
            sides = value.operands()
            grids = (_with_operand(inner(x), x, other, value) for x, other in sides)
            return next((each for each in grids if each is not None), None)
        case "reshape" | "permute" | "expand" | "slice" if is_float(value):
            grid = inner(value.arg)
            return grid and _viewed(a, grid, value)
        case "cat" if is_float(value) and value.attrs[0] < value.rank - 1:
            grids = [inner(each) for each in value.args]
            return _concatenated(a, [each for each in grids if each is not None], value)
        case _:
            return None


def _concatenated(a: Algebra, parts: Sequence[Grid], joined: Value) -> Grid | None:
    """Return the grid of `joined`, a cat of values with the grids `parts` along a dim but the last.

    None unless every piece has a grid, and all have as many factors and offsets and the same `number` and `shift`.
    """
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


def _with_number(grid: Grid | None, value: Value) -> Grid | None:
    """Return the `grid` of the argument of `value`, a scale or a shift, with the number of `value`.

    None if `grid` is, or for a shift behind a factor.
    """
    if grid is None or value.op == "scale":
        return grid and replace(grid, number=grid.number * value.attrs[0])
    return None if grid.is_scaled else replace(grid, shift=grid.shift + value.attrs[0])


def _with_operand(grid: Grid | None, x: Value, other: Value, value: Value) -> Grid | None:
    """Return the `grid` of `x` with the operand `other`: a factor for `value` = x · other, an offset for x + other.

    None if `grid` is, if `x` is broadcast, or for an offset behind a factor.
    """
    if grid is None or x.shape != value.shape:
        return None
    if value.op == "mul":
        return replace(grid, factors=(*grid.factors, other))
    return None if grid.is_scaled else replace(grid, offsets=(*grid.offsets, other))


def _viewed(a: Algebra, grid: Grid, view: Value) -> Grid:
    """Apply `view`, a reshape, permute, expand or slice, to the numbers of `grid` and to all of its factors and
    offsets.
    """

    def viewed(x: Value) -> Value:
        if prod(x.shape) == 1:
            return x
        alike = view.shape[-1:] == view.arg.shape[-1:] and (view.op != "permute" or view.attrs[-1] == view.rank - 1)
        wide = (*grid.base.shape[:-1], x.shape[-1] if alike else grid.base.shape[-1])
        x = a.expand(x, wide)
        if view.op == "slice":
            return a.cut(x, view.attrs[0] - view.rank, *view.attrs[1:])
        if view.op == "permute":
            return a.permute(x, view.attrs)
        shape = (*view.shape[:-1], wide[-1] if alike else view.shape[-1])
        return a.expand(x, shape) if view.op == "expand" else a.reshape(x, shape)

    parts = {name: tuple(map(viewed, getattr(grid, name))) for name in ("factors", "offsets")}
    return replace(grid, base=viewed(grid.base), **parts)
