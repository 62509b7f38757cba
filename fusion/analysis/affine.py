"""Formulas over the positions of a mask: comparisons of affine expressions with 0, joined by and, or, not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from fusion.graph import Value
from fusion.graph.dims import plain


@dataclass(frozen=True)
class Leaf:
    """One element value[index] of a tensor, each index an affine expression of the positions of the mask."""

    value: Value
    index: tuple[Affine, ...]

    def axes(self) -> frozenset[int]:
        """Return the axes of the mask on which the position `index` depends."""
        return frozenset().union(*(each.axes() for each in self.index))


@dataclass(frozen=True)
class Affine:
    """Σ coefficient · term + constant; a term is an axis of the mask (an int) or a `Leaf`."""

    terms: Mapping[int | Leaf, Any] = field(default_factory=lambda: MappingProxyType({}))
    constant: Any = 0

    def key(self) -> tuple[Any, ...]:
        """Return a hashable key that is equal for equal expressions; `terms` itself is not hashable."""
        return frozenset(self.terms.items()), self.constant

    def __hash__(self) -> int:
        return hash(self.key())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Affine) and self.key() == other.key()

    def __add__(self, other: Affine) -> Affine:
        terms = dict(self.terms)
        for term, factor in other.terms.items():
            terms[term] = plain(terms.get(term, 0) + factor)
        nonzero = {term: factor for term, factor in terms.items() if factor != 0}
        return Affine(MappingProxyType(nonzero), plain(self.constant + other.constant))

    def times(self, factor: Any) -> Affine:
        """Multiply the expression by the number `factor`."""
        terms = {term: factor * each for term, each in self.terms.items() if factor != 0}
        return Affine(MappingProxyType(terms), plain(self.constant * factor))

    def plus(self, number: Any) -> Affine:
        """Add `number` to the constant."""
        return Affine(self.terms, plain(self.constant + number))

    def axes(self) -> frozenset[int]:
        """Return the axes of the mask that are terms, or on which the index of a `Leaf` depends."""
        own = frozenset(term for term in self.terms if isinstance(term, int))
        return own.union(*(term.axes() for term in self.terms if isinstance(term, Leaf)))

    def without(self, *axes: int) -> Affine:
        """Drop the terms of `axes`; a `Leaf` whose index depends on one of them remains."""
        return Affine(MappingProxyType({t: f for t, f in self.terms.items() if t not in axes}), self.constant)

    def at(self, places: Mapping[int, Affine]) -> Affine:
        """Replace every axis by the expression `places[axis]`, also in the indices of leaves."""
        result = Affine(constant=self.constant)
        for term, factor in self.terms.items():
            if isinstance(term, int):
                result = result + places[term].times(factor)
            else:
                moved = Leaf(term.value, tuple(each.at(places) for each in term.index))
                result = result + Affine(MappingProxyType({moved: factor}))
        return result


def number(value: Any) -> Affine:
    """Wrap the number `value` as a constant expression."""
    return Affine(constant=value)


def spread(x: Value, over: Value, at: Sequence[Affine]) -> tuple[Affine, ...]:
    """Map the position `at` in `over` to that in `x`, an operand that broadcasts to `over`: 0 in dims of size 1."""
    last = at[over.rank - x.rank :]
    return tuple(number(0) if size == 1 else each for each, size in zip(last, x.shape, strict=True))


Formula = Any
"""True, False, ("le", e) for e ≤ 0, ("eq", e) for e = 0, ("is", leaf), ("not", f), ("and", fs), ("or", fs)."""


def conjunction(*parts: Formula) -> Formula:
    """Join `parts` by "and": flattened, without duplicates, False if a part and its negation occur."""
    return _joined("and", parts, neutral=True)


def disjunction(*parts: Formula) -> Formula:
    """Join `parts` by "or": flattened, without duplicates, True if a part and its negation occur."""
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
    """Negate `formula`, moving the negation inwards; integers turn not(x <= 0) into 1 - x <= 0."""
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
    """Replace every axis in `formula` by the expression `places[axis]`."""
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
    """List the parts of a formula that is joined by "and": () for True, (`formula`,) for any other formula."""
    if formula is True:
        return ()
    return tuple(formula[1]) if not isinstance(formula, bool) and formula[0] == "and" else (formula,)
