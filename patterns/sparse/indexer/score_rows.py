"""The rows of what an indexer sums, however they lie: positions or sequences first, heads or keys last, flattened.

relu(q kᵀ)ᵀ = relu(k qᵀ)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul


def in_order(a: Algebra, x: Value, order: tuple[int, ...]) -> Value:
    """With its dims in another order, made of the same: functions of single elements, products, sums over heads."""
    ends = tuple(place - x.rank for place in order[-2:])
    stay = ends == (-2, -1)
    over_heads = x.op == "mean" and x.rank == 4 and x.attrs == (-2,) and stay
    if over_heads or x.op in ("relu", "scale", "cast"):
        return a.make(x.op, (in_order(a, x.arg, order),), x.attrs, tuple(x.shape[place] for place in order), x.dtype)
    if x.op == "mul" or (x.op == "matmul" and x.rank > 3 and set(ends) == {-2, -1}):
        whole = [a.reshape(each, (*(1,) * (x.rank - each.rank), *each.shape)) for each in x.args]
        parts = [in_order(a, each, order) for each in whole]
        made = a.mul(*parts) if x.op == "mul" else matmul(a, *(parts if stay else reversed(parts)))
        return made or a.permute(x, order)
    return a.permute(x, order)


def heads_before_keys(a: Algebra, x: Value) -> Value:
    """[.., T, N] as [.., N, T]."""
    return in_order(a, x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def unflattened(a: Algebra, x: Value, kept: int) -> Value:
    """With the dims that were flattened for a product, all but the last few, before it was cast or not."""
    if x.op == "cast":
        below = unflattened(a, x.arg, kept)
        return a.make("cast", (below,), x.attrs, below.shape, x.dtype)
    is_flat = x.op == "reshape" and x.arg.rank > x.rank and x.arg.shape[-kept:] == x.shape[-kept:]
    return x.arg if is_flat else x


def of_one_batch(a: Algebra, factors: Sequence[Value]) -> list[Value]:
    """The factors of a product of matrices with the dims of its batch that were flattened in one of them or in both."""
    found = [unflattened(a, each, 2) for each in factors]
    batch = next((each.shape[:-2] for each in found if each.rank == 4), None)
    if batch is None:
        return found
    flat = [each.rank == 3 and each.shape[0] == prod(batch) for each in found]
    return [a.reshape(x, (*batch, *x.shape[-2:])) if is_flat else x for x, is_flat in zip(found, flat, strict=True)]


def with_one_more(a: Algebra, x: Value) -> list[Value]:
    """With a dim for the one query of each sequence, and for the one sequence of all queries, where there is none."""
    return [a.opened(x, place) if x.rank == 3 else x for place in (1, 0)]
