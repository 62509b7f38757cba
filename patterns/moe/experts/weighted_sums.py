"""Weighted sums y[t] = Σ_k weights[t, k] · rows[t, k] over the K experts of a token, in all usual spellings."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, NamedTuple

import torch

from fusion.analysis.dtypes import elements_below
from fusion.analysis.intervals import uncast
from fusion.analysis.rounding import exact, is_float, unscaled
from fusion.graph import Algebra, Annotation, Dim, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from patterns.moe.experts.assigned import is_by_choice
from patterns.moe.experts.expert_lists import unmasked
from patterns.moe.experts.token_expert_pairs import (
    Arranged,
    Pairs,
    are_tokens,
    order_of_tokens,
    put_back,
    sorted_by,
)

RULE = "routed_experts"


class Total(NamedTuple):
    """The operands of y[t] = Σ_k weights[t, k] · (row of the pair (t, k)) + addend[t].

    `rows` are [R, H], sorted by `order` [R] or listed token by token; `weights` [T, K]; `addend` [T, H] or None.
    Rows count as 0 where `mask` [R, 1], if there is one, is False, in the order of the rows.
    """

    rows: Value
    weights: Value
    order: Value | None = None
    addend: Value | None = None
    mask: Value | None = None


class Unweighted(NamedTuple):
    """The operands of y[t] = Σ_k (row of the pair (t, k)) + addend[t], as those of `Total`."""

    rows: Value
    order: Value | None = None
    addend: Value | None = None


def total(a: Algebra, inner: Value, factor: float) -> Total | None:
    """Read `inner` · `factor` as a weighted sum over the K experts of each token; None if it is none.

    Spellings: a sum over dim -2 of products, a matmul with weights [.., 1, K], an index_add, or one product if K = 1.
    """
    if inner.op == "mean" and inner.attrs in ((-2,), (-3,)) and factor == inner.arg.shape[inner.attrs[0]]:
        return _summed_products(a, inner.arg, by_choice=inner.attrs == (-3,))
    if factor != 1:
        return None
    if inner.op == "matmul":
        return _matmul(a, *inner.args)
    if inner.op == "mul":
        return _one_product(a, inner)
    return _index_add(a, *inner.args) if inner.op == "add_rows" else None


def unweighted(a: Algebra, inner: Value, factor: float) -> Unweighted | None:
    """Read `inner` · `factor` as a sum of rows over the K experts of each token, as `total` does; else None."""
    if inner.op == "mean" and inner.attrs in ((-2,), (-3,)) and factor == inner.arg.shape[inner.attrs[0]]:
        pairs, by_choice = _pairs_of(inner.arg, inner.attrs == (-3,)), inner.attrs == (-3,)
        return None if pairs is None else _listed_rows(a, inner.arg, pairs, by_choice)
    if inner.op == "add_rows" and factor == 1:
        base, rows, index = inner.args
        pairs = Pairs(base.shape[0], _ratio(rows.shape[0], base.shape[0]))
        order = order_of_tokens(a, uncast(index), pairs) if base.rank == 2 and pairs.choices is not None else None
        return None if order is None else Unweighted(_flat_rows(a, rows), order, _addend(base))
    listed = put_back(inner) if factor == 1 and inner.rank == 2 else None
    return None if listed is None else Unweighted(_flat_rows(a, listed.value), listed.order)


def summed(graph: Graph) -> dict[tuple[Value, float], list[Value]]:
    """Map each (x, factor) to the values of the graph that are x · factor, below reshapes and casts between floats."""
    groups: dict[tuple[Value, float], list[Value]] = {}
    for value in list(graph.places):
        if is_float(value):
            below, factor = unscaled(elements_below(value))
            groups.setdefault((elements_below(below), factor), []).append(value)
    return groups


def as_sum(weighted: Total | Unweighted, active: tuple[Any, ...], several: list[Value]) -> Annotation:
    """Return the first of `several`, equal values, that has the dtype of the rows, with its expert_sum reading.

    A `Miss` if none has that dtype: operators return no other. `weighted` are the operands of the sum, `active` the
    experts with matrices.
    """
    rows, dtype = weighted.rows, several[0].dtype
    for value in several:
        if value.dtype == rows.dtype:
            captures = {name: part for name, part in weighted._asdict().items() if part is not None and name != "mask"}
            captures["active"] = active
            return value, Reading("expert_sum", {**captures, "shape": value.shape})
    reason = (
        f"sum over experts: it stays {dtype}; npu_moe_finalize_routing rounds it to {rows.dtype} and requires "
        f"that; cast the sum to {rows.dtype}"
    )
    return several[0], Miss(RULE, reason.replace("torch.", ""), at=(rows,))


def sum_of_products(
    a: Algebra, weighted: Total | Unweighted, product: Reading | None, active: tuple[Any, ...], several: list[Value]
) -> Iterator[Annotation]:
    """Yield the reading of the values `several` as the expert_sum of the rows of `product`, with the operands
    `weighted`, of the experts `active`.

    Rows of an int8 product in float32 are cast to the 16-bit dtype of `several`, as operators return no other dtype;
    the cast is yielded as a product too.
    """
    dtype = next((each.dtype for each in several if each.dtype in _HALVES), None)
    if product is not None and product.op == "int8_expert_product" and dtype and weighted.rows.dtype not in _HALVES:
        rows = a.cast(weighted.rows, dtype)
        yield rows, Reading(product.op, {**product.captures, "dtype": dtype})
        weighted = weighted._replace(rows=rows)
    yield as_sum(weighted, active, several)


_HALVES = (torch.float16, torch.bfloat16)


def _summed_products(a: Algebra, x: Value, by_choice: bool) -> Total | None:
    """Read `x` [.., K, H], which is summed over dim -2, as rows times weights; None if it is no such product.

    With `by_choice` it is [K, T, H], summed over dim 0. The rows may be multiplied in the order of tokens, or sorted by
    expert and put back afterwards.
    """
    pairs, inner, width = _pairs_of(x, by_choice), elements_below(x), x.shape[-1]
    if pairs is None:
        return None
    unsorted = put_back(inner)
    inner, mask = unmasked(a, inner if unsorted is None else elements_below(unsorted.value))
    product = elements_below(inner)
    for rows, weights in product.operands("mul"):
        if rows.shape != product.shape or weights.shape != (*rows.shape[:-1], 1) or rows.shape[-1] != width:
            continue
        if unsorted is None:
            return _weighed(a, rows, by_token(a, weights, pairs, by_choice), pairs, by_choice)
        order = unsorted.order
        if order is not None and (1 in pairs or by_choice == is_by_choice(a, order)):
            weighed = _weighed_in_order(a, Arranged(rows, order), weights, pairs)
            return weighed and weighed._replace(mask=mask)
    return None


def _pairs_of(x: Value, by_choice: bool) -> Pairs | None:
    """Return the pairs whose rows are `x` [.., K, H], or [K, T, H] if `by_choice`; None for other dims."""
    if by_choice:
        return Pairs(x.shape[1], x.shape[0]) if x.rank == 3 else None
    return Pairs(prod(x.shape[:-2]), x.shape[-2])


def by_token(a: Algebra, numbers: Value, pairs: Pairs, by_choice: bool) -> Value:
    """Reshape `numbers` of all `pairs`, listed token by token or `by_choice`, to [T, K]."""
    tokens, choices = pairs
    return a.permute(a.reshape(numbers, (choices, tokens)), (1, 0)) if by_choice else a.reshape(numbers, (*pairs,))


def _one_product(a: Algebra, product: Value) -> Total | None:
    """Read `product` = rows [T, H] · weights [T, 1] as a sum over the one expert of each token; None if it is no such
    product.
    """
    for rows, weights in product.operands():
        if rows.rank == 2 and rows.shape == product.shape and weights.shape == (rows.shape[0], 1):
            pairs = Pairs(rows.shape[0], 1)
            return _weighed(a, rows, a.reshape(weights, (*pairs,)), pairs)
    return None


def _weighed(a: Algebra, rows: Value, weights: Value, pairs: Pairs, by_choice: bool = False) -> Total | None:
    """Return the operands of the sum of `rows` times `weights` [T, K], rows in the order of `pairs`, or [K, T, H] if
    `by_choice`; None for rows that `_listed_rows` does not read.
    """
    listed = _listed_rows(a, rows, pairs, by_choice)
    return None if listed is None else Total(listed.rows, weights, listed.order)


def _listed_rows(a: Algebra, rows: Value, pairs: Pairs, by_choice: bool) -> Unweighted | None:
    """Return `rows` in the order of `pairs`, or [K, T, H] if `by_choice`, as [R, H].

    Rows that are sorted by expert and put back are taken as they were sorted, with their order. None for rows listed by
    choice that are not sorted.
    """
    below = elements_below(rows)
    is_swapped = below.op == "permute" and below.attrs == (1, 0, 2)
    listed = put_back(elements_below(below.arg) if is_swapped else below)
    if listed is None or listed.order is None:
        return None if by_choice and 1 not in pairs else Unweighted(_flat_rows(a, rows))
    is_arranged = 1 in pairs or is_by_choice(a, listed.order) == (by_choice != is_swapped)
    return Unweighted(_flat_rows(a, listed.value), listed.order) if is_arranged else None


def _weighed_in_order(a: Algebra, rows: Arranged, weights: Value, pairs: Pairs) -> Total | None:
    """Return the sum over `pairs` of sorted `rows` times `weights` sorted by the same order; None for another order."""
    flat, order = sorted_by(elements_below(weights)), rows.order
    if flat is None or order is None or flat.order is not order:
        return None
    if prod(flat.value.shape) != pairs.tokens * pairs.choices:
        return None
    listed = by_token(a, flat.value, pairs, is_by_choice(a, order))
    return Total(_flat_rows(a, rows.value), listed, order)


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
    pairs = Pairs(prod(lead), choices)
    return _weighed(a, rows, a.reshape(weights, (*pairs,)), pairs)


def _index_add(a: Algebra, base: Value, rows: Value, index: Value) -> Total | None:
    """Read the addition of `rows` [R, H] to the rows `index` [R] of `base` [T, H] as a weighted sum over experts.

    `index` is the token of each row, and `base` an addend unless it is 0. None if it is no such sum.
    """
    pairs = Pairs(base.shape[0], _ratio(rows.shape[0], base.shape[0]))
    if base.rank != 2 or pairs.choices is None:
        return None
    products = _products_of_tokens(a, rows, index, pairs)
    return None if products is None else products._replace(addend=_addend(base))


def _addend(base: Value) -> Value | None:
    """Return the tensor `base` to which rows are added; None if it is 0."""
    return None if (base.op, base.attrs) == ("full", (0,)) else base


def _products_of_tokens(a: Algebra, rows: Value, index: Value, pairs: Pairs) -> Total | None:
    """Read `rows` as rows times weights, in the order of the pairs whose tokens are `index`: the operands of the sum.

    None if they are anything else.
    """
    order, (inner, mask) = order_of_tokens(a, uncast(index), pairs), unmasked(a, elements_below(rows))
    product = elements_below(inner)
    for each, weights in product.operands("mul"):
        if each.shape == product.shape and weights.shape == (*each.shape[:-1], 1):
            if order is not None:
                weighed = _weighed_in_order(a, Arranged(each, order), weights, pairs)
                return weighed and weighed._replace(mask=mask)
            for by_choice in (False, True):
                if mask is None and are_tokens(index, pairs, by_choice):
                    return _weighed(a, each, by_token(a, weights, pairs, by_choice), pairs, by_choice)
    return None


def _ratio(size: Dim, part: Dim) -> int | None:
    """Return `size` / `part` if this is an integer, otherwise None."""
    if isinstance(size, int) and isinstance(part, int):
        return size // part if part and size % part == 0 else None
    ratio: Any = size / part
    return int(ratio) if ratio.is_Integer else None


def weights_before(a: Algebra, product: Reading, order: Value | None) -> tuple[Value, Value] | None:
    """Split the rows of `product`, x = h · w with a weight of each row, into h and the weights [T, K]; or None.

    Weights are sorted by `order`, or listed token by token if it is None.
    """
    x, pairs = product.captures["x"], Pairs(*product.captures["experts"].shape)
    below = elements_below(x)
    for rows, weights in below.operands("mul"):
        if rows.shape != below.shape or weights.shape != (*rows.shape[:-1], 1) or rows.shape[-1] == 1:
            continue
        hidden = a.reshape(a.cast(exact(rows), x.dtype), x.shape)
        if order is None:
            return hidden, a.reshape(weights, (*pairs,))
        flat = sorted_by(elements_below(weights))
        if flat is not None and flat.order is order and prod(flat.value.shape) == pairs.tokens * pairs.choices:
            return hidden, by_token(a, flat.value, pairs, is_by_choice(a, order))
    return None
