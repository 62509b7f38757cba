"""Masks as formulas over their positions (b, h, i, j), derived from how they are computed.

Comparisons of integers, as affine expressions, become atoms `expression ≤ 0` and `expression = 0`, joined by and, or,
not; a tensor of floats becomes a few numbers, each with the formula of the positions that have it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from operator import add, mul
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction, disjunction, negation, spread
from fusion.analysis.affine_integers import Integers
from fusion.analysis.constant_folding import COMPARE, Folder, band
from fusion.analysis.dtypes import is_integer
from fusion.analysis.number_formulas import indicator, logarithm, merged, zero_at
from fusion.analysis.rounding import is_float
from fusion.analysis.stacked_entries import lists_all
from fusion.graph import Value
from fusion.graph.proof_steps import must, proof, proven

Assumption = Callable[[Value, "Sequence[Affine]"], Formula | None]
"""(input mask, positions) -> assumed formula that is true where a key is visible; None without an assumption."""


class Positions(Integers):
    """Evaluation of masks, and of tensors of a few numbers, at the positions of a mask with the dims `shape`."""

    def __init__(
        self,
        shape: Sequence[Any],
        folder: Folder,
        assumed: Assumption = lambda mask, at: None,
        keep_lists: bool = False,
        ones_visible: Callable[[Value], bool] = is_integer,
    ) -> None:
        """Bind the parameters of the evaluation.

        Args:
            shape: the dims of the mask.
            folder: the memo of constant folding.
            assumed: assumptions on masks that are inputs.
            keep_lists: False to evaluate the mask of a list of all positions to True, instead of to an atom.
            ones_visible: True for an assumed mask of numbers in which 1 is visible and 0 masked; False for one that is
                added to scores.
        """
        super().__init__(shape, folder)
        self._assumed, self._keep_lists, self._ones_visible = assumed, keep_lists, ones_visible
        self.relied: set[Value] = set()  # inputs whose assumptions were used
        self.lists_all = False  # True once a list of all positions was evaluated to True

    def over(self, shape: Sequence[Any]) -> Positions:
        """Return a new evaluation for a mask with the dims `shape`, with the same parameters."""
        return Positions(shape, self._folder, self._assumed, self._keep_lists, self._ones_visible)

    def holds_ones(self, x: Value) -> bool:
        """Return True if `x` is an input that has only 0 and 1 by an assumption on which a call relies."""
        return x in self.relied and self._ones_visible(x)

    def supposing(self) -> Positions:
        """Return a new evaluation that takes every integer input for a mask of 0 and 1.

        By it a reason can tell whether only that assumption was lacking.
        """

        def supposed(mask: Value, at: Sequence[Affine]) -> Formula | None:
            is_input = mask.op == "input" and is_integer(mask)
            return ("is", Leaf(mask, tuple(at))) if is_input else self._assumed(mask, at)

        return Positions(self.shape, self._folder, supposed, self._keep_lists, self._ones_visible)

    def names(self) -> frozenset[str]:
        """Return the names of the inputs whose assumptions an answer has relied on so far."""
        return frozenset(each.attrs[0] for each in self.relied)

    def truth(self, x: Value, at: Sequence[Affine]) -> Formula:
        """Evaluate the element x[at] of a boolean tensor, or of a mask of numbers that are not 0, as a formula."""
        below = self._view(x, at)
        if below is not None:
            return self.truth(*below)
        known = self._triangle(x, at)
        if known is not None:
            return known
        mask = x.arg if x.op == "cast" else x
        truths = mask.dtype is torch.bool or self._ones_visible(mask)
        atom = None if is_float(mask) else ("is", Leaf(mask, tuple(at)))
        assumed = self._use_assumption(mask, at, atom) if truths else None
        if assumed is not None:
            return assumed
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
                return self._by_piece([self.truth(*each) for each in self._pieces(x, at)], x, at)
            case "cast" if x.arg.dtype is torch.bool:
                return self.truth(x.arg, at)
            case "cast" if is_integer(x.arg):
                return negation(("eq", self.affine(x.arg, at)))
            case "cast" if (numbers := self.constants(x.arg, at)) is not None:
                return disjunction(*(formula for value, formula in numbers.items() if value != 0))
            case _:
                return ("is", Leaf(x, tuple(at)))

    def _use_assumption(self, mask: Value, at: Sequence[Affine], known: Formula | None = None) -> Formula | None:
        """Return the formula that is assumed of the input `mask` at `at`, and record in `relied` that a call must check
        it.

        None, with nothing recorded, if nothing is assumed, or if the formula is `known` without the assumption.
        """
        formula = self._assumed(mask, at)
        if formula is None or formula == known:
            return None
        self.relied.add(mask)
        return formula

    def _triangle(self, x: Value, at: Sequence[Affine]) -> Formula | None:
        """Evaluate a boolean constant that is uniform, or a band low <= key - query <= high; None for any other `x`."""
        truths = self._folder.fold(x)
        if truths is None or not truths.size:
            return None
        if truths.all() or not truths.any():
            return bool(truths.all())
        query, key = len(self.shape) - 2, len(self.shape) - 1
        table = truths.reshape(-1, *truths.shape[-2:])
        if list(at[-2:]) != [self.axis(query), self.axis(key)] or (table != table[0]).any():
            return None
        limits = band(table[0])
        if limits is None:
            return None
        ahead = self.axis(key) + self.axis(query).times(-1)
        low, high = ahead.times(-1).plus(limits[0]), ahead.plus(-limits[1])
        return conjunction(self.below_one(low), self.below_one(high))

    def _compared_values(self, x: Value, at: Sequence[Affine]) -> Formula:
        """Evaluate a comparison of integers, or of tensors of a few numbers each, as in `mask == 0`; else an atom."""
        pairs = self._pairs(x, at)
        if pairs is not None:
            return disjunction(*(formula for u, v, formula in pairs if COMPARE[x.attrs[0]](u, v)))
        if not all(map(is_integer, x.args)):
            return ("is", Leaf(x, tuple(at)))
        below, above = (self.affine(each, spread(each, x, at)) for each in x.args)
        return self.compared(x.attrs[0], below + above.times(-1))

    # constants -------------------------------------------------------------------------------------------------

    def constants(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Evaluate x[at] as number -> formula of the positions that have it; None for unknown, or too many, numbers."""
        if x.dtype is torch.bool:
            return indicator(x.dtype, self.truth(x, at))
        below = self._view(x, at)
        if below is not None:
            return self.constants(*below)
        assumed = self._use_assumption(x, at)
        if assumed is not None:
            additive = {0.0: assumed, -math.inf: negation(assumed)}
            return indicator(x.dtype, assumed) if self._ones_visible(x) else additive
        match x.op:
            case "full":
                return merged([(x.attrs[0], True)], x.dtype)
            case "cast" | "scale" | "shift" | "clip" | "log":
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
                return self._folded(x, at)

    @proof
    def _folded(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Evaluate x[at] of a constant tensor as {0: formula, number: formula}; None unless it has one number besides
        0.

        Where the number is, is an atom "is": the formula says nothing of the positions.
        """
        numbers = proven(self._folder.fold(x))
        others = numbers[numbers != 0]
        must(others.size and (others == others[0]).all())  # fails for NaN
        there = ("is", Leaf(x, tuple(at)))
        return merged([(float(others[0]), there), (0.0, negation(there))], x.dtype)

    @proof
    def _picked(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Evaluate x[at] of rows gathered from a table as {0: formula, number: formula}; indices may be negative.

        None unless the table has 0 and one other number.
        """
        source, index = x.args
        anywhere = Affine(MappingProxyType({Leaf(index, ()): 1}))
        place, behind = x.attrs[0], x.attrs[0] + index.rank
        numbers = list(proven(self.constants(source, (*at[:place], anywhere, *at[behind:]))))
        must(len(numbers) == 2 and 0 in numbers)
        other = ("is", Leaf(x, tuple(at)))
        return merged([(number, other if number else negation(other)) for number in numbers], x.dtype)

    @proof
    def _joined(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """Evaluate x[at] of a concatenation as number -> formula; None if a piece has unknown, or too many, numbers."""
        pieces = [proven(self.constants(*each)) for each in self._pieces(x, at)]
        numbers = dict.fromkeys(number for each in pieces for number in each)
        pairs = ((n, self._by_piece([each.get(n, False) for each in pieces], x, at)) for n in numbers)
        return merged(pairs, x.dtype)

    @proof
    def _mapped(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        inner = proven(self.constants(x.arg, at)).items()
        if x.op == "cast":
            return merged(inner, x.dtype)
        if x.op == "log":
            return merged([(logarithm(value), formula) for value, formula in inner], x.dtype)
        if x.op == "clip":
            low, high = x.attrs
            return merged(
                [(value if math.isnan(value) else min(max(value, low), high), f) for value, f in inner], x.dtype
            )
        change, how = int(x.attrs[0]) if is_integer(x) else x.attrs[0], mul if x.op == "scale" else add
        return merged([(how(value, change), formula) for value, formula in inner], x.dtype)

    @proof
    def _pairs(self, x: Value, at: Sequence[Affine]) -> list[tuple[float, float, Formula]] | None:
        """List (u, v, formula of the positions that have both) for all numbers u and v of the first and second operand
        of `x`.

        None if an operand has unknown, or too many, numbers.
        """
        left, right = [self.constants(each, spread(each, x, at)) for each in x.args]
        return [(u, v, conjunction(f, g)) for u, f in proven(left).items() for v, g in proven(right).items()]

    @proof
    def _chosen(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        condition = self.truth(x.args[0], spread(x.args[0], x, at))
        zero = zero_at(x)
        yes, no = [{0.0: True} if each is zero else self.constants(each, spread(each, x, at)) for each in x.args[1:]]
        sides = ((condition, proven(yes)), (negation(condition), proven(no)))
        return merged([(value, conjunction(here, f)) for here, side in sides for value, f in side.items()], x.dtype)
