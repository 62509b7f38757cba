"""A dim is one size of a tensor: an int, or the sympy expression of a symbolic size, so that shapes are hashable."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
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


@lru_cache(maxsize=4096)
def without_divisions(expr: Any) -> Any:
    """A size without the divisions that leave nothing over whatever the sizes are: (n·s²) // s is n·s."""
    import sympy

    simpler: dict[Any, Any] = {}
    for each in expr.atoms(sympy.Function):
        if each.func.__name__ == "FloorDiv":  # torch's, which it keeps to itself
            quotient: Any = sympy.cancel(each.args[0] / each.args[1])
            simpler |= {each: quotient} if sympy.denom(quotient) == 1 else {}
    return expr.xreplace(simpler)


def dims_of(sizes: Iterable[int | torch.SymInt]) -> tuple[Dim, ...]:
    """Return the hashable form of a shape."""
    found: Any = tuple(sizes)
    return found if _INTS.issuperset(map(type, found)) else tuple(map(dim_of, found))


def but_ones(shape: Sequence[Dim]) -> tuple[Dim, ...]:
    """Return a shape without its dims of size 1."""
    return tuple(size for size in shape if size != 1)


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
