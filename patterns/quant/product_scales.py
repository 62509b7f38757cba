"""Int8 products with the casts, the factors and the bias that follow, until all scales are applied.

The sums are computed in int32, or in float32 or bfloat16, which round them. A subclass of `Products` (layers, experts)
recognises the products and the scales of their channels and tokens.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial, reduce

import torch

from fusion.analysis.rounding import is_float, unscaled
from fusion.graph import Algebra, Dim, Value
from fusion.graph.proof_steps import proven

SUMS = frozenset({torch.int32, torch.float32, torch.bfloat16})
"""Dtypes in which sums of int8 products are computed; float16 overflows at 65504."""
_HOLD_INT8 = SUMS | {torch.int16, torch.int64, torch.float16, torch.float64}
_RESULTS = frozenset({torch.float16, torch.bfloat16})
_EARLY = (
    "bias: it is {dtype} and added before all scales are multiplied; npu_quant_matmul requires int32 there; "
    "add the bias behind the scales, or store it as int32"
)
_NO_BIAS = (
    "bias: more than one vector [N] is added before all scales are multiplied; npu_quant_matmul requires one "
    "bias; add it behind the scales"
)
_NARROW = (
    "sums: they are cast to float16, which ends at 65504, before they are scaled; npu_quant_matmul requires "
    "int32 or float32; multiply by the scales before the cast"
)
_ENDS = frozenset({"mul", "cast", "add", "scale", "reshape"})
NARROW_SUMS = (
    "sums: they are computed in float16, which ends at 65504; npu_quant_matmul requires int32 sums; multiply "
    "the int8 operands in int32 or float32"
)


@dataclass(frozen=True)
class Product:
    """A product (x · w) · tokens · channels · one · factor + bias; factors that are not read yet are None.

    Attributes:
        x: int8 rows [*B, K], with the dims *B of the value.
        tokens: scales [*B, 1].
        channels: scales of output channels.
        one: a factor [1] in a tensor.
        factor: a factor that is a number.
        reason: why the operator does not compute the product; "" if it may.
    """

    x: Value
    weight: Value
    tokens: Value | None = None
    channels: Value | None = None
    one: Value | None = None
    bias: Value | None = None
    factor: float = 1.0
    reason: str = ""

    @property
    def complete(self) -> bool:
        """Return True if the scales of tokens and of channels are read."""
        return self.tokens is not None and self.channels is not None


Read = Product | str | None
"""A product of int8; the reason why the operator does not compute it; None for other values."""


def int8_of(a: Algebra, value: Value) -> Value | None:
    """Return the int8 tensor whose exact cast to another dtype is `value`, with its views; None for other values."""
    if value.op == "cast" and value.arg.dtype == torch.int8:
        return value.arg
    if value.op == "cast" and value.arg.dtype in _HOLD_INT8:
        return int8_of(a, value.arg)
    below = int8_of(a, value.arg) if value.op in ("permute", "reshape") else None
    return None if below is None else a.seen_as(below, value)


@dataclass(frozen=True)
class Products(ABC):
    """A memoised reader of the products of one kind in the values of `a`."""

    a: Algebra
    _known: dict[Value, Read] = field(default_factory=dict[Value, Read], repr=False)

    @abstractmethod
    def bare(self, value: Value) -> Read:
        """Read `value` as a product without factors."""

    @abstractmethod
    def channels(self, product: Product, factor: Value, value: Value) -> Value | None:
        """Return `factor`, an operand of `value`, as scales of channels; None if it is something else."""

    @abstractmethod
    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """Return `factor` as scales [*rows, 1]; None if it is something else."""

    def of(self, value: Value) -> Read:
        """Read `value` as a product with the factors and the bias that it includes."""
        if value not in self._known:
            reads = (self.of(each) for each in value.args) if value.op in _ENDS else ()
            place, product = next(((n, each) for n, each in enumerate(reads) if isinstance(each, Product)), (0, None))
            if product is not None:
                other = value.args[1 - place] if len(value.args) == 2 else None
                self._known[value] = self._further(product, value, other)
            else:
                self._known[value] = self.bare(value)
        return self._known[value]

    def _further(self, product: Product, value: Value, other: Value | None) -> Read:
        """Extend `product` by the op of `value`, whose second operand is `other`."""
        if value.op == "reshape":
            return self._with_rows(product, value) if value.shape[-1:] == value.arg.shape[-1:] else None
        if value.op == "cast":
            is_early = value.dtype == torch.float16 and product.channels is None
            if product.channels is not None and value.arg.dtype in _RESULTS:
                return None  # an op on the result of the layer
            is_truncated = value.dtype is None or not value.dtype.is_floating_point
            return None if is_truncated else _NARROW if is_early else product
        if value.op == "scale":
            return replace(product, factor=product.factor * value.attrs[0])
        assert other is not None
        return self._scaled(product, other, value) if value.op == "mul" else self._biased(product, other, value)

    def _with_rows(self, product: Product, value: Value) -> Product:
        a, rows = self.a, value.shape[:-1]
        tokens = None if product.tokens is None else a.reshape(product.tokens, (*rows, 1))
        return replace(product, x=a.reshape(product.x, (*rows, product.x.shape[-1])), tokens=tokens)

    def _scaled(self, product: Product, factor: Value, value: Value) -> Read:
        if product.bias is not None and is_float(product.bias):
            return (
                None
                if product.complete
                else (
                    "bias: it is added before all scales are multiplied; npu_quant_matmul requires it behind them, "
                    "or in int32; add it behind the scales"
                )
            )
        outcome: Product | str = product
        for each in factor.args if factor.op == "mul" else (factor,):
            outcome = outcome if isinstance(outcome, str) else self._times_factor(outcome, each, value)
        return None if isinstance(outcome, str) and product.complete else outcome

    def _times_factor(self, product: Product, factor: Value, value: Value) -> Product | str:
        """Extend `product` by one factor: of channels, of tokens, or of all entries."""
        a = self.a
        factor, number = unscaled(factor)
        product = replace(product, factor=product.factor * number)
        more = self.channels(product, factor, value)
        if more is not None:
            return replace(product, channels=more if product.channels is None else a.mul(product.channels, more))
        tokens = self.tokens(factor, value.shape[:-1]) if product.tokens is None else None
        if tokens is not None:
            return replace(product, tokens=tokens)
        if math.prod(factor.shape) == 1:
            one = a.reshape(factor, (1,))
            return replace(product, one=one if product.one is None else a.mul(product.one, one))
        return (
            "scale: one of the product is neither of each token nor of each output channel; npu_quant_matmul "
            "requires [T, 1] and [N]; quantise by token and by channel"
        )

    def _biased(self, product: Product, bias: Value, value: Value) -> Read:
        line = self.a.reshape(bias, bias.shape[-1:]) if bias.rank and math.prod(bias.shape[:-1]) == 1 else bias
        is_early = product.channels is None and is_float(bias)
        if product.bias is None and line.shape == value.shape[-1:] and not is_early:
            return replace(product, bias=line)
        if product.complete:
            return None
        return _EARLY.format(dtype=bias.dtype) if is_early and line.shape == value.shape[-1:] else _NO_BIAS


def times_ones(a: Algebra, channels: Value, ones: Sequence[Value]) -> Value:
    """Multiply scales of channels by numbers `ones` [1], in float32; return `channels` as is if there are none."""
    return reduce(partial(times_one, a), ones, channels)


def times_one(a: Algebra, channels: Value, one: Value) -> Value:
    """Multiply scales of channels by a number `one` [1], in float32."""
    return proven(a.mul(*(a.cast(each, torch.float32) for each in (channels, one))))
