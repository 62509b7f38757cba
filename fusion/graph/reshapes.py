"""Reshapes and permutes moved below slices, concatenations and other reshapes; pieces of concatenations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusion.graph.dims import Dim, but_ones, joined_from
from fusion.graph.value import Value

if TYPE_CHECKING:
    from fusion.graph.algebra import Algebra


def below_parts(a: Algebra, x: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Build the reshape of `x`, a slice or cat, to `shape` as a slice or cat of reshapes; None where it is none."""
    forms = {"slice": (_below_cut, _rejoined_split, _without_last), "cat": (_below_cat,)}.get(x.op, ())
    return next(filter(None, (form(a, x, shape) for form in forms)), None)


def _below_cut(a: Algebra, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Slice the reshaped argument of `cut`, where `shape` only adds or removes dims of size 1.

    None where more changes, or where the sliced dim has size 1 and so no place in `shape`.
    """
    axis, *bounds = cut.attrs
    if cut.shape[axis] == 1 or but_ones(shape) != but_ones(cut.shape):
        return None
    place = [n for n, size in enumerate(shape) if size != 1][len(but_ones(cut.shape[:axis]))]
    opened = a.reshape(cut.arg, (*shape[:place], cut.arg.shape[axis], *shape[place + 1 :]))
    return a.cut(opened, place, *bounds)


def _without_last(a: Algebra, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Remove a trailing dim of size 1 below the slice `cut`, then reshape to `shape`; None where `shape` keeps it."""
    if cut.shape[-1:] != (1,) or shape[-1:] == (1,):
        return None
    squeezed = _below_cut(a, cut, cut.shape[:-1])
    return None if squeezed is None else a.reshape(squeezed, shape)


def _below_cat(a: Algebra, joined: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Concatenate reshaped pieces, where `shape` adds or removes dims of size 1 before the axis.

    A change of later dims stays a reshape of the result. None where no piece changes.
    """
    axis = joined.attrs[0]
    before = but_ones(joined.shape[:axis])
    place = next((p for p in range(len(shape) + 1) if but_ones(shape[:p]) == before), None)
    if place is None:
        return None
    while shape[place : place + 1] == (1,) and shape[place:] != joined.shape[axis:]:
        place += 1
    if place == axis and shape[:place] == joined.shape[:axis]:
        return None
    pieces = [a.reshape(each, (*shape[:place], *each.shape[axis:])) for each in joined.args]
    return a.reshape(a.cat(pieces, place), shape)


def _rejoined_split(a: Algebra, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Slice x [.., O·I, ..] where `cut` takes one entry of O of its reshape [.., O, I, ..] and `shape` drops O."""
    axis, start, stop, _ = cut.attrs
    if cut.arg.op != "reshape":
        return None
    source, inner = cut.arg.arg, cut.shape[axis + 1 : axis + 2]
    split = (*source.shape[:axis], cut.arg.shape[axis], *inner, *source.shape[axis + 1 :])
    if stop - start != 1 or cut.arg.shape != split or not inner or not isinstance(inner[0], int):
        return None
    return a.reshape(a.cut(source, axis, start * inner[0], stop * inner[0]), shape)


def permute_below(a: Algebra, opened: Value, axes: Sequence[int]) -> Value:
    """Permute the argument of `opened`, a reshape by dims of size 1, so that its other dims have the order `axes`."""
    places = [axis for axis, size in enumerate(opened.shape) if size != 1]
    below = [axis for axis, size in enumerate(opened.arg.shape) if size != 1]
    wanted = iter(below[places.index(axis)] for axis in axes)
    order = [next(wanted) if size != 1 else axis for axis, size in enumerate(opened.arg.shape)]
    return a.permute(opened.arg, order)


def opened_order(turned: Value, shape: tuple[Dim, ...]) -> list[int] | None:
    """Return the `order` for which reshape(`turned`, `shape`) is reshape(permute(x, order), shape).

    `turned` is a permute of a reshape of x that merges adjacent dims. None unless the reshape to `shape` splits some of
    them again; it may merge others. None as well for dims of size 0 or 1, whose order is ambiguous.
    """
    below = turned.arg.arg.shape
    groups = None if 0 in below or 1 in below else joined_from(below, turned.arg.shape)
    if groups is None:
        return None
    order = [axis for group in turned.attrs for axis in groups[group]]
    opened = joined_from(tuple(below[axis] for axis in order), shape)
    return order if opened is not None and len(opened) > len(groups) else None


def pieces_within(cat: Value, axis: int, start: int, stop: int) -> list[tuple[Value, int]]:
    """List the pieces of `cat` that overlap [start, stop) along `axis`, each with its offset."""
    overlapping: list[tuple[Value, int]] = []
    offset = 0
    for piece in cat.args:
        size = int(piece.shape[axis])
        if offset < stop and start < offset + size:
            overlapping.append((piece, offset))
        offset += size
    return overlapping


def rejoined(a: Algebra, left: Value, right: Value, axis: int) -> Value | None:
    """Merge `left` and `right` into one slice, if they are adjacent slices of one value along `axis`; else None."""
    if not (left.op == right.op == "slice" and left.arg is right.arg and left.attrs[0] == right.attrs[0] == axis):
        return None
    _, start, stop, step = left.attrs
    if step != 1 or right.attrs[3] != 1 or right.attrs[1] != stop:
        return None
    return a.cut(left.arg, axis, start, right.attrs[2])
