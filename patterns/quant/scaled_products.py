"""What is done to int8 products until all scales are in them: casts, factors, one bias.

The sums may be computed in int32, or in float32 or bfloat16, which round them. Which values are products, and what a
scale of each of their channels is, is said by each kind: of layers, or of experts.
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
from fusion.graph.proof import proven

SUMS = frozenset({torch.int32, torch.float32, torch.bfloat16})
"""Dtypes in which sums of products of int8 are computed; float16 ends at 65504."""
_HOLD_INT8 = SUMS | {torch.int16, torch.int64, torch.float16, torch.float64}
_RESULTS = frozenset({torch.float16, torch.bfloat16})
_EARLY = "a bias of {dtype} is added before all scales are in the product, where the operator adds one of int32"
_NO_BIAS = "something else than one bias is added before all scales are in the product"
_NARROW = "sums are cast to float16, which ends at 65504, before their scales are in them"
_ENDS = frozenset({"mul", "cast", "add", "scale", "reshape"})
NARROW_SUMS = "sums of products are computed in float16, which ends at 65504"


@dataclass(frozen=True)
class Product:
    """(x · w) · tokens · channels · one · factor + bias, as far as it was read; rows as in the value."""

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


Read = Product | str | None
"""How a value is a product of whole numbers; why it is none that the operator computes; None if neither."""


def int8_of(a: Algebra, value: Value) -> Value | None:
    """The int8 that `value` holds in another dtype, perhaps through others that hold all of it."""
    if value.op == "cast" and value.arg.dtype == torch.int8:
        return value.arg
    if value.op == "cast" and value.arg.dtype in _HOLD_INT8:
        return int8_of(a, value.arg)
    below = int8_of(a, value.arg) if value.op in ("permute", "reshape") else None
    return None if below is None else a.seen_as(below, value)


@dataclass(frozen=True)
class Products(ABC):
    """Products of one kind. Each value is looked at once; what is known of all of them is kept."""

    a: Algebra
    _known: dict[Value, Read] = field(default_factory=dict[Value, Read], repr=False)

    @abstractmethod
    def bare(self, value: Value) -> Read:
        """A product without any factor."""

    @abstractmethod
    def channels(self, found: Product, factor: Value, value: Value) -> Value | None:
        """The scales of channels that a factor of `value` is; None where it is something else."""

    @abstractmethod
    def tokens(self, factor: Value, rows: Sequence[Dim]) -> Value | None:
        """The scales [.., 1] that a factor is of these rows; None where it is something else."""

    def of(self, value: Value) -> Read:
        """How `value` is a product."""
        if value not in self._known:
            of_args = (self.of(each) for each in value.args) if value.op in _ENDS else ()
            place, found = next(((n, each) for n, each in enumerate(of_args) if isinstance(each, Product)), (0, None))
            if found is not None:
                other = value.args[1 - place] if len(value.args) == 2 else None
                self._known[value] = self._further(found, value, other)
            else:
                self._known[value] = self.bare(value)
        return self._known[value]

    def _further(self, found: Product, value: Value, other: Value | None) -> Read:
        """A product after one more step."""
        if value.op == "reshape":
            return self._with_rows(found, value) if value.shape[-1:] == value.arg.shape[-1:] else None
        if value.op == "cast":
            early = value.dtype == torch.float16 and found.channels is None
            if found.channels is not None and value.arg.dtype in _RESULTS:
                return None  # what is computed from the result
            cut = value.dtype is None or not value.dtype.is_floating_point
            return None if cut else _NARROW if early else found
        if value.op == "scale":
            return replace(found, factor=found.factor * value.attrs[0])
        assert other is not None
        return self._scaled(found, other, value) if value.op == "mul" else self._biased(found, other, value)

    def _with_rows(self, found: Product, value: Value) -> Product:
        a, rows = self.a, value.shape[:-1]
        tokens = None if found.tokens is None else a.reshape(found.tokens, (*rows, 1))
        return replace(found, x=a.reshape(found.x, (*rows, found.x.shape[-1])), tokens=tokens)

    def _scaled(self, found: Product, factor: Value, value: Value) -> Read:
        if found.bias is not None and is_float(found.bias):
            return None if found.complete else "a bias is added before all scales are in the product"
        made: Product | str = found
        for each in factor.args if factor.op == "mul" else (factor,):
            made = made if isinstance(made, str) else self._taken(made, each, value)
        return None if isinstance(made, str) and found.complete else made

    def _taken(self, found: Product, factor: Value, value: Value) -> Product | str:
        """The product with one more factor, of tokens or of channels."""
        a = self.a
        factor, number = unscaled(factor)
        found = replace(found, factor=found.factor * number)
        more = self.channels(found, factor, value)
        if more is not None:
            return replace(found, channels=more if found.channels is None else a.mul(found.channels, more))
        tokens = self.tokens(factor, value.shape[:-1]) if found.tokens is None else None
        if tokens is not None:
            return replace(found, tokens=tokens)
        if math.prod(factor.shape) == 1:
            one = a.reshape(factor, (1,))
            return replace(found, one=one if found.one is None else a.mul(found.one, one))
        return "a scale is neither one for each token nor one for each output channel"

    def _biased(self, found: Product, bias: Value, value: Value) -> Read:
        line = self.a.reshape(bias, bias.shape[-1:]) if bias.rank and math.prod(bias.shape[:-1]) == 1 else bias
        early = found.channels is None and is_float(bias)
        if found.bias is None and line.shape == value.shape[-1:] and not early:
            return replace(found, bias=line)
        if found.complete:
            return None
        return _EARLY.format(dtype=bias.dtype) if early and line.shape == value.shape[-1:] else _NO_BIAS


def times_ones(a: Algebra, channels: Value, ones: Sequence[Value]) -> Value:
    """Scales of channels times numbers [1], in float32 where there are any."""
    return reduce(partial(times_one, a), ones, channels)


def times_one(a: Algebra, channels: Value, one: Value) -> Value:
    """The same of one number [1]."""
    return proven(a.mul(*(a.cast(each, torch.float32) for each in (channels, one))))
