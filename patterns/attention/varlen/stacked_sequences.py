"""The same expression of each sequence, read as one expression of the batch.

    f(cache[0, :length[0]]), f(cache[1, :length[1]]), ..    →    the first rows of f(cache)
    f(x[0]), f(x[1]), ..                                    →    f(x)

f is made of views, concatenations, casts, products and sums with what all sequences share, and matrix products.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import zip_longest
from math import prod
from typing import Any

from fusion.graph import Algebra, Graph, Value
from fusion.graph.contractions import matmul
from fusion.graph.proof_steps import must, proof, proven
from patterns.attention.varlen.segment_orders import ROWS
from patterns.attention.varlen.sequence_caches import HEADS_LAST, cache_of
from patterns.cache.sequence_writes import adjacent

_VIEWS = ("permute", "reshape", "slice")
_COMMUTATIVE = ("mul", "add")


@dataclass(frozen=True)
class Stacked:
    """The values of all sequences as one value.

    Attributes:
        every: [B, ..], of which each entry has the dims of the value of one sequence.
        axis: the dim, counted from the end, along which only the first rows of an entry are those of its sequence; None
            if all are.
        lengths: the number of these rows of each sequence; () if `axis` is None.
    """

    every: Value
    axis: int | None = None
    lengths: tuple[int, ...] = ()

    def shape(self, one: Sequence[Any], axis: int | None) -> tuple[Any, ...]:
        """Return the shape of the batch, given the shape `one` of a sequence, with the rows at `axis`."""
        sizes = [*self.every.shape[:1], *one]
        if axis is not None and self.axis is not None:
            sizes[axis] = self.every.shape[self.axis]
        return tuple(sizes)

    def opened(self, a: Algebra, rank: int) -> Stacked:
        """Insert or drop dims of size 1 in front of those of each sequence, so that each has `rank` dims."""
        batch, *own = self.every.shape
        more = rank - len(own)
        return replace(self, every=a.reshape(self.every, (batch, *(1,) * more, *own[max(-more, 0) :])))

    def has(self, parts: Sequence[Value]) -> bool:
        """Return True if `parts` have the shapes of the sequences, but for leading dims of size 1."""
        sizes = [[*each.shape[::-1]] for each in parts]
        own = [*self.every.shape[:0:-1]]
        if self.axis is not None:
            for each, length in zip(sizes, self.lengths, strict=True):
                each[~self.axis] = own[~self.axis] if each[~self.axis] == length else 0
        return all(one == other for each in sizes for one, other in zip_longest(each, own, fillvalue=1))


def stacked(graph: Graph, parts: Sequence[Value]) -> Stacked | None:
    """Return `parts`, the same expression of each sequence in the order of the batch, as one expression; else None."""
    return _Stacking(graph).of(tuple(parts))


class _Stacking:
    """The search for one expression of the batch, which visits each tuple of values once."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._known: dict[tuple[Value, ...], Stacked | None] = {}

    def of(self, parts: tuple[Value, ...]) -> Stacked | None:
        """Return `parts` as one expression of the batch; else None."""
        if parts not in self._known:
            self._known[parts] = self._slices(parts) or self._first_rows(parts) or self._applied(parts)
        return self._known[parts]

    @proof
    def _slices(self, parts: tuple[Value, ...]) -> Stacked | None:
        """Return the tensor of which `parts` are adjacent slices, a sequence each; else None."""
        shape = parts[0].shape
        must(all(each.shape == shape for each in parts) and all(isinstance(size, int) for size in shape))
        return Stacked(proven(adjacent(self._graph.algebra, parts, shape)))

    def _first_rows(self, parts: tuple[Value, ...]) -> Stacked | None:
        """Return the cache of which `parts`, [.., n, D] or [n, M, D], are the first rows, by sequence; else None."""
        a, most = self._graph.algebra, ROWS + 2
        if any(each.op not in _VIEWS or not 1 < each.rank <= most for each in parts):
            return None
        cache = cache_of(self._graph, [a.reshape(each, (1,) * (most - each.rank) + each.shape) for each in parts])
        if cache is not None:
            return Stacked(cache.rows(a), -2, cache.lengths).opened(a, parts[0].rank)
        if any(each.rank != most - 1 for each in parts):
            return None
        cache = cache_of(self._graph, [a.opened(a.permute(each, (1, 0, 2)), 0) for each in parts])
        return None if cache is None else Stacked(a.permute(cache.rows(a), HEADS_LAST), -3, cache.lengths)

    @proof
    def _applied(self, parts: tuple[Value, ...]) -> Stacked | None:
        """Return the operation that all `parts` are, applied to its operands of the batch; else None."""
        first, a = parts[0], self._graph.algebra
        must(len({(each.op, each.attrs, each.dtype, len(each.args)) for each in parts}) == 1)
        operands = [self._operand(each) for each in zip(*map(_arguments(parts), parts), strict=True)]
        own = [each for each in operands if isinstance(each, Stacked)]
        must(own)
        match first.op:
            case "permute" | "reshape" | "slice" | "expand":
                result = _viewed(a, parts, own[0])
            case "cast" | "scale" | "shift":
                every = own[0].every
                every = a.cast(every, first.dtype) if first.op == "cast" else getattr(a, first.op)(every, *first.attrs)
                result = replace(own[0], every=every)
            case "cat":
                must(len(own) == len(operands))
                result = _joined(a, first, own)
            case "mul" | "add" | "matmul":
                result = _combined(a, first, operands)
            case _:
                return None
        return result if proven(result).has(parts) else None

    def _operand(self, values: tuple[Value, ...]) -> Stacked | Value:
        """Return the one value that all sequences share, or `values` as one of the batch; unproven if neither is."""
        return values[0] if all(each is values[0] for each in values) else proven(self.of(values))


def _arguments(parts: Sequence[Value]) -> Callable[[Value], Sequence[Value]]:
    """Return a function that lists the arguments of each of `parts`, those that all share first where order is free."""
    shared = [each for each in parts[0].args if all(each in part.args for part in parts)]
    if parts[0].op not in _COMMUTATIVE:
        return lambda part: part.args
    return lambda part: (*shared, *(each for each in part.args if each not in shared))


@proof
def _viewed(a: Algebra, parts: Sequence[Value], x: Stacked) -> Stacked | None:
    """Apply the view that all `parts` are to `x`; None if the view divides or merges the rows of a sequence."""
    first, axis = parts[0], x.axis
    match first.op:
        case "permute":
            x = x.opened(a, first.rank)
            axis = None if axis is None else first.attrs.index(axis + first.rank) - first.rank
            every = a.permute(x.every, (0, *(place + 1 for place in first.attrs)))
        case "slice":
            at, *bounds = first.attrs
            must(at - first.rank != axis)
            every = a.cut(x.every, at - first.rank, *bounds)
        case "expand":
            every = a.expand(x.opened(a, first.rank).every, x.shape(first.shape, axis))
        case _:
            axis = None if axis is None else proven(_rows_behind(parts, axis))
            every = a.reshape(x.every, x.shape(first.shape, axis))
    return Stacked(every, axis, x.lengths)


def _rows_behind(parts: Sequence[Value], axis: int) -> int | None:
    """Return the dim that the reshape which all `parts` are makes of dim `axis`; None if it divides or merges it."""
    for place in range(-min(each.rank for each in parts), 0):
        pairs = [(each.shape[place:], each.arg.shape[axis:]) for each in parts]
        if all(one[0] == other[0] and prod(one) == prod(other) for one, other in pairs):
            return place
    return None


@proof
def _joined(a: Algebra, op: Value, own: Sequence[Stacked]) -> Stacked | None:
    """Concatenate `own` as the value `op` does in a sequence; None along the rows, or for other rows in each."""
    first, axis = own[0], op.attrs[0] - op.rank
    must(axis != first.axis and all((each.axis, each.lengths) == (first.axis, first.lengths) for each in own))
    return replace(first, every=a.cat([each.opened(a, op.rank).every for each in own], axis))


@proof
def _combined(a: Algebra, op: Value, operands: Sequence[Stacked | Value]) -> Stacked | None:
    """Multiply or add `operands` as the value `op` does in a sequence; None if they differ in their rows.

    An operand that all sequences share, or without rows of its own, must be broadcast to the rows.
    """
    rows = {(each.axis, each.lengths) for each in operands if isinstance(each, Stacked) and each.axis is not None}
    must(len(rows) <= 1)
    axis, lengths = rows.pop() if rows else (None, ())
    # a batch of one sequence becomes the batch: the product has no further dim then
    ones = next((place for place, size in enumerate(op.shape) if size != 1 or place - op.rank == axis), op.rank)
    values = [_aligned(a, each, max(2, op.rank - ones)) for each in operands]
    for side, (each, value) in enumerate(zip(operands, values, strict=True)):
        is_dim_of = axis is not None and (op.op != "matmul" or axis != -1 - side)
        has_rows = isinstance(each, Stacked) and each.axis is not None
        must(not has_rows or is_dim_of)  # a sum over rows would take those behind the length
        must(has_rows or not is_dim_of or value.rank < -(axis or 0) or value.shape[axis or 0] == 1)
    made = proven({"mul": a.mul, "add": a.add, "matmul": partial(matmul, a)}[op.op](*values))
    return Stacked(made, axis, lengths).opened(a, op.rank)


def _aligned(a: Algebra, x: Stacked | Value, rank: int) -> Value:
    """Return `x` with `rank` dims for each sequence, or with at most so many if all sequences share it."""
    if isinstance(x, Stacked):
        return x.opened(a, rank).every
    return a.reshape(x, x.shape[max(x.rank - rank, 0) :])
