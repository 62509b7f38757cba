"""Which slots of a buffer listed keys have, and what a status says of them, proven from how a model computes it.

same = ids[:, None] == held[None]      found = same.any(slots)      slot = same.argmax(slots)
free = argsort(same.any(entries))      new = where(found, slot, free[cumsum(~found) - 1])
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion.graph import Algebra, Value
from fusion.graph.dims import INDEX_DTYPES
from fusion.graph.proof import must, proof, proven


@dataclass(frozen=True)
class Compared:
    """Which entry of a list stands in which slot: `equal` [.., K, K] compares it with what is held, along one axis."""

    equal: Value
    held: Value
    slots: int

    def each(self, x: Value, axis: int) -> bool:
        """Whether x says what holds anywhere along an axis, of each entry or of each slot."""
        return _anywhere(x) == (self.equal, axis)

    def is_found(self, x: Value) -> bool:
        """Whether x says of each entry whether a slot holds it."""
        return self.each(x, self.slots)

    def is_used(self, x: Value) -> bool:
        """Whether x says of each slot whether it holds an entry."""
        return self.each(x, 2 * self.equal.rank - 3 - self.slots)

    def is_slot(self, x: Value) -> bool:
        """Whether x is the slot of each entry, or anything where there is none: no slots hold the same."""
        x = plain(x).below("reshape")
        axis = x.attrs[0] if x.attrs else self.equal.rank - 1
        return x.op == "first_greatest" and axis == self.slots and x.arg.below("cast") is self.equal


def _anywhere(x: Value) -> tuple[Value, int] | None:
    """The truths of which x says whether any holds along an axis, and that: any, the greatest, or a sum above 0."""
    x, counted = x.below("reshape", "cast"), False
    if (x.op, x.attrs) == ("compare", ("lt",)) and (x.arg.op, x.arg.attrs) == ("full", (0,)):
        x, counted = x.args[1].below("reshape", "cast"), True
        x = x.arg.below("reshape", "cast") if x.op == "scale" and x.attrs[0] > 0 else x
    if x.op not in ("any", "greatest", *(("mean", "total") if counted else ())) or len(x.attrs) != 1:
        return None
    truths = x.arg.below("cast")
    return (truths, x.attrs[0] % truths.rank) if truths.dtype is torch.bool else None


def plain(x: Value, *ops: str) -> Value:
    """Whole numbers before casts among their dtypes, and before steps of these ops."""
    while x.op in ops or (x.op == "cast" and {x.dtype, x.arg.dtype} <= INDEX_DTYPES):
        x = x.arg
    return x


def choice(x: Value) -> tuple[Value, Value, Value] | None:
    """A condition, what is taken where it holds, and what elsewhere."""
    if x.op != "where":
        return None
    condition, first, second = x.args
    below = condition.below("reshape")
    return (below.arg, second, first) if below.op == "not" else (condition, first, second)


@proof
def compared(a: Algebra, condition: Value, ids: Value) -> Compared | None:
    """A condition on each entry of a list as whether it stands in one of as many slots."""
    (equal, _), (*lead, count) = proven(_anywhere(condition)), ids.shape
    must((equal.op, equal.attrs) == ("compare", ("eq",)))
    must(equal.shape == (*lead, count, count) and count != 1)
    along: dict[Any, int] = {(*lead, count, 1): equal.rank - 2, (*lead, 1, count): equal.rank - 1}
    must({each.shape for each in equal.args} == set(along))
    one, other = (plain(a.reshape(each, ids.shape)) for each in equal.args)
    first = one is plain(ids)
    must(first or other is plain(ids))
    same = Compared(equal, other if first else one, along[equal.args[first].shape])
    return same if same.is_found(condition) else None


def is_next_free(new: Value, same: Compared) -> bool:
    """Whether each entry has the slot that it stands in, or else the next one that holds none of the list."""
    found, old, free = choice(plain(new)) or (None, None, None)
    if found is None or old is None or free is None or not (same.is_found(found) and same.is_slot(old)):
        return False
    taken = plain(free)
    return taken.op == "take" and _is_free_first(taken.arg, same) and _is_rank(plain(taken.args[1]), same)


def free_order(new: Value) -> Value:
    """The order in which such slots are free."""
    found = choice(new)
    return new if found is None else plain(plain(found[2]).arg)


def _is_free_first(order: Value, same: Compared) -> bool:
    """Whether slots are sorted by whether they hold an entry: torch may leave the order of equals open."""
    order, last = plain(order), same.equal.rank - 2
    if order.op == "ascending_index" and order.attrs[0] == last:
        return same.is_used(order.arg)
    free = order.arg.below("cast", "reshape") if order.op == "largest_index" else order
    return free.op == "not" and order.attrs == (order.shape[-1],) and same.is_used(free.arg)


def _is_rank(x: Value, same: Compared) -> bool:
    """Whether x is the number of entries before each one that no slot holds, or anything where one does."""
    count = same.equal.shape[-1]
    x = plain(x.arg) if x.op == "relu" or (x.op == "clamp" and x.attrs[0] == 0 and x.attrs[1] >= count - 1) else x
    total = plain(x.arg) if x.op == "shift" and x.attrs == (-1,) else x
    if total.op != "cumsum" or total is x or total.attrs[0] % total.rank != total.rank - 1:
        return False
    moved = total.arg.below("cast", "reshape")
    return moved.op == "not" and same.is_found(moved.arg)


def is_told(x: Value, same: Compared, new: Value, ids: Value) -> bool:
    """Whether x is the list by its slots, and its length behind."""
    count = ids.shape[-1]
    if x.op == "cat" and x.attrs == (x.rank - 1,) and len(x.args) == 2:
        listed, length = x.args
        whole = length.shape[-1] == 1
    else:
        condition, length, rest = x.args if x.op == "where" else (x, x, x)
        listed = rest.args[-1] if rest.op == "slice_scatter" else x
        whole = rest.attrs == (x.rank - 1, 0, count, 1) and _is_last(condition, count)
    if not whole or listed.op != "placed" or x.shape != (*ids.shape[:-1], count + 1):
        return False
    held, slots, numbers = listed.args
    parts = [plain(held) is same.held, plain(slots) is plain(new), plain(numbers) is plain(ids)]
    length = length.below("reshape", "cast", "expand")
    return all(parts) and length.op == "full" and length.attrs == (count,)


def _is_last(condition: Value, count: Any) -> bool:
    """Whether a condition holds for the last of count + 1 columns alone."""
    if (condition.op, condition.attrs) != ("compare", ("eq",)) or condition.shape[-1] != count + 1:
        return False
    line, number = (each.below("reshape", "cast", "expand") for each in condition.args)
    last = condition.arg.shape[-1:] == (count + 1,) and line.op == "arange" and line.attrs == (0, 1)
    return last and number.op == "full" and number.attrs == (count,)
