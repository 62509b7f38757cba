"""Sums over the choices of a token, each row times its weight, in the ways in which people write them."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Dim, Found, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from patterns.moe.experts.pairs import Arranged, Pairs, are_tokens, order_of_tokens, plain, put_back, sorted_by

RULE = "routed_experts"


class Total(NamedTuple):
    """Σ over the choices of a token of rows [R, H] times weights [T, K], perhaps added to `beside` [T, H]."""

    rows: Value
    weights: Value
    order: Value | None = None
    beside: Value | None = None


def total(a: Algebra, inner: Value, factor: float) -> Total | None:
    """What is summed over the choices of each token, in one of the ways in which sums are written."""
    if inner.op == "mean" and inner.attrs == (-2,) and factor == inner.arg.shape[-2]:
        return _of_products(a, inner.arg)
    if factor != 1:
        return None
    if inner.op == "matmul":
        return _of_matmul(a, *inner.args)
    if inner.op == "mul":
        return _of_one(a, inner)
    return _of_added(a, *inner.args) if inner.op == "add_rows" else None


def summed(graph: Graph) -> dict[tuple[Value, float], list[Value]]:
    """What all floats are before they are rounded or multiplied by a number, with those that are made of each."""
    found: dict[tuple[Value, float], list[Value]] = {}
    for value in list(graph.places):
        if is_float(value):
            below, factor = unscaled(plain(value))
            found.setdefault((plain(below), factor), []).append(value)
    return found


def as_sum(found: Total, several: list[Value]) -> Found:
    """The sum where it first stands in the dtype of its rows."""
    rows, dtype = found.rows, several[0].dtype
    for value in several:
        if value.dtype == rows.dtype:
            parts = {"rows": rows, "weights": found.weights, "order": found.order, "beside": found.beside}
            captures = {name: part for name, part in parts.items() if part is not None}
            return value, Reading("expert_sum", {**captures, "shape": value.shape})
    kept = f"the sum over experts is kept in {dtype}: the operator rounds it to {rows.dtype}, as rows are"
    return several[0], Miss(RULE, kept.replace("torch.", ""), at=(rows,))


def sum_of_products(a: Algebra, found: Total, product: Reading | None, several: list[Value]) -> Iterator[Found]:
    """A sum of rows that are a product; in int8 they have the dtype that they, or the sum, are rounded to."""
    dtype = next((each.dtype for each in several if each.dtype in _HALVES), None)
    if product is not None and product.op == "int8_expert_product" and dtype and found.rows.dtype not in _HALVES:
        rows = a.cast(found.rows, dtype)
        yield rows, Reading(product.op, {**product.captures, "dtype": dtype})
        found = found._replace(rows=rows)
    yield as_sum(found, several)


_HALVES = (torch.float16, torch.bfloat16)


def _of_products(a: Algebra, x: Value) -> Total | None:
    """Rows [.., K, H], each the product of what an expert gives and its weight, sorted before or not."""
    *lead, choices, width = x.shape
    pairs, inner = Pairs(prod(lead), choices), plain(x)
    found = put_back(inner)
    product = inner if found is None else plain(found.value)
    for rows, weights in (product.args, product.args[::-1]) if product.op == "mul" else ():
        if rows.shape != product.shape or weights.shape != (*rows.shape[:-1], 1) or rows.shape[-1] != width:
            continue
        if found is None:
            return _weighed(a, rows, weights, pairs)
        return _weighed_in_order(a, Arranged(rows, found.order), weights, pairs)
    return None


def _of_one(a: Algebra, product: Value) -> Total | None:
    """A row times its weight, of tokens that chose one expert."""
    for rows, weights in (product.args, product.args[::-1]):
        if rows.rank == 2 and rows.shape == product.shape and weights.shape == (rows.shape[0], 1):
            return _weighed(a, rows, weights, Pairs(rows.shape[0], 1))
    return None


def _weighed(a: Algebra, rows: Value, weights: Value, pairs: Pairs) -> Total:
    """Of weights as pairs are listed, and rows that may have been sorted."""
    found = put_back(plain(rows)) or Arranged(rows, None)
    return Total(_of_pairs(a, found.value), a.reshape(weights, (*pairs,)), found.order)


def _weighed_in_order(a: Algebra, rows: Arranged, weights: Value, pairs: Pairs) -> Total | None:
    """Of rows and weights that were sorted by one order."""
    flat = sorted_by(plain(weights))
    if flat is None or flat.order is not rows.order or prod(flat.value.shape) != pairs.tokens * pairs.choices:
        return None
    return Total(_of_pairs(a, rows.value), a.reshape(flat.value, (*pairs,)), rows.order)


def _of_pairs(a: Algebra, rows: Value) -> Value:
    """Rows [R, H] as they were before casts."""
    return a.reshape(plain(rows), (prod(rows.shape[:-1]), rows.shape[-1]))


def _of_matmul(a: Algebra, x: Value, y: Value) -> Total | None:
    """A row of weights [.., 1, K] by rows [.., K, H], or the same turned."""
    if x.shape[-2] == 1 and y.shape[:-2] == x.shape[:-2]:
        weights, rows = x, y
    elif y.shape[-1] == 1 and y.shape[:-2] == x.shape[:-2]:
        weights, rows = y, swapped(a, x)
    else:
        return None
    *lead, choices, _ = rows.shape
    return _weighed(a, rows, weights, Pairs(prod(lead), choices))


def _of_added(a: Algebra, base: Value, rows: Value, index: Value) -> Total | None:
    """Read rows that are added to those of their tokens in `base` [T, H]."""
    pairs = Pairs(base.shape[0], _times(rows.shape[0], base.shape[0]))
    if base.rank != 2 or pairs.choices is None:
        return None
    beside = None if (base.op, base.attrs) == ("full", (0,)) else base
    found = _of_added_products(a, rows, index, pairs)
    return None if found is None else found._replace(beside=beside)


def _of_added_products(a: Algebra, rows: Value, index: Value, pairs: Pairs) -> Total | None:
    order, product = order_of_tokens(uncast(index), pairs), plain(rows)
    for each, weights in (product.args, product.args[::-1]) if product.op == "mul" else ():
        if each.shape == product.shape and weights.shape == (*each.shape[:-1], 1):
            if order is not None:
                return _weighed_in_order(a, Arranged(each, order), weights, pairs)
            return _weighed(a, each, weights, pairs) if are_tokens(index, pairs) else None
    return None


def _times(whole: Dim, part: Dim) -> int | None:
    """How many times one size is another."""
    if isinstance(whole, int) and isinstance(part, int):
        return whole // part if part and whole % part == 0 else None
    found: Any = whole / part
    return int(found) if found.is_Integer else None
