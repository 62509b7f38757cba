"""A dim is one size of a tensor: an int, or the sympy expression of a symbolic size, so that shapes are hashable."""

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
    """Return the hashable form of one size."""
    if isinstance(size, int):
        return size
    expr: Any = size.node.expr
    return int(expr) if isinstance(expr, int) or expr.is_number else without_divisions(expr)


def is_symbolic(size: Any) -> bool:
    """Whether a number is the expression of a symbolic size."""
    return hasattr(size, "free_symbols")


def plain(size: Any) -> Any:
    """A size that is no longer symbolic, as of (s + 8) - s, as an int; others as they are."""
    return size if isinstance(size, (int, float)) or not size.is_Integer else int(size)


@lru_cache(maxsize=4096)
def is_nonnegative(size: Dim) -> bool:
    """Whether a difference of sizes is proven not to be negative, of symbolic ones whatever they are."""
    if isinstance(size, (int, float)):
        return size >= 0
    import sympy

    more = {each: 1 + sympy.Dummy(integer=True, nonnegative=True) for each in size.free_symbols if each.is_positive}
    return bool(sympy.expand(size.xreplace(more)).is_nonnegative)


@lru_cache(maxsize=4096)
def quotient(whole: Dim, part: Dim) -> Dim | None:
    """How often one size is in another, of symbolic ones whatever they are; None where it is not known to be whole."""
    if whole == part:
        return 1
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if part and whole % part == 0 else None
    import sympy

    found: Any = sympy.cancel(sympy.sympify(whole) / part) if part != 0 else sympy.nan
    if sympy.denom(found) != 1 or not found.is_integer:
        return None
    return int(found) if found.is_number else found


@lru_cache(maxsize=4096)
def without_divisions(expr: Any) -> Any:
    """A size without the divisions that leave nothing over whatever the sizes are: (n·s²) // s is n·s."""
    import sympy

    simpler: dict[Any, Any] = {}
    for each in expr.atoms(sympy.Function):
        if each.func.__name__ == "FloorDiv":  # torch's, which it keeps to itself
            found = quotient(*each.args)
            simpler |= {} if found is None else {each: sympy.sympify(found)}
    return expr.xreplace(simpler)


def dims_of(sizes: Iterable[int | torch.SymInt]) -> tuple[Dim, ...]:
    """Return the hashable form of a shape."""
    found: Any = tuple(sizes)
    return found if _INTS.issuperset(map(type, found)) else tuple(map(dim_of, found))


def but_ones(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return a shape without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


def alike_behind(shape: Sequence[Dim], other: Sequence[Dim]) -> int:
    """How many dims are the same, counted from the last one."""
    pairs = zip(reversed(shape), reversed(other), strict=False)
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))


def joined_from(dims: tuple[Dim, ...], shape: tuple[Dim, ...]) -> list[range] | None:
    """Which dims beside each other each dim of `shape` is joined from; None where one is made otherwise."""
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
    """Whether a tensor is proven to lie in row-major order without gaps; symbolic sizes get no guard by this."""
    expected: Any = 1
    for size, stride in zip(reversed(dims_of(tensor.shape)), reversed(dims_of(tensor.stride())), strict=True):
        if size != 1 and stride != expected:
            return False
        expected = expected * size
    return True


def broadcast(*shapes: Sequence[Dim]) -> tuple[Dim, ...] | None:
    """Return the shape that all `shapes` broadcast to, None where they do not (or cannot be proven to)."""
    rank = max((len(shape) for shape in shapes), default=0)
    result: list[Dim] = []
    for position in range(-rank, 0):
        sizes = {shape[position] for shape in shapes if len(shape) >= -position} - {1}
        if len(sizes) > 1:
            return None
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def lie_alike(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether tensors of one shape are proven to lie alike in memory; the strides of dims of size 1 say nothing."""
    sizes, strides = dims_of(x.shape), zip(dims_of(x.stride()), dims_of(y.stride()), strict=True)
    return 0 in sizes or all(size == 1 or one == other for size, (one, other) in zip(sizes, strides, strict=True))


INDEX_DTYPES = frozenset({torch.int32, torch.int64})
"""Dtypes of positions."""
