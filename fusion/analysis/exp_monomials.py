"""Products and sums of exponentials in one form, so that equal shares are equal however they are written.

share = factor · Π generator ** n · Π sum ** m      a generator is exp(x) or x, for a value x that is left whole

A sum has a first term of 1, which makes it one of a kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import reduce
from math import isfinite
from typing import Any

from fusion.graph import Value

TERMS = 64  # beyond which a sum is not written out
Generator = tuple[str, Value]
Powers = frozenset[tuple[Any, int]]
Terms = frozenset[tuple[Powers, float]]


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
        inside = (powers for terms, _ in self.sums for powers, _ in terms)
        return any(kind == "exp" for powers in (self.powers, *inside) for (kind, _), _ in powers)

    @property
    def generators(self) -> frozenset[Generator]:
        """What it is made of."""
        inside = (powers for terms, _ in self.sums for powers, _ in terms)
        return frozenset(each for powers in (self.powers, *inside) for each, _ in powers)

    def moved(self, move: Callable[[Value], Value]) -> Share | None:
        """The same of other values."""
        share = Share(self.factor, moved(self.powers, move))
        for terms, count in self.sums:
            whole = total([Share(factor, moved(powers, move)) for powers, factor in terms])
            if whole is None:
                return None
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


def total(shares: Iterable[Share]) -> Share | None:
    """The sum of shares; None where it is 0, or too long."""
    return reduce(lambda x, y: None if x is None else _plus(x, y), list(shares))  # pyright: ignore


def _plus(x: Share, y: Share) -> Share | None:
    left, right = dict(x.sums), dict(y.sums)
    common = {each: min(left.get(each, 0), right.get(each, 0)) for each in left | right}
    shared = Share(sums=_powers(common))
    terms: dict[Powers, float] = {}
    for share in (x, y):
        written = _written_out(share * shared.inverse())
        for powers, factor in (written or {}).items():
            terms[powers] = terms.get(powers, 0.0) + factor
        if written is None:
            return None
    terms = {powers: factor for powers, factor in terms.items() if abs(factor) > 1e-12}
    return None if not terms or len(terms) > TERMS else shared * _collected(terms)


def _written_out(share: Share) -> Mapping[Powers, float] | None:
    """The terms of a share that has no sum below the line."""
    terms: dict[Powers, float] = {share.powers: share.factor}
    for factors, count in share.sums:
        for _ in range(count):
            product: dict[Powers, float] = {}
            for one, a in terms.items():
                for other, b in factors:
                    powers = _joined(one, other)
                    product[powers] = product.get(powers, 0.0) + a * b
            terms = product
            if len(terms) > TERMS:
                return None
    return terms


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
    counts = dict(x)
    for each, count in y:
        counts[each] = counts.get(each, 0) + count
    return _powers(counts)


def _powers(counts: Mapping[Any, int]) -> Powers:
    return frozenset((each, count) for each, count in counts.items() if count)


def _turned(x: Powers) -> Powers:
    return frozenset((each, -count) for each, count in x)
