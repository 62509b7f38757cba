"""Weighted sums y[t] = Σ_k weights[t, k] · rows[t, k] over the K experts of a token, in all usual spellings."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.dtypes import elements_below
from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Annotation, Dim, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from patterns.moe.experts.pairs import Arranged, Pairs, are_tokens, order_of_tokens, put_back, sorted_by

RULE = "routed_experts"


class Total(NamedTuple):
    """The operands of y[t] = Σ_k weights[t, k] · (row of pair t · K + k) + addend[t].

    `rows` are [R, H], sorted by `order` [R] or listed token by token; `weights` [T, K]; `addend` [T, H] or None.
    """

    rows: Value
    weights: Value
    order: Value | None = None
    addend: Value | None = None


def total(a: Algebra, inner: Value, factor: float) -> Total | None:
    """Read `inner` · `factor` as a weighted sum over the K experts of each token; None if it is none.

    Spellings: a sum over dim -2 of products, a matmul with weights [.., 1, K], an index_add, or one product if K = 1.
    """
    if inner.op == "mean" and inner.attrs == (-2,) and factor == inner.arg.shape[-2]:
        return _summed_products(a, inner.arg)
    if factor != 1:
        return None
    if inner.op == "matmul":
        return _matmul(a, *inner.args)
    if inner.op == "mul":
        return _one_product(a, inner)
    return _index_add(a, *inner.args) if inner.op == "add_rows" else None


def summed(graph: Graph) -> dict[tuple[Value, float], list[Value]]:
    """Map each (x, factor) to the values of the graph that are x · factor, below reshapes and casts between floats."""
    groups: dict[tuple[Value, float], list[Value]] = {}
    for value in list(graph.places):
        if is_float(value):
            below, factor = unscaled(elements_below(value))
            groups.setdefault((elements_below(below), factor), []).append(value)
    return groups


def as_sum(weighted: Total, several: list[Value]) -> Annotation:
    """Return the first of `several`, equal values, that has the dtype of the rows, with its expert_sum reading.

    A `Miss` if none has that dtype: operators return no other. `weighted` are the operands of the sum.
    """
    rows, dtype = weighted.rows, several[0].dtype
    for value in several:
        if value.dtype == rows.dtype:
            parts = {"rows": rows, "weights": weighted.weights, "order": weighted.order, "addend": weighted.addend}
            captures = {name: part for name, part in parts.items() if part is not None}
            return value, Reading("expert_sum", {**captures, "shape": value.shape})
    reason = (
        f"sum over experts: it stays {dtype}; npu_moe_finalize_routing rounds it to {rows.dtype} and requires "
        f"that; cast the sum to {rows.dtype}"
    )
    return several[0], Miss(RULE, reason.replace("torch.", ""), at=(rows,))


def sum_of_products(a: Algebra, weighted: Total, product: Reading | None, several: list[Value]) -> Iterator[Annotation]:
    """Yield the reading of the values `several` as the expert_sum of the rows of `product`, with the operands
    `weighted`.

    Rows of an int8 product in float32 are cast to the 16-bit dtype of `several`, as operators return no other dtype;
    the cast is yielded as a product too.
    """
    dtype = next((each.dtype for each in several if each.dtype in _HALVES), None)
    if product is not None and product.op == "int8_expert_product" and dtype and weighted.rows.dtype not in _HALVES:
        rows = a.cast(weighted.rows, dtype)
        yield rows, Reading(product.op, {**product.captures, "dtype": dtype})
        weighted = weighted._replace(rows=rows)
    yield as_sum(weighted, several)


_HALVES = (torch.float16, torch.bfloat16)


def _summed_products(a: Algebra, x: Value) -> Total | None:
    """Read `x` [.., K, H], which is summed over dim -2, as rows times weights; None if it is no such product.

    The rows may be multiplied in the order of tokens, or sorted by expert and put back afterwards.
    """
    *lead, choices, width = x.shape
    pairs, inner = Pairs(prod(lead), choices), elements_below(x)
    unsorted = put_back(inner)
    product = inner if unsorted is None else elements_below(unsorted.value)
    for rows, weights in (product.args, product.args[::-1]) if product.op == "mul" else ():
        if rows.shape != product.shape or weights.shape != (*rows.shape[:-1], 1) or rows.shape[-1] != width:
            continue
        if unsorted is None:
            return _weighed(a, rows, weights, pairs)
        return _weighed_in_order(a, Arranged(rows, unsorted.order), weights, pairs)
    return None


def _one_product(a: Algebra, product: Value) -> Total | None:
    """Read `product` = rows [T, H] · weights [T, 1] as a sum over the one expert of each token; None if it is no such
    product.
    """
    for rows, weights in (product.args, product.args[::-1]):
        if rows.rank == 2 and rows.shape == product.shape and weights.shape == (rows.shape[0], 1):
            return _weighed(a, rows, weights, Pairs(rows.shape[0], 1))
    return None


def _weighed(a: Algebra, rows: Value, weights: Value, pairs: Pairs) -> Total:
    """Return the operands of the sum of `rows` · `weights`, both in the order of `pairs`.

    Rows that are sorted by expert and put back are taken as they were sorted, with their order.
    """
    listed = put_back(elements_below(rows)) or Arranged(rows, None)
    return Total(_flat_rows(a, listed.value), a.reshape(weights, (*pairs,)), listed.order)


def _weighed_in_order(a: Algebra, rows: Arranged, weights: Value, pairs: Pairs) -> Total | None:
    """Return the sum over `pairs` of sorted `rows` times `weights` sorted by the same order; None for another order."""
    flat = sorted_by(elements_below(weights))
    if flat is None or flat.order is not rows.order or prod(flat.value.shape) != pairs.tokens * pairs.choices:
        return None
    return Total(_flat_rows(a, rows.value), a.reshape(flat.value, (*pairs,)), rows.order)


def _flat_rows(a: Algebra, rows: Value) -> Value:
    """Reshape `rows` to [R, H], without the casts between floats on them."""
    return a.reshape(elements_below(rows), (prod(rows.shape[:-1]), rows.shape[-1]))


def _matmul(a: Algebra, x: Value, y: Value) -> Total | None:
    """Read the matmul of `x` and `y` as weights [.., 1, K] @ rows [.., K, H], or rows [.., H, K] @ weights [.., K, 1].

    None if it is neither.
    """
    if x.shape[-2] == 1 and y.shape[:-2] == x.shape[:-2]:
        weights, rows = x, y
    elif y.shape[-1] == 1 and y.shape[:-2] == x.shape[:-2]:
        weights, rows = y, swapped(a, x)
    else:
        return None
    *lead, choices, _ = rows.shape
    return _weighed(a, rows, weights, Pairs(prod(lead), choices))


def _index_add(a: Algebra, base: Value, rows: Value, index: Value) -> Total | None:
    """Read the addition of `rows` [R, H] to the rows `index` [R] of `base` [T, H] as a weighted sum over experts.

    `index` is the token of each row, and `base` an addend unless it is 0. None if it is no such sum.
    """
    pairs = Pairs(base.shape[0], _ratio(rows.shape[0], base.shape[0]))
    if base.rank != 2 or pairs.choices is None:
        return None
    addend = None if (base.op, base.attrs) == ("full", (0,)) else base
    products = _products_of_tokens(a, rows, index, pairs)
    return None if products is None else products._replace(addend=addend)


def _products_of_tokens(a: Algebra, rows: Value, index: Value, pairs: Pairs) -> Total | None:
    """Read `rows` as rows times weights, in the order of the pairs whose tokens are `index`: the operands of the sum.

    None if they are anything else.
    """
    order, product = order_of_tokens(uncast(index), pairs), elements_below(rows)
    for each, weights in (product.args, product.args[::-1]) if product.op == "mul" else ():
        if each.shape == product.shape and weights.shape == (*each.shape[:-1], 1):
            if order is not None:
                return _weighed_in_order(a, Arranged(each, order), weights, pairs)
            return _weighed(a, each, weights, pairs) if are_tokens(index, pairs) else None
    return None


def _ratio(size: Dim, part: Dim) -> int | None:
    """Return `size` / `part` if this is an integer, otherwise None."""
    if isinstance(size, int) and isinstance(part, int):
        return size // part if part and size % part == 0 else None
    ratio: Any = size / part
    return int(ratio) if ratio.is_Integer else None
