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
from fusion.graph.proof_steps import must, proof, proven


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
        """Return True if `x` is `equal` reduced by "any" over the slots: True for each entry whose key is in a slot (a
        hit).
        """
        return self.is_any(x, self.slots)

    def is_used(self, x: Value) -> bool:
        """Return True if `x` is `equal` reduced by "any" over the entries: True for each slot whose key is in the
        list.
        """
        return self.is_any(x, 2 * self.equal.rank - 3 - self.slots)

    def is_slot(self, x: Value) -> bool:
        """Return True if `x` is argmax of `equal` over the slots: for each hit its only slot, since no two slots have
        the same key.

        The values of `x` at misses are of no importance.
        """
        x = plain(x).below("reshape")
        axis = x.attrs[0] if x.attrs else self.equal.rank - 1
        return x.op == "first_greatest" and axis == self.slots and x.arg.below("cast") is self.equal


def _anywhere(x: Value) -> tuple[Value, int] | None:
    """Read `x` as an "any" over one axis of booleans, written as any, max or sum > 0, below reshapes and casts.

    Returns the booleans, and the axis of them that is reduced; None if `x` is anything else.
    """
    x, counted = x.below("reshape", "cast"), False
    if (x.op, x.attrs) == ("compare", ("lt",)) and (x.arg.op, x.arg.attrs) == ("full", (0,)):
        x, counted = x.args[1].below("reshape", "cast"), True
        x = x.arg.below("reshape", "cast") if x.op == "scale" and x.attrs[0] > 0 else x
    if x.op not in ("any", "greatest", *(("mean", "total") if counted else ())) or len(x.attrs) != 1:
        return None
    truths = x.arg.below("cast")
    return (truths, x.attrs[0] % truths.rank) if truths.dtype is torch.bool else None


def plain(x: Value, *ops: str) -> Value:
    """Strip from `x`, as long as there are any, casts between integer dtypes and ops whose name is one of `ops`."""
    while x.op in ops or (x.op == "cast" and {x.dtype, x.arg.dtype} <= INDEX_DTYPES):
        x = x.arg
    return x


def choice(x: Value) -> tuple[Value, Value, Value] | None:
    """Return the condition of the "where" `x`, its value where the condition is True, and its value where it is False.

    A negated condition is returned without "not", with the two values exchanged. None if `x` is no "where".
    """
    if x.op != "where":
        return None
    condition, first, second = x.args
    below = condition.below("reshape")
    return (below.arg, second, first) if below.op == "not" else (condition, first, second)


@proof
def compared(a: Algebra, condition: Value, ids: Value) -> Compared | None:
    """Read `condition` [.., K] as (`ids`[.., :, None] == stored[.., None, :]).any(slots), True for each hit.

    Returns the comparison. None if `condition` is anything else, if there are not exactly K slots, or if K is 1.
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
    """Return True if `new` is where(hit, slot, free[rank]), by the entries and slots of `same`.

    That is the present slot of each hit; and for the n-th miss of the list, the n-th slot whose key is not in the list.
    """
    condition, old, free = choice(plain(new)) or (None, None, None)
    if condition is None or old is None or free is None or not (same.is_hit(condition) and same.is_slot(old)):
        return False
    taken = plain(free)
    return taken.op == "take" and _is_free_first(taken.arg, same) and _is_rank(plain(taken.args[1]), same)


def free_order(new: Value) -> Value:
    """Return `free` of a `new` = where(hit, slot, free[rank]): the order in which misses take slots; `new` itself if it
    is no "where".
    """
    chosen = choice(new)
    return new if chosen is None else plain(plain(chosen[2]).arg)


def _is_free_first(order: Value, same: Compared) -> bool:
    """Return True if `order` [.., K] lists the slots whose key is not in the list of `same` before all others.

    It is an argsort, or a top-K of all K slots.
    """
    order, last = plain(order), same.equal.rank - 2
    if order.op == "ascending_index" and order.attrs[0] == last:
        return same.is_used(order.arg)
    free = order.arg.below("cast", "reshape") if order.op == "largest_index" else order
    return free.op == "not" and order.attrs == (order.shape[-1],) and same.is_used(free.arg)


def _is_rank(x: Value, same: Compared) -> bool:
    """Return True if `x` is cumsum(miss) - 1 along the entries of `same`: for each miss the number of misses before it.

    The values of `x` at hits are of no importance, so that it may also be clamped to 0 .. K - 1.
    """
    count = same.equal.shape[-1]
    x = plain(x.arg) if x.op == "relu" or (x.op == "clamp" and x.attrs[0] == 0 and x.attrs[1] >= count - 1) else x
    total = plain(x.arg) if x.op == "shift" and x.attrs == (-1,) else x
    if total.op != "cumsum" or total is x or total.attrs[0] % total.rank != total.rank - 1:
        return False
    moved = total.arg.below("cast", "reshape")
    return moved.op == "not" and same.is_hit(moved.arg)


def is_updated_status(x: Value, same: Compared, new: Value, ids: Value) -> bool:
    """Return True if `x` [.., K + 1] is the status after a step.

    Its first K columns are the keys in the slots of `same`, with `ids` scattered over them at the slots `new`; its last
    column is the number K.
    """
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
    """Return True if `condition` is arange(`count` + 1) == `count`: True in the last of `count` + 1 columns alone."""
    if (condition.op, condition.attrs) != ("compare", ("eq",)) or condition.shape[-1] != count + 1:
        return False
    line, number = (each.below("reshape", "cast", "expand") for each in condition.args)
    last = condition.arg.shape[-1:] == (count + 1,) and line.op == "arange" and line.attrs == (0, 1)
    return last and number.op == "full" and number.attrs == (count,)
