"""Pairs (t, k) of a token and its k-th expert, of which each has one row; R = T · K.

Rows are listed token by token, row t · K + k for (t, k), or sorted by expert: then an order [R], the argsort of the
experts, has at each sorted row its place in the list. Whether the sort is stable is left open.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Dim, Value


class Arranged(NamedTuple):
    """A value, and the order [R] of the sorted rows that it has or gives; None where rows are listed token by token."""

    value: Value
    order: Value | None


class Pairs(NamedTuple):
    """Number of tokens T, and number of experts K that each token chooses."""

    tokens: Dim
    choices: Any


# orders -------------------------------------------------------------------------------------------------------------


def sorts(order: Value, experts: Value) -> bool:
    """Return True if `order` [R] is an argsort of `experts` [T, K]."""
    return order.rank == 1 and uncast(order.arg, "reshape") is uncast(experts, "reshape")


def _order(x: Value) -> Value | None:
    """Return the argsort [R] of which `x` is a cast, or whose negative indices `x` converts; None for others."""
    x = uncast(x.below("wrap"))
    return x if x.op == "ascending_index" and x.rank == 1 else None


def gathered_by(x: Value) -> tuple[Value, Value] | None:
    """Read `x` [R, ..] as rows of a tensor, gathered at indices [R]; return both, or None."""
    is_gather = (x.op == "index" and x.attrs == (0,)) or (x.op == "take" and x.arg.rank == x.rank)
    return (x.arg, uncast(x.args[1])) if is_gather and x.args[1].rank == 1 else None


def _put_rows(x: Value) -> tuple[Value, Value] | None:
    """Read `x` as rows [R, ..] that are scattered to all R places by an argsort; return the rows and the argsort, or
    None.
    """
    rows, places = _scattered(x) or (x, x)
    order = _order(places) if rows is not x and rows.shape == x.shape else None
    return None if order is None else (rows, order)


def _scattered(x: Value) -> tuple[Value, Value] | None:
    """Read `x` as rows written into a tensor at indices of its dim 0; return the rows and the indices, or None."""
    if x.op == "placed" and x.rank == 1:
        return x.args[2], x.args[1]
    return (x.args[1], x.args[2]) if x.op == "write_rows" and x.attrs == (0,) and len(x.args) == 3 else None


def sorted_by(x: Value) -> Arranged | None:
    """Read `x` as x[i] = y[order[i]], with an argsort `order`; return y, which is in the order of pairs, and the
    argsort.

    None if `x` is anything else.
    """
    gathered = gathered_by(x)
    order = None if gathered is None else _order(gathered[1])
    return None if gathered is None or order is None else Arranged(gathered[0], order)


def put_back(x: Value) -> Arranged | None:
    """Read `x` as x[order[i]] = y[i], by a scatter or by a gather with the inverse of the argsort `order`.

    Returns y, which is sorted, and the argsort; None if `x` is anything else.
    """
    scattered, gathered = _put_rows(x), gathered_by(x)
    if scattered is not None:
        return Arranged(*scattered)
    order = None if gathered is None else _inverse(gathered[1])
    return None if gathered is None or order is None else Arranged(gathered[0], order)


def _inverse(x: Value) -> Value | None:
    """Return the argsort `order` with x[order[i]] = i: `x` is its argsort, or 0 … R - 1 scattered by it. None for
    others.
    """
    if x.op == "ascending_index":
        return _order(x.arg)
    rows, order = _put_rows(x) or (x, None)
    return order if (rows.op, rows.attrs) == ("arange", (0, 1)) else None


# rows of tokens -----------------------------------------------------------------------------------------------------


def sorted_tokens(a: Algebra, rows: Value, pairs: Pairs) -> Arranged | None:
    """Read `rows` [R, H] as tokens[order[i] // K], with an argsort `order` of the pairs; return the tokens and the
    argsort.

    None if `rows` are anything else.
    """
    gathered = gathered_by(rows)
    if gathered is None:
        return None
    tokens, listed = gathered
    order = _order(listed)
    if order is not None:  # the model repeats each token K times before it sorts
        repeated = repeated_tokens(a, tokens, pairs)
        return None if repeated is None else Arranged(repeated, order)
    order = order_of_tokens(listed, pairs)
    return None if order is None or tokens.shape[0] != pairs.tokens else Arranged(tokens, order)


def order_of_tokens(listed: Value, pairs: Pairs) -> Value | None:
    """Return the argsort `order` of the pairs if `listed` [R] is the token of each sorted row, order[i] // K; else
    None.
    """
    if pairs.choices == 1:
        return _order(listed)
    if listed.op == "floor_divide" and listed.attrs == (pairs.choices,):
        return _order(listed.arg)
    gathered = gathered_by(listed)
    return _order(gathered[1]) if gathered is not None and are_tokens(gathered[0], pairs) else None


def are_tokens(x: Value, pairs: Pairs) -> bool:
    """Return True if `x` is the token of each listed pair: 0 (K times), 1 (K times), … T - 1."""
    x = uncast(x, "reshape")
    if x.op == "floor_divide":
        return x.attrs == (pairs.choices,) and _is_line(x.arg, pairs.tokens * pairs.choices)
    once = x.op == "expand" and (x.shape, x.arg.shape) == ((*pairs,), (pairs.tokens, 1))
    return once and _is_line(uncast(x.arg, "reshape"), pairs.tokens)


def _is_line(x: Value, length: Dim) -> bool:
    return (x.op, x.attrs, x.shape) == ("arange", (0, 1), (length,))


def _repeated(rows: Value, pairs: Pairs) -> Value | None:
    """Return the tensor [T, ..] whose rows `rows` [R, ..] repeats for the K experts of each token, by an expand or a
    gather.

    `pairs` has T and K. None for other rows.
    """
    inner = rows.below("reshape")
    if pairs.choices == 1:
        return rows
    if inner.op == "expand" and inner.rank > 1 and inner.shape[-2:] == (pairs.choices, rows.shape[-1]):
        return inner.arg if inner.arg.shape == (*inner.shape[:-2], 1, rows.shape[-1]) else None
    gathered = gathered_by(inner)
    if gathered is None or not are_tokens(gathered[1], pairs) or gathered[0].shape[0] != pairs.tokens:
        return None
    return gathered[0]


def repeated_tokens(a: Algebra, rows: Value, pairs: Pairs) -> Value | None:
    """Return the tokens [T, H] that `rows` [R, H] repeats K times each, in the order of listed pairs; or None."""
    tokens = _repeated(rows, pairs)
    return None if tokens is None else a.reshape(tokens, (pairs.tokens, rows.shape[-1]))


# vectors of experts -------------------------------------------------------------------------------------------------


def expert_vectors(a: Algebra, rows: Value, width: Dim, product: Mapping[str, Any]) -> Value | None:
    """Return the tensor [E, width] from which `rows` gathers the vector of each row's expert; or None.

    The experts, and the order of the rows, are those of `product`, the captures of an expert_product. Such vectors are
    biases or scales of channels.
    """
    taken = rows.below("reshape", "expand")
    is_gather = (taken.op, taken.attrs) == ("index", (0,)) and taken.arg.rank > 1
    if not is_gather or prod(taken.arg.shape[1:]) != width or prod(taken.shape) != prod(rows.shape):
        return None
    lines, listed = a.reshape(taken.arg, (taken.arg.shape[0], width)), uncast(taken.args[1], "reshape")
    experts = uncast(product["experts"], "reshape")
    if not product["is_sorted"]:
        return lines if listed is experts else None
    gathered = gathered_by(listed)
    order = uncast(gathered[1]) if gathered is not None and uncast(gathered[0], "reshape") is experts else None
    is_sorted = listed.op == "ascending" or (order is not None and order.op == "ascending_index")
    source = listed.arg if listed.op == "ascending" else (order.arg if order is not None else listed)
    return lines if is_sorted and uncast(source, "reshape") is experts else None
