"""y_t = Σ_c w[t, c] · D_e · swiglu(U_e x_t) over the experts e = e(t, c) that token t chose  (Shazeer et al., 2017).

*Matches* rows that are sorted by expert and multiplied in groups, and rows that meet matrices gathered for them; gate
and up of an expert in one matrix or in two, or no gate, the sum by a reshape, a product or additions. *Replaces with*
`npu_moe_init_routing_v2`, `npu_grouped_matmul`, `npu_swiglu`, `npu_grouped_matmul` and `npu_moe_finalize_routing`,
which weighs and adds in float32. Weights, and biases that it adds, are rounded to the dtype of the rows. Biases behind
the first product are added as rows, as npu_grouped_matmul is documented to take one of one dim alone; those behind the
second by the sum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import (
    Rule,
    bounded,
    calls,
    lookalike,
    lowering,
    pattern,
    require,
    rounding,
    tensor,
    variants,
)  # fmt: skip
from patterns.linear.gates import BOUNDS, Unbounded, activated
from patterns.moe.experts.activations import ACTIVATIONS, GATED
from patterns.moe.experts.encodings import (
    ENCODINGS,
    GATES,
    INT8_ENCODINGS,
    Choice,
    FloatRows,
    Inward,
    OneMatrix,
    Outward,
    QuantisedTokens,
    Routed,
    Sum,
)


@dataclass(frozen=True)
class RoutedExperts(Rule):
    """What the experts that a token chose give of it, weighted and summed."""

    aliases = ("experts", "moe", "mixture_of_experts", "fused_moe")

    def reference(self, tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The meaning: tokens [T, H], experts, weights [T, K], gate_up [E, H, 2 · I], down [E, I, H] → [T, H]."""
        gate, up = torch.einsum("th,tkhj->tkj", tokens, gate_up[experts]).chunk(2, dim=-1)
        rows = torch.einsum("tki,tkih->tkh", F.silu(gate) * up, down[experts])
        return torch.einsum("tkh,tk->th", rows, weights)

    @pattern
    @variants(rows=ENCODINGS, gate=GATES, bounds=(*BOUNDS, *GATED))
    def summed(self, p, rows, gate, bounds, choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """Rows, two products with an activation between, and their sum."""
        like, listed = rows.like(gate.first), rows.listed(p, choice)
        terms = gate.terms(p, partial(rows.product, p, choice, listed))
        hidden = rows.further(p, activated(p, bounds, terms, like), like)
        given = rows.product(p, choice, hidden, down)
        return result.of(p, given, choice)

    @pattern
    @variants(rows=ENCODINGS, gate=(OneMatrix,), bounds=ACTIVATIONS)
    def ungated(self, p, rows, gate, bounds, choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """The same with an activation of one product."""
        like, listed = rows.like(gate.first), rows.listed(p, choice)
        activation = bounds.activated(p, gate.terms(p, partial(rows.product, p, choice, listed)))
        given = rows.product(p, choice, rows.further(p, activation, like), down)
        return result.of(p, given, choice)

    @lookalike("what an expert computes between its two products is not a gated silu or gelu, nor an activation alone")
    def otherwise(self, p, hidden=tensor("*R I"), choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """Any sum of what experts give."""
        given = FloatRows.product(p, choice, hidden, down)
        return result.of(p, given, choice)

    @lookalike(
        "what an expert computes between its two int8 products is no activation whose rows are quantised by token, "
        "or what it reads is not rows of tokens in int8"
    )
    def otherwise_in_int8(
        self,
        p,
        hidden=tensor("*R I"),
        scales=tensor("*R 1"),
        choice: Any = Choice,
        down: Any = Outward,
        result: Any = Sum,
    ):
        """The same in int8."""
        given = QuantisedTokens.product(p, choice, (hidden, scales), down)
        return result.of(p, given, choice)

    def guard(self, rows: Any, gate: Any, bounds: Any, choice: Choice, down: Outward, result: Sum):
        """What the operators take."""
        bounds.refuse(gate.interleaved)
        gate.refuse()
        rows.refuse(down)
        result.refuse()

    @lowering
    @variants(rows=INT8_ENCODINGS, bounds=(Unbounded,))
    def gated(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """The first product, its activation and quantisation as one, which reads matrices in FRACTAL_NZ alone."""
        both = gate.joined()
        require(
            both.bias is None, "between the product and its activation stand biases, of which the operator has none"
        )
        require(both.is_parameter_only, "the matrices of the experts are not prepared: the operator reads FRACTAL_NZ")
        routed = rows.routed(choice.experts, down.weight.shape[0])
        int8, scales = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            routed.rows, [both.in_nz()], [both.scale], routed.scales, routed.counts, group_list_type=1
        )
        given = _second_product(rows, routed._replace(rows=int8, scales=scales), down)
        return _total(given, choice, routed.places, down, result)

    @lowering
    @calls("npu::npu_swiglu_quant")
    @variants(rows=INT8_ENCODINGS, bounds=(Unbounded,))
    def quantised(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Activation and quantisation as one, which not every compiler takes."""
        first = gate.joined()
        require(first.bias is None, "biases stand between the product and its activation")
        routed = rows.routed(choice.experts, down.weight.shape[0])
        both = _first_product(rows, routed, gate, first, down)
        int8, inverse = torch.ops.npu.npu_swiglu_quant(both, activate_left=True, quant_mode=1)
        scaled = routed._replace(rows=int8, scales=inverse.reciprocal())  # it gives 127 / rowmax
        given = _second_product(rows, scaled, down)
        return _total(given, choice, routed.places, down, result)

    @lowering
    def npu(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Rows in order of their experts, two products of groups with an activation between, and the sum."""
        routed, first = rows.routed(choice.experts, down.weight.shape[0]), gate.joined()
        both = _first_product(rows, routed, gate, first, down)
        with bounded():  # the model holds both in the dtype of the first product
            if first.bias is not None:
                both = (both + first.bias[choice.in_order(routed.places)]).to(both.dtype)
            activated = bounds.run(both, gate.interleaved)
        hidden = rows.encoded(routed, activated)
        return _total(_second_product(rows, hidden, down), choice, routed.places, down, result)


def _first_product(rows: Any, routed: Routed, gate: Any, first: Inward, down: Outward) -> Tensor:
    """Return gate and up of all rows, [R, 2 · I], by the matrices `first` in the dtype of what experts give."""
    like = rows.like(gate.first)
    held = like.dtype if isinstance(like, Tensor) else like
    with rounding("the product before the activation", held, down.dtype or held):
        return rows.multiplied(routed, replace(first, dtype=down.dtype))


def _second_product(rows: Any, routed: Routed, down: Outward) -> Tensor:
    """Return what each expert gives, [R, H]."""
    with bounded():  # the model holds it in this dtype as well
        return rows.multiplied(routed, down)


def _total(given: Tensor, choice: Choice, places: Tensor, down: Outward, result: Sum) -> Tensor:
    """The sum of what experts give, each row with its weight, and perhaps their biases."""
    weights, of = choice.weights.to(given.dtype), None if down.bias is None else choice.experts.to(torch.int32)
    bias = None if down.bias is None else down.bias.to(given.dtype)
    y = torch.ops.npu.npu_moe_finalize_routing(given, result.beside, None, bias, weights, places, of, drop_pad_mode=2)
    return y.reshape([each if isinstance(each, int) else -1 for each in result.shape])
