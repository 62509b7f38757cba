"""Int8 products with their scales: (x · wᵀ) · s[token] · c[channel] (+ bias).

The sums are computed in int32 (`_int_mm` or a matmul in int32), or in float32 or bfloat16, which round them; or the
operands were dequantised before the product.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import torch

from fusion import reader, word
from fusion.analysis.factored_products import scaled_int8
from fusion.analysis.node_predicates import are_read_by, is_computed
from fusion.analysis.rounding import exact, unscaled
from fusion.graph import Algebra, Annotation, Dim, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof_steps import proof
from patterns.quant.product_scales import NARROW_SUMS, SUMS, Product, Products, Read, int8_of, times_one, times_ones

_SEVERAL = (
    "weight: rows are multiplied by {number} int8 weights in one product; npu_quant_matmul requires one "
    "weight [N, K]; write a linear layer for each"
)

INT8_MATMUL = word(
    "int8_matmul",
    "(x · weightᵀ) · scale · tokens (+ bias), sums in int32",
    x="[*B, K]", weight="[N, K]", scale="[N]", tokens="[*B, 1]", bias="[N]", dtype="of the result",
    is_parameter_only="True if the weight is computed from Parameters alone",
)  # fmt: skip


@dataclass(frozen=True)
class Layers(Products):
    """A reader of products of rows with one matrix."""

    def bare(self, value: Value) -> Read:
        """Read a matmul of int8 operands, or of dequantised ones."""
        return _bare(self.a, value) if value.op == "matmul" else None

    def channels(self, product: Product, factor: Value, value: Value) -> Value | None:
        """Return `factor` as [N] if it has one entry for each of the N channels of `value`, else None."""
        line = (*(1,) * (value.rank - 1), value.shape[-1])
        return self.a.reshape(factor, line[-1:]) if _padded(factor, value.rank) == line else None

    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """Return `factor` as [*rows, 1] if it has one entry for each row, else None."""
        return self.a.reshape(factor, (*rows, 1)) if _padded(factor, len(rows) + 1) == (*rows, 1) else None


def _padded(factor: Value, rank: int) -> tuple[Dim, ...]:
    return (*(1,) * (rank - factor.rank), *factor.shape)


def _bare(a: Algebra, value: Value) -> Read:
    x, y = (int8_of(a, each) for each in value.args)
    if math.prod(value.args[1].shape[:-2]) != 1:  # a batched product of two tensors is no linear layer
        several = x is not None and y is not None and math.prod(x.below("expand").shape[:-2]) == 1
        return _SEVERAL.format(number=math.prod(value.shape[:-2])) if several else None
    if x is None or y is None:
        return _dequantised(a, *value.args)
    reason = "" if value.dtype in SUMS else NARROW_SUMS
    return Product(x, swapped(a, a.reshape(y, y.shape[-2:])), reason=reason)


def _dequantised(a: Algebra, x: Value, y: Value) -> Product | None:
    """Read the product of dequantised operands as an int8 product with scales; None for other operands.

    The dtype of the sums is not checked: float16 overflows by sums of int8, but not by those of dequantised numbers.
    """
    left, right = scaled_int8(a, x), scaled_int8(a, swapped(a, a.reshape(y, y.shape[-2:])))
    if left is None or right is None or right.rows is None or right.ones:
        return None
    channels = a.reshape(right.rows, right.rows.shape[:1])
    one = reduce(partial(times_one, a), left.ones) if left.ones else None
    return Product(left.base, right.base, left.rows, channels, one, factor=left.number * right.number)


@proof
def _reading(graph: Graph, product: Product, value: Value) -> Reading | str | None:
    if product.reason:
        return product.reason
    if product.channels is None:
        return "scale: the int8 product has none of each output channel; npu_quant_matmul requires one, [N] or [1]"
    a, tokens, ones = graph.algebra, product.tokens, [] if product.one is None else [product.one]
    if tokens is not None and math.prod(tokens.shape) == 1 and graph.is_fixed(tokens):
        tokens, ones = None, [*ones, a.reshape(tokens, (1,))]
    channels = times_ones(a, exact(product.channels), ones)  # the lowering's cast of a Parameter runs once
    if tokens is not None:
        tokens = a.scale(tokens, product.factor)
    elif product.factor != 1:
        channels = a.scale(a.cast(channels, torch.float32), product.factor)
    optional = {name: each for name, each in (("tokens", tokens), ("bias", product.bias)) if each is not None}
    how = {"x": product.x, "weight": product.weight, "scale": channels, "dtype": value.dtype}
    return Reading("int8_matmul", {**how, "is_parameter_only": graph.is_fixed(product.weight), **optional})


@reader(gives=(INT8_MATMUL,))
def int8_matmuls(graph: Graph) -> Iterator[Annotation]:
    """Read every int8 product with all factors and the bias that follow; report why others are not read."""
    layers = Layers(graph.algebra)
    places = list(graph.places) if torch.int8 in graph.dtypes else []
    products = {value: each for value in places if (each := layers.of(value))}
    read, tried = (
        {node for value, each in products.items() if isinstance(each, kinds) for node in graph.places[value]}
        for kinds in (Product, Product | str)
    )
    for value, each in products.items():
        if not is_computed(graph, value) or are_read_by(graph.places[value], read):
            continue  # a view, or an intermediate of larger products alone
        outcome = each if isinstance(each, str) else _reading(graph, each, value)
        if isinstance(outcome, Reading):
            yield value, outcome
        elif outcome is not None and not are_read_by(graph.places[value], tried):
            yield value, Miss("quantised_linear", outcome)  # a user of it gives the reason otherwise
        below, _ = unscaled(value)  # also read without the factor: rules of rotated or absorbed lanes need that
        inner = products.get(below)
        bare = _reading(graph, inner, below) if isinstance(inner, Product) else None
        if isinstance(bare, Reading):
            yield below, bare
