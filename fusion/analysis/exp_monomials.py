"""Products and sums of exponentials in one form, so that equal shares are equal however they are written.

share = factor · Π generator ** n · Π sum ** m      a generator is exp(x) or x, for a value x that is left whole

A sum has a first term of 1, which makes it one of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from itertools import chain
from math import isfinite
from typing import Any

from fusion.graph import Value
from fusion.graph.proof import must, proof, proven

TERMS = 64  # beyond which a sum is not written out
Generator = tuple[str, Value]
Powers = frozenset[tuple[Any, int]]


@dataclass(frozen=True)
class Share:
    """A number times powers of generators and of sums of them."""

    factor: float = 1.0
    powers: Powers = field(default_factory=frozenset[tuple[Any, int]])
    sums: Powers = field(default_factory=frozenset[tuple[Any, int]])

    def __mul__(self, other: Share) -> Share:
        """The product."""
        return Share(self.factor * other.factor, _joined(self.powers, other.powers), _joined(self.sums, other.sums))

    def inverse(self) -> Share:
        """One over it."""
        return Share(1 / self.factor, _turned(self.powers), _turned(self.sums))

    def scaled(self, factor: float) -> Share:
        """Times a number."""
        return Share(self.factor * factor, self.powers, self.sums)

    @property
    def is_weight(self) -> bool:
        """Whether there is an exponential in it."""
        return any(kind == "exp" for kind, _ in self.generators)

    @property
    def generators(self) -> frozenset[Generator]:
        """What it is made of."""
        inside = (powers for terms, _ in self.sums for powers, _ in terms)
        return frozenset(each for powers in (self.powers, *inside) for each, _ in powers)

    @proof
    def moved(self, move: Callable[[Value], Value]) -> Share | None:
        """The same of other values."""
        share = Share(self.factor, moved(self.powers, move))
        for terms, count in self.sums:
            whole = proven(total([Share(factor, moved(powers, move)) for powers, factor in terms]))
            for _ in range(abs(count)):
                share = share * (whole if count > 0 else whole.inverse())
        return share


ONE = Share()


def moved(powers: Powers, move: Callable[[Value], Value]) -> Powers:
    """Powers of generators of other values."""
    return frozenset(((kind, move(value)), count) for (kind, value), count in powers)


def divides(number: float) -> bool:
    """Whether one can divide by a factor, so that a share that has it has an inverse."""
    return bool(number) and isfinite(number) and isfinite(1 / number)


def generator(kind: str, value: Value) -> Share:
    """`value` as it is ("is"), or its exponential ("exp")."""
    return Share(powers=frozenset({((kind, value), 1)}))


@proof
def total(shares: Iterable[Share]) -> Share:
    """The sum of shares; None where it is 0, or too long."""
    return reduce(_plus, shares)


def _plus(x: Share, y: Share) -> Share:
    left, right = dict(x.sums), dict(y.sums)
    common = {each: min(left.get(each, 0), right.get(each, 0)) for each in left | right}
    shared = Share(sums=_powers(common))
    written = _summed(each for share in (x, y) for each in _written_out(share * shared.inverse()).items())
    terms = {powers: factor for powers, factor in written.items() if abs(factor) > 1e-12}
    must(terms)
    return shared * _collected(terms)


def _written_out(share: Share) -> Mapping[Powers, float]:
    """The terms of a share that has no sum below the line."""
    terms: Mapping[Powers, float] = {share.powers: share.factor}
    for factors, count in share.sums:
        for _ in range(count):
            terms = _summed((_joined(one, other), a * b) for one, a in terms.items() for other, b in factors)
            must(len(terms) <= TERMS)
    return terms


def _summed(terms: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Equal powers, or generators, once each."""
    found: dict[Any, Any] = {}
    for each, factor in terms:
        found[each] = found.get(each, 0) + factor
    return found


def _collected(terms: Mapping[Powers, float]) -> Share:
    """A sum with its first term outside."""
    first = min(terms, key=_rank)
    lead = Share(terms[first], first)
    if len(terms) == 1:
        return lead
    rest = frozenset((_joined(powers, _turned(first)), factor / terms[first]) for powers, factor in terms.items())
    return lead * Share(sums=frozenset({(rest, 1)}))


def _rank(powers: Powers) -> list[Any]:
    return sorted((value.id, kind, count) for (kind, value), count in powers)


def _joined(x: Powers, y: Powers) -> Powers:
    return _powers(_summed(chain(x, y)))


def _powers(counts: Mapping[Any, int]) -> Powers:
    return frozenset((each, count) for each, count in counts.items() if count)


def _turned(x: Powers) -> Powers:
    return frozenset((each, -count) for each, count in x)
