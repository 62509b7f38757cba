"""Vectors of a state S [*L, X, Y]: contractions with them, factors of them, and their values as [*L, lanes].

Σ_x S[x, y] · vector[x]          a mean of a product, or a matmul, in either order of its operands
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from fusion.analysis.dtypes import is_rounding, unrounded
from fusion.graph import Algebra, Dim, Value, but_ones
from fusion.graph.proof_steps import must, proof, proven


@dataclass(frozen=True)
class Contraction:
    """number · Σ matrix · vector over `axis`, -2 or -1, of a matrix [.., X, Y].

    The vector is [.., X, 1] or [.., 1, Y], and broadcasts to the matrix.
    """

    matrix: Value
    vector: Value
    axis: int
    number: float = 1.0


@dataclass(frozen=True)
class Scaled:
    """number · Π factors · value: a value below scales and factors of a vector.

    Each factor is one number of a head; `frames` are the shapes that they broadcast to.
    """

    value: Value
    number: float = 1.0
    factors: tuple[Value, ...] = ()
    frames: tuple[tuple[Dim, ...], ...] = ()


def plain(x: Value) -> Value:
    """Return the value below casts between floats of `x` and reshapes that only insert or remove dims of size 1."""
    while is_rounding(x) or _opens(x):
        x = x.arg
    return x


def _opens(x: Value) -> bool:
    return x.op == "reshape" and but_ones(x.shape) == but_ones(x.arg.shape)


def contraction(a: Algebra, x: Value) -> Contraction | None:
    """Read `x` as a sum over one of the last two dims of a matrix, weighed by a vector; None for anything else."""
    x = plain(x)
    if x.op == "mean" and x.attrs in ((-1,), (-2,)):
        return _mean_of_product(x)
    return _product(a, x) if x.op == "matmul" else None


@proof
def _mean_of_product(x: Value) -> Contraction | None:
    (axis,), product = x.attrs, x.arg
    size, number = product.shape[axis], 1.0
    while product.op == "scale" or is_rounding(product):
        number *= product.attrs[0] if product.op == "scale" else 1.0
        product = product.arg
    must(product.op == "mul" and isinstance(size, int))
    for matrix, vector in (product.args, product.args[::-1]):
        if matrix.shape == product.shape and (1, *vector.shape)[-3 - axis] == 1:
            return Contraction(unrounded(matrix), vector, axis, number / int(size))
    return None


@proof
def _product(a: Algebra, x: Value) -> Contraction | None:
    left, right = x.args
    must(left.rank == right.rank and 1 in (left.shape[-2], right.shape[-1]))
    matrix, vector, axis = (right, left, -2) if left.shape[-2] == 1 else (left, right, -1)
    must(1 not in matrix.shape[-2:])
    matrix = unrounded(matrix)
    if matrix.op == "permute" and matrix.attrs == (*range(matrix.rank - 2), matrix.rank - 1, matrix.rank - 2):
        matrix, axis = unrounded(matrix.arg), -3 - axis
    lead, size = vector.shape[:-2], matrix.shape[axis]
    return Contraction(matrix, a.reshape(vector, (*lead, size, 1) if axis == -2 else (*lead, 1, size)), axis)


def descend(x: Value, is_end: Callable[[Value], bool]) -> Scaled | None:
    """Walk from `x` through casts, scales and factors of one number for a head to the value that `is_end` accepts.

    None if another op is met before.
    """
    number, factors, frames = 1.0, list[Value](), list[tuple[Dim, ...]]()
    while not is_end(x):
        if x.op == "scale":
            number, x = number * x.attrs[0], x.arg
        elif is_rounding(x) or _opens(x):
            x = x.arg
        elif x.op == "mul" and (inner := _vector_of(x)) is not None:
            factors.append(x.args[1] if inner is x.args[0] else x.args[0])
            frames.append(x.shape)
            x = inner
        else:
            return None
    return Scaled(x, number, tuple(factors), tuple(frames))


def _vector_of(product: Value) -> Value | None:
    """Return the operand of `product` that has all its lanes, if the other one has one number for each head."""
    large = [each for each in product.args if but_ones(each.shape) == but_ones(product.shape)]
    other = [each for each in product.args if each not in large]
    lanes = _lanes(product.shape)
    is_of_heads = len(other) == 1 and (1,) * product.rank + other[0].shape
    return large[0] if len(large) == 1 and is_of_heads and is_of_heads[lanes] == 1 else None


def _lanes(shape: Sequence[Dim]) -> int:
    """Return the last axis of `shape`, counted from its end, whose size is not 1."""
    return next((axis for axis in range(-1, -len(shape) - 1, -1) if shape[axis] != 1), -1)


@proof
def without(a: Algebra, x: Value, heads: Sequence[Value], lead: Sequence[Dim]) -> Scaled | None:
    """Divide the product `x` by each of `heads` [*lead], factors of one number for each head; None where one is no
    factor of it.
    """
    number, waiting = 1.0, list(heads)
    while waiting:
        below = proven(descend(x, lambda each: each.op == "mul"))
        product, inner = below.value, proven(_vector_of(below.value))
        other = product.args[1] if inner is product.args[0] else product.args[0]
        factor = proven(heads_of(a, other, product.shape, lead))
        must(not below.factors and factor in waiting)
        waiting.remove(factor)
        number, x = number * below.number, inner
    below = Scaled(x) if x.op != "scale" else Scaled(x.arg, x.attrs[0])
    return Scaled(below.value, number * below.number)


@proof
def lanes_of(a: Algebra, x: Value, frame: Sequence[Dim], shape: Sequence[Dim]) -> Value | None:
    """Broadcast `x` to `frame`, which has the dims of `shape` and others of size 1, and reshape it to `shape`.

    Casts that lose nothing are left out.
    """
    must(but_ones(frame) == but_ones(shape) and x.rank <= len(frame))
    return narrowed(a.reshape(a.expand(x, frame), shape))


@proof
def heads_of(a: Algebra, x: Value, frame: Sequence[Dim], lead: Sequence[Dim]) -> Value | None:
    """Broadcast `x`, one number of each head, to `frame` without its lanes, and reshape it to `lead`."""
    lanes = len(frame) + _lanes(frame)
    return lanes_of(a, x, (*frame[:lanes], 1, *frame[lanes + 1 :]), lead)


def narrowed(x: Value) -> Value:
    """Return the value below the casts of `x` that widen a float of 16 bits."""
    while x.op == "cast" and x.arg.dtype is not None and x.arg.dtype.is_floating_point and x.arg.dtype.itemsize == 2:
        x = x.arg
    return x
