"""Decisions about formulas over the positions of a mask, which its sizes bound: comparison, implication, choice."""

from __future__ import annotations

from collections.abc import Sequence
from types import MappingProxyType
from typing import Any

from fusion.analysis.affine import Affine, Formula, conjunction, disjunction, negation, number
from fusion.graph import Value
from fusion.graph.dims import is_nonnegative


class Extent:
    """The positions of a mask with the dims `shape`; an axis of a formula is the index of a dim."""

    def __init__(self, shape: Sequence[Any]) -> None:
        self.shape = tuple(shape)
        self.origin = tuple(self.axis(place) for place in range(len(self.shape)))

    def axis(self, place: int) -> Affine:
        """Return the position along the dim `place` as an expression: constant 0 if its size is 1."""
        return number(0) if self.shape[place] == 1 else Affine(MappingProxyType({place: 1}))

    def of(self, mask: Value) -> tuple[Affine, ...]:
        """Return the positions in `mask`, which broadcasts to this extent; 0 in dims of size 1."""
        last = self.origin[len(self.origin) - mask.rank :]
        return tuple(number(0) if size == 1 else each for each, size in zip(last, mask.shape, strict=True))

    def below_one(self, expression: Affine) -> Formula:
        """Build the formula `expression` ≤ 0; True if it is proven to hold at all positions, False if at none."""
        places = {place: factor for place, factor in expression.terms.items() if isinstance(place, int)}
        if len(places) < len(expression.terms):
            return ("le", expression)
        low = high = expression.constant
        for place, factor in places.items():
            last = (self.shape[place] - 1) * factor
            low, high = (low + last, high) if factor < 0 else (low, high + last)
        if is_nonnegative(-high):
            return True
        return False if is_nonnegative(low - 1) else ("le", expression)

    def compared(self, op: str, difference: Affine) -> Formula:
        """Build the formula `difference` op 0, for `op` in "le", "lt", "eq", "ne"."""
        match op:
            case "le":
                return self.below_one(difference)
            case "lt":
                return self.below_one(difference.plus(1))
            case _:
                equal = difference.constant == 0 if not difference.terms else ("eq", difference)
                return equal if op == "eq" else negation(equal)

    def implies(self, formula: Formula, other: Formula) -> bool:
        """Return True if `other` is proven to hold at every position at which `formula` does."""
        if other is True or formula is False or formula == other:
            return True
        if formula is True or other is False:
            return False
        if formula[0] == "or":
            return all(self.implies(each, other) for each in formula[1])
        if other[0] == "and":
            return all(self.implies(formula, each) for each in other[1])
        if formula[0] == "and":
            return any(self.implies(each, other) for each in formula[1])
        if other[0] == "or":
            return any(self.implies(formula, each) for each in other[1])
        return formula[0] == other[0] == "le" and self.below_one(other[1] + formula[1].times(-1)) is True

    def tightest(self, parts: Sequence[Formula]) -> list[Formula]:
        """Drop those of the conjuncts `parts` that another one implies."""
        minimal: list[Formula] = []
        for each in parts:
            if not any(self.implies(other, each) for other in minimal):
                minimal = [*(other for other in minimal if not self.implies(each, other)), each]
        return minimal

    def choice(self, condition: Formula, yes: Formula, no: Formula) -> Formula:
        """Build the formula (`condition` and `yes`) or (not `condition` and `no`)."""
        otherwise = negation(condition)
        for here, there, where, elsewhere in ((yes, no, condition, otherwise), (no, yes, otherwise, condition)):
            if here is True:
                return there if self.implies(where, there) else disjunction(where, there)
            if here is False:
                return there if self.implies(there, elsewhere) else conjunction(elsewhere, there)
        return disjunction(conjunction(condition, yes), conjunction(otherwise, no))
