"""Dims: sizes of tensors, either an int or the sympy expression of a symbolic size, so that shapes are hashable."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    import sympy  # a second to import, and torch loads it only once sizes are symbolic

    Dim = int | sympy.Expr
else:
    Dim = Any


_INTS = frozenset((int,))


def dim_of(size: int | torch.SymInt) -> Dim:
    """Convert one size to its hashable form, the expression without exact floor divisions."""
    if isinstance(size, int):
        return size
    expr: Any = size.node.expr
    return int(expr) if isinstance(expr, int) or expr.is_number else without_divisions(expr)


def is_symbolic(size: Any) -> bool:
    """Return True if `size` is the expression of a symbolic size."""
    return hasattr(size, "free_symbols")


def plain(size: Any) -> Any:
    """Convert `size` to an int where its symbols cancelled, as in (s + 8) - s; return others unchanged."""
    return size if isinstance(size, (int, float)) or not size.is_Integer else int(size)


@lru_cache(maxsize=4096)
def is_nonnegative(size: Dim) -> bool:
    """Return True if `size`, such as a difference of sizes, is proven to be at least 0 for all values of its
    symbols.
    """
    if isinstance(size, (int, float)):
        return size >= 0
    import sympy

    more = {each: 1 + sympy.Dummy(integer=True, nonnegative=True) for each in size.free_symbols if each.is_positive}
    return bool(sympy.expand(size.xreplace(more)).is_nonnegative)


@lru_cache(maxsize=4096)
def quotient(dividend: Dim, divisor: Dim) -> Dim | None:
    """Divide `dividend` by `divisor`; None unless the quotient is proven an integer for all values of the symbols."""
    if dividend == divisor:
        return 1
    if isinstance(dividend, int) and isinstance(divisor, int):
        return dividend // divisor if divisor and dividend % divisor == 0 else None
    import sympy

    ratio: Any = sympy.cancel(sympy.sympify(dividend) / divisor) if divisor != 0 else sympy.nan
    if sympy.denom(ratio) != 1 or not ratio.is_integer:
        return None
    return int(ratio) if ratio.is_number else ratio


@lru_cache(maxsize=4096)
def without_divisions(expr: Any) -> Any:
    """Simplify each floor division in `expr` that is proven to be exact: (n·s²) // s is n·s."""
    import sympy

    simpler: dict[Any, Any] = {}
    for each in expr.atoms(sympy.Function):
        if each.func.__name__ == "FloorDiv":  # a private class of torch
            exact = quotient(*each.args)
            simpler |= {} if exact is None else {each: sympy.sympify(exact)}
    return expr.xreplace(simpler)


def dims_of(sizes: Iterable[int | torch.SymInt]) -> tuple[Dim, ...]:
    """Convert a shape to its hashable form."""
    shape: Any = tuple(sizes)
    return shape if _INTS.issuperset(map(type, shape)) else tuple(map(dim_of, shape))


def but_ones(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return `shape` without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


def equal_trailing(shape: Sequence[Dim], other: Sequence[Dim]) -> int:
    """Count the equal trailing dims of `shape` and `other`."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def joined_from(dims: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[range] | None:
    """Return for each dim of `shape` the adjacent `dims` that it merges; None where `shape` is not made by merging."""
    groups: list[range] = []
    for size in shape:
        start = groups[-1].stop if groups else 0
        stops = range(start + 1, len(dims) + 1)
        stop = next((each for each in stops if math.prod(dims[start:each]) == size), None)
        if stop is None:
            return None
        groups.append(range(start, stop))
    return groups if groups and groups[-1].stop == len(dims) else None


def is_dense(tensor: torch.Tensor) -> bool:
    """Return True if `tensor` is proven to be contiguous in row-major order; adds no guards on symbolic sizes."""
    expected: Any = 1
    for size, stride in zip(reversed(dims_of(tensor.shape)), reversed(dims_of(tensor.stride())), strict=True):
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Return the shape that all `shapes` broadcast to; None where they do not, or symbolic sizes leave it open."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = []
    for position in range(-rank, 0):
        sizes = {shape[position] for shape in shapes if len(shape) >= -position} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def lie_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return True if `x` and `y`, of one shape, are proven to have equal strides in all dims but those of size 1."""
    sizes, strides = dims_of(x.shape), zip(dims_of(x.stride()), dims_of(y.stride()), strict=True)
    return 0 in sizes or all(size == 1 or one == other for size, (one, other) in zip(sizes, strides, strict=True))


INDEX_DTYPES = frozenset({torch.int32, torch.int64})
"""Dtypes of positions, for which scaling and shifting is exact."""
