"""Int8 products with their scales: (x · wᵀ) · s[token] · c[channel] (+ bias).

The sums may be computed in int32 (`_int_mm` or a product in int32), or in float32 or bfloat16, which round them; or of
operands that were multiplied by their scales before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from fusion import reader, word
from fusion.analysis.factored_products import scaled_int8
from fusion.analysis.nodes import are_read_by, is_computed
from fusion.analysis.rounding import exact, unscaled
from fusion.graph import Algebra, Dim, Found, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import proof
from patterns.quant.scaled_products import NARROW_SUMS, SUMS, Product, Products, Read, int8_of, times_one, times_ones

_SEVERAL = "rows are multiplied by {number} int8 weights in one product, where the operator takes one"

INT8_MATMUL = word(
    "int8_matmul",
    "(x · weightᵀ) · scale · tokens (+ bias), sums in int32",
    x="[*B, K]", weight="[N, K]", scale="[N]", tokens="[*B, 1]", bias="[N]", dtype="of the result",
    is_parameter_only="whether the weight is computed from Parameters alone",
)  # fmt: skip


@dataclass(frozen=True)
class Layers(Products):
    """Products of rows with one matrix."""

    def bare(self, value: Value) -> Read:
        """Of whole numbers, or of numbers that were multiplied by their scales before."""
        return _bare(self.a, value) if value.op == "matmul" else None

    def channels(self, found: Product, factor: Value, value: Value) -> Value | None:
        """One line for all rows."""
        line = (*(1,) * (value.rank - 1), value.shape[-1])
        return self.a.reshape(factor, line[-1:]) if _padded(factor, value.rank) == line else None

    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """One of each row."""
        return self.a.reshape(factor, (*rows, 1)) if _padded(factor, len(rows) + 1) == (*rows, 1) else None


def _padded(factor: Value, rank: int) -> tuple[Dim, ...]:
    return (*(1,) * (rank - factor.rank), *factor.shape)


def _bare(a: Algebra, value: Value) -> Read:
    x, y = (int8_of(a, each) for each in value.args)
    if math.prod(value.args[1].shape[:-2]) != 1:  # of batches on both sides it is no layer
        several = x is not None and y is not None and math.prod(x.below("expand").shape[:-2]) == 1
        return _SEVERAL.format(number=math.prod(value.shape[:-2])) if several else None
    if x is None or y is None:
        return _dequantised(a, *value.args)
    odd = "" if value.dtype in SUMS else NARROW_SUMS
    return Product(x, swapped(a, a.reshape(y, y.shape[-2:])), odd=odd)


def _dequantised(a: Algebra, x: Value, y: Value) -> Product | None:
    """A product of whole numbers each of which was multiplied by its scale first: its sums end nowhere."""
    left, right = scaled_int8(a, x), scaled_int8(a, swapped(a, a.reshape(y, y.shape[-2:])))
    if left is None or right is None or right.rows is None or right.ones:
        return None
    channels = a.reshape(right.rows, right.rows.shape[:1])
    one = reduce(partial(times_one, a), left.ones) if left.ones else None
    return Product(left.base, right.base, left.rows, channels, one, factor=left.number * right.number)


@proof
def _reading(graph: Graph, found: Product, value: Value) -> Reading | str | None:
    if found.odd:
        return found.odd
    if found.channels is None:
        return "there is no scale for each output channel"
    a, tokens, ones = graph.algebra, found.tokens, [] if found.one is None else [found.one]
    if tokens is not None and math.prod(tokens.shape) == 1 and graph.is_fixed(tokens):
        tokens, ones = None, [*ones, a.reshape(tokens, (1,))]
    channels = times_ones(a, exact(found.channels), ones)  # a cast of Parameters by the lowering is prepared
    if tokens is not None:
        tokens = a.scale(tokens, found.factor)
    elif found.factor != 1:
        channels = a.scale(a.cast(channels, torch.float32), found.factor)
    optional = {name: each for name, each in (("tokens", tokens), ("bias", found.bias)) if each is not None}
    how = {"x": found.x, "weight": found.weight, "scale": channels, "dtype": value.dtype}
    return Reading("int8_matmul", {**how, "is_parameter_only": graph.is_fixed(found.weight), **optional})


@reader(gives=(INT8_MATMUL,))
def int8_matmuls(graph: Graph) -> Iterator[Found]:
    """All scaled products of whole numbers, as far as each goes on; why others are none."""
    layers = Layers(graph.algebra)
    places = list(graph.places) if torch.int8 in graph.dtypes else []
    products = {value: each for value in places if (each := layers.of(value))}
    held, seen = (
        {node for value, each in products.items() if isinstance(each, kinds) for node in graph.places[value]}
        for kinds in (Product, Product | str)
    )
    for value, each in products.items():
        if not is_computed(graph, value) or are_read_by(graph.places[value], held):
            continue  # only seen in another shape, or all that reads it is a product still
        made = each if isinstance(each, str) else _reading(graph, each, value)
        if isinstance(made, Reading):
            yield value, made
        elif made is not None and not are_read_by(graph.places[value], seen):
            yield value, Miss("quantised_linear", made)  # else what goes on from it says why
        below, _ = unscaled(value)  # what of it is rotated, or absorbed, may be read without the number
        inner = products.get(below)
        alone = _reading(graph, inner, below) if isinstance(inner, Product) else None
        if isinstance(alone, Reading):
            yield below, alone
