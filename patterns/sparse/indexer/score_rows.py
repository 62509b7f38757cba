"""Layouts of the rows that an indexer sums: positions or sequences first, heads or keys last, batch dims flattened.

relu(q kᵀ)ᵀ = relu(k qᵀ)
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from fusion.graph import Algebra, Value
from fusion.graph.contractions import matmul


def in_order(a: Algebra, x: Value, order: tuple[int, ...]) -> Value:
    """Return `x` permuted by `order`, with the permute moved below elementwise ops, matmuls and sums over heads.

    Where it cannot be moved, `x` is permuted as it is. A matmul whose last two dims change places is q kᵀ as k qᵀ.
    """
    ends = tuple(place - x.rank for place in order[-2:])
    stay = ends == (-2, -1)
    over_heads = x.op == "mean" and x.rank == 4 and x.attrs == (-2,) and stay
    if over_heads or x.op in ("relu", "scale", "cast"):
        return a.make(x.op, (in_order(a, x.arg, order),), x.attrs, tuple(x.shape[place] for place in order), x.dtype)
    if x.op == "mul" or (x.op == "matmul" and x.rank > 3 and set(ends) == {-2, -1}):
        opened = [a.reshape(each, (*(1,) * (x.rank - each.rank), *each.shape)) for each in x.args]
        parts = [in_order(a, each, order) for each in opened]
        made = a.mul(*parts) if x.op == "mul" else matmul(a, *(parts if stay else reversed(parts)))
        return made or a.permute(x, order)
    return a.permute(x, order)


def heads_before_keys(a: Algebra, x: Value) -> Value:
    """Transpose `x` [.., T, N] to [.., N, T], as `in_order` does."""
    return in_order(a, x, (*range(x.rank - 2), x.rank - 1, x.rank - 2))


def unflattened(a: Algebra, x: Value, last: int) -> Value:
    """Strip from `x`, below casts, a reshape that flattened the dims before the last `last` dims; `x` if there is
    none.
    """
    if x.op == "cast":
        below = unflattened(a, x.arg, last)
        return a.make("cast", (below,), x.attrs, below.shape, x.dtype)
    is_flat = x.op == "reshape" and x.arg.rank > x.rank and x.arg.shape[-last:] == x.shape[-last:]
    return x.arg if is_flat else x


def with_batch_dims(a: Algebra, factors: Sequence[Value]) -> list[Value]:
    """Return both `factors` of a matmul without the reshape that flattened their batch dims, if any of the two has one.

    A factor whose flattened dims are no reshape is reshaped to the batch dims of the other.
    """
    restored = [unflattened(a, each, 2) for each in factors]
    batch = next((each.shape[:-2] for each in restored if each.rank == 4), None)
    if batch is None:
        return restored
    flat = [each.rank == 3 and each.shape[0] == prod(batch) for each in restored]
    return [a.reshape(x, (*batch, *x.shape[-2:])) if is_flat else x for x, is_flat in zip(restored, flat, strict=True)]


def with_one_more(a: Algebra, x: Value) -> list[Value]:
    """Return two readings of `x` [X, N, T] as rank 4: [X, 1, N, T], sequences of one query, and [1, X, N, T], one
    sequence.

    `x` of another rank is returned twice.
    """
    return [a.opened(x, place) if x.rank == 3 else x for place in (1, 0)]
