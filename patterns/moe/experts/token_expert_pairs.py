"""Pairs (t, k) of a token and its k-th expert, of which each has one row; R = T · K.

Rows are listed token by token, row t · K + k for (t, k), or choice by choice, row k · T + t, or sorted by expert: then
an order [R], the argsort of the experts in one of both lists, has at each sorted row its place in the list. Whether the
sort is stable is left open.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, NamedTuple

from fusion.analysis.dtypes import is_rounding
from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Dim, Value
from patterns.moe.experts.assigned import assigned, is_by_choice
from patterns.moe.experts.expert_lists import Active, is_line, listed_like, unsorted


class Arranged(NamedTuple):
    """A value, and the order [R] of the sorted rows that it has or gives; None where rows are listed token by token."""

    value: Value
    order: Value | None


class Pairs(NamedTuple):
    """Number of tokens T, and number of experts K that each token chooses."""

    tokens: Dim
    choices: Any


# orders -------------------------------------------------------------------------------------------------------------


def sorts(a: Algebra, order: Value, experts: Value, active: Active) -> bool:
    """Return True if `order` [R] is an argsort of `experts` [T, K] that puts the `active` ones in groups, in their
    order, before all others.
    """
    if order.rank != 1:
        return False
    if uncast(order.arg, "reshape") is uncast(experts, "reshape"):
        return active.is_all
    listed = assigned(a, order.arg)
    is_same = listed is not None and uncast(listed.experts, "reshape") is uncast(experts, "reshape")
    return is_same and listed is not None and listed.order is None and active.have_indices_before_others(listed.numbers)


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
        return _sorted_products(a, rows) if pairs.choices == 1 else None
    tokens, listed = gathered
    order = _order(listed)
    if order is not None:  # the model repeats each token K times before it sorts
        repeated = repeated_tokens(a, tokens, pairs, is_by_choice(a, order))
        return None if repeated is None else Arranged(repeated, order)
    order = order_of_tokens(a, listed, pairs)
    return None if order is None or tokens.shape[0] != pairs.tokens else Arranged(tokens, order)


def _sorted_products(a: Algebra, rows: Value) -> Arranged | None:
    """Read `rows` [T, H] = tokens[order] · numbers[order], as tokens that choose one expert are weighed before it.

    Returns tokens · numbers, in the order of the tokens, and the argsort; None if `rows` are anything else, or if the
    product is rounded otherwise than one in the dtype of `rows`.
    """
    product = rows.arg if is_rounding(rows) else rows
    for left, right in product.operands("mul"):
        tokens, numbers = sorted_by(exact(left)), sorted_by(exact(right).below("reshape"))
        if tokens is None or numbers is None or tokens.order is not numbers.order or right.shape != (rows.shape[0], 1):
            continue
        if tokens.value.dtype == numbers.value.dtype == rows.dtype and tokens.value.shape == rows.shape:
            weighed = a.mul(tokens.value, a.reshape(numbers.value, right.shape))
            return None if weighed is None else Arranged(weighed, tokens.order)
    return None


def order_of_tokens(a: Algebra, listed: Value, pairs: Pairs) -> Value | None:
    """Return the argsort `order` of the pairs if `listed` [R] is the token of each sorted row; else None.

    The token is order[i] // K, or order[i] % T where pairs are listed choice by choice.
    """
    if pairs.choices == 1:
        return _order(listed)
    for op, number, by_choice in (("floor_divide", pairs.choices, False), ("remainder", pairs.tokens, True)):
        if (listed.op, listed.attrs) == (op, (number,)):
            order = _order(listed.arg)
            is_token = order is not None and (pairs.tokens == 1 or is_by_choice(a, order) == by_choice)
            return order if is_token else None
    gathered = gathered_by(listed)
    order = None if gathered is None else _order(gathered[1])
    is_token = order is not None and gathered is not None and are_tokens(gathered[0], pairs, is_by_choice(a, order))
    return order if is_token else None


def are_tokens(x: Value, pairs: Pairs, by_choice: bool = False) -> bool:
    """Return True if `x` is the token of each listed pair: 0 (K times), 1 (K times), … T - 1.

    With `by_choice`, pairs are listed choice by choice: 0, 1, … T - 1, all K times.
    """
    x, is_one = uncast(x, "reshape"), pairs.tokens == 1  # of one token, both lists are the same
    return ((by_choice or is_one) and _tokens_by_choice(x, pairs)) or ((not by_choice or is_one) and _tokens(x, pairs))


def _tokens(x: Value, pairs: Pairs) -> bool:
    """Return True if `x` is 0 (K times), 1 (K times), … T - 1 of `pairs`."""
    if x.op == "floor_divide":
        return x.attrs == (pairs.choices,) and is_line(x.arg, pairs.tokens * pairs.choices)
    once = x.op == "expand" and (x.shape, x.arg.shape) == ((*pairs,), (pairs.tokens, 1))
    return once and is_line(uncast(x.arg, "reshape"), pairs.tokens)


def _tokens_by_choice(x: Value, pairs: Pairs) -> bool:
    """Return True if `x` is 0, 1, … T - 1, all K times, of `pairs`."""
    if x.op == "remainder":
        return x.attrs == (pairs.tokens,) and is_line(x.arg, pairs.tokens * pairs.choices)
    if x.op == "cat":
        return len(x.args) == pairs.choices and all(is_line(uncast(each, "reshape"), pairs.tokens) for each in x.args)
    once = x.op == "expand" and x.shape == (pairs.choices, pairs.tokens) and prod(x.arg.shape) == pairs.tokens
    return once and is_line(uncast(x.arg, "reshape"), pairs.tokens)


def _repeated(rows: Value, pairs: Pairs, by_choice: bool) -> Value | None:
    """Return the tensor [T, ..] whose rows `rows` [R, ..] repeats for the K experts of each token, by an expand, a
    concatenation or a gather.

    `pairs` has T and K; rows are listed `by_choice` or token by token. None for other rows.
    """
    inner, by_choice = rows.below("reshape"), by_choice or pairs.tokens == 1
    if pairs.choices == 1:
        return rows
    if by_choice and inner.op == "cat":
        is_repeated = inner.attrs == (0,) and len(inner.args) == pairs.choices and len(set(inner.args)) == 1
        return inner.arg if is_repeated else None
    if by_choice and inner.op == "expand":
        is_once = prod(inner.arg.shape) * pairs.choices == prod(rows.shape)
        is_repeated = is_once and inner.arg.shape[-2:] == (pairs.tokens, rows.shape[-1])
        if is_repeated and inner.shape[0] == pairs.choices:
            return inner.arg
    if inner.op == "expand" and inner.rank > 1 and inner.shape[-2:] == (pairs.choices, rows.shape[-1]):
        return inner.arg if inner.arg.shape == (*inner.shape[:-2], 1, rows.shape[-1]) else None
    gathered = gathered_by(inner)
    if gathered is None or not are_tokens(gathered[1], pairs, by_choice) or gathered[0].shape[0] != pairs.tokens:
        return None
    return gathered[0]


def repeated_tokens(a: Algebra, rows: Value, pairs: Pairs, by_choice: bool = False) -> Value | None:
    """Return the tokens [T, H] that `rows` [R, H] repeats K times each, in the order of listed pairs; or None.

    Pairs are listed token by token, or `by_choice`.
    """
    tokens = _repeated(rows, pairs, by_choice)
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
    lines, listed = a.reshape(taken.arg, (taken.arg.shape[0], width)), taken.args[1]
    source, experts = unsorted(listed), uncast(product["experts"], "reshape")
    if uncast(listed if source is None else source, "reshape") is experts:
        return lines if product["is_sorted"] == (source is not None) else None
    indices = listed_like(a, listed, product)
    return lines if indices is not None and Active(*product["active"]).are_indexed(indices) else None
