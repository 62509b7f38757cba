"""Formulas over the positions of a mask: affine expressions, comparisons of them with zero, and, or, not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fusion.graph import Value
from fusion.graph.dims import plain


@dataclass(frozen=True)
class Leaf:
    """One element of a tensor, at positions that are expressions themselves."""

    value: Value
    index: tuple[Affine, ...]

    def axes(self) -> frozenset[int]:
        """The axes of the mask on which the element depends."""
        return frozenset().union(*(each.axes() for each in self.index))


@dataclass(frozen=True)
class Affine:
    """Σ coefficient · term + constant; a term is an axis of the mask (an int) or a `Leaf`."""

    terms: Mapping[int | Leaf, Any] = field(default_factory=lambda: MappingProxyType({}))
    constant: Any = 0

    def key(self) -> tuple[Any, ...]:
        """Equal for equal expressions."""
        return frozenset(self.terms.items()), self.constant

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and self.key() == other.key()

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = plain(terms.get(term, 0) + factor)
        kept = {term: factor for term, factor in terms.items() if factor != 0}
        return Affine(MappingProxyType(kept), plain(self.constant + other.constant))

    def times(self, factor: Any) -> Affine:
        """The expression · a number."""
        kept = {term: factor * each for term, each in self.terms.items() if factor != 0}
        return Affine(MappingProxyType(kept), plain(self.constant * factor))

    def plus(self, number: Any) -> Affine:
        """The expression + a number."""
        return Affine(self.terms, plain(self.constant + number))

    def axes(self) -> frozenset[int]:
        """The axes of the mask that it depends on."""
        found = frozenset(term for term in self.terms if isinstance(term, int))
        return found.union(*(term.axes() for term in self.terms if isinstance(term, Leaf)))

    def without(self, *axes: int) -> Affine:
        """The expression without what it has of these axes themselves."""
        return Affine(MappingProxyType({t: f for t, f in self.terms.items() if t not in axes}), self.constant)

    def at(self, places: Mapping[int, Affine]) -> Affine:
        """The expression where each of its axes is at another place."""
        found = Affine(constant=self.constant)
        for term, factor in self.terms.items():
            if isinstance(term, int):
                found = found + places[term].times(factor)
            else:
                moved = Leaf(term.value, tuple(each.at(places) for each in term.index))
                found = found + Affine(MappingProxyType({moved: factor}))
        return found


def number(value: Any) -> Affine:
    """A constant expression."""
    return Affine(constant=value)


def spread(x: Value, over: Value, at: Sequence[Affine]) -> tuple[Affine, ...]:
    """Positions in an operand that broadcasts: its last dims, with position 0 where its size is 1."""
    last = at[over.rank - x.rank :]
    return tuple(number(0) if size == 1 else each for each, size in zip(last, x.shape, strict=True))


# A formula: True, False, ("le", affine), ("eq", affine), ("is", leaf), ("not", f), ("and", fs), ("or", fs).
Formula = Any


def conjunction(*parts: Formula) -> Formula:
    """All of them."""
    return _joined("and", parts, neutral=True)


def disjunction(*parts: Formula) -> Formula:
    """At least one of them."""
    return _joined("or", parts, neutral=False)


def _joined(op: str, parts: Sequence[Formula], neutral: bool) -> Formula:
    flat: dict[Formula, None] = {}
    for part in parts:
        if part is (not neutral):
            return part
        if part is not neutral:
            flat.update(dict.fromkeys(part[1] if part[0] == op else (part,)))
    if not flat:
        return neutral
    if any(negation(part) in flat for part in flat if part[0] not in ("and", "or")):
        return not neutral
    return next(iter(flat)) if len(flat) == 1 else (op, tuple(flat))


def negation(formula: Formula) -> Formula:
    """Where it does not hold; whole numbers make a comparison of a negated one."""
    if isinstance(formula, bool):
        return not formula
    op, content = formula
    match op:
        case "not":
            return content
        case "le":
            return ("le", content.times(-1).plus(1))
        case "and":
            return disjunction(*map(negation, content))
        case "or":
            return conjunction(*map(negation, content))
        case _:
            return ("not", formula)


def moved(formula: Formula, places: Mapping[int, Affine]) -> Formula:
    """The formula where each axis is at another place."""
    if isinstance(formula, bool):
        return formula
    op, content = formula
    match op:
        case "is":
            return op, Leaf(content.value, tuple(each.at(places) for each in content.index))
        case "not":
            return negation(moved(content, places))
        case "and" | "or":
            parts = [moved(each, places) for each in content]
            return conjunction(*parts) if op == "and" else disjunction(*parts)
        case _:
            return op, content.at(places)


def conjuncts(formula: Formula) -> tuple[Formula, ...]:
    """The parts that must all hold."""
    if formula is True:
        return ()
    return tuple(formula[1]) if not isinstance(formula, bool) and formula[0] == "and" else (formula,)
