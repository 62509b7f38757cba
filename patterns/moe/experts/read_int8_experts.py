"""Products of experts in whole numbers of 8 bits: (x · w[e]) · s[row] · c[e], and the same of rows and matrices that
were multiplied by their scales before.

They are read of products of rows with the matrices of their experts, whose operands hold int8 in another dtype.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch

from fusion.analysis.factored_products import scaled_int8
from fusion.analysis.rounding import exact
from fusion.graph import Algebra, Dim, Found, Graph, Miss, Reading, Value, broadcast
from fusion.graph.contractions import swapped
from patterns.moe.experts.pairs import Arranged, Pairs, expert_lines, repeated_tokens, sorted_tokens, sorts
from patterns.moe.experts.weighted_sums import RULE
from patterns.quant.scaled_products import NARROW_SUMS, SUMS, Product, Products, Read, int8_of, times_ones

_MOVED = ("index", "take", "expand", "reshape", "permute")
"""Ops that list rows, repeat them or see them otherwise."""


@dataclass(frozen=True)
class _Product(Product):
    """One of rows with the matrices [E, M, N] of their experts."""

    of: Reading = field(default_factory=lambda: Reading("expert_product", {}))

    @property
    def is_static(self) -> bool:
        """Whether its rows have one scale, not one each."""
        return self.channels is not None and self.tokens is None and self.one is not None


@dataclass(frozen=True)
class _Experts(Products):
    """Products of rows with the matrices of their experts, of those that are `given`."""

    given: Mapping[Value, Reading] = field(default_factory=dict[Value, Reading])

    def bare(self, value: Value) -> Read:
        """Of whole numbers, or of numbers that were multiplied by their scales before."""
        reading = self.given.get(value)
        if reading is None or reading.op != "expert_product" or "bias" in reading.captures:
            return None
        rows, matrices = reading.captures["x"], reading.captures["weight"]
        rows = self.a.reshape(rows, (*value.shape[:-1], rows.shape[-1]))
        x, weight = _int8_rows(self.a, rows), int8_of(self.a, matrices)
        if x is None or weight is None:
            return self._dequantised(reading, rows, matrices)
        return _Product(x, weight, odd="" if value.dtype in SUMS else NARROW_SUMS, of=reading)

    def _dequantised(self, reading: Reading, rows: Value, matrices: Value) -> Read:
        a = self.a
        left, right = scaled_int8(a, rows), scaled_int8(a, swapped(a, matrices))
        if left is None or right is None or right.rows is None or left.ones or right.ones:
            return None
        channels, number = a.reshape(right.rows, right.rows.shape[:2]), left.number * right.number
        return _Product(left.base, swapped(a, right.base), left.rows, channels, factor=number, of=reading)

    def channels(self, found: Product, factor: Value, value: Value) -> Value | None:
        """The line of each row's expert."""
        assert isinstance(found, _Product)
        inner, width = exact(factor), value.shape[-1]
        lines = expert_lines(self.a, inner, width, found.of.captures) if factor.shape[-1:] == (width,) else None
        return None if lines is None else self.a.cast(lines, factor.dtype)

    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """One of each row."""
        shape = (*rows, 1)
        one = prod(factor.shape) == 1 != prod(rows)
        return self.a.expand(factor, shape) if broadcast(factor.shape, shape) == shape and not one else None


def _int8_rows(a: Algebra, x: Value) -> Value | None:
    """The whole numbers of 8 bits that rows hold in another dtype, perhaps listed or repeated in that."""
    below = _int8_rows(a, x.arg) if x.op in _MOVED else None
    if below is None:
        return int8_of(a, x)
    listed = x.op in ("index", "take")
    return a.make(x.op, (below, *x.args[1:]), x.attrs, x.shape, below.dtype) if listed else a.seen_as(below, x)


def int8_products(graph: Graph, given: Mapping[Value, Reading]) -> Iterator[Found]:
    """All products of int8 with both scales, and the rows of tokens that they take; why others are none."""
    products, static = _Experts(graph.algebra, given=given), list[Reading]()
    for value in list(graph.owners) if given and torch.int8 in graph.dtypes else ():
        found = products.of(value)
        if isinstance(found, str):
            yield value, Miss(RULE, found)
        if isinstance(found, _Product) and found.is_static and not any(found.of is each for each in static):
            static.append(found.of)
            yield value, Miss(RULE, _STATIC)
        if isinstance(found, _Product) and found.complete:
            made = _reading(graph, found, value)
            yield value, made
            if isinstance(made, Reading):
                yield graph.algebra.reshape(value, (prod(value.shape[:-1]), value.shape[-1])), made
                yield from _routed(graph, made)


def _reading(graph: Graph, found: _Product, value: Value) -> Reading | Miss:
    if found.odd or found.bias is not None or found.channels is None or found.tokens is None:
        return Miss(RULE, found.odd or _BIASED)
    a, ones = graph.algebra, [] if found.one is None else [found.one]
    channels, tokens = times_ones(a, found.channels, ones), a.scale(found.tokens, found.factor)
    said = {name: found.of.captures[name] for name in ("experts", "is_sorted")}
    operands = {"x": found.x, "tokens": tokens, "weight": found.weight, "scale": channels}
    fixed = graph.is_fixed(found.weight, channels)
    return Reading("int8_expert_product", {**operands, **said, "dtype": value.dtype, "is_parameter_only": fixed})


_BIASED = "experts add a bias to products of int8, which are computed without"


_STATIC = "experts multiply rows in int8 of one static scale: only rows with a scale of each are read"


def _routed(graph: Graph, product: Reading) -> Iterator[Found]:
    """The rows of tokens, in int8 or before, and their scales."""
    captures = product.captures
    pairs, before = Pairs(*captures["experts"].shape), graph.readings.one(captures["x"], "quantise")
    for rows in (captures["x"], captures["tokens"], *(() if before is None else (before.captures["x"],))):
        found = _arranged(graph.algebra, rows, pairs, captures)
        if found is not None:
            yield rows, routed_rows(found, captures["experts"])


def _arranged(a: Algebra, rows: Value, pairs: Pairs, captures: Mapping[str, Any]) -> Arranged | None:
    if not captures["is_sorted"]:
        tokens = repeated_tokens(a, rows, pairs)
        return None if tokens is None else Arranged(tokens, None)
    found = sorted_tokens(a, rows, pairs)
    return found if found is not None and found.order is not None and sorts(found.order, captures["experts"]) else None


def routed_rows(tokens: Arranged, experts: Value) -> Reading:
    """That rows are those of these tokens, one for each expert that they chose."""
    said = {"tokens": tokens.value, "experts": experts}
    return Reading("routed_rows", said if tokens.order is None else {**said, "order": tokens.order})
