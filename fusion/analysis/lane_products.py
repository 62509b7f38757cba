"""Lanes as sums of products: each is (a lane of x) · (a lane of a table) + ..., down to the tensors behind it.

Whatever way a rotation was written, lane j ends as the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fusion.analysis.constant_folding import Folder
from fusion.analysis.dtypes import is_rounding
from fusion.analysis.lanes import NONE, Index, Rows, descend, lanes_at, within
from fusion.graph import Value
from fusion.graph.algebra import of_constants, widens


@dataclass(frozen=True)
class Factor:
    """One factor per lane: sign or scale, which leaf, and which lane of it."""

    coefficient: NDArray[np.float64]
    leaf: Index
    index: Index


@dataclass(frozen=True)
class Term:
    """One product per lane; `second` is NONE where the lane passes through without a table."""

    coefficient: NDArray[np.float64]
    first: Factor
    second: Factor


@dataclass
class Leaves:
    """The tensors at which lanes end, numbered, and the dtypes in which their products are computed.

    `rounded` lets the lanes of one operand end in several tensors, like a table of [[cos, -sin], [sin, cos]], each of
    which it rounds where the whole is; without it, such an operand is `joined` from them: a leaf itself.
    """

    rounded: Callable[[Value, torch.dtype | None], Value] | None = None
    joined: bool = False
    found: list[tuple[Value, int]] = field(default_factory=list)
    computed: set[torch.dtype | None] = field(default_factory=set)

    folder: Folder = field(default_factory=Folder)

    def number(self, value: Value, depth: int) -> int:
        """Number of this leaf, new or known; the same lanes in another shape are the same leaf."""
        known = (place for place, each in enumerate(self.found) if _run_of(*each) == _run_of(value, depth))
        number = next(known, len(self.found))
        if number == len(self.found):
            self.found.append((value, depth))
        return number


def _run_of(value: Value, depth: int) -> tuple[object, ...]:
    """What a leaf is, however its dims of lanes are divided, before it is cast or after."""
    lead = value.rank - depth
    below, dtypes = value, list[object]()
    while below.op in ("reshape", "cast"):
        dtypes += [below.dtype] if below.op == "cast" else []
        below = below.arg
    return below, *dtypes, value.shape[:lead], math.prod(value.shape[lead:])


def factor(at: Rows, leaves: Leaves) -> Factor:
    """Follow an operand of a product down to one leaf; where its lanes come from several, the operand is the leaf."""
    value = at.value
    if value.op == "scale":
        inner = factor(at.below(), leaves)
        return Factor(inner.coefficient * value.attrs[0], inner.leaf, inner.index)
    if value.op == "cast" and widens(value.arg.dtype, value.dtype):
        return factor(at.below(), leaves)
    if value.op == "cast" and value.arg.op == "scale" and value.arg.attrs == (-1.0,) and leaves.rounded is not None:
        inner = factor(replace(at, value=leaves.rounded(value.arg.arg, value.dtype)), leaves)
        return Factor(-inner.coefficient, inner.leaf, inner.index)
    if value.op == "mul" and (split := _by_constants(at, leaves)) is not None:
        numbers, source = split
        inner = factor(source, leaves)
        return Factor(inner.coefficient * numbers, inner.leaf, inner.index)
    parts = descend(at) or _rounded(at, leaves)
    if parts is not None:
        joined = _join([(where, factor(source, leaves)) for where, source in parts], len(at.index))
        if leaves.rounded is not None or (joined.leaf == joined.leaf[0]).all():
            return joined
        leaves.joined = True
    number = leaves.number(value, at.depth)
    return Factor(np.ones(len(at.index)), np.full(len(at.index), number), at.index)


def _rounded(at: Rows, leaves: Leaves) -> list[tuple[Index, Rows]] | None:
    """The parts of what is rounded as a whole, each rounded by itself."""
    value = at.value
    below = descend(at.below()) if is_rounding(value) else None
    leaves.joined |= below is not None
    if below is None or leaves.rounded is None:
        return None
    return [(where, replace(each, value=leaves.rounded(each.value, value.dtype))) for where, each in below]


def _join(parts: Sequence[tuple[Index, Factor]], size: int) -> Factor:
    result = Factor(np.zeros(size), np.full(size, NONE), np.full(size, NONE))
    for where, part in parts:
        result.coefficient[where] = part.coefficient
        result.leaf[where] = part.leaf
        result.index[where] = part.index
    return result


def terms(at: Rows, leaves: Leaves, limit: int = 3) -> list[Term] | None:
    """Write every lane as a sum of at most `limit` products; None where it is something else.

    Lanes of zeros are sums of none.
    """
    value, size = at.value, len(at.index)
    zeros = value.below("reshape", "expand", "cast")
    if (zeros.op, zeros.attrs) == ("full", (0,)):
        return []
    match value.op:
        case "add":
            sides = [_operand(at, each) for each in value.args]
            found = [None if side is None else terms(side, leaves, limit) for side in sides]
            if found[0] is None or found[1] is None or len(found[0]) + len(found[1]) > limit:
                return None
            return _compact(found[0] + found[1])
        case "scale":
            inner = terms(at.below(), leaves, limit)
            return inner and [Term(each.coefficient * value.attrs[0], each.first, each.second) for each in inner]
        case "mul" if (split := _by_constants(at, leaves)) is not None:
            inner = terms(split[1], leaves, limit)
            return inner and [Term(each.coefficient * split[0], each.first, each.second) for each in inner]
        case "matmul" if at.depth > 1 and isinstance(count := value.arg.shape[-1], int) and count <= limit:
            return _of_product(at, leaves, count)
        case "mean" if len(value.attrs) == 1 and -value.attrs[0] <= at.depth:
            return _of_mean(at, leaves, limit)
        case "mul":
            left, right = (_operand(at, each) for each in value.args)
            if left is None or right is None:
                return None
            leaves.computed.add(value.dtype)
            first, second = factor(left, leaves), factor(right, leaves)
            return [Term(first.coefficient * second.coefficient, first, second)]
        case "cast" if is_rounding(value):
            return terms(at.below(), leaves, limit)
        case _:
            parts = descend(at)
            if parts is None:
                alone = factor(at, leaves)
                return [Term(alone.coefficient, alone, _join([], size))]
            return _join_terms([(where, terms(source, leaves, limit)) for where, source in parts], size)


def _compact(found: list[Term]) -> list[Term]:
    """Move the products of each lane to the first terms, in order, and drop terms without any."""
    is_missing = np.array([each.first.leaf == NONE for each in found])
    if not is_missing.any():
        return found
    order = np.argsort(is_missing, axis=0, kind="stable")

    def moved(rows: list[NDArray[Any]]) -> NDArray[Any]:
        return np.take_along_axis(np.array(rows), order, axis=0)

    coefficients = moved([each.coefficient for each in found])
    sides = [
        [moved([getattr(each, name) for each in side]) for name in ("coefficient", "leaf", "index")]
        for side in ([each.first for each in found], [each.second for each in found])
    ]
    count = int((~is_missing).sum(axis=0).max())
    return [Term(coefficients[n], *(Factor(*(row[n] for row in side)) for side in sides)) for n in range(count)]


def _of_mean(at: Rows, leaves: Leaves, limit: int) -> list[Term] | None:
    """The terms of all entries of a lane dim, which has no more of them than there may be terms."""
    (axis,), count = at.value.attrs, at.value.arg.shape[at.value.attrs[0]]
    if not isinstance(count, int) or not 0 < count <= limit:
        return None
    place, found = at.place, list[Term]()
    for entry in range(count):
        place[axis] = np.full(len(at.index), entry)
        inner = terms(lanes_at(at.value.arg, at.depth, place), leaves, limit)
        if inner is None or len(found) + len(inner) > limit:
            return None
        found += [replace(each, coefficient=each.coefficient / count) for each in inner]
    return found


def _of_product(at: Rows, leaves: Leaves, count: int) -> list[Term] | None:
    """The terms of a product of small matrices, one for each entry that it sums over."""
    *batch, row, column = at.place
    found = list[Term]()
    for each in range(count):
        entry = np.full(len(at.index), each)
        places = [*batch, row, entry], [*batch, entry, column]
        left, right = (_operand(at, side, place) for side, place in zip(at.value.args, places, strict=True))
        if left is None or right is None:
            return None
        first, second = factor(left, leaves), factor(right, leaves)
        found.append(Term(first.coefficient * second.coefficient, first, second))
    leaves.computed.add(at.value.dtype)
    return found


def _by_constants(at: Rows, leaves: Leaves) -> tuple[NDArray[np.float64], Rows] | None:
    """The numbers that a product multiplies its lanes by, where one operand is numbers alone, and the other operand."""
    for other, constant in (at.value.args, at.value.args[::-1]):
        numbers = leaves.folder.fold(constant) if of_constants(constant) else None
        if numbers is None:
            continue
        sides = _operand(at, constant), _operand(at, other)
        if sides[0] is None or sides[1] is None or numbers.size != math.prod(sides[0].lanes):
            continue
        return numbers.reshape(-1)[sides[0].index].astype(np.float64), sides[1]
    return None


def _operand(at: Rows, operand: Value, place: Sequence[Index] | None = None) -> Rows | None:
    """The lanes of a broadcast operand, at the same places or at others."""
    padded = (1,) * (at.value.rank - operand.rank) + operand.shape
    depth = min(at.depth, operand.rank)
    own = [within(size, where) for where, size in zip(place or at.place, padded[at.lead :], strict=True)]
    return lanes_at(operand, depth, own[at.depth - depth :]) if depth else None


def _join_terms(parts: Sequence[tuple[Index, list[Term] | None]], size: int) -> list[Term] | None:
    known = [(where, found) for where, found in parts if found is not None]
    if len(known) < len(parts):
        return None
    joined: list[Term] = []
    for number in range(max(len(found) for _, found in known)):
        here = [(where, found[number]) for where, found in known if number < len(found)]
        coefficient = np.zeros(size)
        for where, term in here:
            coefficient[where] = term.coefficient
        first = _join([(where, term.first) for where, term in here], size)
        second = _join([(where, term.second) for where, term in here], size)
        joined.append(Term(coefficient, first, second))
    return joined
