"""Single entries of a dim, analysed one by one: parts that were stacked in order to be weighted and summed."""

from __future__ import annotations

from typing import Any, NamedTuple

from fusion.graph import Algebra, Dim, Value, but_ones

MOST = 16
"""The largest size of a dim whose entries are analysed one by one."""
Pick = tuple[int, int] | None
"""(axis counted from the end, index): one entry of that dim; None for the tensor with all entries."""


class Picked(NamedTuple):
    """A proven pick in the argument of a reshape or a permute; wrapped, as None, all entries, is a proven pick too."""

    pick: Pick


def stacked(reduced: Value) -> list[Pick] | None:
    """List a pick for each entry of the dim along which `reduced`, a reduction or a softmax, is computed.

    None if there are several such dims; if the size is 1, symbolic or above `MOST`; and unless all dims before it have
    size 1, in a tensor of two dims or more, or its entries were concatenated one by one.
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
    """Return the entry `pick` of `x`, a pair of a negative dim and an index, without that dim; `x` itself if it is
    None.
    """
    if pick is None:
        return x
    axis, entry = pick[0] + x.rank, pick[1]
    shape = (*x.shape[:axis], *x.shape[axis + 1 :])
    rows, size = (x.arg if x.op == "reshape" else x), x.shape[axis]
    known = all(isinstance(each, int) for each in (size, *rows.shape[:1])) and all(each == 1 for each in x.shape[:axis])
    if known and rows.shape[0] % size == 0:
        run: Any = rows.shape[0] // size
        return a.reshape(a.cut(rows, 0, entry * run, (entry + 1) * run), shape)
    return a.reshape(a.cut(x, axis, entry, entry + 1), shape)


def arranged_pick(x: Value, pick: Pick) -> Picked | None:
    """Return the pick in the argument of `x`, a reshape or a permute, that has the same elements as `pick` in `x`.

    None if the elements are in another order there, dims of size 1 left out of account. `Picked(None)` stands for all.
    """
    if x.op == "permute":
        rest = x.attrs if pick is None else tuple(axis for p, axis in enumerate(x.attrs) if p - x.rank != pick[0])
        axes = [axis for axis in rest if x.arg.shape[axis] != 1]
        inner = None if pick is None else (x.attrs[pick[0]] - x.rank, pick[1])
        return Picked(inner) if axes == sorted(axes) else None
    if but_ones(x.shape) != but_ones(x.arg.shape):
        return None
    if pick is None:
        return Picked(None)
    behind = len(but_ones(x.shape[pick[0] :]))
    places = [place - x.arg.rank for place, size in enumerate(x.arg.shape) if size != 1]
    return Picked((places[-behind], pick[1]))


def pick_on(x: Value, pick: Pick) -> Pick:
    """Return the pick in `x`, an operand of an elementwise op, that the entry `pick` of the result is computed from.

    None, for all of `x`, if `x` is broadcast along the dim of `pick`, or if `pick` is None.
    """
    return None if pick is None or x.rank < -pick[0] or x.shape[pick[0]] == 1 else pick


def without(x: Value, pick: Pick) -> tuple[Dim, ...]:
    """Return the shape of `x` without the dim of `pick`."""
    return x.shape if pick is None else tuple(s for p, s in enumerate(x.shape) if p - x.rank != pick[0])


def lists_all(chosen: Value) -> bool:
    """Return True if the indices of `chosen` are a permutation of all positions: the top k of k."""
    places, size = chosen.arg, chosen.shape[-1]
    return places.op == "largest_index" and places.attrs == (size,)
