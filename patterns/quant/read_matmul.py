"""Products of whole numbers of 8 bits with their scales: (x · wᵀ) · s[token] · c[channel] (+ bias).

The sums may be computed in int32 (`_int_mm` or a product in int32), or in float32 or bfloat16, which round them; or of
operands that were multiplied by their scales before.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial, reduce

import torch

from fusion import reader, word
from fusion.analysis.factored_products import scaled_int8
from fusion.analysis.nodes import are_read_by, is_computed
from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.graph.contractions import swapped
from fusion.graph.proof import proof, proven

_SUMS = frozenset({torch.int32, torch.float32, torch.bfloat16})
"""Dtypes in which sums of products of int8 are computed; float16 ends at 65504."""
_HOLD_INT8 = _SUMS | {torch.int16, torch.int64, torch.float16, torch.float64}
_RESULTS = frozenset({torch.float16, torch.bfloat16})
_EARLY = "a bias of {dtype} is added before all scales are in the product, where the operator adds one of int32"
_NO_BIAS = "something else than one bias is added before all scales are in the product"
_SEVERAL = "rows are multiplied by {number} int8 weights in one product, where the operator takes one"
_ENDS = frozenset({"mul", "cast", "add", "scale", "reshape"})

INT8_MATMUL = word(
    "int8_matmul",
    "(x · weightᵀ) · scale · tokens (+ bias), sums in int32",
    x="[*B, K]", weight="[N, K]", scale="[N]", tokens="[*B, 1]", bias="[N]", dtype="of the result",
    is_parameter_only="whether the weight is computed from Parameters alone",
)  # fmt: skip


@dataclass(frozen=True)
class _Product:
    """(x · wᵀ) · tokens · channels · one · factor + bias, as far as it was read; rows as in `value`."""

    x: Value
    weight: Value
    tokens: Value | None = None
    channels: Value | None = None
    one: Value | None = None
    bias: Value | None = None
    factor: float = 1.0
    odd: str = ""

    @property
    def complete(self) -> bool:
        """Whether both scales are in it."""
        return self.tokens is not None and self.channels is not None


def _int8(a: Algebra, value: Value) -> Value | None:
    """The whole numbers of 8 bits that `value` holds in another dtype, perhaps through others that hold them all."""
    if value.op == "cast" and value.arg.dtype == torch.int8:
        return value.arg
    if value.op == "cast" and value.arg.dtype in _HOLD_INT8:
        return _int8(a, value.arg)
    below = _int8(a, value.arg) if value.op in ("permute", "reshape") else None
    return None if below is None else a.seen_as(below, value)


Known = dict[Value, "_Product | str | None"]


def _product(a: Algebra, value: Value, known: Known) -> _Product | str | None:
    """How `value` is a product of whole numbers; why it is none that the operator computes; None if neither.

    Each value is looked at once; what is known of all of them is kept.
    """
    if value not in known:
        of_args = (_product(a, each, known) for each in value.args) if value.op in _ENDS else ()
        place, found = next(((n, each) for n, each in enumerate(of_args) if isinstance(each, _Product)), (0, None))
        if found is not None:
            known[value] = _further(a, found, value, value.args[1 - place] if len(value.args) == 2 else None)
        else:
            known[value] = _bare(a, value) if value.op == "matmul" else None
    return known[value]


def _further(a: Algebra, found: _Product, value: Value, other: Value | None) -> _Product | str | None:
    """A product after one more step."""
    if value.op == "reshape":
        return _with_rows(a, found, value) if value.shape[-1:] == value.arg.shape[-1:] else None
    if value.op == "cast":
        early = value.dtype == torch.float16 and found.channels is None
        if found.channels is not None and value.arg.dtype in _RESULTS:
            return None  # what is computed from the result
        cut = value.dtype is None or not value.dtype.is_floating_point
        reason = "sums are cast to float16, which ends at 65504, before their scales are in them"
        return None if cut else reason if early else found
    if value.op == "scale":
        return replace(found, factor=found.factor * value.attrs[0])
    assert other is not None
    return _scaled(a, found, other, value) if value.op == "mul" else _biased(a, found, other, value)


def _bare(a: Algebra, value: Value) -> _Product | str | None:
    x, y = (_int8(a, each) for each in value.args)
    if math.prod(value.args[1].shape[:-2]) != 1:  # of batches on both sides it is no layer
        several = x is not None and y is not None and math.prod(x.below("expand").shape[:-2]) == 1
        return _SEVERAL.format(number=math.prod(value.shape[:-2])) if several else None
    if x is None or y is None:
        return _dequantised(a, *value.args)
    odd = "" if value.dtype in _SUMS else "sums of products are computed in float16, which ends at 65504"
    return _Product(x, swapped(a, a.reshape(y, y.shape[-2:])), odd=odd)


def _dequantised(a: Algebra, x: Value, y: Value) -> _Product | None:
    """A product of whole numbers each of which was multiplied by its scale first: its sums end nowhere."""
    left, right = scaled_int8(a, x), scaled_int8(a, swapped(a, a.reshape(y, y.shape[-2:])))
    if left is None or right is None or right.rows is None or left.ones or right.ones:
        return None
    channels = a.reshape(right.rows, right.rows.shape[:1])
    return _Product(left.base, right.base, left.rows, channels, factor=left.number * right.number)


def _with_rows(a: Algebra, found: _Product, value: Value) -> _Product:
    rows = value.shape[:-1]
    tokens = None if found.tokens is None else a.reshape(found.tokens, (*rows, 1))
    return replace(found, x=a.reshape(found.x, (*rows, found.x.shape[-1])), tokens=tokens)


def _scaled(a: Algebra, found: _Product, factor: Value, value: Value) -> _Product | str | None:
    if found.bias is not None and is_float(found.bias):
        return None if found.complete else "a bias is added before all scales are in the product"
    made: _Product | str = found
    for each in factor.args if factor.op == "mul" else (factor,):
        made = made if isinstance(made, str) else _taken(a, made, each, value)
    return None if isinstance(made, str) and found.complete else made


def _taken(a: Algebra, found: _Product, factor: Value, value: Value) -> _Product | str:
    """The product with one more factor, of tokens or of channels."""
    shape = (*(1,) * (value.rank - factor.rank), *factor.shape)
    rows, width = value.shape[:-1], value.shape[-1]
    factor, number = unscaled(factor)
    found = replace(found, factor=found.factor * number)
    if shape == (*(1,) * len(rows), width):
        more = a.reshape(factor, (width,))
        channels = more if found.channels is None else a.mul(found.channels, more)
        return replace(found, channels=channels)
    if shape == (*rows, 1) and found.tokens is None:
        return replace(found, tokens=a.reshape(factor, (*rows, 1)))
    if math.prod(shape) == 1:
        one = a.reshape(factor, (1,))
        return replace(found, one=one if found.one is None else a.mul(found.one, one))
    return "a scale is neither one for each token nor one for each output channel"


def _biased(a: Algebra, found: _Product, bias: Value, value: Value) -> _Product | str | None:
    line = a.reshape(bias, bias.shape[-1:]) if bias.rank and math.prod(bias.shape[:-1]) == 1 else bias
    early = found.channels is None and is_float(bias)
    if found.bias is None and line.shape == value.shape[-1:] and not early:
        return replace(found, bias=line)
    if found.complete:
        return None
    return _EARLY.format(dtype=bias.dtype) if early and line.shape == value.shape[-1:] else _NO_BIAS


def _times(a: Algebra, channels: Value, one: Value) -> Value:
    """Scales [N] times one [1], in float32."""
    return proven(a.mul(*(a.cast(each, torch.float32) for each in (channels, one))))


@proof
def _reading(graph: Graph, found: _Product, value: Value) -> Reading | str | None:
    if found.odd:
        return found.odd
    if found.channels is None:
        return "there is no scale for each output channel"
    a, tokens, ones = graph.algebra, found.tokens, [] if found.one is None else [found.one]
    if tokens is not None and math.prod(tokens.shape) == 1 and graph.is_fixed(tokens):
        tokens, ones = None, [*ones, a.reshape(tokens, (1,))]
    channels = reduce(partial(_times, a), ones, found.channels)
    if tokens is None:
        channels = a.scale(channels, found.factor)
    else:
        tokens = a.scale(tokens, found.factor)
    optional = {name: each for name, each in (("tokens", tokens), ("bias", found.bias)) if each is not None}
    how = {"x": found.x, "weight": found.weight, "scale": channels, "dtype": value.dtype}
    return Reading("int8_matmul", {**how, "is_parameter_only": graph.is_fixed(found.weight), **optional})


@reader(gives=(INT8_MATMUL,))
def int8_matmuls(graph: Graph) -> Iterator[Found]:
    """All scaled products of whole numbers, as far as each goes on; why others are none."""
    known: Known = {}
    products = {value: each for value in list(graph.places) if (each := _product(graph.algebra, value, known))}
    held, seen = (
        {node for value, each in products.items() if isinstance(each, kinds) for node in graph.places[value]}
        for kinds in (_Product, _Product | str)
    )
    for value, each in products.items():
        if not is_computed(graph, value) or are_read_by(graph.places[value], held):
            continue  # only seen in another shape, or all that reads it is a product still
        made = each if isinstance(each, str) else _reading(graph, each, value)
        if isinstance(made, Reading):
            yield value, made
        elif made is not None and not are_read_by(graph.places[value], seen):
            yield value, Miss("quant_matmul", made)  # else what goes on from it says why
        below, _ = unscaled(value)  # what of it is rotated, or absorbed, may be read without the number
        inner = products.get(below)
        alone = _reading(graph, inner, below) if isinstance(inner, _Product) else None
        if isinstance(alone, Reading):
            yield below, alone
