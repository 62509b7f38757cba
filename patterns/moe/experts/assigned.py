"""Integers that are computed from the experts which a router chose: lists of them, masks, indices of their matrices.

An integer or boolean of one pair (t, k), of a token and its k-th expert, is read as a table, with one entry for each of
the E experts: the computation is repeated on 0 … E - 1 in place of the chosen experts, and folded.

    e - 4                                    -4, -3, …
    where((e >= 4) & (e < 8), e - 4, 4)      4, 4, 4, 4, 0, 1, 2, 3, 4, …
    expert_map[e]                            the entries of a constant map
"""

from __future__ import annotations

from collections.abc import Iterable
from math import prod
from typing import NamedTuple

from fusion.analysis.constant_folding import Folder
from fusion.graph import Algebra, Value
from fusion.graph.proof_steps import must, proof, proven

CHOICES = ("largest_index", "first_greatest")
"""Ops that choose experts: the K largest of a row, and the greatest alone."""
_ARRANGED = ("reshape", "permute", "ascending")
"""Views, and a sort of numbers: entries stay functions of single experts."""
_OF_ONE = ("cast", "shift", "scale", "floor_divide", "remainder", "clamp", "not", "below")
_OF_SEVERAL = ("where", "compare", "and", "or", "add", "mul")


class Assigned(NamedTuple):
    """The number of each pair, `numbers`[e] for its expert e.

    Attributes:
        experts: the chosen experts [.., K].
        by_choice: True if pairs are listed choice by choice, k · T + t, False if token by token, t · K + k.
        order: numbers of the experts by which the pairs are sorted; None where they are listed.
    """

    experts: Value
    numbers: tuple[int, ...]
    by_choice: bool = False
    order: tuple[int, ...] | None = None


class _Entries(NamedTuple):
    """Entries of all experts [E], and how the pairs are arranged; `by_choice` is None for a constant."""

    value: Value
    by_choice: bool | None = None
    order: tuple[int, ...] | None = None


@proof
def assigned(a: Algebra, x: Value) -> Assigned:
    """Read the integers or booleans `x` as a number of each pair of a token and an expert; unproven if they are not
    computed from one list of chosen experts alone, entry by entry.
    """
    lists = [each for each in x.sources(_operands) if each.op in CHOICES]
    must(len(lists) == 1 and prod(x.shape) == prod(lists[0].shape))
    (experts,) = lists
    axis = experts.attrs[0] if experts.op == "first_greatest" and experts.attrs else -1
    count = experts.arg.shape[axis]
    entries = _entries(a, x, experts, proven(count if isinstance(count, int) else None))
    return Assigned(experts, _numbers(entries), bool(entries.by_choice), entries.order)


def _numbers(entries: _Entries) -> tuple[int, ...]:
    """Fold `entries` to the integers of all experts; unproven if they depend on an input, or are no integers."""
    numbers = proven(Folder().fold(entries.value))
    must((numbers == numbers.astype(int)).all())
    return tuple(int(each) for each in numbers)


def _operands(x: Value) -> Iterable[Value]:
    """Return the operands of `x` from which its entries are computed one by one; () for a list of chosen experts."""
    if x.op in (*_ARRANGED, *_OF_ONE):
        return (x.arg,)
    if x.op == "index" and x.attrs == (0,):
        return (x.arg,) if _is_sorting(x.args[1]) else (x.args[1],)
    return x.args if x.op in _OF_SEVERAL else ()


def _is_sorting(x: Value) -> bool:
    return x.below("cast", "wrap").op == "ascending_index"


def _entries(a: Algebra, x: Value, experts: Value, count: int) -> _Entries:
    """Build the entries of `x` for 0 … `count` - 1 in place of the list `experts`; unproven for an op that mixes
    pairs.
    """
    if x is experts:
        return _Entries(a.make("arange", (), (0, 1), (count,), x.dtype), by_choice=False)
    if x.below("reshape", "expand").op == "full":
        number = x.below("reshape", "expand")
        return _Entries(a.make("full", (), number.attrs, (), x.dtype))
    if x.op in _ARRANGED:
        return _arranged(x, _entries(a, x.arg, experts, count))
    if x.op == "index" and x.attrs == (0,):
        return _indexed(a, x, experts, count)
    must(x.op in (*_OF_ONE, *_OF_SEVERAL))
    parts = [_entries(a, each, experts, count) for each in x.args]
    how = {(each.by_choice, each.order) for each in parts if each.by_choice is not None}
    must(len(how) <= 1)
    varying = [arg for each, arg in zip(parts, x.args, strict=True) if each.by_choice is not None]
    must(all(prod(arg.shape) == prod(x.shape) for arg in varying))
    shape = (count,) if how else ()
    value = a.make(x.op, tuple(each.value for each in parts), x.attrs, shape, x.dtype)
    return _Entries(value, *how.pop()) if how else _Entries(value)


def _arranged(x: Value, below: _Entries) -> _Entries:
    """Return the entries `below` of the operand of `x`, a view or a sort, as arranged by it."""
    if x.op == "reshape" or below.by_choice is None:
        return below
    if x.op == "ascending":
        must(x.rank == 1 and below.order is None)
        return below._replace(order=_numbers(below))
    last = (x.rank - 1, *range(x.rank - 1)) if not below.by_choice else (*range(1, x.rank), 0)
    must(x.attrs == last and below.order is None)
    return below._replace(by_choice=not below.by_choice)


def _indexed(a: Algebra, x: Value, experts: Value, count: int) -> _Entries:
    """Return the entries of `x`, numbers gathered by an argsort, or those of a constant table that pairs index."""
    source, places = x.args
    if _is_sorting(places):
        below, by = _entries(a, source, experts, count), proven(assigned(a, places.below("cast", "wrap").arg))
        must(below.order is None and by.order is None and by.experts is experts and by.by_choice == below.by_choice)
        return below._replace(order=by.numbers)
    index = _entries(a, places, experts, count)
    must(source.rank == 1 and index.by_choice is not None)
    return index._replace(value=a.make("index", (source, index.value), x.attrs, (count,), x.dtype))


def is_by_choice(a: Algebra, order: Value) -> bool:
    """Return True if the argsort `order` [R] is of pairs listed choice by choice, k · T + t."""
    listed = assigned(a, order.arg)
    return listed is not None and listed.by_choice
