"""The facets of experts: in which numbers they multiply, and how their first matrices lie.

FloatRows        floats, rows of tokens
QuantisedTokens  W8A8: tokens in int8 with a scale of each, then rows of these; the second product likewise
QuantisedRows    the same of rows that are quantised once they are listed
Int8Tokens       the same of tokens that something else has quantised, or that something else reads in int8

MergedGate       gate and up of an expert in one matrix          TwoGates    in a matrix each
OneMatrix        no gate: an activation of one product
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.linear.gates import Merged
from patterns.quant.quantisation import quantised_rows
from patterns.quant.quantised_linear import CODES, NZ

f32 = torch.float32
Multiply = Callable[[Any], Any]
"""The term of the product of some rows with these matrices."""


@dataclass(frozen=True)
class Choice(Group):
    """Which experts each token chose, how rows stand for them, and what each counts."""

    experts: Any = tensor("T K")
    weights: Any = tensor("T K")
    order: Any = tensor("R", optional=True)
    is_sorted: Any = attribute()

    def rows(self, p, tokens):
        """Those of tokens [T, ..], one for each expert that they chose."""
        return p.routed_rows(tokens=tokens, experts=self.experts, order=self.order)

    def in_order(self, places: Tensor) -> Tensor:
        """The expert of each sorted row [R], of the place that each pair has there."""
        listed = self.experts.flatten().to(torch.int64)
        return listed.new_zeros(listed.shape).scatter(0, places.to(torch.int64), listed)


@dataclass(frozen=True)
class Inward(Group):
    """Matrices of all experts that read tokens, perhaps with biases: of floats, or of int8 with scales of channels."""

    weight: Any = tensor("E H J")
    bias: Any = tensor("E J", optional=True)
    scale: Any = tensor("E J", optional=True)
    is_parameter_only: Any = attribute()
    dtype: Any = attribute()

    def in_nz(self) -> Tensor:
        """As the operators read them fastest, where that is prepared once."""
        return torch.ops.npu.npu_format_cast(self.weight.contiguous(), NZ) if self.is_parameter_only else self.weight


@dataclass(frozen=True)
class Outward(Inward):
    """Matrices of all experts that give what a token is given."""

    weight: Any = tensor("E I H")
    bias: Any = tensor("E H", optional=True)
    scale: Any = tensor("E H", optional=True)


@dataclass(frozen=True)
class Sum(Group):
    """The sum of what the experts of a token give, and what is added to that."""

    shape: Any = attribute()
    beside: Any = tensor("T H", optional=True)

    def of(self, p, given, choice):
        """The term of rows `given`, each with the weight of its choice."""
        parts = dict(rows=given, weights=choice.weights, order=choice.order)
        return p.expert_sum(**parts, shape=self.shape, beside=self.beside)

    def refuse(self) -> None:
        """Refuse a shape that -1 does not describe."""
        known = [each for each in self.shape if isinstance(each, int)]
        require(len(self.shape) - len(known) <= 1, "the result has several symbolic sizes")


# encodings ----------------------------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """Rows in the order of their experts, where each pair has its own, how many each expert has, and their scales."""

    rows: Tensor
    places: Tensor
    counts: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class FloatRows(Group):
    """Products of floats."""

    tokens: Any = tensor("T H")

    def listed(self, p, choice):
        """The rows of the first product."""
        return choice.rows(p, self.tokens)

    def like(self, first):
        """What has the dtype of what stands between both products, of the first matrices."""
        return self.tokens

    def further(self, p, hidden, like):
        """The rows of the second product."""
        return p.as_dtype(hidden, like=like)

    @staticmethod
    def product(p, choice, rows, matrices):
        """Each row by the matrix of its expert, and perhaps its bias."""
        how = dict(is_sorted=choice.is_sorted, is_parameter_only=matrices.is_parameter_only)
        return p.expert_product(x=rows, weight=matrices.weight, bias=matrices.bias, experts=choice.experts, **how)

    def refuse(self, matrices: Inward) -> None:
        """The products have the dtype of the rows."""

    def routed(self, experts: Tensor, count: int) -> Routed:
        """Rows of tokens."""
        return _routed(self.tokens, experts, count)

    def multiplied(self, routed: Routed, matrices: Inward) -> Tensor:
        """Each group by its own matrix."""
        return _by_group(routed, matrices.weight)

    def encoded(self, routed: Routed, hidden: Tensor) -> Routed:
        """What the second product reads of what stands between both."""
        return routed._replace(rows=hidden)


@dataclass(frozen=True)
class QuantisedTokens(Group):
    """W8A8: tokens that are quantised and then listed."""

    tokens: Any = tensor("T H")
    scale_dtype: Any = attribute()

    def listed(self, p, choice):
        """The rows of the first product, and their scales."""
        int8, scale = quantised_rows(p, self.tokens, self.scale_dtype)
        return choice.rows(p, int8), choice.rows(p, scale)

    def like(self, first):
        """The dtype of what stands between both products, of the first matrices."""
        return first.dtype

    def further(self, p, hidden, like):
        """The rows of the second product, and their scales."""
        return quantised_rows(p, p.maybe_cast(hidden, to=like), self.scale_dtype)

    @staticmethod
    def product(p, choice, rows, matrices):
        """Each row by the matrix of its expert, times both scales, and perhaps its bias."""
        int8, tokens = rows
        how = dict(is_sorted=choice.is_sorted, is_parameter_only=matrices.is_parameter_only, dtype=matrices.dtype)
        operands = dict(x=int8, tokens=tokens, weight=matrices.weight, scale=matrices.scale, bias=matrices.bias)
        return p.int8_expert_product(**operands, experts=choice.experts, **how)

    def refuse(self, matrices: Inward) -> None:
        """What the operator returns."""
        said = "what experts give is of {dtype}, the operator gives float16 and bfloat16"
        require(matrices.dtype in CODES, said, dtype=matrices.dtype)

    def routed(self, experts: Tensor, count: int) -> Routed:
        """Rows that are quantised on the way."""
        return _routed(self.tokens, experts, count, quant_mode=1)

    def multiplied(self, routed: Routed, matrices: Inward) -> Tensor:
        """Each group by its own matrix, in FRACTAL_NZ where that is prepared once."""
        scales = dict(scale=[matrices.scale], per_token_scale=[routed.scales])
        return _by_group(routed, matrices.in_nz(), output_dtype=CODES[matrices.dtype], **scales)

    def encoded(self, routed: Routed, hidden: Tensor) -> Routed:
        """What the second product reads of what stands between both."""
        int8, scales = torch.ops.npu.npu_dynamic_quant(hidden)
        return routed._replace(rows=int8, scales=scales)


@dataclass(frozen=True)
class QuantisedRows(QuantisedTokens):
    """W8A8: rows that are listed and then quantised."""

    def listed(self, p, choice):
        """The rows of the first product, and their scales."""
        return quantised_rows(p, choice.rows(p, self.tokens), self.scale_dtype)


@dataclass(frozen=True)
class Int8Tokens(QuantisedTokens):
    """W8A8: tokens in int8, with their scales."""

    scale: Any = tensor("T 1")

    def listed(self, p, choice):
        """The rows of the first product, and their scales."""
        return choice.rows(p, self.tokens), choice.rows(p, self.scale)

    def routed(self, experts: Tensor, count: int) -> Routed:
        """Rows and scales of tokens."""
        return _routed(self.tokens, experts, count, scale=self.scale.float().reshape(-1))


INT8_ENCODINGS: tuple[Any, ...] = (QuantisedTokens, QuantisedRows, Int8Tokens)
ENCODINGS: tuple[Any, ...] = (FloatRows, *INT8_ENCODINGS)


def _routed(tokens: Tensor, experts: Tensor, count: int, **how: Any) -> Routed:
    how = dict(how, active_num=0, expert_num=count, active_expert_range=[0, count])
    counted = dict(expert_tokens_num_type=1, expert_tokens_num_flag=True)
    return Routed(*torch.ops.npu.npu_moe_init_routing_v2(tokens, experts.to(torch.int32), **counted, **how))


def _by_group(routed: Routed, matrices: Tensor, **how: Any) -> Tensor:
    """Sorted rows by the matrix of their expert, of which each has so many."""
    groups = dict(group_list=routed.counts, split_item=2, group_type=0, group_list_type=1)
    return torch.ops.npu.npu_grouped_matmul([routed.rows], [matrices], **groups, **how)[0]


# gates --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergedGate(Group):
    """Gate and up of an expert in one matrix."""

    both: Any = Inward
    interleaved: Any = attribute()

    @property
    def first(self) -> Inward:
        """Some of the matrices."""
        return self.both

    def terms(self, p, multiply: Multiply):
        """Both, of all rows."""
        return Merged(multiply(self.both), self.interleaved).terms(p)

    def refuse(self) -> None:
        """They lie in one tensor already."""

    def joined(self) -> Inward:
        """Both, [E, H, 2 · I]."""
        return self.both


@dataclass(frozen=True)
class TwoGates(Group):
    """Gate and up of an expert in a matrix each."""

    gate: Any = Inward
    up: Any = Inward
    interleaved: ClassVar[bool] = False

    @property
    def first(self) -> Inward:
        """Some of the matrices."""
        return self.gate

    def terms(self, p, multiply: Multiply):
        """Both, of all rows."""
        return p.maybe_cast(multiply(self.gate), to=f32), p.maybe_cast(multiply(self.up), to=f32)

    def refuse(self) -> None:
        """Joining is free only where it is done once."""
        fixed = self.gate.is_parameter_only and self.up.is_parameter_only
        require(fixed, "the matrices of the experts do not come from Parameters alone: joining them would cost a copy")
        require((self.gate.bias is None) == (self.up.bias is None), "only one of gate and up has biases of the experts")

    def joined(self) -> Inward:
        """Both, [E, H, 2 · I]."""
        return replace(self.gate, **{name: self._beside(name) for name in ("weight", "bias", "scale")})

    def _beside(self, name: str) -> Tensor | None:
        gate = getattr(self.gate, name)
        return None if gate is None else torch.cat([gate, getattr(self.up, name)], -1)


GATES: tuple[Any, ...] = (MergedGate, TwoGates)


@dataclass(frozen=True)
class OneMatrix(Group):
    """No gate: what an activation of one product is of."""

    up: Any = Inward
    interleaved: ClassVar[bool] = False

    @property
    def first(self) -> Inward:
        """The matrices."""
        return self.up

    def terms(self, p, multiply: Multiply):
        """The product, of all rows."""
        return p.maybe_cast(multiply(self.up), to=f32)

    def refuse(self) -> None:
        """Nothing is joined."""

    def joined(self) -> Inward:
        """The matrices, [E, H, I]."""
        return self.up
