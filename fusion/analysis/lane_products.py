"""Every lane of a value as a sum of products (lane of a leaf) · (lane of a leaf).

However a rotation x · cos + rotated(x) · sin is written, its lane j becomes the same sum.
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
from fusion.graph.algebra import is_input_free, widens


@dataclass(frozen=True)
class Factor:
    """One factor of every lane: coefficient · (lane `index` of the leaf with the number `leaf`); arrays [lanes]."""

    coefficient: NDArray[np.float64]
    leaf: Index
    index: Index


@dataclass(frozen=True)
class Term:
    """One product of every lane: coefficient · first · second; the leaf of `second` is NONE for a single factor.

    `coefficient` includes those of the factors.
    """

    coefficient: NDArray[np.float64]
    first: Factor
    second: Factor


@dataclass
class Leaves:
    """The tensors that lanes come from, collected while lanes are followed.

    Attributes:
        rounded: (value, dtype) -> the value cast to dtype. With it the lanes of one operand may come from several
            leaves, as of a table [[cos, -sin], [sin, cos]], each rounded where the operand is; without it such an
            operand is a leaf itself.
        joined: True if an operand whose lanes come from several tensors was taken as a leaf.
        leaves: (leaf, number of its last dims that are lanes), in the order of leaf numbers.
        computed: the dtypes in which products are computed.
        folder: the memo of constant folding.
    """

    rounded: Callable[[Value, torch.dtype | None], Value] | None = None
    joined: bool = False
    leaves: list[tuple[Value, int]] = field(default_factory=list)
    computed: set[torch.dtype | None] = field(default_factory=set)
    folder: Folder = field(default_factory=Folder)

    def number(self, value: Value, depth: int) -> int:
        """Return the number of the leaf `value`, whose last `depth` dims are lanes, and add it if it has none yet.

        Leaves that differ only in how their lanes are split into dims have one number.
        """
        known = (place for place, each in enumerate(self.leaves) if _identity(*each) == _identity(value, depth))
        number = next(known, len(self.leaves))
        if number == len(self.leaves):
            self.leaves.append((value, depth))
        return number


def _identity(value: Value, depth: int) -> tuple[object, ...]:
    """Return a key of the leaf `value`, whose last `depth` dims are lanes.

    It is the same for leaves that differ only in how lanes are split into dims, or in the order of reshapes and casts.
    """
    lead = value.rank - depth
    below, dtypes = value, list[object]()
    while below.op in ("reshape", "cast"):
        dtypes += [below.dtype] if below.op == "cast" else []
        below = below.arg
    return below, *dtypes, value.shape[:lead], math.prod(value.shape[lead:])


def factor(at: Rows, leaves: Leaves) -> Factor:
    """Express each selected lane of `at`, an operand of a product, as coefficient · lane of a leaf, added to
    `leaves`.
    """
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
    """Follow a rounding cast above moves of lanes to the sources of the lanes.

    Returns for each source the positions in `at.index` that have lanes of it, and these lanes of the source with the
    cast applied. None for other ops. None too if `leaves.rounded` is None; then `leaves.joined` is set.
    """
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
    """Express each selected lane of `at` as a sum of at most `limit` products of lanes of `leaves`.

    Each returned term has one product of every lane, with coefficient 0 where a lane has fewer; [] if all lanes are 0.
    None if a lane has more products, or is computed in another way.
    """
    value, size = at.value, len(at.index)
    zeros = value.below("reshape", "expand", "cast")
    if (zeros.op, zeros.attrs) == ("full", (0,)):
        return []
    match value.op:
        case "add":
            sides = [_operand(at, each) for each in value.args]
            addends = [None if side is None else terms(side, leaves, limit) for side in sides]
            if addends[0] is None or addends[1] is None or len(addends[0]) + len(addends[1]) > limit:
                return None
            return _compact(addends[0] + addends[1])
        case "scale":
            inner = terms(at.below(), leaves, limit)
            return inner and [Term(each.coefficient * value.attrs[0], each.first, each.second) for each in inner]
        case "mul" if (split := _by_constants(at, leaves)) is not None:
            inner = terms(split[1], leaves, limit)
            return inner and [Term(each.coefficient * split[0], each.first, each.second) for each in inner]
        case "matmul" if at.depth > 1 and isinstance(count := value.arg.shape[-1], int) and count <= limit:
            return _matmul_terms(at, leaves, count)
        case "mean" if len(value.attrs) == 1 and -value.attrs[0] <= at.depth:
            return _mean_terms(at, leaves, limit)
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


def _compact(products: list[Term]) -> list[Term]:
    """Move the products of each lane to its first terms, in order, and drop terms without a product in any lane."""
    is_missing = np.array([each.first.leaf == NONE for each in products])
    if not is_missing.any():
        return products
    order = np.argsort(is_missing, axis=0, kind="stable")

    def moved(rows: list[NDArray[Any]]) -> NDArray[Any]:
        return np.take_along_axis(np.array(rows), order, axis=0)

    coefficients = moved([each.coefficient for each in products])
    sides = [
        [moved([getattr(each, name) for each in side]) for name in ("coefficient", "leaf", "index")]
        for side in ([each.first for each in products], [each.second for each in products])
    ]
    count = int((~is_missing).sum(axis=0).max())
    return [Term(coefficients[n], *(Factor(*(row[n] for row in side)) for side in sides)) for n in range(count)]


def _mean_terms(at: Rows, leaves: Leaves, limit: int) -> list[Term] | None:
    """Express the lanes of the mean `at.value` over a lane dim as the sum of the terms of all entries of the dim,
    divided.

    None if the dim has more than `limit` entries, or if an entry cannot be expressed.
    """
    (axis,), count = at.value.attrs, at.value.arg.shape[at.value.attrs[0]]
    if not isinstance(count, int) or not 0 < count <= limit:
        return None
    place, products = at.place, list[Term]()
    for entry in range(count):
        place[axis] = np.full(len(at.index), entry)
        inner = terms(lanes_at(at.value.arg, at.depth, place), leaves, limit)
        if inner is None or len(products) + len(inner) > limit:
            return None
        products += [replace(each, coefficient=each.coefficient / count) for each in inner]
    return products


def _matmul_terms(at: Rows, leaves: Leaves, count: int) -> list[Term] | None:
    """Express the lanes of the matmul `at.value`, both of whose dims are lane dims, as sums of `count` products.

    `count` is the inner dim of the matmul. None if an operand has no lanes.
    """
    *batch, row, column = at.place
    products = list[Term]()
    for each in range(count):
        entry = np.full(len(at.index), each)
        places = [*batch, row, entry], [*batch, entry, column]
        left, right = (_operand(at, side, place) for side, place in zip(at.value.args, places, strict=True))
        if left is None or right is None:
            return None
        first, second = factor(left, leaves), factor(right, leaves)
        products.append(Term(first.coefficient * second.coefficient, first, second))
    leaves.computed.add(at.value.dtype)
    return products


def _by_constants(at: Rows, leaves: Leaves) -> tuple[NDArray[np.float64], Rows] | None:
    """Split the product `at.value` into a constant for each selected lane, [lanes], and the lanes of the other operand.

    None if neither operand is a constant that is the same in all rows.
    """
    for other, constant in at.value.operands():
        numbers = leaves.folder.fold(constant) if is_input_free(constant) else None
        if numbers is None:
            continue
        sides = _operand(at, constant), _operand(at, other)
        if sides[0] is None or sides[1] is None or numbers.size != math.prod(sides[0].lanes):
            continue
        return numbers.reshape(-1)[sides[0].index].astype(np.float64), sides[1]
    return None


def _operand(at: Rows, operand: Value, place: Sequence[Index] | None = None) -> Rows | None:
    """Return the lanes of `operand`, which broadcasts to `at.value`, that lanes of `at.value` are computed from.

    These are the lanes at `place`, by default those that `at` selects. None if `operand` has no dims.
    """
    padded = (1,) * (at.value.rank - operand.rank) + operand.shape
    depth = min(at.depth, operand.rank)
    own = [within(size, where) for where, size in zip(place or at.place, padded[at.lead :], strict=True)]
    return lanes_at(operand, depth, own[at.depth - depth :]) if depth else None


def _join_terms(parts: Sequence[tuple[Index, list[Term] | None]], size: int) -> list[Term] | None:
    known = [(where, products) for where, products in parts if products is not None]
    if len(known) < len(parts):
        return None
    joined: list[Term] = []
    for number in range(max(len(products) for _, products in known)):
        here = [(where, products[number]) for where, products in known if number < len(products)]
        coefficient = np.zeros(size)
        for where, term in here:
            coefficient[where] = term.coefficient
        first = _join([(where, term.first) for where, term in here], size)
        second = _join([(where, term.second) for where, term in here], size)
        joined.append(Term(coefficient, first, second))
    return joined
