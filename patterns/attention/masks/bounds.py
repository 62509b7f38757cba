"""Bounds on the keys that a query sees: low(b) + i ≤ j ≤ high(b) + i, read off the formula of a mask."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf
from fusion.graph import Algebra, Value
from fusion.graph.dims import is_nonnegative


@dataclass(frozen=True)
class Limits:
    """Bounds low(b) + i·moving ≤ j ≤ high(b) + i·moving on the key j of query i in sequence b, and other conditions.

    Attributes:
        high: the last visible key of query 0; None for no upper bound.
        low: the first visible key of query 0; None for no lower bound.
        moving: true if the bounds move with the query, as those of causal masks do.
        rest: the conjuncts of the mask's formula that are no bounds.
    """

    high: Affine | None
    low: Affine | None
    moving: bool
    rest: tuple[Formula, ...]


def sees_some(bounds: Limits, queries: Any, keys: Any, lengths: Collection[Any] = ()) -> bool:
    """Return True if each of `queries` queries is proven to see one of `keys` keys within `bounds`.

    Elements of tensors are taken as nonnegative positions; `lengths` are symbolic sizes that are nonnegative.
    """
    high, low = bounds.high, bounds.low
    if high is None and low is not None and not low.terms:  # up to the last key
        return not bounds.rest and is_nonnegative(keys - 1 - low.constant - (queries - 1 if bounds.moving else 0))
    if bounds.rest or high is None:
        return False
    if high.constant in lengths and not high.terms and low is None:
        return True
    if any(not isinstance(term, Leaf) or factor != 1 for term, factor in high.terms.items()):
        return False
    counted = sum(map(is_counted, high.terms))  # at least one key each
    if not is_nonnegative(high.constant + counted):
        return False
    if low is None:
        return True
    span = high + low.times(-1)
    last = low.plus(queries - 1 if bounds.moving else 0).plus(-keys)
    within = is_nonnegative(-1 - last.constant) or (bool(last.terms) and not isinstance(last.constant, int))
    return within and not span.terms and isinstance(span.constant, int) and span.constant >= 0


def is_counted(term: int | Leaf) -> bool:
    """Return True if `term` is the capture "count" of a mask that is passed in: how many keys the first query sees.

    It is at least 1, which is checked at each call.
    """
    return isinstance(term, Leaf) and term.value.op == "count"


def bound(part: Formula, query: int, key: int) -> tuple[str, Affine, int] | None:
    """Read `part` as the bound j ≤ high + move·i or j ≥ low + move·i on the key j of query i.

    Returns the side ("high" or "low"), its bound, which may depend on the sequence, and `move` (0 or 1); None for
    other formulas.
    """
    if isinstance(part, bool) or part[0] != "le":
        return None
    difference: Affine = part[1]
    sign, move = difference.terms.get(key, 0), difference.terms.get(query, 0)
    others = difference.without(query, key)
    if sign not in (1, -1) or -sign * move not in (0, 1) or not others.axes() <= {0}:
        return None
    return ("high", others.times(-1), -move) if sign == 1 else ("low", others, move)


def per_sequence(a: Algebra, expression: Affine, batch: Any) -> Value | None:
    """Build `expression`, which depends on the sequence alone, as int64 [B]; None where it cannot be built."""
    total: Value | None = None
    for term, factor in expression.terms.items():
        read = _element(a, term, batch) if isinstance(term, Leaf) else None
        if read is None or not isinstance(factor, int):
            return None
        read = a.scale(a.cast(read, torch.int64), factor)
        total = read if total is None else a.add(total, read)
    if total is None or not isinstance(expression.constant, int):
        return None
    return a.expand(a.shift(total, expression.constant), (batch,))


def per_query(a: Algebra, expression: Affine, sizes: tuple[Any, Any], query: int) -> Value | None:
    """Build the tensor [B, S] of `expression`, which reads one element of a tensor for each query; None for others.

    Args:
        a: the algebra of the graph.
        expression: a multiple of one tensor element, plus a constant.
        sizes: B and S.
        query: the axis of queries; that of sequences is 0.
    """
    terms, constant = list(expression.terms.items()), expression.constant
    if len(terms) != 1 or not all(isinstance(each, int) for each in (terms[0][1], constant)):
        return None
    leaf, factor = terms[0]
    value = _elements(a, leaf, sizes, query) if isinstance(leaf, Leaf) else None
    return None if value is None else a.shift(a.scale(a.cast(value, torch.int64), factor), constant)


def _elements(a: Algebra, leaf: Leaf, sizes: tuple[Any, Any], query: int) -> Value | None:
    """Gather the elements [B, S] = `sizes` of the tensor of `leaf` that the queries read; None for other indices.

    Each query reads one element, its own or one shared by all sequences. `query` is the axis of queries.
    """
    own = [({place: 1}, size) for place, size in zip((0, query), sizes, strict=True) if size != 1]
    axes = list(zip(leaf.index, leaf.value.shape, strict=True))
    read = [(dict(index.terms), size) for index, size in axes if index.terms]
    alike = len(own) == 2 and read == own[1:]
    if (read != own and not alike) or any(index.constant != 0 for index, _ in axes):
        return None
    value = leaf.value
    for axis, (index, _) in enumerate(axes):
        value = value if index.terms else a.cut(value, axis, 0, 1)
    return a.expand(a.reshape(value, (1, sizes[1]) if alike else sizes), sizes)


def _element(a: Algebra, leaf: Leaf, batch: Any) -> Value | None:
    """Slice the one element of the tensor of `leaf` that is read [1], or the one of each of `batch` sequences [B].

    None for other indices.
    """
    value = leaf.value
    size: Any = 1
    for axis, index in enumerate(leaf.index):
        if not index.terms and isinstance(index.constant, int):
            taken = a.slice(value, axis, index.constant, index.constant + 1)
            if taken is None:
                return None
            value = taken
        elif index.terms == {0: 1} and value.shape[axis] == batch and size == 1:
            size = batch
        else:
            return None
    return a.reshape(value, (size,))
