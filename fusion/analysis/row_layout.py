"""Layouts of rows: sequences of reshapes and permutes of all dims but the last, analysed dim by dim.

Every dim is a row-major product of atoms. A reshape splits atoms and regroups them, a permute reorders dims; so a
tensor that broadcasts to the layout before the steps can be rearranged to broadcast to the layout after them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusion.analysis.dtypes import is_exact
from fusion.analysis.repeated_entries import unrepeated
from fusion.graph import Algebra, Value, but_ones
from fusion.graph.algebra import widens
from fusion.graph.dims import quotient

Step = tuple[str, tuple[Any, ...]]
Atom = int
Dims = tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """The sizes of the atoms, and the dims before and after the steps, each as the atoms that it is the product of."""

    sizes: tuple[Any, ...]
    before: Dims
    after: Dims


def named(steps: Sequence[Step], names: Mapping[Any, str]) -> tuple[Step, ...] | None:
    """Replace symbolic sizes in `steps` by their `names`, or -1; of consecutive reshapes keep only the last.

    None if a reshape has several symbolic sizes without a name.
    """
    result: list[Step] = []
    for op, how in steps:
        if op == "reshape" and result and result[-1][0] == "reshape":
            result.pop()
        if op == "reshape":
            how = tuple(each if isinstance(each, int) else names.get(each, -1) for each in how)
        result.append((op, how))
    return None if any(op == "reshape" and how.count(-1) > 1 for op, how in result) else tuple(result)


def row_step(x: Value) -> Step | None:
    """Return the step of `x`, a reshape or a permute, on the dims before the last; None if it changes the last dim."""
    if x.op == "reshape" and x.shape[-1:] == x.arg.shape[-1:]:
        return "reshape", x.shape[:-1]
    return ("permute", x.attrs[:-1]) if x.op == "permute" and x.attrs[-1] == x.rank - 1 else None


def arranged(a: Algebra, x: Value, steps: Sequence[Step]) -> Value:
    """Apply `steps` to the dims of `x` before the last."""
    for op, how in steps:
        x = a.reshape(x, (*how, x.shape[-1])) if op == "reshape" else a.permute(x, (*how, x.rank - 1))
    return x


def broadcast_arranged(a: Algebra, x: Value, shape: Sequence[Any], steps: Sequence[Step]) -> Value:
    """Apply `steps` to the rows of `x`, which broadcasts to `shape` [*rows, T], without expanding it where possible.

    A dim of the result that consists only of atoms along which `x` is broadcast has size 1. If the layout cannot be
    computed, the result is that of the expanded `x`.
    """
    x = a.reshape(x, (*(1,) * (len(shape) - x.rank), *x.shape))
    x = a.expand(x, (*x.shape[:-1], shape[-1]))
    layout = arrangement(shape[:-1], steps)
    if layout is None:
        return arranged(a, a.expand(x, shape), steps)
    runs = zip(x.shape[:-1], layout.before, strict=True)
    have = {atom: 1 if size == 1 else layout.sizes[atom] for size, run in runs for atom in run}
    placed = _placed(a, x, have, layout.after, 1)
    varies = [any(have[atom] != 1 for atom in run) for run in layout.after]
    sizes = [
        [layout.sizes[atom] if full else 1 for atom in run] for full, run in zip(varies, layout.after, strict=True)
    ]
    spread = a.expand(placed, (*(size for run in sizes for size in run), shape[-1]))
    return a.reshape(spread, (*map(prod, sizes), shape[-1]))


def arrangement(shape: Sequence[Any], steps: Sequence[Step]) -> Arrangement | None:
    """Compute the layout of rows of `shape` after `steps`, applied in order.

    None if the sizes of a reshape are not products of atoms, or of parts into which atoms can be split.
    """
    layout = Arrangement(tuple(shape), *(2 * (tuple((place,) for place in range(len(shape))),)))
    for op, how in steps:
        if op == "permute":
            layout = Arrangement(layout.sizes, layout.before, tuple(layout.after[axis] for axis in how))
            continue
        reshaped = _reshaped(layout, how)
        if reshaped is None:
            return None
        layout = reshaped
    return layout


def _reshaped(layout: Arrangement, shape: Sequence[Any]) -> Arrangement | None:
    """Return the layout with the dims `shape`, of the atoms of `layout` in their order, which are split where needed.

    Atoms of size 1 are dropped. None if the sizes do not divide each other.
    """
    sizes, before = list(layout.sizes), layout.before
    waiting = [atom for run in layout.after for atom in run if sizes[atom] != 1]
    after: list[tuple[Atom, ...]] = []
    for left in shape:
        run: list[Atom] = []
        while left != 1:
            taken = _taken(sizes[waiting[0]], left) if waiting else None
            if taken is None:
                return None
            atom = waiting.pop(0)
            if taken != sizes[atom]:
                inner = len(sizes)
                sizes.append(quotient(sizes[atom], taken))
                sizes[atom] = taken
                waiting.insert(0, inner)
                before = tuple(_split(row, atom, inner) for row in before)
            run.append(atom)
            left = quotient(left, taken)
        after.append(tuple(run))
    return None if waiting else Arrangement(tuple(sizes), before, tuple(after))


def _split(run: tuple[Atom, ...], atom: Atom, inner: Atom) -> tuple[Atom, ...]:
    return tuple(each for old in run for each in ((old, inner) if old == atom else (old,)))


def _taken(size: Any, left: Any) -> Any:
    """Return the size of the part of an atom of `size` that goes into a dim with room for `left`: the smaller of the
    two.

    None if neither divides the other.
    """
    if size == left or quotient(left, size) is not None:
        return size
    return left if quotient(size, left) is not None else None


def rearranged(a: Algebra, x: Value, layout: Arrangement, source: Dims, target: Dims) -> Value | None:
    """Reshape and permute `x` [*source dims, T, E] to [*atoms in the order of `target`, T, E].

    Each source dim has its size in `layout`, or 1 where `x` is broadcast; None otherwise.
    """
    lead, rows = x.shape[:-2], x.shape[-2:]
    full = [prod(layout.sizes[atom] for atom in run) for run in source]
    if len(lead) != len(source) or any(size not in (1, each) for size, each in zip(lead, full, strict=True)):
        return None
    pairs = zip(lead, source, strict=True)
    have = {atom: 1 if size == 1 else layout.sizes[atom] for size, run in pairs for atom in run}
    return a.reshape(_placed(a, x, have, target, 2), (*(have.get(atom, 1) for run in target for atom in run), *rows))


def _placed(a: Algebra, x: Value, have: Mapping[Atom, Any], target: Dims, last: int) -> Value:
    """Split the leading dims of `x` into the atoms of `have` (atom -> size), and permute them to the order of `target`.

    The `last` dims of `x` remain. Atoms that are not in `target`, which have size 1, are dropped; those that are not in
    `have` are left out.
    """
    rows = x.shape[x.rank - last :]
    wanted = [atom for run in target for atom in run if atom in have]
    order = [atom for atom in have if atom in wanted]
    opened = _repeated_outside(a, a.reshape(x, (*(have[atom] for atom in order), *rows)))
    return a.permute(opened, (*map(order.index, wanted), *range(len(order), len(order) + last)))


def _repeated_outside(a: Algebra, x: Value) -> Value:
    """Return the reshape `x` of an expand, if it only inserts or removes dims of size 1, as an expand of a reshape.

    Any other `x` as it is.
    """
    if x.op != "reshape" or x.arg.op != "expand" or but_ones(x.shape) != but_ones(x.arg.shape):
        return x
    once, repeated = x.arg.arg, x.arg
    own = (size for size, expanded in zip(once.shape, repeated.shape, strict=True) if expanded != 1)
    return a.expand(a.reshape(once, [1 if size == 1 else next(own) for size in x.shape]), x.shape)


def once(a: Algebra, kv: Value) -> Value:
    """Remove the repetition of heads from keys or values [B, N, T, D]."""
    return unrepeated(a, kv, 1)[0]


def unwidened(a: Algebra, x: Value, dtype: Any = None) -> Value:
    """Strip the widening casts from `x`, below views and concatenations; if `dtype` is given, only those from `dtype`.

    `x` itself if there are none, or if the pieces of a concatenation have different dtypes below.
    """
    if x.op == "cast" and widens(x.arg.dtype, x.dtype) and dtype in (None, x.arg.dtype):
        return x.arg
    if x.op in ("permute", "expand", "reshape"):
        return a.seen_as(unwidened(a, x.arg, dtype), x)
    if x.op == "slice":
        return a.cut(unwidened(a, x.arg, dtype), *x.attrs)
    if x.op == "cat":
        pieces = [unwidened(a, each, dtype) for each in x.args]
        return a.cat(pieces, *x.attrs) if len({each.dtype for each in pieces}) == 1 else x
    return x


def narrowed(a: Algebra, x: Value, dtype: torch.dtype) -> Value:
    """Return `x` in `dtype`, if all its elements are proven to be exact in it; else `x`.

    They are if `x` was widened from `dtype`, or is a where of such values and of constants that are exact.
    """
    below = unwidened(a, x, dtype)
    if below.dtype == dtype:
        return below
    if x.op in ("permute", "expand", "reshape"):
        return a.seen_as(narrowed(a, x.arg, dtype), x)
    if x.op == "slice":
        return a.cut(narrowed(a, x.arg, dtype), *x.attrs)
    exact = x.op == "where" and all(_is_exact(a, each, dtype) for each in x.args[1:])
    return a.cast(x, dtype) if exact else x


def _is_exact(a: Algebra, x: Value, dtype: torch.dtype) -> bool:
    """Return True if `x` was widened from `dtype`, or is a constant that `dtype` represents exactly."""
    number = x.below("expand", "reshape")
    return is_exact(number.attrs[0], dtype) if number.op == "full" else unwidened(a, x, dtype).dtype == dtype
