"""Entries of lists by which a model gathers rows: visible ones, and bounds on their positions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fusion.analysis.affine import Affine, Formula, Leaf, conjuncts, negation
from fusion.analysis.intervals import bounds, uncast
from fusion.graph import Algebra, Value
from patterns.attention.masks.masks import Masks

_VIEWS = ("reshape", "expand", "permute")


@dataclass(frozen=True)
class Entries:
    """Entries of lists, of which a mask hides some.

    Attributes:
        masks: masks of the scores [*rows, K].
        lists: number of leading dims of `rows` that are lists.
        places: positions of rows in the source, [X, M, K].
        parts: conditions that hold for every visible entry.
    """

    masks: Masks
    lists: int
    places: Value
    parts: tuple[Formula, ...]

    def number(self, places: Value | None = None) -> Affine:
        """Express the entries of `places` [X, M, K] (default: `self.places`) as an affine term over the positions of
        the scores.
        """
        return self.masks.positions.affine(*self._opened(places or self.places))

    def _opened(self, x: Value) -> tuple[Value, tuple[Affine, ...]]:
        """Reshape `x` [X, M, K] to broadcast to the scores [*rows, K], with size 1 for the dims of heads.

        Returns the reshaped value, and the index of each of its dims, as affine terms over the positions of the scores.
        """
        *rows, entries = self.masks.positions.shape
        heads = len(rows) - self.lists
        opened = self.masks.a.reshape(x, (*rows[: self.lists], *[1] * heads, entries))
        return opened, self.masks.positions.of(opened)

    def holds(self, condition: Value, how: bool) -> bool:
        """Return True if `condition` [X, M, K] is proven to be `how` for every visible entry."""
        truth = self.masks.positions.truth(*self._opened(condition))
        return set(conjuncts(truth if how else negation(truth))) <= set(self.parts)

    def least(self, places: Value) -> bool:
        """Return True if no entry of `places` [X, M, K] that the masks leave visible is negative."""
        return bounds(places)[0] >= 0 or any(says_below(each, self.number(places), -1, 0) for each in self.parts)

    def within(self, places: Value, low: Any, high: Any) -> bool:
        """Return True if every entry of `places` [X, M, K] that the masks leave visible is proven to be in `low` ..
        `high`.
        """
        number = self.number(places)
        above = low <= bounds(places)[0] or any(says_below(each, number, -1, low) for each in self.parts)
        return above and (high >= bounds(places)[1] or any(says_below(each, number, 1, -high) for each in self.parts))

    def others(self, size: Any) -> tuple[Formula, ...]:
        """Return `self.parts` without those that only say that an entry of `self.places` is in 0 .. `size` - 1.

        If `size` is None, only the condition that it is at least 0 is left out.
        """
        number = self.number()
        known = [number.times(-1)] if size is None else [number.times(-1), number.plus(1 - size)]
        return tuple(each for each in self.parts if each not in [("le", bound) for bound in known])

    def is_tail(self) -> bool:
        """Return True if every condition in `self.parts` is an upper bound on the index of an entry in its list.

        Then hidden entries are at the end of each list.
        """
        last = len(self.masks.positions.shape) - 1
        return all(grows(each, last) for each in self.parts)


def says_below(part: Formula, number: Affine, sign: int, bound: Any) -> bool:
    """Return True if the condition `part` is proven to imply `sign` · `number` + `bound` ≤ 0."""
    if isinstance(part, bool) or part[0] != "le":
        return False
    left = part[1] + number.times(-sign)
    return not left.terms and isinstance(left.constant, int) and left.constant >= bound


def grows(part: Formula, axis: int) -> bool:
    """Return True if the condition `part` is an upper bound on the index along dim `axis` of the scores."""
    if isinstance(part, bool) or part[0] != "le" or not part[1].terms.get(axis, 0) > 0:
        return False
    return not any(isinstance(term, Leaf) and axis in term.axes() for term in part[1].terms)


def unclamped(a: Algebra, entries: Entries) -> Entries:
    """Return `entries` with `places` below each clamp and "where" that changes entries only where the masks hide
    them.
    """
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
    return entries if inner is None else unclamped(a, replace(entries, places=inner))


def _below_view(a: Algebra, x: Value) -> Value:
    """Return `x` without exact casts of integers, and with a clamp or "where" below views moved to the outside.

    view(clamp(y)) becomes clamp(view(y)), and view(where(c, y, z)) becomes where(view(c), view(y), view(z)).
    """
    x = uncast(x)
    if x.op not in _VIEWS:
        return x
    below = _below_view(a, x.arg)
    if below.op not in ("clamp", "where"):
        return x
    args = [a.seen_as(a.expand(each, below.shape), x) for each in below.args]
    return a.make(below.op, args, below.attrs, x.shape, below.dtype)
