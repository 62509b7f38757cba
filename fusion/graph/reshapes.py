"""Reshapes and permutes, as those of what a value is cut, joined or opened from; pieces of what is joined."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fusion.graph.dims import Dim, but_ones, joined_from
from fusion.graph.value import Value

if TYPE_CHECKING:
    from fusion.graph.algebra import Algebra


def below_parts(a: Algebra, x: Value, shape: tuple[Dim, ...]) -> Value | None:
    """A reshape of what is cut or joined, as that of what it is cut or joined from."""
    forms = {"slice": (_below_cut, _rejoined_split, _without_last), "cat": (_below_cat,)}.get(x.op, ())
    return next(filter(None, (form(a, x, shape) for form in forms)), None)


def _below_cut(a: Algebra, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Dims of size 1 come or go before others are cut; None where more changes, or one of size 1 is cut."""
    axis, *bounds = cut.attrs
    if cut.shape[axis] == 1 or but_ones(shape) != but_ones(cut.shape):
        return None
    place = [n for n, size in enumerate(shape) if size != 1][len(but_ones(cut.shape[:axis]))]
    opened = a.reshape(cut.arg, (*shape[:place], cut.arg.shape[axis], *shape[place + 1 :]))
    return a.cut(opened, place, *bounds)


def _without_last(a: Algebra, cut: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Of what was cut before a last dim of size 1, which goes first; None where it stays."""
    if cut.shape[-1:] != (1,) or shape[-1:] == (1,):
        return None
    squeezed = _below_cut(a, cut, cut.shape[:-1])
    return None if squeezed is None else a.reshape(squeezed, shape)


def _below_cat(a: Algebra, joined: Value, shape: tuple[Dim, ...]) -> Value | None:
    """Dims of size 1 before the joined one come or go in each piece; a change of later dims stays above."""
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
    """Entries of the outer part of a dim that was split in two, joined again: a slice of that dim itself."""
    axis, start, stop, _ = cut.attrs
    if cut.arg.op != "reshape":
        return None
    whole, inner = cut.arg.arg, cut.shape[axis + 1 : axis + 2]
    split = (*whole.shape[:axis], cut.arg.shape[axis], *inner, *whole.shape[axis + 1 :])
    if stop - start != 1 or cut.arg.shape != split or not inner or not isinstance(inner[0], int):
        return None
    return a.reshape(a.cut(whole, axis, start * inner[0], stop * inner[0]), shape)


def permute_below(a: Algebra, opened: Value, kept: Sequence[int]) -> Value:
    """The dims other than 1 in the order `kept`, in the value to which `opened` has given dims of size 1."""
    places = [axis for axis, size in enumerate(opened.shape) if size != 1]
    below = [axis for axis, size in enumerate(opened.arg.shape) if size != 1]
    wanted = iter(below[places.index(axis)] for axis in kept)
    order = [next(wanted) if size != 1 else axis for axis, size in enumerate(opened.arg.shape)]
    return a.permute(opened.arg, order)


def opened_order(turned: Value, shape: tuple[Dim, ...]) -> list[int] | None:
    """The order in which dims stand that are joined, turned, and opened again to `shape`; None where they stay joined.

    Some of the dims of `shape` may be joined from several that stand beside each other. Dims of one entry or none are
    in no order.
    """
    below = turned.arg.arg.shape
    groups = None if 0 in below or 1 in below else joined_from(below, turned.arg.shape)
    if groups is None:
        return None
    order = [axis for group in turned.attrs for axis in groups[group]]
    opened = joined_from(tuple(below[axis] for axis in order), shape)
    return order if opened is not None and len(opened) > len(groups) else None


def pieces_within(cat: Value, axis: int, start: int, stop: int) -> list[tuple[Value, int]]:
    """What of a joined value lies in [start, stop), each piece with its place."""
    found: list[tuple[Value, int]] = []
    offset = 0
    for piece in cat.args:
        size = int(piece.shape[axis])
        if offset < stop and start < offset + size:
            found.append((piece, offset))
        offset += size
    return found


def rejoined(a: Algebra, left: Value, right: Value, axis: int) -> Value | None:
    """Neighbours that were cut from one source, as one."""
    if not (left.op == right.op == "slice" and left.arg is right.arg and left.attrs[0] == right.attrs[0] == axis):
        return None
    _, start, stop, step = left.attrs
    if step != 1 or right.attrs[3] != 1 or right.attrs[1] != stop:
        return None
    return a.cut(left.arg, axis, start, right.attrs[2])
