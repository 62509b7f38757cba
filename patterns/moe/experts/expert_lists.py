"""Lists of experts: the experts whose matrices are given, and the numbers of rows in a list, or sorted by it.

A device of several has the matrices of some experts alone. Rows of others then count as 0: they have greater numbers in
the list that is sorted, so that they stand behind all groups, and a mask leaves them out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.dtypes import elements_below
from fusion.analysis.intervals import bounds, uncast
from fusion.analysis.rounding import unscaled
from fusion.graph import Algebra, Dim, Graph, Value
from patterns.moe.experts.assigned import assigned


class Active(NamedTuple):
    """The `count` experts `first`, `first` + 1, … of all `total` whose matrices are given: those of one device."""

    first: int
    count: Any
    total: Any

    @property
    def is_all(self) -> bool:
        """True if the matrices of all experts are given."""
        return self.count == self.total

    def have_indices_before_others(self, numbers: Sequence[int]) -> bool:
        """Return True if `numbers`, of all experts, are 0, 1, … for these, and greater ones for all others."""
        rest = (*numbers[: self.first], *numbers[self.first + self.count :])
        return self.are_indexed(numbers) and all(each >= self.count for each in rest)

    def are_indexed(self, numbers: Sequence[int]) -> bool:
        """Return True if `numbers`, of all experts, are 0, 1, … for these."""
        return tuple(numbers[self.first : self.first + self.count]) == tuple(range(self.count))

    def are_marked(self, numbers: Sequence[int]) -> bool:
        """Return True if `numbers`, of all experts, are 1 for these and 0 for all others."""
        inside = range(self.first, self.first + self.count)
        return tuple(numbers) == tuple(int(each in inside) for each in range(self.total))


class Listing(NamedTuple):
    """The experts [T, K] of all pairs, and those of them whose matrices are given.

    Attributes:
        is_by_token: True if they are listed token by token.
    """

    experts: Value
    active: Active
    is_by_token: bool = True


def listed_experts(graph: Graph, listed: Value, count: Dim) -> Listing | None:
    """Read `listed`, one number for each pair, as the experts of the pairs, of which `count` have matrices.

    The numbers 0 … `count` - 1 are those of the matrices. None if a number is not proven to be one of these, or a
    greater one of an expert without a matrix.
    """
    a = graph.algebra
    pairs = assigned(a, listed)
    if pairs is not None and pairs.order is None and isinstance(count, int):
        total = len(pairs.numbers)
        for first in range(total - count + 1):
            active = Active(first, count, total)
            if active.have_indices_before_others(pairs.numbers):
                return Listing(_by_last_dim(a, pairs.experts), active, not pairs.by_choice)
    low, high = bounds(listed)
    is_index = isinstance(count, int) and (0 <= low <= high < count or _gathers(graph, listed, count))
    return Listing(_by_last_dim(a, listed), Active(0, count, count)) if is_index else None


def _gathers(graph: Graph, listed: Value, count: int) -> bool:
    """Return True if the model gathers scores of `count` experts at the indices `listed`, which fails for others."""
    chosen = uncast(listed, "reshape")
    taken = (each for each in graph.places if each.op == "take" and each.arg.shape[-1:] == (count,))
    return any(uncast(each.args[1], "reshape") is chosen and each.args[1].rank == each.rank for each in taken)


def _by_last_dim(a: Algebra, listed: Value) -> Value:
    """Reshape `listed`, the experts of all pairs, to [T, K], by the last dim of the router's own list below its
    reshapes.
    """
    chosen = uncast(listed, "reshape")
    if chosen.op == "first_greatest":  # one expert of each token, perhaps without a dim of size 1
        return a.reshape(chosen, (prod(chosen.shape), 1))
    return a.reshape(chosen, (prod(chosen.shape[:-1]), chosen.shape[-1]))


def unsorted(x: Value) -> Value | None:
    """Return the list [R] of which `x` has the entries in ascending order, by a sort or a gather with its own argsort;
    None if `x` is anything else.
    """
    below = uncast(x, "reshape")
    if below.op == "ascending":
        return below.arg
    order = uncast(below.args[1].below("wrap")) if (below.op, below.attrs) == ("index", (0,)) else below
    is_own = order.op == "ascending_index" and uncast(order.arg, "reshape") is uncast(below.arg, "reshape")
    return below.arg if order is not below and is_own else None


def listed_like(a: Algebra, x: Value, product: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Return the numbers of all experts which `x` has for the rows of `product`, captures of an expert_product.

    None if `x` is not proven to be a function of the expert of each row, in the order of the rows.
    """
    pairs = assigned(a, x)
    if pairs is None or uncast(pairs.experts, "reshape") is not uncast(product["experts"], "reshape"):
        return None
    active = Active(*product["active"])
    is_sorted = pairs.order is not None and active.have_indices_before_others(pairs.order)
    is_arranged = is_sorted if product["is_sorted"] else pairs.order is None and not pairs.by_choice
    return pairs.numbers if is_arranged else None


def is_line(x: Value, length: Dim) -> bool:
    """Return True if `x` is 0 … `length` - 1."""
    return (x.op, x.attrs, x.shape) == ("arange", (0, 1), (length,))


# rows of other experts ----------------------------------------------------------------------------------------------


def unmasked(a: Algebra, x: Value) -> tuple[Value, Value | None]:
    """Split `x` = where(flags, y, 0) into y and the boolean `flags`, which are None where `x` is no such choice."""
    if x.op != "where":
        return x, None
    flags, *sides = x.args
    for y, other, chosen in (
        (sides[0], sides[1], flags),
        (sides[1], sides[0], a.make("not", (flags,), (), flags.shape, flags.dtype)),
    ):
        if other.below("expand", "reshape").op == "full" and other.below("expand", "reshape").attrs == (0,):
            return y, chosen
    return x, None


def marks_active(a: Algebra, flags: Value, product: Mapping[str, Any]) -> bool:
    """Return True if `flags` [R, 1] are True at the rows of `product`, captures of an expert_product, whose experts are
    active, and at no other row.

    They are a mask of the experts, in the order of the rows, or row numbers < number of pairs with an active expert.
    """
    active, numbers = Active(*product["active"]), listed_like(a, flags, product)
    if numbers is not None:
        return active.are_marked(numbers)
    return bool(product["is_sorted"]) and _are_first(a, flags, uncast(product["experts"], "reshape"), active)


def _are_first(a: Algebra, flags: Value, experts: Value, active: Active) -> bool:
    """Return True if `flags` are row numbers 0 … R - 1 < number of pairs whose expert is `active`."""
    rows = prod(experts.shape)
    if (flags.op, flags.attrs) != ("compare", ("lt",)) or not is_line(uncast(flags.arg, "reshape"), rows):
        return False
    below, factor = unscaled(uncast(flags.args[1], "reshape"))
    below = below.below("reshape")
    is_sum = (below.op == "total" and factor == 1) or (below.op == "mean" and factor == rows)
    if not is_sum or prod(below.shape) != 1:
        return False
    marked = assigned(a, below.arg)
    return marked is not None and uncast(marked.experts, "reshape") is experts and active.are_marked(marked.numbers)


def weights_of_active(a: Algebra, weights: Value, product: Mapping[str, Any]) -> tuple[Value, bool]:
    """Return `weights` [T, K] without a mask that is 1 at active experts of `product`, captures of an expert_product,
    and 0 at all others; and True if there was such a mask.
    """
    listed = {**product, "is_sorted": False}
    below, active = elements_below(weights), Active(*product["active"])
    inner, flags = unmasked(a, below)
    if below.op == "mul":
        choices = ((x, y.below("cast")) for x, y in below.operands() if y.below("cast").dtype == torch.bool)
        inner, flags = next(choices, (below, None))
    numbers = None if flags is None else listed_like(a, flags, listed)
    is_marked = numbers is not None and active.are_marked(numbers)
    return (a.reshape(inner, weights.shape), True) if is_marked else (weights, False)
