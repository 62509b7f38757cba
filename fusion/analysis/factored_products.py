"""Scores and sums of which one part multiplies whole numbers of 8 bits, with all factors put to one side.

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

from fusion.analysis.rounding import is_float
from fusion.graph import Algebra, Value, broadcast
from fusion.graph.contractions import matmul, swapped
from fusion.graph.proof import Unproven, must, proof, proven

WIDE = torch.float32


@dataclass(frozen=True)
class ScaledInt8:
    """base · rows · ones · number: whole numbers, a factor of each row [.., 1], and those of the whole tensor [1]."""

    base: Value
    rows: Value | None = None
    ones: tuple[Value, ...] = ()
    number: float = 1.0


@proof
def scaled_int8(a: Algebra, value: Value) -> ScaledInt8 | None:
    """The whole numbers of 8 bits that `value` is computed from, with all factors; None where it is something else."""
    if value.op == "cast" and value.arg.dtype == torch.int8:
        return ScaledInt8(value.arg) if is_float(value) else None
    if value.op == "mul":
        return _multiplied(a, value, *value.args) or _multiplied(a, value, *value.args[::-1])
    must(value.op in ("cast", "scale", "reshape", "permute", "expand", "slice") and is_float(value))
    found = proven(scaled_int8(a, value.arg))
    if value.op == "cast":
        return found
    if value.op == "scale":
        return replace(found, number=found.number * value.attrs[0])
    return _viewed(a, value, found)


@proof
def _multiplied(a: Algebra, value: Value, x: Value, factor: Value) -> ScaledInt8 | None:
    """One more factor, of rows or of the whole tensor."""
    found = proven(scaled_int8(a, x))
    must(x.shape == value.shape)
    if prod(factor.shape) == 1:
        return replace(found, ones=(*found.ones, a.reshape(_plain(factor), (1,))))
    must(factor.shape[-1] == 1)
    rows = a.expand(a.cast(_plain(factor), WIDE), (*x.shape[:-1], 1))
    return replace(found, rows=rows if found.rows is None else proven(a.mul(found.rows, rows)))


def _viewed(a: Algebra, value: Value, found: ScaledInt8) -> ScaledInt8:
    """The same seen through a view that leaves the last dim alone."""
    last = value.rank - 1
    must(value.shape[-1:] == value.arg.shape[-1:] and not (value.op == "permute" and value.attrs[-1] != last))
    must(value.op != "slice" or value.attrs[0] != last)

    def seen(x: Value) -> Value:
        shape = (*value.shape[:-1], x.shape[-1])
        match value.op:
            case "reshape":
                return a.reshape(x, shape)
            case "permute":
                return a.permute(x, value.attrs)
            case "expand":
                return a.expand(x, shape)
            case _:
                return proven(a.slice(x, value.attrs[0] - value.rank, *value.attrs[1:]))

    return replace(found, base=seen(found.base), rows=None if found.rows is None else seen(found.rows))


# scores ------------------------------------------------------------------------------------------------------------

Steps = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclass(frozen=True)
class _Product:
    """number · factors · (x yᵀ), each factor one of rows or of all, arranged by steps."""

    x: Value
    y: Value
    factors: tuple[Value, ...] = ()
    number: float = 1.0
    steps: Steps = ()


def _product(a: Algebra, z: Value, found: _Product | None = None) -> _Product:
    """The product below `z`, with all factors that stand behind it."""
    so = found or _Product(z, z)
    match z.op:
        case "matmul":
            return replace(so, x=z.arg, y=z.args[1])
        case "cast" if is_float(z):
            return _product(a, z.arg, so)
        case "scale":
            return _product(a, z.arg, replace(so, number=so.number * z.attrs[0]))
        case "mul":
            factors = [each for each in z.args if prod(each.shape) == 1 or each.shape[-1:] == (1,)]
            inner = [each for each in z.args if each.shape == z.shape and each not in factors]
            must(len(factors) == 1 and len(inner) == 1)
            return _product(a, inner[0], replace(so, factors=(*so.factors, factors[0])))
        case "reshape" | "permute" if z.shape[-1:] == z.arg.shape[-1:]:
            kept = tuple(below(a, z, each) for each in so.factors)
            step = ("reshape", z.shape) if z.op == "reshape" else ("permute", z.attrs)
            return _product(a, z.arg, replace(so, factors=kept, steps=(step, *so.steps)))
        case _:
            raise Unproven


def below(a: Algebra, z: Value, factor: Value) -> Value:
    """A factor of what a view `z` shows, as one of what lies below."""
    if prod(factor.shape) == 1:
        return factor
    rows = a.expand(factor, (*z.shape[:-1], 1))
    if z.op == "reshape":
        return a.reshape(rows, (*z.arg.shape[:-1], 1))
    return a.permute(rows, [z.attrs.index(axis) for axis in range(z.rank)])


@proof
def joined(a: Algebra, left: Value, right: Value) -> Value:
    """A sum of two products, one of whole numbers, as one product with all factors in the queries."""
    both = [_product(a, each) for each in (left, right)]
    of_floats = [each for each in both if not _is_int8(a, each)]
    must(both[0].steps == both[1].steps and len(of_floats) == 1 and of_floats[0].number)
    number = of_floats[0].number
    queries = [_with_factors(a, each, number) for each in both]
    keys = [a.cast(swapped(a, each.y), WIDE) for each in both]
    product = proven(matmul(a, _beside(a, queries), swapped(a, _beside(a, keys))))
    for op, how in both[0].steps:
        product = a.reshape(product, how) if op == "reshape" else a.permute(product, how)
    return a.scale(product, number)


def _beside(a: Algebra, pair: Sequence[Value]) -> Value:
    """[q, r]; what one has for all heads is repeated."""
    lead = proven(broadcast(pair[0].shape[:-1], pair[1].shape[:-1]))
    return a.cat([a.expand(each, (*lead, each.shape[-1])) for each in pair], -1)


def _is_int8(a: Algebra, found: _Product) -> bool:
    return scaled_int8(a, found.x) is not None and scaled_int8(a, swapped(a, found.y)) is not None


def _with_factors(a: Algebra, found: _Product, number: float) -> Value:
    factors = (a.cast(_plain(each), WIDE) for each in found.factors)
    x = reduce(lambda x, factor: proven(a.mul(x, factor)), factors, a.cast(found.x, WIDE))
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
            small = [each for each in z.args if prod(each.shape) == 1 or each.shape[-1:] == (1,)]
            must(len(small) == 1 and z.args[0] is not z.args[1])
            factors.append(small[0])
            z = z.args[1] if z.args[0] is small[0] else z.args[0]
            continue
        number *= z.attrs[0] if z.op == "scale" else 1.0
        z = z.arg
    must(z.op == "add" and factors)
    sides = z.args
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
