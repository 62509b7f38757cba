"""Lanes: the entries of the last dim, followed through ops that only move them to the tensors that they come from.

A value is taken as rows of D lanes. Slices, concatenations, reshapes, permutes, flips and expands move lanes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fusion.graph import Dim, Value

Index = NDArray[np.int64]
NONE = -1
_POINTWISE = ("cast", "cos", "sin", "scale", "shift", "power", "exp")


@dataclass(frozen=True)
class Rows:
    """A selection of lanes: the last `depth` dims of `value` flattened to lanes, of which `index` [n] are selected."""

    value: Value
    depth: int
    index: Index

    @property
    def lanes(self) -> tuple[int, ...]:
        """The sizes of the lane dims."""
        return tuple(int(size) for size in self.value.shape[self.lead :])

    @property
    def lead(self) -> int:
        """The number of dims before the lane dims."""
        return self.value.rank - self.depth

    @property
    def place(self) -> list[Index]:
        """The positions of the selected lanes along each lane dim, [n] each."""
        return [self.index] if self.depth == 1 else list(np.unravel_index(self.index, self.lanes))

    def below(self) -> Rows:
        """Select the same lanes of the argument of `value`, an elementwise op."""
        return Rows(self.value.arg, self.depth, self.index)

    @property
    def batch(self) -> tuple[object, ...]:
        """The sizes of the dims before the lane dims."""
        return self.value.shape[: self.lead]


def rows(value: Value) -> Rows | None:
    """Select all lanes of the last dim; None without dims, and for a size that is 0 or symbolic."""
    if not value.rank or not isinstance(value.shape[-1], int) or not value.shape[-1]:
        return None
    return Rows(value, 1, np.arange(value.shape[-1]))


def descend(at: Rows) -> list[tuple[Index, Rows]] | None:
    """Follow the lanes that `at` selects through one op that only moves lanes, not rows.

    Returns:
        For each argument with selected lanes, the positions in `at.index` of these, and the lanes in that argument.
        None
        for any other op.
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
            place = [within(size, where) for where, size in zip(place, value.arg.shape[lead:], strict=True)]
        case "slice" if value.attrs[0] >= lead:
            axis, start, _, step = value.attrs
            place[axis - lead] = start + step * place[axis - lead]
        case "flip" if value.attrs[0] >= lead:
            (axis,) = value.attrs
            place[axis - lead] = int(value.shape[axis]) - 1 - place[axis - lead]
        case _:
            return None
    return [(np.arange(len(at.index)), lanes_at(value.arg, at.depth, place))]


def lanes_at(value: Value, depth: int, place: Sequence[Index]) -> Rows:
    """Select the lanes of `value` at the positions `place`, one array for each of the last `depth` dims."""
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
            parts.append((here, lanes_at(piece, at.depth, inside)))
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
        here = np.nonzero(~written)[0]
        parts.append((here, lanes_at(at.value.args[0], at.depth, [where[here] for where in place])))
    if written.any():
        here = np.nonzero(written)[0]
        inside = [where[here] for where in place]
        inside[axis] = (inside[axis] - start) // step
        parts.append((here, lanes_at(at.value.args[1], at.depth, inside)))
    return parts


def within(size: Dim, where: Index) -> Index:
    """Return the positions `where` along a dim as positions in an operand that has `size` there: 0 if it is
    broadcast.
    """
    return np.zeros_like(where) if size == 1 else where


def same_lanes(value: Value, left: Index, right: Index) -> bool:
    """Return True if x[.., left] and x[.., right] of `value` are proven equal, such as both halves of cos(cat(f,
    f)).
    """
    numbers: dict[object, int] = {}
    ends = [_ends(Rows(value, 1, index), (), numbers) for index in (left, right)]
    return bool((ends[0][0] == ends[1][0]).all() and (ends[0][1] == ends[1][1]).all())


def _ends(at: Rows, chain: tuple[object, ...], numbers: dict[object, int]) -> tuple[Index, Index]:
    """Follow the lanes that `at` selects through moves and elementwise functions to the values that they come from.

    A source is such a value with the `chain` of functions above it. `numbers` maps each source to a number, and is
    extended.

    Returns:
        The number of the source of each lane, and the lane in that source, [n] each.
    """
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
    """Step to the input of a reshape, permute, slice or expand that keeps the last dim, with all lanes; None for other
    ops.

    Lanes that are equal in every row of the input are equal in every row of the result.
    """
    value = at.value
    if at.depth != 1 or value.op not in ("reshape", "permute", "slice", "expand"):
        return None
    moved = value.op == "permute" and value.attrs[-1] != value.rank - 1
    if moved or value.arg.shape[-1:] != value.shape[-1:]:
        return None
    return [(np.arange(len(at.index)), at.below())]
