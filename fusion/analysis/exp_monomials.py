"""A normal form of rational expressions of exponentials, so that equal softmax weights are equal however written.

share = factor · Π generator ** n · Π sum ** m      a generator is exp(x) or x, for a value x that is not analysed

A sum is divided by one of its terms, which becomes 1, so that proportional sums are equal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from math import isfinite
from typing import Any

from fusion.graph import Value
from fusion.graph.proof_steps import must, proof, proven

TERMS = 64
"""The largest number of terms to which a product of sums is expanded."""
Generator = tuple[str, Value]
"""("exp", x) for exp(x), ("is", x) for x."""
Powers = frozenset[tuple[Any, int]]
"""The product of base ** exponent over its pairs; a base is a generator, or a sum as a set of (powers, factor)."""


@dataclass(frozen=True)
class Share:
    """factor · Π powers · Π sums: a number times powers of generators and powers of sums of products of them."""

    factor: float = 1.0
    powers: Powers = field(default_factory=frozenset[tuple[Any, int]])
    sums: Powers = field(default_factory=frozenset[tuple[Any, int]])

    def __mul__(self, other: Share) -> Share:
        powers, sums = _multiplied(self.powers, other.powers), _multiplied(self.sums, other.sums)
        return Share(self.factor * other.factor, powers, sums)

    def inverse(self) -> Share:
        """Return 1 / share; the factor must not be 0."""
        return Share(1 / self.factor, _inverse(self.powers), _inverse(self.sums))

    def scaled(self, factor: float) -> Share:
        """Multiply the share by the number `factor`."""
        return Share(self.factor * factor, self.powers, self.sums)

    @property
    def is_weight(self) -> bool:
        """Return True if an exponential is among the generators."""
        return any(kind == "exp" for kind, _ in self.generators)

    @property
    def generators(self) -> frozenset[Generator]:
        """All generators, those in sums included."""
        inside = (powers for terms, _ in self.sums for powers, _ in terms)
        return frozenset(each for powers in (self.powers, *inside) for each, _ in powers)

    @proof
    def moved(self, move: Callable[[Value], Value]) -> Share | None:
        """Replace the value x in every generator x or exp(x) by move(x); None if a sum becomes 0 by that."""
        share = Share(self.factor, moved(self.powers, move))
        for terms, count in self.sums:
            base = proven(total([Share(factor, moved(powers, move)) for powers, factor in terms]))
            for _ in range(abs(count)):
                share = share * (base if count > 0 else base.inverse())
        return share


ONE = Share()


def moved(powers: Powers, move: Callable[[Value], Value]) -> Powers:
    """Replace the value x in every generator x or exp(x) of `powers` by move(x)."""
    return frozenset(((kind, move(value)), count) for (kind, value), count in powers)


def divides(number: float) -> bool:
    """Return True if `number` and 1 / number are finite and not 0, so that a share with that factor has an inverse."""
    return bool(number) and isfinite(number) and isfinite(1 / number)


def generator(kind: str, value: Value) -> Share:
    """Build the share `value`, for the kind "is", or exp(value), for the kind "exp"."""
    return Share(powers=frozenset({((kind, value), 1)}))


@proof
def total(shares: Iterable[Share]) -> Share:
    """Sum `shares`; None if the sum is 0, or has more than `TERMS` terms on the way."""
    return reduce(_plus, shares)


def _plus(x: Share, y: Share) -> Share:
    left, right = dict(x.sums), dict(y.sums)
    common = {each: min(left.get(each, 0), right.get(each, 0)) for each in left | right}
    shared = Share(sums=_powers(common))
    written = _summed(each for share in (x, y) for each in _expanded(share * shared.inverse()).items())
    terms = {powers: factor for powers, factor in written.items() if abs(factor) > 1e-12}
    must(terms)
    return shared * _collected(terms)


def _expanded(share: Share) -> Mapping[Powers, float]:
    """Expand `share` to a sum of products of generators: powers -> factor.

    Unproven if a sum is in the denominator, or beyond `TERMS` terms.
    """
    terms: Mapping[Powers, float] = {share.powers: share.factor}
    for factors, count in share.sums:
        for _ in range(count):
            terms = _summed((_multiplied(one, other), a * b) for one, a in terms.items() for other, b in factors)
            must(len(terms) <= TERMS)
    return terms


def _summed(terms: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Sum the numbers of equal keys in `terms`."""
    totals: dict[Any, Any] = {}
    for each, factor in terms:
        totals[each] = totals.get(each, 0) + factor
    return totals


def _collected(terms: Mapping[Powers, float]) -> Share:
    """Build the share of Σ factor · powers over `terms`: the first term in a fixed order, times the sum divided by
    it.
    """
    first = min(terms, key=_rank)
    lead = Share(terms[first], first)
    if len(terms) == 1:
        return lead
    inverse = _inverse(first)
    base = frozenset((_multiplied(powers, inverse), factor / terms[first]) for powers, factor in terms.items())
    return lead * Share(sums=frozenset({(base, 1)}))


def _rank(powers: Powers) -> list[Any]:
    return sorted((value.id, kind, count) for (kind, value), count in powers)


def _multiplied(x: Powers, y: Powers) -> Powers:
    return _powers(_summed(chain(x, y)))


def _powers(counts: Mapping[Any, int]) -> Powers:
    return frozenset((each, count) for each, count in counts.items() if count)


def _inverse(x: Powers) -> Powers:
    return frozenset((each, -count) for each, count in x)
