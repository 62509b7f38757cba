"""Sums of two scaled matrix products, of which one may have dequantised int8 operands, as one matrix product.

    c · q kᵀ + c · q_r k_rᵀ                          =  c · [q, q_r] [k, k_r]ᵀ
    c · (q8 k8ᵀ) · tokens · ones + d · q_r k_rᵀ  =  d · [q8 · tokens · ones · c / d, q_r] [k8, k_r]ᵀ

The model may apply the scales to operands or to products, in any order. `tokens` are factors [.., 1] of rows, `ones`
factors [1] of a tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from math import prod
from typing import Any

import torch

from fusion.analysis.dequantised import grid_of
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.rounding import is_float
from fusion.analysis.row_layout import Step, arranged, row_step
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.algebra import widens
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof_steps import must, proof, proven

WIDE = torch.float32


@dataclass(frozen=True)
class ScaledInt8:
    """base · rows · Π ones · number: an int8 tensor, factors [.., 1] of its rows, tensors [1], and a number."""

    base: Value
    rows: Value | None = None
    ones: tuple[Value, ...] = ()
    number: float = 1.0


def scaled_int8(a: Algebra, value: Value) -> ScaledInt8 | None:
    """Return the int8 tensor that `value` is dequantised from, with its factors.

    None for any other value, with an offset, and with factors other than of rows or of the tensor.
    """
    grid = grid_of(a, value)
    if grid is None or grid.encoding.torch_dtype != torch.int8 or grid.offsets or grid.shift:
        return None
    scaled = ScaledInt8(grid.base, number=grid.number)
    for factor in grid.factors:
        if prod(factor.shape) == 1:
            scaled = replace(scaled, ones=(*scaled.ones, a.reshape(_uncast(factor), (1,))))
            continue
        if factor.shape[-1] != 1:
            return None
        rows = a.expand(a.cast(_uncast(factor), WIDE), (*value.shape[:-1], 1))
        scaled = replace(scaled, rows=rows if scaled.rows is None else a.mul(scaled.rows, rows))
    return scaled


@dataclass(frozen=True)
class Peeled:
    """number · Π factors · value, followed by `steps`, the reshapes and permutes of its rows.

    Each factor broadcasts to `value`: [.., 1], or one element.
    """

    value: Value
    factors: tuple[Value, ...] = ()
    number: float = 1.0
    steps: tuple[Step, ...] = ()


def peeled(a: Algebra, z: Value, to: str, above: Peeled | None = None) -> Peeled | None:
    """Walk from `z` down to a value of the op `to`, collecting numbers, factors of rows, and reshapes and permutes of
    rows.

    Casts are dropped. `above` holds what was collected above `z`. None if another op is met on the way.
    """
    so = replace(above, value=z) if above is not None else Peeled(z)
    if not is_float(z) and not _is_rounded(z):
        return None
    match z.op:
        case _ if z.op == to:
            return so
        case "cast" if is_rounding(z) or _is_rounded(z):
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
            factors = () if step is None else tuple(_below(a, z, each) for each in so.factors)
            return step and peeled(a, z.arg, to, replace(so, factors=factors, steps=(step, *so.steps)))


def _factor_of(z: Value) -> tuple[Value | None, Value]:
    """Split the "mul" `z` into its one operand that is [.., 1] or has one element, and the other operand.

    None and `z` if none or both of the operands are such.
    """
    small = [each for each in z.args if prod(each.shape) == 1 or each.shape[-1:] == (1,)]
    if len(small) != 1:
        return None, z
    return small[0], z.args[1] if z.args[0] is small[0] else z.args[0]


def _is_rounded(z: Value) -> bool:
    """Return True if `z` is the result of a round, through casts, views and clips, in any dtype but bool."""
    return z.dtype is not torch.bool and z.below("cast", "reshape", "permute", "clip").op == "round"


def factors_of(a: Algebra, x: Value) -> list[Value]:
    """List the factors of the product `x`, at any depth of nesting; 1 / (y · z) has the factors 1 / y and 1 / z."""
    if x.op == "mul":
        return [factor for each in x.args for factor in factors_of(a, each)]
    if x.op == "power" and x.attrs == (-1.0,):
        return [a.power(factor, -1) for factor in factors_of(a, x.arg)]
    return [x]


def product_of(a: Algebra, factors: Sequence[Value]) -> Value | None:
    """Multiply `factors`; None if there are none, or if their shapes do not broadcast."""
    return reduce(lambda x, y: None if x is None else a.mul(x, y), factors[1:], factors[0]) if factors else None


def _below(a: Algebra, z: Value, factor: Value) -> Value:
    """Arrange `factor`, one number for each row of `z`, for the rows of the argument of `z`, a reshape or permute of
    rows.
    """
    if prod(factor.shape) == 1:
        return factor
    rows = a.expand(factor, (*z.shape[:-1], 1))
    if z.op == "reshape":
        return a.reshape(rows, (*z.arg.shape[:-1], 1))
    return a.permute(rows, [z.attrs.index(axis) for axis in range(z.rank)])


@proof
def joined(a: Algebra, left: Value, right: Value) -> Value | None:
    """Return `left` + `right`, two scaled matrix products, as one matrix product whose inner dim is that of both.

    If one product is of int8, all factors are moved to the left operands. None for any other sum.
    """
    first, second = (proven(peeled(a, each, "matmul")) for each in (left, right))
    if first.steps != second.steps:
        first, second = (_arranged_first(a, each) for each in (first, second))
    must(first.steps == second.steps and first.value.shape == second.value.shape)
    floating = [each for each in (first, second) if not _is_int8(a, each.value)]
    number = floating[0].number if floating else 0.0
    must(number)
    if len(floating) == 2:
        must(first.number == second.number and not first.factors and not second.factors)
        pairs = ((each.value.arg, swapped(a, each.value.args[1])) for each in (first, second))
        queries, keys = (_below_widening(a, *pair) for pair in zip(*pairs, strict=True))
    else:
        queries = _side_by_side(a, *(_with_factors(a, each, number) for each in (first, second)))
        keys = _side_by_side(a, *(a.cast(swapped(a, each.value.args[1]), WIDE) for each in (first, second)))
    product = proven(matmul(a, queries, swapped(a, keys)))
    return a.scale(arranged(a, product, first.steps), number)


def _arranged_first(a: Algebra, side: Peeled) -> Peeled:
    """Move the steps of `side`, a product of rows with one matrix, to its left operand; others stay."""
    x, y = side.value.args
    if prod(y.shape[:-2]) != 1 or side.factors:
        return side
    x, y = arranged(a, x, side.steps), a.reshape(y, y.shape[-2:])
    # not by `matmul`, which would move the steps out again
    product = a.make("matmul", (x, y), (), (*x.shape[:-1], y.shape[-1]), side.value.dtype)
    return replace(side, value=product, steps=())


def _below_widening(a: Algebra, left: Value, right: Value) -> Value:
    """Concatenate `left` and `right` along the last dim; if both are widened from one dtype, before the cast."""
    if left.op == right.op == "cast" and left.arg.dtype == right.arg.dtype and widens(left.arg.dtype, left.dtype):
        return a.cast(_side_by_side(a, left.arg, right.arg), left.dtype)
    return _side_by_side(a, left, right)


def _side_by_side(a: Algebra, left: Value, right: Value) -> Value:
    """Concatenate `left` and `right`, of one dtype, along the last dim; their other dims are broadcast to each
    other.
    """
    must(left.dtype == right.dtype)
    lead = proven(broadcast(left.shape[:-1], right.shape[:-1]))
    return a.cat([a.expand(each, (*lead, each.shape[-1])) for each in (left, right)], -1)


def _is_int8(a: Algebra, product: Value) -> bool:
    x, y = product.args
    return scaled_int8(a, x) is not None and scaled_int8(a, swapped(a, y)) is not None


def _with_factors(a: Algebra, product: Peeled, number: float) -> Value:
    x = a.cast(product.value.arg, WIDE)
    for factor in product.factors:
        x = proven(a.mul(x, a.cast(_uncast(factor), WIDE)))
    return a.scale(x, product.number / number)


def _uncast(factor: Value) -> Value:
    """Strip casts between floats from `factor`."""
    while factor.op == "cast" and is_float(factor.arg):
        factor = factor.arg
    return factor


@proof
def scaled_sum(a: Algebra, z: Value) -> Value | None:
    """Read `z` as (product + product) · Π factors, each [.., 1] or of one element, and return one matrix product that
    equals it.

    None for any other value.
    """
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
    """Read `value` as a matrix product P · v of dequantised int8 v, times numbers or tensors of one element, below
    views.

    Returns:
        P · (v · factors), and the (op, shape or order) of each reshape and permute from it to `value`, innermost first.
        None for any other value, and if there are no factors to move.
    """
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
    inside = (value.arg, a.scale(values, number))  # not by `matmul`, which would move the number out again
    return a.make("matmul", inside, (), value.shape, value.dtype), tuple(reversed(steps))
