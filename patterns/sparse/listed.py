"""Attention over rows that the model gathers by lists of its own (FlashMLA, 2025; DeepSeek-V3.2, 2025).

    out[i] = softmax(scale · q[i] · kv[places[i]] where an entry is not hidden) · kv[places[i], :C]

An entry counts as often as it stands in a list, as for the operator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjuncts, negation
from fusion.analysis.intervals import bounds
from fusion.analysis.intervals import uncast as unwidened
from fusion.analysis.row_layout import Step, named, uncast
from fusion.analysis.runs import wrapped
from fusion.graph import Algebra, Miss, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.attention.masks import Empty, Masks, unseen
from patterns.sparse.rows import distinct, gathered

_VIEWS = ("reshape", "expand", "permute")


@dataclass(frozen=True)
class Operands:
    """Attention of heads for each list: q [*rows, D], k [X, M, K, D], v [X, M, K, E], and the result.

    The first rows are the X · M lists, the others their N heads. `finish` is how [*rows, E] becomes the result of
    `dtype`.
    """

    q: Value
    k: Value
    v: Value
    dtype: torch.dtype | None
    finish: Sequence[Step]


@dataclass(frozen=True)
class Entries:
    """Which entries of lists are seen.

    Attributes:
        masks: those of the scores [*rows, K].
        lists: how many of the rows are lists.
        places: the numbers of rows, [X, M, K].
        parts: what must hold where an entry is seen.
    """

    masks: Masks
    lists: int
    places: Value
    parts: tuple[Formula, ...]

    def number(self, places: Value | None = None) -> Affine:
        """The place of an entry, at the positions of the scores."""
        return self.masks.positions.affine(*self._opened(places or self.places))

    def _opened(self, x: Value) -> tuple[Value, tuple[Affine, ...]]:
        """[X, M, K] as the scores of one head, and the positions there."""
        *rows, entries = self.masks.positions.shape
        heads = len(rows) - self.lists
        opened = self.masks.a.reshape(x, (*rows[: self.lists], *[1] * heads, entries))
        return opened, self.masks.positions.of(opened)

    def holds(self, condition: Value, how: bool) -> bool:
        """Whether every entry that is seen meets a condition, or none does."""
        truth = self.masks.positions.truth(*self._opened(condition))
        return set(conjuncts(truth if how else negation(truth))) <= set(self.parts)

    def least(self, places: Value) -> bool:
        """Whether every entry that is seen has a place of 0 at least."""
        return bounds(places)[0] >= 0 or any(_rest(each, self.number(places), -1, 0) for each in self.parts)

    def within(self, places: Value, low: Any, high: Any) -> bool:
        """Whether every entry that is seen has a place between these numbers."""
        number = self.number(places)
        above = low <= bounds(places)[0] or any(_rest(each, number, -1, low) for each in self.parts)
        return above and (high >= bounds(places)[1] or any(_rest(each, number, 1, -high) for each in self.parts))

    def others(self, size: Any) -> tuple[Formula, ...]:
        """What must hold besides that places are those of `size` rows; that none is negative, where this is None."""
        number = self.number()
        known = [number.times(-1)] if size is None else [number.times(-1), number.plus(1 - size)]
        return tuple(each for each in self.parts if each not in [("le", bound) for bound in known])

    def is_tail(self) -> bool:
        """Whether hidden entries stand behind those that are seen, by the number of the entry alone."""
        last = len(self.masks.positions.shape) - 1
        return all(grows(each, last) for each in self.parts)


def _rest(part: Formula, number: Affine, sign: int, bound: Any) -> bool:
    """Whether a part of a formula says that sign · number + bound ≤ 0."""
    if isinstance(part, bool) or part[0] != "le":
        return False
    left = part[1] + number.times(-sign)
    return not left.terms and isinstance(left.constant, int) and left.constant >= bound


def grows(part: Formula, axis: int) -> bool:
    """Whether a part of a formula holds up to some position along an axis."""
    if isinstance(part, bool) or part[0] != "le" or not part[1].terms.get(axis, 0) > 0:
        return False
    return not any(isinstance(term, Leaf) and axis in term.axes() for term in part[1].terms)


@proof
def listed_attention(
    masks: Masks, of: Operands, scale: float, softmax: Empty, beyond: str = ""
) -> Reading | Miss | None:
    """Attention over listed rows; why it is none; None if keys and values are not gathered by one list.

    Args:
        masks: those of its scores, [*rows, K].
        of: its operands.
        scale: what the scores are multiplied by.
        softmax: what the softmax makes of a row without a key.
        beyond: what else is done to the scores, of which the operator knows nothing.
    """
    a = masks.a
    k, v = (proven(gathered(a, each)) for each in (of.k, of.v))
    must((k.places, k.counted_back) == (v.places, v.counted_back) and k.source.shape[:2] == v.source.shape[:2])
    if beyond:
        return _miss(beyond)
    q = uncast(a, of.q)
    if len({q.dtype, k.source.dtype, v.source.dtype, of.dtype}) != 1:
        return _miss("queries, listed rows and result have different dtypes")
    seen = masks.visible()
    if isinstance(seen, str):
        return _miss(seen)
    empty = "zero" if seen is True else unseen(masks.positions, masks.terms, softmax)
    if not empty:
        return _miss("a query that sees none of its list would see what is lowered least: replace it by -inf")
    groups, size = k.source.shape[:2]
    rows, count = masks.positions.shape[:-1], prod(of.k.shape[:2])
    lists = proven(next((place for place in range(1, len(rows)) if prod(rows[:place]) == count), None))
    entries = Entries(masks, lists, k.places, conjuncts(seen))
    entries = entries if empty == "mean" else _unclamped(a, entries)
    told = not entries.others(size if empty == "zero" else None) and empty != "mean"  # a list of -1 alone gives NaN
    hidden = None if told else masks.hidden_entries(lists)
    if hidden is None and not told:
        return _miss("the mask of the rows that are listed differs from head to head")
    places = entries.places
    counted_back = k.counted_back and not entries.least(places)
    places = wrapped(a, places, size) if counted_back else places
    positive = counted_back or bounds(places)[0] >= 0 or (places is k.places and not k.counted_back)
    batch, heads = _batch(groups, *of.k.shape[:2]), prod(rows[lists:])
    view = proven(named((("permute", (0, 2, 1, 3)), *of.finish), {batch[1]: "S", batch[0]: "B"}))
    said: dict[str, Any] = {
        "q": a.permute(a.reshape(q, (*batch, heads, q.shape[-1])), (0, 2, 1, 3)),
        "k": a.reshape(k.source, (groups, 1, *k.source.shape[1:])),
        "v": a.reshape(v.source, (groups, 1, *v.source.shape[1:])),
        "places": a.reshape(places, (*batch, places.shape[-1])), "scale": scale, "fully_masked_row": empty,
        "distinct": distinct(places), "ends": positive if told else entries.is_tail() and empty != "mean",
        "output_view": view,
    }  # fmt: skip
    if hidden is not None:
        said["hidden"] = a.reshape(hidden, (*batch, places.shape[-1]))
    return Reading("listed_attention", said, masks.positions.names())


def _miss(reason: str) -> Miss:
    return Miss("sparse_attention", reason)


def _batch(groups: Any, first: Any, second: Any) -> tuple[Any, Any]:
    """B and S of first · second lists in so many groups."""
    if groups == 1:
        return 1, first * second
    if groups == first:
        return groups, second
    must(isinstance(groups, int) and isinstance(first, int) and isinstance(second, int))
    must(first * second % groups == 0)
    return groups, first * second // groups


def _unclamped(a: Algebra, entries: Entries) -> Entries:
    """With places as they are before what changes those of hidden entries alone."""
    x = entries.places
    below = _below_view(a, x)
    inner: Value | None = None
    if below.op == "clamp" and entries.within(below.arg, *below.attrs):
        inner = below.arg
    elif below.op == "where":
        condition, yes, no = (a.expand(each, x.shape) for each in below.args)
        if entries.holds(condition, how=False):
            inner = no
        elif entries.holds(condition, how=True):
            inner = yes
    return entries if inner is None else _unclamped(a, replace(entries, places=inner))


def _below_view(a: Algebra, x: Value) -> Value:
    """A choice or a clamp that `x` sees, of what it sees of their arguments; before casts that keep all numbers."""
    x = unwidened(x)
    if x.op not in _VIEWS:
        return x
    below = _below_view(a, x.arg)
    if below.op not in ("clamp", "where"):
        return x
    args = [a.seen_as(a.expand(each, below.shape), x) for each in below.args]
    return a.make(below.op, args, below.attrs, x.shape, below.dtype)
