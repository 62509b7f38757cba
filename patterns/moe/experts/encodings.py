"""The facets of experts: dtype of the operands of their products, and layout of their first matrices.

FloatRows        floats
QuantisedTokens  W8A8: each token is quantised by its own scale, then repeated for its experts
QuantisedRows    W8A8: tokens are repeated, then each row is quantised by its own scale
Int8Tokens       W8A8: tokens come in int8, with a scale of each
                 In W8A8 the rows of the second product are quantised by a scale of each row.

MergedGate       gate and up of an expert in one matrix [E, H, 2 · I]
TwoGates         gate and up of an expert in two matrices [E, H, I]
OneMatrix        no gate: an activation of one product [E, H, I]
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
"""Function from an `Inward` to the term of the product of all rows with its matrices."""


@dataclass(frozen=True)
class Choice(Group):
    """The experts [T, K] that tokens chose, their weights [T, K], None for 1, and the order of the R = T · K rows.

    Attributes:
        order: index of the pair of each row, None where rows are listed token by token.
        is_sorted: true where the rows of the products are sorted by expert.
        active: (first, count, E), the experts first … first + count - 1 of all E that have matrices here.
    """

    experts: Any = tensor("T K")
    weights: Any = tensor("T K", optional=True)
    order: Any = tensor("R", optional=True)
    is_sorted: Any = attribute()
    active: Any = attribute()

    @property
    def is_complete(self) -> bool:
        """True if all experts have matrices here."""
        _, count, total = self.active
        return count == total

    def product_captures(self, matrices) -> dict[str, Any]:
        """Return the captures that products of all encodings share: the experts, how rows and `matrices` are given."""
        how = dict(is_sorted=self.is_sorted, is_parameter_only=matrices.is_parameter_only)
        return dict(experts=self.experts, active=self.active, **how)

    def rows(self, p, tokens):
        """Build the term of `tokens` [T, ..] repeated for their experts [R, ..]."""
        return p.routed_rows(tokens=tokens, experts=self.experts, order=self.order)

    def sorted_experts(self, places: Tensor) -> Tensor:
        """Return the expert of each row after sorting, int64 [R].

        `places` [R] maps the pair (token t, its k-th expert), at index t · K + k, to its row after sorting.
        """
        listed = self.experts.flatten().to(torch.int64)
        return listed.new_zeros(listed.shape).scatter(0, places.to(torch.int64), listed)


@dataclass(frozen=True)
class Inward(Group):
    """Matrices [E, H, J] of the first products of all experts, in floats, or in int8 with `scale` [E, J].

    Attributes:
        is_parameter_only: true where the matrices are computed from Parameters alone.
        dtype: dtype of an int8 product, None in floats.
    """

    weight: Any = tensor("E H J")
    bias: Any = tensor("E J", optional=True)
    scale: Any = tensor("E J", optional=True)
    is_parameter_only: Any = attribute()
    dtype: Any = attribute()

    def in_nz(self) -> Tensor:
        """Cast the matrices to FRACTAL_NZ, which operators read fastest, if the cast runs once; else return them."""
        return torch.ops.npu.npu_format_cast(self.weight.contiguous(), NZ) if self.is_parameter_only else self.weight


@dataclass(frozen=True)
class Outward(Inward):
    """Matrices [E, I, H] of the second products of all experts, in floats, or in int8 with `scale` [E, H]."""

    weight: Any = tensor("E I H")
    bias: Any = tensor("E H", optional=True)
    scale: Any = tensor("E H", optional=True)


@dataclass(frozen=True)
class Sum(Group):
    """The weighted sum of the outputs of the experts of each token in `shape`, plus `addend` [T, H]."""

    shape: Any = attribute()
    addend: Any = tensor("T H", optional=True)

    def term(self, p, rows, choice):
        """Build the term of the sum of `rows` [R, H], each times its weight in `choice`."""
        parts = dict(rows=rows, weights=choice.weights, order=choice.order, active=choice.active)
        return p.expert_sum(**parts, shape=self.shape, addend=self.addend)

    def refuse(self) -> None:
        """Refuse a `shape` with more than one symbolic size: the reshape to it has one -1."""
        known = [each for each in self.shape if isinstance(each, int)]
        require(
            len(self.shape) - len(known) <= 1,
            "result: it has several symbolic sizes; npu_moe_finalize_routing requires one at most; compile for "
            "static sizes of all but one",
        )


# encodings ----------------------------------------------------------------------------------------------------------


class Routed(NamedTuple):
    """Rows [R, ..] sorted by expert, as npu_moe_init_routing_v2 returns them.

    Attributes:
        places: sorted row of each listed pair (t, k), int32 [R]; -1 for an expert without matrices here.
        counts: number of rows of each expert, int64 [E].
        scales: scale of each row in int8, float32 [R]; None in floats.
    """

    rows: Tensor
    places: Tensor
    counts: Tensor
    scales: Tensor | None = None


@dataclass(frozen=True)
class FloatRows(Group):
    """Rows of experts in floats: the tokens [T, H] that they are taken from."""

    tokens: Any = tensor("T H")

    def listed(self, p, choice):
        """Build the term of the rows of the first product: the tokens repeated for the experts of `choice`."""
        return choice.rows(p, self.tokens)

    def like(self, first):
        """Return the term whose dtype the activation between the two products has: the tokens.

        `first` is the first product, which has the same dtype.
        """
        return self.tokens

    def further(self, p, hidden, like):
        """Build the term of the rows of the second product: `hidden` in the dtype of `like`."""
        return p.as_dtype(hidden, like=like)

    @staticmethod
    def product(p, choice, rows, matrices):
        """Build the term of the product of `rows` with those of `matrices` that belong to their experts in `choice`,
        plus biases.
        """
        how = choice.product_captures(matrices)
        return p.expert_product(x=rows, weight=matrices.weight, bias=matrices.bias, **how)

    def refuse(self, matrices: Inward) -> None:
        """Refuse nothing: a product of floats has the dtype of its rows, which is that of the operator's result."""

    def routed(self, choice: Choice) -> Routed:
        """Emit npu_moe_init_routing_v2, which sorts the tokens by their experts in `choice`."""
        return _routed(self.tokens, choice)

    def multiplied(self, routed: Routed, matrices: Inward) -> Tensor:
        """Emit npu_grouped_matmul of the sorted rows with the matrices of their experts: [R, J]."""
        return _by_group(routed, matrices.weight)

    def encoded(self, routed: Routed, hidden: Tensor) -> Routed:
        """Return `routed` with the rows `hidden` [R, I], the activations that the second product multiplies, in their
        dtype.
        """
        return routed._replace(rows=hidden)


@dataclass(frozen=True)
class QuantisedTokens(Group):
    """W8A8: tokens [T, H] are quantised by a scale of each in `scale_dtype`, then repeated for their experts."""

    tokens: Any = tensor("T H")
    scale_dtype: Any = attribute()

    def listed(self, p, choice):
        """Build the terms of the rows of the first product in int8, repeated for the experts of `choice`, and of their
        scales.
        """
        int8, scale = quantised_rows(p, self.tokens, self.scale_dtype)
        return choice.rows(p, int8), choice.rows(p, scale)

    def like(self, first):
        """Return the dtype of the activation between the two products: the one in which the product with `first` is
        returned.
        """
        return first.dtype

    def further(self, p, hidden, like):
        """Build the terms of the rows of the second product in int8, quantised from `hidden`, and of their scales."""
        return quantised_rows(p, p.maybe_cast(hidden, to=like), self.scale_dtype)

    @staticmethod
    def product(p, choice, rows, matrices):
        """Build the term of the int8 product of `rows` (int8, scales) with `matrices`, plus biases if there are any."""
        int8, tokens = rows
        operands = dict(x=int8, tokens=tokens, weight=matrices.weight, scale=matrices.scale, bias=matrices.bias)
        return p.int8_expert_product(**operands, **choice.product_captures(matrices), dtype=matrices.dtype)

    def refuse(self, matrices: Inward) -> None:
        """Refuse a result of another dtype than float16 and bfloat16, which the operator returns."""
        reason = (
            "result of the experts: it is {dtype}; npu_grouped_matmul requires float16 or bfloat16 behind "
            "int8; cast it to the dtype of the model"
        )
        require(matrices.dtype in CODES, reason, dtype=matrices.dtype)

    def routed(self, choice: Choice) -> Routed:
        """Emit npu_moe_init_routing_v2 with quant_mode=1: sort the tokens by their experts in `choice`, and quantise
        rows.
        """
        return _routed(self.tokens, choice, quant_mode=1)

    def multiplied(self, routed: Routed, matrices: Inward) -> Tensor:
        """Emit npu_grouped_matmul in int8 with both scales: [R, J]; matrices in FRACTAL_NZ if they are prepared."""
        scales = dict(scale=[matrices.scale], per_token_scale=[routed.scales])
        return _by_group(routed, matrices.in_nz(), output_dtype=CODES[matrices.dtype], **scales)

    def encoded(self, routed: Routed, hidden: Tensor) -> Routed:
        """Emit npu_dynamic_quant of `hidden` [R, I], and return `routed` with its int8 rows and their scales."""
        int8, scales = torch.ops.npu.npu_dynamic_quant(hidden)
        return routed._replace(rows=int8, scales=scales)


@dataclass(frozen=True)
class QuantisedRows(QuantisedTokens):
    """W8A8: tokens [T, H] are repeated for their experts, then each row is quantised by a scale of its own."""

    def listed(self, p, choice):
        """Build the terms of the rows of the first product, repeated for the experts of `choice`, then quantised; and
        their scales.
        """
        return quantised_rows(p, choice.rows(p, self.tokens), self.scale_dtype)


@dataclass(frozen=True)
class Int8Tokens(QuantisedTokens):
    """W8A8: tokens in int8 [T, H], with scales [T, 1]."""

    scale: Any = tensor("T 1")

    def listed(self, p, choice):
        """Build the terms of the int8 tokens repeated for the experts of `choice`, and of their scales repeated
        alike.
        """
        return choice.rows(p, self.tokens), choice.rows(p, self.scale)

    def routed(self, choice: Choice) -> Routed:
        """Emit npu_moe_init_routing_v2: sort int8 tokens and their scales by their experts in `choice`."""
        return _routed(self.tokens, choice, scale=self.scale.float().reshape(-1))


INT8_ENCODINGS: tuple[Any, ...] = (QuantisedTokens, QuantisedRows, Int8Tokens)
ENCODINGS: tuple[Any, ...] = (FloatRows, *INT8_ENCODINGS)


def _routed(tokens: Tensor, choice: Choice, **how: Any) -> Routed:
    """Emit npu_moe_init_routing_v2 of `tokens` [T, H] and the experts of `choice`; `how` are options."""
    first, count, total = choice.active
    how = dict(how, active_num=0, expert_num=total, active_expert_range=[first, first + count])
    counted = dict(expert_tokens_num_type=1, expert_tokens_num_flag=True)
    return Routed(*torch.ops.npu.npu_moe_init_routing_v2(tokens, choice.experts.to(torch.int32), **counted, **how))


def _by_group(routed: Routed, matrices: Tensor, **how: Any) -> Tensor:
    """Emit npu_grouped_matmul of rows sorted by expert, in groups of `routed.counts` rows, with `matrices` [E, ..]."""
    groups = dict(group_list=routed.counts, split_item=2, group_type=0, group_list_type=1)
    return torch.ops.npu.npu_grouped_matmul([routed.rows], [matrices], **groups, **how)[0]


# gates --------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MergedGate(Group):
    """Gate and up in one matrix `both` [E, H, 2 · I], `interleaved` lane by lane or one behind the other."""

    both: Any = Inward
    interleaved: Any = attribute()
    gate_first: ClassVar[bool] = True

    @property
    def first(self) -> Inward:
        """Matrices of the first product."""
        return self.both

    def terms(self, p, multiply: Multiply):
        """Build the terms of gate and up of all rows, perhaps cast to float32; `multiply` builds a product with
        matrices.
        """
        return Merged(multiply(self.both), self.interleaved).terms(p)

    def refuse(self) -> None:
        """Refuse nothing: gate and up are in one matrix already."""

    def joined(self) -> Inward:
        """Return the matrices of gate and up, [E, H, 2 · I]."""
        return self.both


@dataclass(frozen=True)
class TwoGates(Group):
    """Gate and up in two matrices `gate` and `up` [E, H, I]."""

    gate: Any = Inward
    up: Any = Inward
    interleaved: ClassVar[bool] = False
    gate_first: ClassVar[bool] = True

    @property
    def first(self) -> Inward:
        """The matrices `gate`: both first products have one dtype, so the one of the gate stands for both."""
        return self.gate

    def terms(self, p, multiply: Multiply):
        """Build the terms of gate and up of all rows, perhaps cast to float32; `multiply` builds a product with
        matrices.
        """
        return p.maybe_cast(multiply(self.gate), to=f32), p.maybe_cast(multiply(self.up), to=f32)

    def refuse(self) -> None:
        """Refuse matrices that are not from Parameters alone, which each call would concatenate, and a bias of only one
        of them.
        """
        fixed = self.gate.is_parameter_only and self.up.is_parameter_only
        require(
            fixed,
            "experts: their matrices are no Parameters of the module, or computed from inputs; "
            "npu_grouped_matmul requires gate and up in one Parameter, as joining others costs a copy at every "
            "call; register them as Parameters",
        )
        require(
            (self.gate.bias is None) == (self.up.bias is None),
            "biases: one of gate and up alone has them; one product of both requires biases of both; give the "
            "other zeros",
        )

    def joined(self) -> Inward:
        """Concatenate the matrices, biases and scales of gate and up: [E, H, 2 · I], [E, 2 · I]."""
        return replace(self.gate, **{name: self._concatenated(name) for name in ("weight", "bias", "scale")})

    def _concatenated(self, name: str) -> Tensor | None:
        gate = getattr(self.gate, name)
        return None if gate is None else torch.cat([gate, getattr(self.up, name)], -1)


GATES: tuple[Any, ...] = (MergedGate, TwoGates)


@dataclass(frozen=True)
class OneMatrix(Group):
    """No gate: one product, whose matrices `up` are [E, H, I]."""

    up: Any = Inward
    interleaved: ClassVar[bool] = False
    gate_first: ClassVar[bool] = True

    @property
    def first(self) -> Inward:
        """The matrices of the product."""
        return self.up

    def terms(self, p, multiply: Multiply):
        """Build the term of the product of all rows, perhaps cast to float32; `multiply` builds a product with
        matrices.
        """
        return p.maybe_cast(multiply(self.up), to=f32)

    def refuse(self) -> None:
        """Refuse nothing: there is one matrix."""

    def joined(self) -> Inward:
        """Return the matrices [E, H, I]."""
        return self.up
