"""Pairs of a token and one of its choices: rows of tokens, as pairs are listed, token by token, or sorted by expert.

An order is the places [R] that a sort of the pairs has found; which of equal ones comes first is left open.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Dim, Value


class Arranged(NamedTuple):
    """Values of pairs [R, ..] as they are listed, or sorted by `order`."""

    value: Value
    order: Value | None


class Pairs(NamedTuple):
    """How many tokens there are, and how many experts each has chosen."""

    tokens: Dim
    choices: Any


def plain(x: Value) -> Value:
    """Floats before they are rounded, or their rows arranged otherwise."""
    while is_rounding(x) or x.op == "reshape":
        x = x.arg
    return x


# orders -------------------------------------------------------------------------------------------------------------


def sorts(order: Value, experts: Value) -> bool:
    """Whether an order of the pairs sorts them by their experts."""
    return order.rank == 1 and uncast(order.arg, "reshape") is uncast(experts, "reshape")


def _order(x: Value) -> Value | None:
    """An order of pairs, which a sort has found."""
    x = uncast(x.below("wrap"))
    return x if x.op == "ascending_index" and x.rank == 1 else None


def named_rows(x: Value) -> tuple[Value, Value] | None:
    """Of what `x` is rows, and the list [R] that names them."""
    named = (x.op == "index" and x.attrs == (0,)) or (x.op == "take" and x.arg.rank == x.rank)
    return (x.arg, uncast(x.args[1])) if named and x.args[1].rank == 1 else None


def _put_rows(x: Value) -> tuple[Value, Value] | None:
    """Return the rows that `x` holds, each at the place that an order names: so `x` holds nothing else."""
    rows, places = _written(x) or (x, x)
    order = _order(places) if rows is not x and rows.shape == x.shape else None
    return None if order is None else (rows, order)


def _written(x: Value) -> tuple[Value, Value] | None:
    """Return the rows that are written into another tensor, or the numbers of a line, and at which places."""
    if x.op == "placed" and x.rank == 1:
        return x.args[2], x.args[1]
    return (x.args[1], x.args[2]) if x.op == "write_rows" and x.attrs == (0,) and len(x.args) == 3 else None


def sorted_by(x: Value) -> Arranged | None:
    """The values that `x` holds sorted, and by which order."""
    found = named_rows(x)
    order = None if found is None else _order(found[1])
    return None if found is None or order is None else Arranged(found[0], order)


def put_back(x: Value) -> Arranged | None:
    """The sorted values that `x` holds as pairs are listed, and by which order they are sorted."""
    put, named = _put_rows(x), named_rows(x)
    if put is not None:
        return Arranged(*put)
    order = None if named is None else _inverse(named[1])
    return None if named is None or order is None else Arranged(named[0], order)


def _inverse(x: Value) -> Value | None:
    """The order of which `x` is the inverse: its own sort, or 0, 1, … put to its places."""
    if x.op == "ascending_index":
        return _order(x.arg)
    rows, order = _put_rows(x) or (x, None)
    return order if (rows.op, rows.attrs) == ("arange", (0, 1)) else None


# rows of tokens -----------------------------------------------------------------------------------------------------


def sorted_tokens(a: Algebra, rows: Value, pairs: Pairs) -> Arranged | None:
    """The tokens of which sorted rows are, and by which order."""
    found = named_rows(rows)
    if found is None:
        return None
    tokens, listed = found
    order = _order(listed)
    if order is not None:  # of rows that were repeated before
        repeated = repeated_tokens(a, tokens, pairs)
        return None if repeated is None else Arranged(repeated, order)
    order = order_of_tokens(listed, pairs)
    return None if order is None or tokens.shape[0] != pairs.tokens else Arranged(tokens, order)


def order_of_tokens(listed: Value, pairs: Pairs) -> Value | None:
    """The order of the pairs whose tokens are listed."""
    if pairs.choices == 1:
        return _order(listed)
    if listed.op == "floor_divide" and listed.attrs == (pairs.choices,):
        return _order(listed.arg)
    found = named_rows(listed)
    return _order(found[1]) if found is not None and are_tokens(found[0], pairs) else None


def are_tokens(x: Value, pairs: Pairs) -> bool:
    """Whether `x` is the token of each pair, as pairs are listed."""
    x = uncast(x, "reshape")
    if x.op == "floor_divide":
        return x.attrs == (pairs.choices,) and _is_line(x.arg, pairs.tokens * pairs.choices)
    once = x.op == "expand" and (x.shape, x.arg.shape) == ((*pairs,), (pairs.tokens, 1))
    return once and _is_line(uncast(x.arg, "reshape"), pairs.tokens)


def _is_line(x: Value, length: Dim) -> bool:
    return (x.op, x.attrs, x.shape) == ("arange", (0, 1), (length,))


def _repeated(rows: Value, pairs: Pairs) -> Value | None:
    """Of what [T, ..] `rows` [R, ..] are, each as often as its token chose, as pairs are listed."""
    whole = rows.below("reshape")
    if pairs.choices == 1:
        return rows
    if whole.op == "expand" and whole.rank > 1 and whole.shape[-2:] == (pairs.choices, rows.shape[-1]):
        return whole.arg if whole.arg.shape == (*whole.shape[:-2], 1, rows.shape[-1]) else None
    found = named_rows(whole)
    if found is None or not are_tokens(found[1], pairs) or found[0].shape[0] != pairs.tokens:
        return None
    return found[0]


def repeated_tokens(a: Algebra, rows: Value, pairs: Pairs) -> Value | None:
    """The same in two dims, [T, H]."""
    found = _repeated(rows, pairs)
    return None if found is None else a.reshape(found, (pairs.tokens, rows.shape[-1]))


# lines of experts ---------------------------------------------------------------------------------------------------


def expert_lines(a: Algebra, rows: Value, width: Dim, product: Mapping[str, Any]) -> Value | None:
    """The lines [E, width] of all experts, of which `rows` are those of the experts of a product's rows."""
    taken = rows.below("reshape", "expand")
    named = (taken.op, taken.attrs) == ("index", (0,)) and taken.arg.rank > 1
    if not named or prod(taken.arg.shape[1:]) != width or prod(taken.shape) != prod(rows.shape):
        return None
    lines, listed = a.reshape(taken.arg, (taken.arg.shape[0], width)), uncast(taken.args[1], "reshape")
    experts = uncast(product["experts"], "reshape")
    if not product["is_sorted"]:
        return lines if listed is experts else None
    by = named_rows(listed)
    order = uncast(by[1]) if by is not None and uncast(by[0], "reshape") is experts else None
    is_sorted = listed.op == "ascending" or (order is not None and order.op == "ascending_index")
    named_by = listed.arg if listed.op == "ascending" else (order.arg if order is not None else listed)
    return lines if is_sorted and uncast(named_by, "reshape") is experts else None
