"""int8_expert_product, read from expert_product: (x · w[e]) · tokens · scale[e], rows x and matrices w in int8.

x and w are int8 cast to a wider dtype. Scales are factors of the product, or of x and w, which are then dequantised
before the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fusion.analysis.factored_products import scaled_int8
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Annotation, Dim, Graph, Miss, Reading, Value, broadcast
from fusion.graph.contractions import swapped
from patterns.moe.experts.expert_lists import Active
from patterns.moe.experts.token_expert_pairs import (
    Arranged,
    Pairs,
    expert_vectors,
    repeated_tokens,
    sorted_tokens,
    sorts,
)
from patterns.moe.experts.weighted_sums import RULE
from patterns.quant.product_scales import NARROW_SUMS, SUMS, Product, Products, Read, int8_of, times_ones

_MOVED = ("index", "take", "expand", "reshape", "permute")
"""Gathers and views of rows."""


@dataclass(frozen=True)
class _Product(Product):
    """An int8 product of rows with the matrices [E, M, N] of their experts; `reading` is its expert_product."""

    reading: Reading = field(default_factory=lambda: Reading("expert_product", {}))

    @property
    def is_static(self) -> bool:
        """Return True if all rows have one scale (static quantisation), not one each."""
        return self.channels is not None and self.tokens is None and self.one is not None


@dataclass(frozen=True)
class _Experts(Products):
    """The int8 products among the expert_product readings `given`."""

    given: Mapping[Value, Reading] = field(default_factory=dict[Value, Reading])

    def bare(self, value: Value) -> Read:
        """Read `value` as a product with int8 operands, which have no scales, or are dequantised before the product.

        None if `value` is no expert_product; a `Miss` if its scales do not fit.
        """
        reading = self.given.get(value)
        if reading is None or reading.op != "expert_product" or "bias" in reading.captures:
            return None
        rows, matrices = reading.captures["x"], reading.captures["weight"]
        rows = self.a.reshape(rows, (*value.shape[:-1], rows.shape[-1]))
        x, weight = _int8_rows(self.a, rows), int8_of(self.a, matrices)
        if x is None or weight is None:
            return self._dequantised(reading, rows, matrices)
        return _Product(x, weight, reason="" if value.dtype in SUMS else NARROW_SUMS, reading=reading)

    def _dequantised(self, reading: Reading, rows: Value, matrices: Value) -> Read:
        """Read the expert_product `reading` of `rows` and `matrices`, each int8 times scales, as an int8 product with
        these scales.

        None if one of them is not dequantised from int8 so.
        """
        a = self.a
        left, right = scaled_int8(a, rows), scaled_int8(a, swapped(a, matrices))
        if left is None or right is None or right.rows is None or left.ones or right.ones:
            return None
        channels, number = a.reshape(right.rows, right.rows.shape[:2]), left.number * right.number
        return _Product(left.base, swapped(a, right.base), left.rows, channels, factor=number, reading=reading)

    def channels(self, product: Product, factor: Value, value: Value) -> Value | None:
        """Return scales [E, N] if `factor` [.., N] has, for each row, those of its expert; else None.

        `product` has the experts of the rows, and `value` the shape [.., N] of the scaled product.
        """
        assert isinstance(product, _Product)
        inner, width = exact(factor), value.shape[-1]
        lines = (
            expert_vectors(self.a, inner, width, product.reading.captures) if factor.shape[-1:] == (width,) else None
        )
        return None if lines is None else self.a.cast(lines, factor.dtype)

    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """Expand `factor` to a scale of each row [*rows, 1]; None if it is one number, or has other dims."""
        shape = (*rows, 1)
        is_one = prod(factor.shape) == 1 != prod(rows)
        return self.a.expand(factor, shape) if broadcast(factor.shape, shape) == shape and not is_one else None


def _int8_rows(a: Algebra, x: Value) -> Value | None:
    """Return the int8 tensor of which `x` is a cast, gathered, expanded or viewed before or after the cast; or None."""
    below = _int8_rows(a, x.arg) if x.op in _MOVED else None
    if below is None:
        return int8_of(a, x)
    listed = x.op in ("index", "take")
    return a.make(x.op, (below, *x.args[1:]), x.attrs, x.shape, below.dtype) if listed else a.seen_as(below, x)


def int8_products(graph: Graph, given: Mapping[Value, Reading]) -> Iterator[Annotation]:
    """Read every int8_expert_product among `given`, and its routed_rows; a miss where scales or a bias do not fit."""
    products, static = _Experts(graph.algebra, given=given), list[Reading]()
    for value in list(graph.owners) if given and torch.int8 in graph.dtypes else ():
        product = products.of(value)
        if isinstance(product, str):
            yield value, Miss(RULE, product)
        if isinstance(product, _Product) and product.is_static and not any(product.reading is each for each in static):
            static.append(product.reading)
            yield value, Miss(RULE, _STATIC)
        if isinstance(product, _Product) and product.complete:
            reading = _reading(graph, product, value)
            yield value, reading
            if isinstance(reading, Reading):
                yield graph.algebra.reshape(value, (prod(value.shape[:-1]), value.shape[-1])), reading
                yield from _routed(graph, reading)


def _reading(graph: Graph, product: _Product, value: Value) -> Reading | Miss:
    """Return the int8_expert_product reading of `value`, which is `product` with all scales; a miss for a bias."""
    if product.reason or product.bias is not None or product.channels is None or product.tokens is None:
        return Miss(RULE, product.reason or _BIASED)
    a, ones = graph.algebra, [] if product.one is None else [product.one]
    channels, tokens = times_ones(a, product.channels, ones), a.scale(product.tokens, product.factor)
    routing = {name: product.reading.captures[name] for name in ("experts", "active", "is_sorted")}
    operands = {"x": product.x, "tokens": tokens, "weight": product.weight, "scale": channels}
    fixed = graph.is_fixed(product.weight, channels)
    return Reading("int8_expert_product", {**operands, **routing, "dtype": value.dtype, "is_parameter_only": fixed})


_BIASED = (
    "bias: experts add one to products of int8; npu_grouped_matmul requires none beside int8; fold it into the "
    "next layer, or leave it out"
)


_STATIC = (
    "scale of rows: experts multiply int8 of one static scale; npu_grouped_matmul requires a scale of each row "
    "here; quantise rows by token"
)


def _routed(graph: Graph, product: Reading) -> Iterator[Annotation]:
    """Read the int8 rows of `product`, the rows that they are quantised from, and their scales as routed_rows."""
    captures = product.captures
    pairs, before = Pairs(*captures["experts"].shape), graph.readings.one(captures["x"], "quantise")
    for rows in (captures["x"], captures["tokens"], *(() if before is None else (before.captures["x"],))):
        tokens = _arranged(graph.algebra, rows, pairs, captures)
        if tokens is not None:
            yield rows, routed_rows(tokens, captures["experts"])


def _arranged(a: Algebra, rows: Value, pairs: Pairs, captures: Mapping[str, Any]) -> Arranged | None:
    """Read `rows` as tokens repeated for the experts of `pairs`, in the order of the product with `captures`;
    or None.
    """
    if not captures["is_sorted"]:
        tokens = repeated_tokens(a, rows, pairs)
        return None if tokens is None else Arranged(tokens, None)
    taken, active = sorted_tokens(a, rows, pairs), Active(*captures["active"])
    order = None if taken is None else taken.order
    return taken if order is not None and sorts(a, order, captures["experts"], active) else None


def routed_rows(tokens: Arranged, experts: Value) -> Reading:
    """Make the reading of rows that repeat `tokens` for their `experts` [T, K], listed or sorted by its order."""
    captures = {"tokens": tokens.value, "experts": experts}
    return Reading("routed_rows", captures if tokens.order is None else {**captures, "order": tokens.order})
