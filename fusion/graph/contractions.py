"""Matrix products x [.., M, K] · y [.., K, N], with scale factors moved out of the operands."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

from fusion.graph import Algebra, Value, broadcast
from fusion.graph.proof_steps import must, proof, proven


@proof
def matmul(a: Algebra, x: Value, y: Value) -> Value:
    """Build x [*A, M, K] · y [*B, K, N], A and B broadcast and scales outside; None where the shapes do not fit."""
    x, left = _unscaled(a, x)
    y, right = _unscaled(a, y)
    product = _by_one_matrix(a, x, y) if y.rank == 2 else _batched(a, x, y)
    return a.scale(product, left * right)


def swapped(a: Algebra, x: Value) -> Value:
    """Transpose the last two dims of `x`."""
    return a.permute(x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def _unscaled(a: Algebra, x: Value) -> tuple[Value, float]:
    """Return `x` without the scale below its views, and the factor of that scale."""
    if x.op == "scale":
        inner, factor = _unscaled(a, x.arg)
        return inner, factor * x.attrs[0]
    if x.op not in ("permute", "expand", "reshape"):
        return x, 1.0
    inner, factor = _unscaled(a, x.arg)
    if factor == 1:
        return x, 1.0
    return a.seen_as(inner, x), factor


def _by_one_matrix(a: Algebra, x: Value, y: Value) -> Value:
    """Multiply `x` [.., K] by one matrix `y` [K, N], restoring the dims of rows that were flattened for the product."""
    if x.op == "reshape" and x.arg.rank and x.arg.shape[-1] == x.shape[-1]:
        return a.reshape(_product(a, x.arg, y), (*x.shape[:-1], y.shape[-1]))
    return _product(a, x, y)


def _batched(a: Algebra, x: Value, y: Value) -> Value:
    """Multiply with batch dims: unflatten those that were flattened for the product, and batch single rows by head."""
    for flat in (x, y):
        is_flattened = flat.op == "reshape" and flat.arg.rank > flat.rank and flat.arg.shape[-2:] == flat.shape[-2:]
        if is_flattened and x.shape[:-2] == y.shape[:-2]:
            batch = flat.arg.shape[:-2]
            unflattened = proven(matmul(a, *(a.reshape(each, (*batch, *each.shape[-2:])) for each in (x, y))))
            return a.reshape(unflattened, (*x.shape[:-2], *unflattened.shape[-2:]))
    lead = x.rank - len(_batch(y)) - 2
    if x.shape[-2] == 1 and len(_batch(y)) == 1 and lead > 0 and prod(x.shape[:lead]) != 1:
        return _by_head(a, x, y, lead)
    return _product(a, x, y)


def _batch(y: Value) -> tuple[Any, ...]:
    """Return the batch dims of `y`, without leading ones of size 1."""
    own = next((place for place, size in enumerate(y.shape[:-2]) if size != 1), y.rank - 2)
    return y.shape[own:-2]


def _by_head(a: Algebra, x: Value, y: Value, lead: int) -> Value:
    """Multiply single rows `x` [*lead, N, 1, K] by `y` [.., N, K, P] as one product [N, prod(lead), K] · [N, K, P]."""
    heads, width = x.shape[lead], x.shape[-1]
    rows = a.permute(a.reshape(x, (prod(x.shape[:lead]), heads, width)), (1, 0, 2))
    product = _product(a, rows, a.reshape(y, y.shape[-3:]))
    return a.reshape(a.permute(product, (1, 0, 2)), (*x.shape[:-1], y.shape[-1]))


def _product(a: Algebra, x: Value, y: Value) -> Value:
    batch = proven(broadcast(x.shape[:-2], y.shape[:-2]))
    x, y = _once(x, y.shape[:-2], batch), _once(y, x.shape[:-2], batch)
    must(x.shape[-1:] == y.shape[-2:-1])
    return a.make("matmul", (x, y), (), (*batch, *x.shape[-2:-1], y.shape[-1]), x.dtype)


def _once(x: Value, other: Sequence[Any], batch: Sequence[Any]) -> Value:
    """Return `x` without an expand of its batch dims, if the product with batch dims `other` broadcasts them to `batch`
    anyway.
    """
    plain = x.op == "expand" and x.arg.rank == x.rank and x.arg.shape[-2:] == x.shape[-2:]
    return x.arg if plain and broadcast(x.arg.shape[:-2], other) == batch else x
