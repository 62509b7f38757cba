"""Slots of listed keys in a buffer, and the status of the buffer, proven from how a model computes them.

same = ids[:, None] == stored[None]    hit = same.any(slots)        slot = same.argmax(slots)
free = argsort(same.any(entries))      new = where(hit, slot, free[cumsum(~hit) - 1])
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
    """Comparison of each entry of a list with the key in each slot.

    Attributes:
        equal: bool [.., K, K], True where an entry is the key in a slot.
        stored: key in each slot, [.., K].
        slots: axis of the slots in `equal`; the entries are along the other of the last two.
    """

    equal: Value
    stored: Value
    slots: int

    def is_any(self, x: Value, axis: int) -> bool:
        """Return True if `x` is `equal` reduced by "any" along `axis`."""
        return _anywhere(x) == (self.equal, axis)

    def is_hit(self, x: Value) -> bool:
        """Return True if `x` is True for each entry whose key is in a slot (a hit)."""
        return self.is_any(x, self.slots)

    def is_used(self, x: Value) -> bool:
        """Return True if `x` is True for each slot whose key is in the list."""
        return self.is_any(x, 2 * self.equal.rank - 3 - self.slots)

    def is_slot(self, x: Value) -> bool:
        """Return True if `x` is the slot of each hit; values at misses are ignored. No two slots have the same key."""
        x = plain(x).below("reshape")
        axis = x.attrs[0] if x.attrs else self.equal.rank - 1
        return x.op == "first_greatest" and axis == self.slots and x.arg.below("cast") is self.equal


def _anywhere(x: Value) -> tuple[Value, int] | None:
    """Read `x` as an "any" of booleans: any, max, or sum > 0; return the booleans and the axis, else None."""
    x, counted = x.below("reshape", "cast"), False
    if (x.op, x.attrs) == ("compare", ("lt",)) and (x.arg.op, x.arg.attrs) == ("full", (0,)):
        x, counted = x.args[1].below("reshape", "cast"), True
        x = x.arg.below("reshape", "cast") if x.op == "scale" and x.attrs[0] > 0 else x
    if x.op not in ("any", "greatest", *(("mean", "total") if counted else ())) or len(x.attrs) != 1:
        return None
    truths = x.arg.below("cast")
    return (truths, x.attrs[0] % truths.rank) if truths.dtype is torch.bool else None


def plain(x: Value, *ops: str) -> Value:
    """Strip casts between integer dtypes, and steps of `ops`, from `x`."""
    while x.op in ops or (x.op == "cast" and {x.dtype, x.arg.dtype} <= INDEX_DTYPES):
        x = x.arg
    return x


def choice(x: Value) -> tuple[Value, Value, Value] | None:
    """Return condition, value where it holds, and value elsewhere, of a "where"; None for another op."""
    if x.op != "where":
        return None
    condition, first, second = x.args
    below = condition.below("reshape")
    return (below.arg, second, first) if below.op == "not" else (condition, first, second)


@proof
def compared(a: Algebra, condition: Value, ids: Value) -> Compared | None:
    """Read `condition`, True for the entries of `ids` that are in a slot, as the comparison that it is computed from.

    The list has as many entries as there are slots, and more than one.
    """
    (equal, _), (*lead, count) = proven(_anywhere(condition)), ids.shape
    must((equal.op, equal.attrs) == ("compare", ("eq",)))
    must(equal.shape == (*lead, count, count) and count != 1)
    along: dict[Any, int] = {(*lead, count, 1): equal.rank - 2, (*lead, 1, count): equal.rank - 1}
    must({each.shape for each in equal.args} == set(along))
    one, other = (plain(a.reshape(each, ids.shape)) for each in equal.args)
    first = one is plain(ids)
    must(first or other is plain(ids))
    same = Compared(equal, other if first else one, along[equal.args[first].shape])
    return same if same.is_hit(condition) else None


def is_next_free(new: Value, same: Compared) -> bool:
    """Return True if `new` is the slot of each hit, and for each miss the next slot that has no key of the list."""
    condition, old, free = choice(plain(new)) or (None, None, None)
    if condition is None or old is None or free is None or not (same.is_hit(condition) and same.is_slot(old)):
        return False
    taken = plain(free)
    return taken.op == "take" and _is_free_first(taken.arg, same) and _is_rank(plain(taken.args[1]), same)


def free_order(new: Value) -> Value:
    """Return the order of the free slots that `new` takes; `new` if it is no choice."""
    chosen = choice(new)
    return new if chosen is None else plain(plain(chosen[2]).arg)


def _is_free_first(order: Value, same: Compared) -> bool:
    """Return True if `order` lists the slots without a listed key first, in any order among them."""
    order, last = plain(order), same.equal.rank - 2
    if order.op == "ascending_index" and order.attrs[0] == last:
        return same.is_used(order.arg)
    free = order.arg.below("cast", "reshape") if order.op == "largest_index" else order
    return free.op == "not" and order.attrs == (order.shape[-1],) and same.is_used(free.arg)


def _is_rank(x: Value, same: Compared) -> bool:
    """Return True if `x` is the exclusive rank of each miss (cumsum(miss) - 1); values at hits are ignored."""
    count = same.equal.shape[-1]
    x = plain(x.arg) if x.op == "relu" or (x.op == "clamp" and x.attrs[0] == 0 and x.attrs[1] >= count - 1) else x
    total = plain(x.arg) if x.op == "shift" and x.attrs == (-1,) else x
    if total.op != "cumsum" or total is x or total.attrs[0] % total.rank != total.rank - 1:
        return False
    moved = total.arg.below("cast", "reshape")
    return moved.op == "not" and same.is_hit(moved.arg)


def is_updated_status(x: Value, same: Compared, new: Value, ids: Value) -> bool:
    """Return True if `x` is the status after a step: the list scattered by its `new` slots, then its length."""
    count = ids.shape[-1]
    if x.op == "cat" and x.attrs == (x.rank - 1,) and len(x.args) == 2:
        listed, length = x.args
        has_length = length.shape[-1] == 1
    else:
        condition, length, rest = x.args if x.op == "where" else (x, x, x)
        listed = rest.args[-1] if rest.op == "slice_scatter" else x
        has_length = rest.attrs == (x.rank - 1, 0, count, 1) and _is_last(condition, count)
    if not has_length or listed.op != "placed" or x.shape != (*ids.shape[:-1], count + 1):
        return False
    stored, slots, numbers = listed.args
    parts = [plain(stored) is same.stored, plain(slots) is plain(new), plain(numbers) is plain(ids)]
    length = length.below("reshape", "cast", "expand")
    return all(parts) and length.op == "full" and length.attrs == (count,)


def _is_last(condition: Value, count: Any) -> bool:
    """Return True if `condition` holds for the last of count + 1 columns alone."""
    if (condition.op, condition.attrs) != ("compare", ("eq",)) or condition.shape[-1] != count + 1:
        return False
    line, number = (each.below("reshape", "cast", "expand") for each in condition.args)
    last = condition.arg.shape[-1:] == (count + 1,) and line.op == "arange" and line.attrs == (0, 1)
    return last and number.op == "full" and number.attrs == (count,)
