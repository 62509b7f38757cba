"""Lanes: what each entry of the last dim is made of, proven by following every lane down to the tensors behind it.

A value is seen as rows of `D` lanes. Slices, joins, interleavings, transposes and broadcasts of lanes only move them,
so whatever way a rotation was written, lane j ends as the same sum of (lane of x) · (lane of a table).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from fusion.analysis.constant_folding import Folder
from fusion.analysis.dtypes import is_rounding
from fusion.graph import Dim, Value
from fusion.graph.algebra import of_constants, widens

Index = NDArray[np.int64]
NONE = -1
_POINTWISE = ("cast", "cos", "sin", "scale", "shift", "power", "exp")


@dataclass(frozen=True)
class Rows:
    """A value with its last `depth` dims taken as one run of lanes, and the lanes that are asked for."""

    value: Value
    depth: int
    index: Index

    @property
    def lanes(self) -> tuple[int, ...]:
        """Sizes of the lane dims."""
        return tuple(int(size) for size in self.value.shape[self.lead :])

    @property
    def lead(self) -> int:
        """How many dims stand before them."""
        return self.value.rank - self.depth

    @property
    def place(self) -> list[Index]:
        """Where along each lane dim the lanes are."""
        return [self.index] if self.depth == 1 else list(np.unravel_index(self.index, self.lanes))

    def below(self) -> Rows:
        """The same lanes of what the value is a function of, element by element."""
        return Rows(self.value.arg, self.depth, self.index)

    @property
    def batch(self) -> tuple[object, ...]:
        """Sizes of the dims before them."""
        return self.value.shape[: self.lead]


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


def rows(value: Value) -> Rows | None:
    """All lanes of the last dim; None where there are none or their number is symbolic."""
    if not value.rank or not isinstance(value.shape[-1], int) or not value.shape[-1]:
        return None
    return Rows(value, 1, np.arange(value.shape[-1]))


def descend(at: Rows) -> list[tuple[Index, Rows]] | None:
    """Follow one op that only moves lanes.

    Returns the parts as (positions in the question, where those lanes come from); None where the op does more than
    move lanes, or moves rows as well.
    """
    value, lead, place = at.value, at.lead, at.place
    match value.op:
        case "reshape":
            return _through_reshape(at)
        case "cat" if value.attrs[0] >= lead:
            return _through_cat(at, value.attrs[0] - lead)
        case "slice_scatter" if value.attrs[0] >= lead:
            return _through_scatter(at)
        case "permute" if value.attrs[:lead] == tuple(range(lead)):
            order = value.attrs[lead:]
            place = [place[order.index(axis)] for axis in range(lead, value.rank)]
        case "expand":
            place = [_within(size, where) for where, size in zip(place, value.arg.shape[lead:], strict=True)]
        case "slice" if value.attrs[0] >= lead:
            axis, start, _, step = value.attrs
            place[axis - lead] = start + step * place[axis - lead]
        case "flip" if value.attrs[0] >= lead:
            (axis,) = value.attrs
            place[axis - lead] = int(value.shape[axis]) - 1 - place[axis - lead]
        case _:
            return None
    return [(np.arange(len(at.index)), _at(value.arg, at.depth, place))]


def _at(value: Value, depth: int, place: Sequence[Index]) -> Rows:
    if depth == 1:
        return Rows(value, depth, place[0])
    sizes = tuple(int(size) for size in value.shape[value.rank - depth :])
    return Rows(value, depth, np.ravel_multi_index(tuple(place), sizes))


def _through_reshape(at: Rows) -> list[tuple[Index, Rows]] | None:
    source, lead = at.value.arg, at.lead
    inner = source.shape[lead:]
    if not inner or source.shape[:lead] != at.batch or math.prod(inner) != math.prod(at.lanes):
        return None
    return [(np.arange(len(at.index)), Rows(source, source.rank - lead, at.index))]


def _through_cat(at: Rows, axis: int) -> list[tuple[Index, Rows]]:
    place = at.place
    parts: list[tuple[Index, Rows]] = []
    offset = 0
    for piece in at.value.args:
        size = int(piece.shape[axis - at.depth])
        here = np.nonzero((place[axis] >= offset) & (place[axis] < offset + size))[0]
        if len(here):
            inside = [where[here] - (offset if each == axis else 0) for each, where in enumerate(place)]
            parts.append((here, _at(piece, at.depth, inside)))
        offset += size
    return parts


def _through_scatter(at: Rows) -> list[tuple[Index, Rows]]:
    axis, start, stop, step = at.value.attrs
    axis -= at.lead
    place = at.place
    lane = place[axis]
    written = (lane >= start) & (lane < stop) & ((lane - start) % step == 0)
    parts: list[tuple[Index, Rows]] = []
    if not written.all():
        kept = np.nonzero(~written)[0]
        parts.append((kept, _at(at.value.args[0], at.depth, [where[kept] for where in place])))
    if written.any():
        here = np.nonzero(written)[0]
        inside = [where[here] for where in place]
        inside[axis] = (inside[axis] - start) // step
        parts.append((here, _at(at.value.args[1], at.depth, inside)))
    return parts


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
    """Write every lane as a sum of at most `limit` products; None where it is something else."""
    value, size = at.value, len(at.index)
    match value.op:
        case "add":
            sides = [_operand(at, each) for each in value.args]
            found = [None if side is None else terms(side, leaves, limit) for side in sides]
            if found[0] is None or found[1] is None or len(found[0]) + len(found[1]) > limit:
                return None
            return found[0] + found[1]
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


def _of_mean(at: Rows, leaves: Leaves, limit: int) -> list[Term] | None:
    """The terms of all entries of a lane dim, which has no more of them than there may be terms."""
    (axis,), count = at.value.attrs, at.value.arg.shape[at.value.attrs[0]]
    if not isinstance(count, int) or not 0 < count <= limit:
        return None
    place, found = at.place, list[Term]()
    for entry in range(count):
        place[axis] = np.full(len(at.index), entry)
        inner = terms(_at(at.value.arg, at.depth, place), leaves, limit)
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
    own = [_within(size, where) for where, size in zip(place or at.place, padded[at.lead :], strict=True)]
    return _at(operand, depth, own[at.depth - depth :]) if depth else None


def _within(size: Dim, where: Index) -> Index:
    """Places along a dim that is broadcast where it has one entry."""
    return np.zeros_like(where) if size == 1 else where


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


def same_lanes(value: Value, left: Index, right: Index) -> bool:
    """Whether two choices of lanes of one value are provably equal, like both halves of cos(cat(f, f))."""
    numbers: dict[object, int] = {}
    ends = [_ends(Rows(value, 1, index), (), numbers) for index in (left, right)]
    return bool((ends[0][0] == ends[1][0]).all() and (ends[0][1] == ends[1][1]).all())


def _ends(at: Rows, chain: tuple[object, ...], numbers: dict[object, int]) -> tuple[Index, Index]:
    """Leaf (with the functions applied on the way) and lane of each lane."""
    value = at.value
    if value.op in _POINTWISE:
        return _ends(at.below(), (*chain, value.op, value.attrs, value.dtype), numbers)
    parts = descend(at) or _past_rows(at)
    if parts is None:
        number = numbers.setdefault((value, at.depth, chain), len(numbers))
        return np.full(len(at.index), number), at.index
    leaf, index = np.full(len(at.index), NONE), np.full(len(at.index), NONE)
    for where, source in parts:
        leaf[where], index[where] = _ends(source, chain, numbers)
    return leaf, index


def _past_rows(at: Rows) -> list[tuple[Index, Rows]] | None:
    """Pass an op that only rearranges whole rows of one lane dim: what holds for every row still does."""
    value = at.value
    if at.depth != 1 or value.op not in ("reshape", "permute", "slice", "expand"):
        return None
    moved = value.op == "permute" and value.attrs[-1] != value.rank - 1
    if moved or value.arg.shape[-1:] != value.shape[-1:]:
        return None
    return [(np.arange(len(at.index)), at.below())]
