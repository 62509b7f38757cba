"""A mask as a formula over its own positions: which (b, h, i, j) it lets through, proven from how it was built.

Whole numbers become affine expressions Σ c·position + Σ c·leaf[..] + constant, as far as no dtype on the way is proven
to make them wrap round; comparisons of them become atoms
`expression ≤ 0` and `expression = 0`; and, or, not join atoms; a tensor of floats becomes its few constants, each with
the formula of where it stands. What cannot be followed is a leaf: a tensor read at known positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import add, mul
from types import MappingProxyType
from typing import Any

import torch

from fusion.analysis.affine import Affine, Formula, Leaf, conjunction, disjunction, negation, number
from fusion.analysis.constant_folding import COMPARE, Folder, band
from fusion.analysis.dtypes import held_number, is_integer
from fusion.analysis.intervals import is_exact
from fusion.graph import Value, but_ones
from fusion.graph.proof import proof, proven

MOST = 8  # different constants that a mask of floats may have


Assumption = Callable[[Value, "Sequence[Affine]"], Formula | None]
"""Where a mask that is passed in shows a key, if anything is assumed of it."""


class Positions:
    """Evaluates values at the positions of one mask, whose dims have these sizes."""

    def __init__(
        self,
        shape: Sequence[Any],
        folder: Folder,
        assumed: Assumption = lambda mask, at: None,
        keep_lists: bool = False,
    ) -> None:
        """`keep_lists`: a list of all places stays a list, for those who look for one."""
        self.shape, self._folder, self._assumed, self._keep_lists = tuple(shape), folder, assumed, keep_lists
        self.relied: set[Value] = set()  # inputs of which something was assumed
        self.lists_all = False  # whether a list of all places was among what was evaluated
        self.origin = tuple(self.axis(place) for place in range(len(shape)))

    def names(self) -> frozenset[str]:
        """Names of the inputs of which something was assumed."""
        return frozenset(each.attrs[0] for each in self.relied)

    def axis(self, place: int) -> Affine:
        """The position along one axis; a dim of size 1 has only position 0."""
        return number(0) if self.shape[place] == 1 else Affine(MappingProxyType({place: 1}))

    def of(self, mask: Value) -> tuple[Affine, ...]:
        """The positions in a mask that broadcasts to the scores."""
        last = self.origin[len(self.origin) - mask.rank :]
        return tuple(number(0) if size == 1 else each for each, size in zip(last, mask.shape, strict=True))

    def below_one(self, expression: Affine) -> Formula:
        """`expression ≤ 0`: True or False where the sizes of the mask decide it."""
        places = {place: factor for place, factor in expression.terms.items() if isinstance(place, int)}
        if len(places) < len(expression.terms):
            return ("le", expression)
        low = high = expression.constant
        for place, factor in places.items():
            last = (self.shape[place] - 1) * factor
            low, high = (low + last, high) if factor < 0 else (low, high + last)
        if isinstance(high, (int, float)) and high <= 0:
            return True
        return False if isinstance(low, (int, float)) and low > 0 else ("le", expression)

    # whole numbers ---------------------------------------------------------------------------------------------

    def affine(self, x: Value, at: Sequence[Affine]) -> Affine:
        """A tensor of whole numbers at these positions."""
        below = self._view(x, at)
        if below is not None:
            return self.affine(*below)
        even = self._folder.steps(x)
        if even is not None:
            return reduce(Affine.__add__, map(Affine.times, at, even[1]), number(even[0]))
        match x.op if is_exact(x) else "":
            case "arange":
                return at[0].times(x.attrs[1]).plus(x.attrs[0])
            case "full":
                return number(int(x.attrs[0]))
            case "shift":
                return self.affine(x.arg, at).plus(int(x.attrs[0]))
            case "scale" if x.arg.op != "mean":  # of which a sum is made
                return self.affine(x.arg, at).times(int(x.attrs[0]))
            case "add":
                left, right = (self.affine(each, _spread(each, x, at)) for each in x.args)
                return left + right
            case "cast" if is_integer(x.arg):
                return self.affine(x.arg, at)
            case "cumsum" if not (each := self.affine(x.arg, at)).terms:  # of what is the same at every position
                return at[x.attrs[0]].plus(1).times(each.constant)
            case _:
                return Affine(MappingProxyType({Leaf(x, tuple(at)): 1}))

    def _view(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """Where a value only passes on elements of another: that one, and the positions there."""
        match x.op:
            case "expand":
                return x.arg, _spread(x.arg, x, at)
            case "permute":
                back = {source: place for place, source in enumerate(x.attrs)}
                return x.arg, tuple(at[back[place]] for place in range(x.rank))
            case "slice":
                axis, start, _, step = x.attrs
                moved = at[axis].times(step).plus(start)
                return x.arg, (*at[:axis], moved, *at[axis + 1 :])
            case "reshape":
                kept = [each for each, size in zip(at, x.shape, strict=True) if size != 1]
                if but_ones(x.shape) != but_ones(x.arg.shape):
                    return None
                sizes = iter(kept)
                return x.arg, tuple(number(0) if size == 1 else next(sizes) for size in x.arg.shape)
            case "index":
                return self._gathered(x, at)
            case _:
                return None

    def _gathered(self, x: Value, at: Sequence[Affine]) -> tuple[Value, tuple[Affine, ...]] | None:
        """x[i, j] with one index for every dim of x, none of which counts from the end, as masks read padding."""
        source, indices = x.arg, x.args[1:]
        if x.attrs != tuple(range(source.rank)):
            return None
        found = tuple(self.affine(each, _spread(each, x, at)) for each in indices)
        return (source, found) if all(self.below_one(each.times(-1)) is True for each in found) else None

    # truths ----------------------------------------------------------------------------------------------------

    def truth(self, x: Value, at: Sequence[Affine]) -> Formula:
        """A tensor of booleans at these positions."""
        below = self._view(x, at)
        if below is not None:
            return self.truth(*below)
        known = self._triangle(x, at)
        if known is not None:
            return known
        mask = x.arg if x.op == "cast" else x
        said = self._said(mask, at) if mask.dtype is torch.bool or is_integer(mask) else None
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
                parts = [self.truth(each, _spread(each, x, at)) for each in x.args]
                return conjunction(*parts) if x.op in ("and", "mul") else disjunction(*parts)
            case "not":
                return negation(self.truth(x.arg, at))
            case "where":
                condition, yes, no = (self.truth(each, _spread(each, x, at)) for each in x.args)
                return disjunction(conjunction(condition, yes), conjunction(negation(condition), no))
            case "cast" if x.arg.dtype is torch.bool:
                return self.truth(x.arg, at)
            case "cast" if is_integer(x.arg):
                return negation(("eq", self.affine(x.arg, at)))
            case "cast" if (found := self.constants(x.arg, at)) is not None:
                return disjunction(*(formula for value, formula in found.items() if value != 0))
            case _:
                return ("is", Leaf(x, tuple(at)))

    def _said(self, mask: Value, at: Sequence[Affine]) -> Formula | None:
        """Where a mask that is passed in shows a key, if something is assumed of it; noted, to be checked."""
        formula = self._assumed(mask, at)
        if formula is not None:
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

    def _compared(self, op: str, difference: Affine) -> Formula:
        match op:
            case "le":
                return self.below_one(difference)
            case "lt":
                return self.below_one(difference.plus(1))
            case _:
                equal = difference.constant == 0 if not difference.terms else ("eq", difference)
                return equal if op == "eq" else negation(equal)

    def _compared_values(self, x: Value, at: Sequence[Affine]) -> Formula:
        """Whole numbers, or tensors of a few numbers each, as in `mask == 0`."""
        pairs = self._pairs(x, at)
        if pairs is not None:
            return disjunction(*(formula for u, v, formula in pairs if COMPARE[x.attrs[0]](u, v)))
        if not all(map(is_integer, x.args)):
            return ("is", Leaf(x, tuple(at)))
        below, above = (self.affine(each, _spread(each, x, at)) for each in x.args)
        return self._compared(x.attrs[0], below + above.times(-1))

    # constants -------------------------------------------------------------------------------------------------

    def constants(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        """The few numbers that a tensor consists of, each with where it stands; None where it has others, or many."""
        if x.dtype is torch.bool:
            return _of_truth(x.dtype, self.truth(x, at))
        below = self._view(x, at)
        if below is not None:
            return self.constants(*below)
        said = self._said(x, at)
        if said is not None:
            return _of_truth(x.dtype, said) if is_integer(x) else {0.0: said, -math.inf: negation(said)}
        match x.op:
            case "full":
                return _merged([(x.attrs[0], True)], x.dtype)
            case "cast" | "scale" | "shift" | "log":
                return self._mapped(x, at)
            case "add" | "mul":
                pairs, how = self._pairs(x, at), add if x.op == "add" else mul
                return None if pairs is None else _merged([(how(u, v), formula) for u, v, formula in pairs], x.dtype)
            case "where":
                return self._chosen(x, at)
            case _:
                return None

    @proof
    def _mapped(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        inner = proven(self.constants(x.arg, at)).items()
        if x.op == "cast":
            return _merged(inner, x.dtype)
        if x.op == "log":
            return _merged([(_log(value), formula) for value, formula in inner], x.dtype)
        change, how = int(x.attrs[0]) if is_integer(x) else x.attrs[0], mul if x.op == "scale" else add
        return _merged([(how(value, change), formula) for value, formula in inner], x.dtype)

    @proof
    def _pairs(self, x: Value, at: Sequence[Affine]) -> list[tuple[float, float, Formula]] | None:
        """The constants of both operands, two at a time, with where these two meet."""
        left, right = [self.constants(each, _spread(each, x, at)) for each in x.args]
        return [(u, v, conjunction(f, g)) for u, f in proven(left).items() for v, g in proven(right).items()]

    @proof
    def _chosen(self, x: Value, at: Sequence[Affine]) -> dict[float, Formula] | None:
        condition = self.truth(x.args[0], _spread(x.args[0], x, at))
        yes, no = [self.constants(each, _spread(each, x, at)) for each in x.args[1:]]
        sides = ((condition, proven(yes)), (negation(condition), proven(no)))
        return _merged([(value, conjunction(here, f)) for here, side in sides for value, f in side.items()], x.dtype)


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf if value == 0 else math.nan


def _of_truth(dtype: torch.dtype | None, formula: Formula) -> dict[float, Formula] | None:
    return _merged([(1, formula), (0, negation(formula))], dtype)


def _merged(pairs: Iterable[tuple[float, Formula]], dtype: torch.dtype | None) -> dict[float, Formula] | None:
    """One formula for each number as the dtype holds it; NaN, as of 0 · ∞, is one of them."""
    found: dict[float, Formula] = {}
    for value, formula in pairs:
        if formula is False:
            continue
        kept = held_number(value, dtype)
        if kept is None:
            return None
        kept = math.nan if math.isnan(kept) else kept
        found[kept] = disjunction(found.get(kept, False), formula)
    return found if len(found) <= MOST else None


def _spread(x: Value, over: Value, at: Sequence[Affine]) -> tuple[Affine, ...]:
    """Positions in an operand that broadcasts: its last dims, with position 0 where its size is 1."""
    last = at[over.rank - x.rank :]
    return tuple(number(0) if size == 1 else each for each, size in zip(last, x.shape, strict=True))


def lists_all(chosen: Value) -> bool:
    """Whether the places are all that there are: as many, and no two the same."""
    places, size = chosen.arg, chosen.shape[-1]
    return places.op == "largest_index" and places.attrs == (size,)
