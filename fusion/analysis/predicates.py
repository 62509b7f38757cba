"""A mask as a formula over its own positions: which (b, h, i, j) it lets through, proven from how it was built.

Comparisons of integers, which are affine expressions, become atoms `expression ≤ 0` and `expression = 0`; and, or, not
join atoms; a tensor of floats becomes its few constants, each with the formula of where it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add, mul
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction, disjunction, negation, spread
from fusion.analysis.constant_folding import COMPARE, Folder, band
from fusion.analysis.dtypes import is_integer
from fusion.analysis.elements import lists_all
from fusion.analysis.few_numbers import logarithm, merged, of_truth, zero_at
from fusion.analysis.integers import Integers
from fusion.analysis.rounding import is_float
from fusion.graph import Value
from fusion.graph.proof import must, proof, proven

Assumption = Callable[[Value, "Sequence[Affine]"], Formula | None]
"""Where a mask that is passed in shows a key, if anything is assumed of it."""


class Positions(Integers):
    """Evaluates values at the positions of one mask, whose dims have these sizes."""

    def __init__(
        self,
        shape: Sequence[Any],
        folder: Folder,
        assumed: Assumption = lambda mask, at: None,
        keep_lists: bool = False,
        of_ones: Callable[[Value], bool] = is_integer,
    ) -> None:
        """Take a list of all places for one that shows everything, unless `keep_lists`.

        `of_ones` says of a mask of numbers that is assumed whether 1 is visible there, not 0.
        """
        super().__init__(shape, folder)
        self._assumed, self._keep_lists, self._of_ones = assumed, keep_lists, of_ones
        self.relied: set[Value] = set()  # inputs of which something was assumed
        self.lists_all = False  # whether a list of all places was among what was evaluated

    def over(self, shape: Sequence[Any]) -> Positions:
        """The positions of a mask of another shape in the same graph."""
        return Positions(shape, self._folder, self._assumed, self._keep_lists, self._of_ones)

    def supposing(self) -> Positions:
        """The same if whole numbers that are passed in were 0 or 1, to learn what else is not known then."""

        def supposed(mask: Value, at: Sequence[Affine]) -> Formula | None:
            whole = mask.op == "input" and is_integer(mask)
            return ("is", Leaf(mask, tuple(at))) if whole else self._assumed(mask, at)

        return Positions(self.shape, self._folder, supposed, self._keep_lists, self._of_ones)

    def names(self) -> frozenset[str]:
        """Names of the inputs of which something was assumed."""
        return frozenset(each.attrs[0] for each in self.relied)

    def truth(self, x: Value, at: Sequence[Affine]) -> Formula:
        """A tensor of booleans at these positions."""
        below = self._view(x, at)
        if below is not None:
            return self.truth(*below)
        known = self._triangle(x, at)
        if known is not None:
            return known
        mask = x.arg if x.op == "cast" else x
        truths = mask.dtype is torch.bool or self._of_ones(mask)
        said = self._said(mask, at, None if is_float(mask) else ("is", Leaf(mask, tuple(at)))) if truths else None
        if said is not None:
            return said
        match x.op:
            case "full":
                return bool(x.attrs[0])
            case "chosen" if lists_all(x) and not self._keep_lists:
                self.lists_all = True
                return True
            case "compare":
                return self._compared_values(x, at)
            case "and" | "or" | "mul" | "add":
                parts = [self.truth(each, spread(each, x, at)) for each in x.args]
                return conjunction(*parts) if x.op in ("and", "mul") else disjunction(*parts)
            case "not":
                return negation(self.truth(x.arg, at))
            case "where":
                return self.choice(*(self.truth(each, spread(each, x, at)) for each in x.args))
            case "cat":
                return self._of_pieces([self.truth(*each) for each in self._pieces(x, at)], x, at)
            case "cast" if x.arg.dtype is torch.bool:
                return self.truth(x.arg, at)
            case "cast" if is_integer(x.arg):
                return negation(("eq", self.affine(x.arg, at)))
            case "cast" if (found := self.constants(x.arg, at)) is not None:
                return disjunction(*(formula for value, formula in found.items() if value != 0))
            case _:
                return ("is", Leaf(x, tuple(at)))

    def _said(self, mask: Value, at: Sequence[Affine], known: Formula | None = None) -> Formula | None:
        """Read where a mask that is passed in shows a key, if more is assumed than is `known`; noted, to be checked."""
        formula = self._assumed(mask, at)
        if formula is None or formula == known:
            return None
        self.relied.add(mask)
        return formula

    def _triangle(self, x: Value, at: Sequence[Affine]) -> Formula | None:
        """Booleans that depend on no input: the same everywhere, or keys within bounds that move with the query."""
        truths = self._folder.fold(x)
        if truths is None or not truths.size:
            return None
        if truths.all() or not truths.any():
            return bool(truths.all())
        query, key = len(self.shape) - 2, len(self.shape) - 1
        table = truths.reshape(-1, *truths.shape[-2:])
        if list(at[-2:]) != [self.axis(query), self.axis(key)] or (table != table[0]).any():
            return None
        found = band(table[0])
        if found is None:
            return None
        ahead = self.axis(key) + self.axis(query).times(-1)
        low, high = ahead.times(-1).plus(found[0]), ahead.plus(-found[1])
        return conjunction(self.below_one(low), self.below_one(high))

    def _compared_values(self, x: Value, at: Sequence[Affine]) -> Formula:
        """Whole numbers, or tensors of a few numbers each, as in `mask == 0`."""
        pairs = self._pairs(x, at)
        if pairs is not None:
            return disjunction(*(formula for u, v, formula in pairs if COMPARE[x.attrs[0]](u, v)))
        if not all(map(is_integer, x.args)):
            return ("is", Leaf(x, tuple(at)))
        below, above = (self.affine(each, spread(each, x, at)) for each in x.args)
        return self.compared(x.attrs[0], below + above.times(-1))

    # constants -------------------------------------------------------------------------------------------------

    def constants(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """The few numbers that a tensor consists of, each with where it stands; None where it has others, or many."""
        if x.dtype is torch.bool:
            return of_truth(x.dtype, self.truth(x, at))
        below = self._view(x, at)
        if below is not None:
            return self.constants(*below)
        said = self._said(x, at)
        if said is not None:
            return of_truth(x.dtype, said) if self._of_ones(x) else {0.0: said, -math.inf: negation(said)}
        match x.op:
            case "full":
                return merged([(x.attrs[0], True)], x.dtype)
            case "cast" | "scale" | "shift" | "log":
                return self._mapped(x, at)
            case "add" | "mul":
                pairs, how = self._pairs(x, at), add if x.op == "add" else mul
                return None if pairs is None else merged([(how(u, v), formula) for u, v, formula in pairs], x.dtype)
            case "where":
                return self._chosen(x, at)
            case "cat":
                return self._joined(x, at)
            case "index" if len(x.args) == 2:
                return self._picked(x, at)
            case _:
                return self._held(x, at)

    @proof
    def _held(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """0 and one other number of a tensor that depends on no input, however it was filled."""
        numbers = proven(self._folder.fold(x))
        others = numbers[numbers != 0]
        must(others.size and (others == others[0]).all())  # NaN is not equal to itself
        there = ("is", Leaf(x, tuple(at)))
        return merged([(float(others[0]), there), (0.0, negation(there))], x.dtype)

    @proof
    def _picked(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Rows of a table of two numbers, one of them 0, by an index that may count from the end."""
        source, index = x.args
        anywhere = Affine(MappingProxyType({Leaf(index, ()): 1}))
        place, behind = x.attrs[0], x.attrs[0] + index.rank
        numbers = list(proven(self.constants(source, (*at[:place], anywhere, *at[behind:]))))
        must(len(numbers) == 2 and 0 in numbers)
        other = ("is", Leaf(x, tuple(at)))
        return merged([(number, other if number else negation(other)) for number in numbers], x.dtype)

    @proof
    def _joined(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Numbers of several pieces, each where a piece that has it stands and has it."""
        pieces = [proven(self.constants(*each)) for each in self._pieces(x, at)]
        numbers = dict.fromkeys(number for each in pieces for number in each)
        pairs = ((n, self._of_pieces([each.get(n, False) for each in pieces], x, at)) for n in numbers)
        return merged(pairs, x.dtype)

    @proof
    def _mapped(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        inner = proven(self.constants(x.arg, at)).items()
        if x.op == "cast":
            return merged(inner, x.dtype)
        if x.op == "log":
            return merged([(logarithm(value), formula) for value, formula in inner], x.dtype)
        change, how = int(x.attrs[0]) if is_integer(x) else x.attrs[0], mul if x.op == "scale" else add
        return merged([(how(value, change), formula) for value, formula in inner], x.dtype)

    @proof
    def _pairs(self, x: Value, at: Sequence[Affine]) -> list[tuple[float, float, Formula]] | None:
        """The constants of both operands, two at a time, with where these two meet."""
        left, right = [self.constants(each, spread(each, x, at)) for each in x.args]
        return [(u, v, conjunction(f, g)) for u, f in proven(left).items() for v, g in proven(right).items()]

    @proof
    def _chosen(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        condition = self.truth(x.args[0], spread(x.args[0], x, at))
        zero = zero_at(x)
        yes, no = [{0.0: True} if each is zero else self.constants(each, spread(each, x, at)) for each in x.args[1:]]
        sides = ((condition, proven(yes)), (negation(condition), proven(no)))
        return merged([(value, conjunction(here, f)) for here, side in sides for value, f in side.items()], x.dtype)
