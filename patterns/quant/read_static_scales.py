"""Rows quantised to int8 by constant scales, of each head, of each channel or of all.

    divided     int8(clamp(round(x / s + z)))        multiplied     int8(clamp(round(x · s + z)))

s and z, tensors or numbers, are the same for every token, as for the rows of an int8 cache (C8). The order of rounding
and clamping does not matter, nor that of rounding and adding a zero point that is proven to be a whole number.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch

from fusion import reader, word
from fusion.analysis.node_predicates import is_computed
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from patterns.quant.read_quantise import UNBOUNDED
from patterns.quant.zero_points import rounded_last

INT8_ROWS = word(
    "int8_rows",
    "int8(clamp(round(x / scale + zero))), or x · scale",
    x="[*B, D]", scale="as many dims as x, 1 where all share it", zero="as the scale; absent for 0 and for a number",
    shift="the zero point as a number; absent for 0 and for a tensor",
    divided="True if x is divided by the scale, False if multiplied",
)  # fmt: skip
INT8_BY_NUMBER = word(
    "int8_by_number", "int8(clamp(round(x · by + shift)))",
    x="[*B, D]", by="a number other than 1", shift="a number",
)  # fmt: skip
_BOUNDS = (
    "int8: numbers are clamped to {low:g} and {high:g}; npu_quantize requires bounds of -128 and 127; clamp to these"
)
_VIEWS = ("reshape", "permute", "expand", "slice", "cast")


@reader(gives=(INT8_ROWS, INT8_BY_NUMBER))
def int8_rows(graph: Graph) -> Iterator[Annotation]:
    """Read every int8 value that is quantised by constant scales; report why similar values are not read."""
    for value in graph.places:
        if value.op != "cast" or value.dtype != torch.int8 or not is_computed(graph, value):
            continue
        below = rounded_last(graph.algebra, value.arg)
        if not below.rounded or not is_float(below.quotient):
            continue
        outcome = _scaled(graph.algebra, below.quotient)
        has_int8_bounds = (below.low, below.high) == (-128, 127)
        if outcome is None:
            outcome = _by_number(below.quotient) if has_int8_bounds and not below.unbounded else None
        elif below.unbounded:
            outcome = Miss("quantisation", UNBOUNDED)
        elif not has_int8_bounds:
            outcome = Miss("quantisation", _BOUNDS.format(low=below.low, high=below.high))
        if outcome is not None:
            yield value, outcome


def _scaled(a: Algebra, quotient: Value) -> Reading | None:
    """Read `quotient` = x / scale or x · scale, plus an optional zero point; None if it has no constant scale."""
    zero: Value | None = None
    shift = 0.0
    if quotient.op == "shift":
        quotient, shift = quotient.arg, float(quotient.attrs[0])
    elif quotient.op == "add":
        pairs = quotient.operands()
        quotient, zero = next(
            ((x, z) for x, z in pairs if _is_input(z) and x.shape == quotient.shape), (quotient, None)
        )
    for x, factor in quotient.operands("mul"):
        divided = factor.op == "power" and factor.attrs == (-1.0,)
        scale = factor.arg if divided else factor
        if x.shape != quotient.shape or not _is_input(scale) or not _is_per_channel(x, scale):
            continue
        if zero is not None and not _is_per_channel(x, zero):
            return None
        captures: dict[str, Any] = {"shift": shift} if shift else {}
        captures |= {} if zero is None else {"zero": _with_rank(a, exact(zero), x.rank)}
        captures |= {"x": exact(x), "scale": _with_rank(a, exact(scale), x.rank), "divided": divided}
        return Reading("int8_rows", captures)
    return None


def _by_number(quotient: Value) -> Reading | None:
    """Return the reading of x · by + shift; None without a factor, and for a quotient of tensors.

    A tensor that divides x may be a scale of each token, and the number then a part of that scale.
    """
    product, shift = (quotient.arg, quotient.attrs[0]) if quotient.op == "shift" else (quotient, 0.0)
    x, by = unscaled(product)
    is_quotient = x.op == "mul" and any((each.op, each.attrs) == ("power", (-1.0,)) for each in x.args)
    if by in (0, 1) or is_quotient:
        return None
    return Reading("int8_by_number", {"x": exact(x), "by": by, "shift": shift})


def _is_input(factor: Value) -> bool:
    """Return True if `factor` is an input, or a view or a cast of one."""
    return factor.below(*_VIEWS).op == "input"


def _is_per_channel(x: Value, factor: Value) -> bool:
    """Return True if `factor` varies along the last dim of `x` and at most one more, or along one dim alone.

    A factor with as many entries and dims as `x`, of one row, may be one of each row instead: False.
    """
    own = [axis for axis, size in enumerate((*(1,) * (x.rank - factor.rank), *factor.shape)) if size != 1]
    is_full = factor.rank == x.rank and prod(factor.shape) == prod(x.shape)
    return not is_full and len(own) < (3 if x.rank - 1 in own else 2)


def _with_rank(a: Algebra, factor: Value, rank: int) -> Value:
    return a.reshape(factor, (*(1,) * (rank - factor.rank), *factor.shape))
