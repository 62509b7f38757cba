"""Products with factors: sums of two as one, of which one may be of int8.

    c · q kᵀ + c · q_r k_rᵀ                          =  c · [q, q_r] [k, k_r]ᵀ
    c · (q8 k8ᵀ) · tokens · ones + d · q_r k_rᵀ  =  d · [q8 · tokens · ones · c / d, q_r] [k8, k_r]ᵀ

The model may multiply by scales before the products or behind them, in any order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.int8_grids import grid_of
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import Step, arranged, row_step
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof import must, proof, proven

WIDE = torch.float32


@dataclass(frozen=True)
class ScaledInt8:
    """base · rows · ones · number: whole numbers, a factor of each row [.., 1], and those of the whole tensor [1]."""

    base: Value
    rows: Value | None = None
    ones: tuple[Value, ...] = ()
    number: float = 1.0


def scaled_int8(a: Algebra, value: Value) -> ScaledInt8 | None:
    """The int8 that `value` is computed from, with all factors; None where it is something else.

    So it is where other factors than those of rows and of the whole tensor stand on it, or where it has an offset.
    """
    grid = grid_of(a, value)
    if grid is None or grid.offsets or grid.shift:
        return None
    found = ScaledInt8(grid.base, number=grid.number)
    for factor in grid.factors:
        if prod(factor.shape) == 1:
            found = replace(found, ones=(*found.ones, a.reshape(_plain(factor), (1,))))
            continue
        if factor.shape[-1] != 1:
            return None
        rows = a.expand(a.cast(_plain(factor), WIDE), (*value.shape[:-1], 1))
        found = replace(found, rows=rows if found.rows is None else a.mul(found.rows, rows))
    return found


# scores ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peeled:
    """number · factors · value with its rows arranged by steps, each factor one of rows [.., 1] or of all."""

    value: Value
    factors: tuple[Value, ...] = ()
    number: float = 1.0
    steps: tuple[Step, ...] = ()


def peeled(a: Algebra, z: Value, to: str, above: Peeled | None = None) -> Peeled | None:
    """The value of an op below casts, factors and arrangements of rows, with those `above` as they apply to it."""
    so = replace(above, value=z) if above is not None else Peeled(z)
    if not is_float(z) and not _holds_rounded(z):
        return None
    match z.op:
        case _ if z.op == to:
            return so
        case "cast" if is_rounding(z) or _holds_rounded(z):
            return peeled(a, z.arg, to, so)
        case "scale":
            return peeled(a, z.arg, to, replace(so, number=so.number * z.attrs[0]))
        case "mul":
            factor, inner = _factor_of(z)
            if factor is None or inner.shape != z.shape:
                return None
            return peeled(a, inner, to, replace(so, factors=(*so.factors, factor)))
        case _:
            step = row_step(z)
            kept = () if step is None else tuple(_below(a, z, each) for each in so.factors)
            return step and peeled(a, z.arg, to, replace(so, factors=kept, steps=(step, *so.steps)))


def _factor_of(z: Value) -> tuple[Value | None, Value]:
    """The one factor of a product that is of rows [.., 1] or of all, and what it multiplies; None without one."""
    small = [each for each in z.args if prod(each.shape) == 1 or each.shape[-1:] == (1,)]
    if len(small) != 1:
        return None, z
    return small[0], z.args[1] if z.args[0] is small[0] else z.args[0]


def _holds_rounded(z: Value) -> bool:
    """Whether whole numbers hold what was rounded, and nothing else."""
    return z.dtype is not torch.bool and z.below("cast", "reshape", "permute", "clip").op == "round"


def factors_of(a: Algebra, x: Value) -> list[Value]:
    """The factors of a product, those below the line one by one."""
    if x.op == "mul":
        return [factor for each in x.args for factor in factors_of(a, each)]
    if x.op == "power" and x.attrs == (-1.0,):
        return [a.power(factor, -1) for factor in factors_of(a, x.arg)]
    return [x]


def product_of(a: Algebra, factors: Sequence[Value]) -> Value | None:
    """Their product; None without any, or where their shapes do not broadcast."""
    return reduce(lambda x, y: None if x is None else a.mul(x, y), factors[1:], factors[0]) if factors else None


def _below(a: Algebra, z: Value, factor: Value) -> Value:
    """A factor of what a view `z` shows, as one of what lies below."""
    if prod(factor.shape) == 1:
        return factor
    rows = a.expand(factor, (*z.shape[:-1], 1))
    if z.op == "reshape":
        return a.reshape(rows, (*z.arg.shape[:-1], 1))
    return a.permute(rows, [z.attrs.index(axis) for axis in range(z.rank)])


@proof
def joined(a: Algebra, left: Value, right: Value) -> Value | None:
    """A sum of two products as one; all factors in the queries, if one is of whole numbers. None for other sums."""
    first, second = (proven(peeled(a, each, "matmul")) for each in (left, right))
    must(first.steps == second.steps and first.value.shape == second.value.shape)
    of_floats = [each for each in (first, second) if not _is_int8(a, each.value)]
    number = of_floats[0].number if of_floats else 0.0
    must(number)
    if len(of_floats) == 2:
        must(first.number == second.number and not first.factors and not second.factors)
        pairs = ((each.value.arg, swapped(a, each.value.args[1])) for each in (first, second))
        queries, keys = (_below_widening(a, *pair) for pair in zip(*pairs, strict=True))
    else:
        queries = _side_by_side(a, *(_with_factors(a, each, number) for each in (first, second)))
        keys = _side_by_side(a, *(a.cast(swapped(a, each.value.args[1]), WIDE) for each in (first, second)))
    product = proven(matmul(a, queries, swapped(a, keys)))
    return a.scale(arranged(a, product, first.steps), number)


def _below_widening(a: Algebra, left: Value, right: Value) -> Value:
    """Two tensors joined along their last dim, before both are widened if they are."""
    if left.op == right.op == "cast" and left.arg.dtype == right.arg.dtype and widens(left.arg.dtype, left.dtype):
        return a.cast(_side_by_side(a, left.arg, right.arg), left.dtype)
    return _side_by_side(a, left, right)


def _side_by_side(a: Algebra, left: Value, right: Value) -> Value:
    """Two tensors joined along their last dim; what one has for all heads is repeated."""
    must(left.dtype == right.dtype)
    lead = proven(broadcast(left.shape[:-1], right.shape[:-1]))
    return a.cat([a.expand(each, (*lead, each.shape[-1])) for each in (left, right)], -1)


def _is_int8(a: Algebra, product: Value) -> bool:
    x, y = product.args
    return scaled_int8(a, x) is not None and scaled_int8(a, swapped(a, y)) is not None


def _with_factors(a: Algebra, found: Peeled, number: float) -> Value:
    x = a.cast(found.value.arg, WIDE)
    for factor in found.factors:
        x = proven(a.mul(x, a.cast(_plain(factor), WIDE)))
    return a.scale(x, found.number / number)


def _plain(factor: Value) -> Value:
    """A factor before it was cast from floats to floats."""
    while factor.op == "cast" and is_float(factor.arg):
        factor = factor.arg
    return factor


@proof
def scaled_sum(a: Algebra, z: Value) -> Value | None:
    """(products added) · factors, of rows or of all, as one product; None for others."""
    factors: list[Value] = []
    number = 1.0
    while z.op in ("mul", "scale", "cast") and is_float(z):
        if z.op == "mul":
            factor, z = _factor_of(z)
            factors.append(proven(factor))
            continue
        number *= z.attrs[0] if z.op == "scale" else 1.0
        z = z.arg
    must(z.op == "add")
    sides = list(z.args)
    for factor in factors:
        sides = [proven(a.mul(each, a.cast(factor, each.dtype))) for each in sides]
    return a.scale(proven(joined(a, *sides)), number)


def weighted_sum(a: Algebra, value: Value) -> tuple[Value, tuple[tuple[str, tuple[Any, ...]], ...]] | None:
    """P k8 with the factors behind it put to k8, and how the result is arranged; None where `value` is no such sum."""
    ones: list[Value] = []
    steps: list[tuple[str, tuple[Any, ...]]] = []
    number = 1.0
    while value.op != "matmul":
        single = [each for each in value.args if prod(each.shape) == 1] if value.op == "mul" else []
        if single:
            ones.append(single[0])
            value = value.args[1] if value.args[0] is single[0] else value.args[0]
            continue
        if value.op in ("reshape", "permute"):
            steps.append((value.op, value.shape if value.op == "reshape" else value.attrs))
        elif value.op == "scale":
            number *= value.attrs[0]
        elif value.op != "cast" or not is_float(value.arg):
            return None
        value = value.arg
    if (number == 1 and not ones) or scaled_int8(a, value.args[1]) is None:
        return None
    values = value.args[1]
    for one in ones:
        values = a.mul(values, a.cast(one, values.dtype)) or values
    inside = (value.arg, a.scale(values, number))  # made as it is: `matmul` would put the number outside again
    return a.make("matmul", inside, (), value.shape, value.dtype), tuple(reversed(steps))
