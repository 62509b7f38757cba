"""One entry of a dim, told from the others, as of parts that were stacked to be weighed and summed."""

from __future__ import annotations

from typing import Any, NamedTuple

from fusion.graph import Algebra, Dim, Value, but_ones

MOST = 16  # entries of a dim that are told apart
Pick = tuple[int, int] | None
"""One entry of a dim, which is counted from the end; None for all."""


class Picked(NamedTuple):
    """A pick below a reshape or a permute."""

    pick: Pick


def stacked(reduced: Value) -> list[Pick] | None:
    """The entries of the one dim that a reduction, or a softmax, goes over, where they are parts: the first dim of all,
    or one along which single entries were joined.
    """
    axes, x = (reduced.attrs[:1] if reduced.op == "softmax" else reduced.attrs), reduced.arg
    if len(axes) != 1:
        return None
    axis = axes[0]
    size = x.shape[axis]
    first = all(each == 1 for each in x.shape[:axis])
    joined = x.op == "cat" and x.attrs[0] == axis + x.rank and len(x.args) == size
    known = isinstance(size, int) and 1 < size <= MOST
    return [(axis, entry) for entry in range(size)] if known and ((first and x.rank > 1) or joined) else None


def cut(a: Algebra, x: Value, pick: Pick) -> Value:
    """One entry of a dim whose size is a number, without the dim."""
    if pick is None:
        return x
    axis, entry = pick[0] + x.rank, pick[1]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    rows, size = (x.arg if x.op == "reshape" else x), x.shape[axis]
    whole = all(isinstance(each, int) for each in (size, *rows.shape[:1])) and all(each == 1 for each in x.shape[:axis])
    if whole and rows.shape[0] % size == 0:
        run: Any = rows.shape[0] // size
        return a.reshape(a.cut(rows, 0, entry * run, (entry + 1) * run), shape)
    return a.reshape(a.cut(x, axis, entry, entry + 1), shape)


def arranged_pick(x: Value, pick: Pick) -> Picked | None:
    """The same entry in what `x` arranges otherwise, if the entry itself stays as it is but for dims of size 1."""
    if x.op == "permute":
        rest = x.attrs if pick is None else tuple(axis for p, axis in enumerate(x.attrs) if p - x.rank != pick[0])
        kept = [axis for axis in rest if x.arg.shape[axis] != 1]
        inner = None if pick is None else (x.attrs[pick[0]] - x.rank, pick[1])
        return Picked(inner) if kept == sorted(kept) else None
    if but_ones(x.shape) != but_ones(x.arg.shape):
        return None
    if pick is None:
        return Picked(None)
    behind = len(but_ones(x.shape[pick[0] :]))
    places = [place - x.arg.rank for place, size in enumerate(x.arg.shape) if size != 1]
    return Picked((places[-behind], pick[1]))


def pick_on(x: Value, pick: Pick) -> Pick:
    """The entry of an operand that is broadcast, perhaps, along the dim."""
    return None if pick is None or x.rank < -pick[0] or x.shape[pick[0]] == 1 else pick


def without(x: Value, pick: Pick) -> tuple[Dim, ...]:
    """The shape of `x`, or of one entry of a dim of it."""
    return x.shape if pick is None else tuple(s for p, s in enumerate(x.shape) if p - x.rank != pick[0])


def lists_all(chosen: Value) -> bool:
    """Whether the places are all that there are: as many, and no two the same."""
    places, size = chosen.arg, chosen.shape[-1]
    return places.op == "largest_index" and places.attrs == (size,)
