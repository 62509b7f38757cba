"""Arrangement: how the rows of scores or weights come out of reshapes and permutes, dim by dim.

Every dim is a run of atoms, row-major. A reshape splits and joins runs, a permute exchanges dims; so a tensor that
belongs to one side, but is shared along some dims, can be carried over to the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from fusion.analysis.dtypes import is_exact
from fusion.analysis.repetition import unrepeated
from fusion.graph import Algebra, Value, but_ones
from fusion.graph.algebra import widens
from fusion.graph.dims import quotient

Step = tuple[str, tuple[Any, ...]]
Atom = int
Dims = tuple[tuple[Atom, ...], ...]


@dataclass(frozen=True)
class Arrangement:
    """Sizes of the atoms, and the dims before and after the steps as runs of atoms."""

    sizes: tuple[Any, ...]
    before: Dims
    after: Dims


def named(steps: Sequence[Step], names: Mapping[Any, str]) -> tuple[Step, ...] | None:
    """The steps with symbolic sizes by name, -1 for one of each; of reshapes in a row only the last.

    None where a reshape has several sizes without a name.
    """
    found: list[Step] = []
    for op, how in steps:
        if op == "reshape" and found and found[-1][0] == "reshape":
            found.pop()
        said = how if op != "reshape" else tuple(each if isinstance(each, int) else names.get(each, -1) for each in how)
        found.append((op, said))
    return None if any(op == "reshape" and how.count(-1) > 1 for op, how in found) else tuple(found)


def row_step(x: Value) -> Step | None:
    """What a reshape or a permute does to all dims but the last, if it leaves that alone."""
    if x.op == "reshape" and x.shape[-1:] == x.arg.shape[-1:]:
        return "reshape", x.shape[:-1]
    return ("permute", x.attrs[:-1]) if x.op == "permute" and x.attrs[-1] == x.rank - 1 else None


def arranged(a: Algebra, x: Value, steps: Sequence[Step]) -> Value:
    """`x` after such steps, whatever its last dim."""
    for op, how in steps:
        x = a.reshape(x, (*how, x.shape[-1])) if op == "reshape" else a.permute(x, (*how, x.rank - 1))
    return x


def broadcast_arranged(a: Algebra, x: Value, shape: Sequence[Any], steps: Sequence[Step]) -> Value:
    """`x`, which broadcasts to `shape` [*rows, T], after such steps of its rows: as one where a dim is all repeated."""
    x = a.reshape(x, (*(1,) * (len(shape) - x.rank), *x.shape))
    x = a.expand(x, (*x.shape[:-1], shape[-1]))
    found = arrangement(shape[:-1], steps)
    if found is None:
        return arranged(a, a.expand(x, shape), steps)
    runs = zip(x.shape[:-1], found.before, strict=True)
    have = {atom: 1 if size == 1 else found.sizes[atom] for size, run in runs for atom in run}
    placed = _placed(a, x, have, found.after, 1)
    whole = [any(have[atom] != 1 for atom in run) for run in found.after]
    sizes = [
        [found.sizes[atom] if is_whole else 1 for atom in run] for is_whole, run in zip(whole, found.after, strict=True)
    ]
    spread = a.expand(placed, (*(size for run in sizes for size in run), shape[-1]))
    return a.reshape(spread, (*map(prod, sizes), shape[-1]))


def arrangement(shape: Sequence[Any], steps: Sequence[Step]) -> Arrangement | None:
    """Follow `steps` (first one first) over rows of `shape`; None where a reshape breaks dims in other places."""
    found = Arrangement(tuple(shape), *(2 * (tuple((place,) for place in range(len(shape))),)))
    for op, how in steps:
        if op == "permute":
            found = Arrangement(found.sizes, found.before, tuple(found.after[axis] for axis in how))
            continue
        reshaped = _reshaped(found, how)
        if reshaped is None:
            return None
        found = reshaped
    return found


def _reshaped(found: Arrangement, shape: Sequence[Any]) -> Arrangement | None:
    """The same atoms, some of them split, in the runs that `shape` asks for; atoms of size 1 are in none."""
    sizes, before = list(found.sizes), found.before
    waiting = [atom for run in found.after for atom in run if sizes[atom] != 1]
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
    """How much of an atom goes into a dim of which `left` is still open; None where they do not fit."""
    if size == left or quotient(left, size) is not None:
        return size
    return left if quotient(size, left) is not None else None


def carried(a: Algebra, x: Value, found: Arrangement, source: Dims, target: Dims) -> Value | None:
    """`x` [*source dims, T, E], each of them whole or 1, as [*atoms in the order of `target`, T, E]."""
    lead, rows = x.shape[:-2], x.shape[-2:]
    wholes = [prod(found.sizes[atom] for atom in run) for run in source]
    if len(lead) != len(source) or any(size not in (1, whole) for size, whole in zip(lead, wholes, strict=True)):
        return None
    have = {atom: 1 if size == 1 else found.sizes[atom] for size, run in zip(lead, source, strict=True) for atom in run}
    return a.reshape(_placed(a, x, have, target, 2), (*(have.get(atom, 1) for run in target for atom in run), *rows))


def _placed(a: Algebra, x: Value, have: Mapping[Atom, Any], target: Dims, last: int) -> Value:
    """`x` as [*atoms, ..] with `last` dims behind: atoms of these sizes, those that there are as `target` has them."""
    rows = x.shape[x.rank - last :]
    wanted = [atom for run in target for atom in run if atom in have]
    order = [atom for atom in have if atom in wanted]
    opened = _repeated_outside(a, a.reshape(x, (*(have[atom] for atom in order), *rows)))
    return a.permute(opened, (*map(order.index, wanted), *range(len(order), len(order) + last)))


def _repeated_outside(a: Algebra, x: Value) -> Value:
    """What is repeated, and seen with other dims of size 1, as seen so and then repeated."""
    if x.op != "reshape" or x.arg.op != "expand" or but_ones(x.shape) != but_ones(x.arg.shape):
        return x
    repeated = x.arg
    own = (size for size, all_of in zip(repeated.arg.shape, repeated.shape, strict=True) if all_of != 1)
    return a.expand(a.reshape(repeated.arg, [1 if size == 1 else next(own) for size in x.shape]), x.shape)


def once(a: Algebra, kv: Value) -> Value:
    """Keys or values [B, N, T, D] without the repetition of heads."""
    return unrepeated(a, kv, 1)[0]


def uncast(a: Algebra, x: Value, dtype: Any = None) -> Value:
    """`x` before it was widened from `dtype`, or from any; itself where it was not."""
    if x.op == "cast" and widens(x.arg.dtype, x.dtype) and dtype in (None, x.arg.dtype):
        return x.arg
    if x.op in ("permute", "expand", "reshape"):
        return a.seen_as(uncast(a, x.arg, dtype), x)
    if x.op == "slice":
        return a.cut(uncast(a, x.arg, dtype), *x.attrs)
    if x.op == "cat":
        pieces = [uncast(a, each, dtype) for each in x.args]
        return a.cat(pieces, *x.attrs) if len({each.dtype for each in pieces}) == 1 else x
    return x


def narrowed(a: Algebra, x: Value, dtype: torch.dtype) -> Value:
    """`x` in a dtype that holds its numbers: before it was widened, or cast where it is chosen of such; else itself."""
    found = uncast(a, x, dtype)
    if found.dtype == dtype:
        return found
    if x.op in ("permute", "expand", "reshape"):
        return a.seen_as(narrowed(a, x.arg, dtype), x)
    if x.op == "slice":
        return a.cut(narrowed(a, x.arg, dtype), *x.attrs)
    chosen = x.op == "where" and all(_is_held(a, each, dtype) for each in x.args[1:])
    return a.cast(x, dtype) if chosen else x


def _is_held(a: Algebra, x: Value, dtype: torch.dtype) -> bool:
    """Whether a value was widened from a dtype, or consists of one number that it holds."""
    number = x.below("expand", "reshape")
    return is_exact(number.attrs[0], dtype) if number.op == "full" else uncast(a, x, dtype).dtype == dtype
