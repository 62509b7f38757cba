"""y_t = Σ_c w[t, c] · D_e · swiglu(U_e x_t) over the experts e = e(t, c) that token t chose  (Shazeer et al., 2017).

*Matches* grouped products of rows sorted by expert, and products of rows with matrices gathered for them; gate and up
of an expert in one matrix or in two, or no gate; the weighted sum by a reduction, a matmul or an index_add. *Replaces
with* `npu_moe_init_routing_v2`, `npu_grouped_matmul`, `npu_swiglu`, `npu_grouped_matmul` and
`npu_moe_finalize_routing`, which multiplies by the weights and adds in float32; weights and biases are rounded to the
dtype of the rows before. A bias of the first product is gathered for each row and added: npu_grouped_matmul is
documented to take biases of one dim only. A bias of the second product is an argument of npu_moe_finalize_routing.
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
from patterns.linear.gates import ALTERNATE_LANES, BOUNDS, Unbounded, activated
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
    """Weighted sum of the outputs of the experts that each token chose."""

    aliases = ("experts", "moe", "mixture_of_experts", "fused_moe")

    def reference(self, tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """Compute [T, H] of tokens [T, H], experts and weights [T, K], gate_up [E, H, 2 · I] and down [E, I, H]."""
        gate, up = torch.einsum("th,tkhj->tkj", tokens, gate_up[experts]).chunk(2, dim=-1)
        rows = torch.einsum("tki,tkih->tkh", F.silu(gate) * up, down[experts])
        return torch.einsum("tkh,tk->th", rows, weights)

    @pattern
    @variants(rows=ENCODINGS, gate=GATES, bounds=(*BOUNDS, *GATED))
    def summed(self, p, rows, gate, bounds, choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """Σ_k w[t, k] · (act(x_t · G_e) ⊙ (x_t · U_e)) · D_e, act = silu, clipped silu or gelu, e = e(t, k)."""
        like, listed = rows.like(gate.first), rows.listed(p, choice)
        terms = gate.terms(p, partial(rows.product, p, choice, listed))
        hidden = rows.further(p, activated(p, bounds, terms, like), like)
        output = rows.product(p, choice, hidden, down)
        return result.term(p, output, choice)

    @pattern
    @variants(rows=ENCODINGS, gate=(OneMatrix,), bounds=ACTIVATIONS)
    def ungated(self, p, rows, gate, bounds, choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """Σ_k w[t, k] · act(x_t · U_e) · D_e, act = relu, silu or gelu, e = e(t, k)."""
        like, listed = rows.like(gate.first), rows.listed(p, choice)
        activation = bounds.activated(p, gate.terms(p, partial(rows.product, p, choice, listed)))
        output = rows.product(p, choice, rows.further(p, activation, like), down)
        return result.term(p, output, choice)

    @lookalike(
        "experts: between their two products stands something else than a gated silu or gelu, or one "
        "activation; npu_grouped_matmul is called with these and requires one of them"
    )
    def otherwise(self, p, hidden=tensor("*R I"), choice: Any = Choice, down: Any = Outward, result: Any = Sum):
        """Σ_k w[t, k] · h[t, k] · D_e, e = e(t, k), of any h between the products."""
        output = FloatRows.product(p, choice, hidden, down)
        return result.term(p, output, choice)

    @lookalike(
        "experts: between their two int8 products stands no activation whose rows are quantised by token, "
        "or the rows are no int8 of tokens; npu_grouped_matmul requires round(h / scale) with scale = "
        "amax(|h|, -1, keepdim=True) / 127"
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
        """Σ_k w[t, k] · (h[t, k] · D_e) · scales[t, k], e = e(t, k), of any int8 h, and D_e in int8."""
        output = QuantisedTokens.product(p, choice, (hidden, scales), down)
        return result.term(p, output, choice)

    def guard(self, rows: Any, gate: Any, bounds: Any, choice: Choice, down: Outward, result: Sum):
        """Refuse what the facets refuse.

        `bounds` refuses alternate lanes of gate and up that its activation does not split; `gate` matrices joined per
        call; `rows` a dtype that no operator returns; `result` a shape with two symbolic sizes. Biases are refused
        where some experts are on other devices.
        """
        bounds.refuse(gate.interleaved)
        gate.refuse()
        rows.refuse(down)
        result.refuse()
        has_bias = any(each.bias is not None for each in (gate.first, down))
        require(
            choice.is_complete or not has_bias,
            "biases: experts have them, some of which are on other devices; npu_moe_finalize_routing requires none "
            "where it leaves out their rows; leave out the biases, or give it all experts",
        )

    @lowering
    @variants(rows=INT8_ENCODINGS, bounds=(Unbounded,))
    def gated(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Emit npu_grouped_matmul_swiglu_quant_v2: the first int8 product, swiglu and quantisation in one kernel.

        The operator requires matrices in FRACTAL_NZ. The other calls are those of `npu`.
        """
        both = gate.joined()
        require(
            both.bias is None,
            "biases: they stand between the int8 product and its activation; "
            "npu_grouped_matmul_swiglu_quant_v2 requires none",
        )
        require(
            both.is_parameter_only,
            "experts: their matrices are no Parameters; npu_grouped_matmul_swiglu_quant_v2 requires "
            "FRACTAL_NZ, which is prepared of Parameters alone",
        )
        routed = rows.routed(choice)
        int8, scales = torch.ops.npu.npu_grouped_matmul_swiglu_quant_v2(
            routed.rows, [both.in_nz()], [both.scale], routed.scales, routed.counts, group_list_type=1
        )
        outputs = _second_product(rows, routed._replace(rows=int8, scales=scales), down)
        return _total(outputs, choice, routed.places, down, result)

    @lowering
    @calls("npu::npu_swiglu_quant")
    @variants(rows=INT8_ENCODINGS, bounds=(Unbounded,))
    def quantised(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Emit npu_swiglu_quant, swiglu and quantisation in one kernel, between two npu_grouped_matmul in int8."""
        first = gate.joined()
        require(
            first.bias is None,
            "biases: they stand between the int8 product and its activation; npu_swiglu_quant requires none",
        )
        routed = rows.routed(choice)
        both = _first_product(rows, routed, gate, first, down)
        int8, inverse = torch.ops.npu.npu_swiglu_quant(both, activate_left=True, quant_mode=1)
        scaled = routed._replace(rows=int8, scales=inverse.reciprocal())  # npu_swiglu_quant returns 127 / rowmax
        outputs = _second_product(rows, scaled, down)
        return _total(outputs, choice, routed.places, down, result)

    @lowering
    @variants(bounds=GATED)
    def npu_geglu(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Emit what `npu` does, with npu_geglu for the activation of halves."""
        require(not gate.interleaved, ALTERNATE_LANES)
        return self.npu(rows, choice, gate, bounds.as_operator(), down, result)

    @lowering
    def npu(self, rows: Any, choice: Choice, gate: Any, bounds: Any, down: Outward, result: Sum):
        """Emit npu_moe_init_routing_v2, npu_grouped_matmul twice with the activation, and npu_moe_finalize_routing."""
        routed, first = rows.routed(choice), gate.joined()
        both = _first_product(rows, routed, gate, first, down)
        with bounded():  # the model has the sum and the activation in the dtype of the product
            if first.bias is not None:
                both = (both + first.bias[choice.sorted_experts(routed.places)]).to(both.dtype)
            activated = bounds.run(both, gate)
        hidden = rows.encoded(routed, activated)
        return _total(_second_product(rows, hidden, down), choice, routed.places, down, result)


def _first_product(rows: Any, routed: Routed, gate: Any, first: Inward, down: Outward) -> Tensor:
    """Emit the product of the rows sorted in `routed` with `first`, the matrices of `gate`: [R, 2 · I].

    In W8A8 it is returned in the dtype of the second product, `down.dtype`.
    """
    like = rows.like(gate.first)
    dtype = like.dtype if isinstance(like, Tensor) else like
    with rounding("the product before the activation", dtype, down.dtype or dtype):
        return rows.multiplied(routed, replace(first, dtype=down.dtype))


def _second_product(rows: Any, routed: Routed, down: Outward) -> Tensor:
    """Emit the product of the activated rows in `routed` with `down`: the outputs [R, H] of the experts, sorted by
    expert.
    """
    with bounded():  # the model has the outputs in the dtype of the product
        return rows.multiplied(routed, down)


def _total(outputs: Tensor, choice: Choice, places: Tensor, down: Outward, result: Sum) -> Tensor:
    """Emit npu_moe_finalize_routing: for each token Σ_k weight · (row of `outputs` [R, H] + bias) + `result.addend`.

    `choice` has the weights and experts, `places` the row of each pair of a token and an expert, and `down` the biases.
    """
    weights = None if choice.weights is None else choice.weights.to(outputs.dtype)
    experts = None if down.bias is None else choice.experts.to(torch.int32)
    bias = None if down.bias is None else down.bias.to(outputs.dtype)
    mode, choices = 2, {} if weights is not None else {"k": choice.experts.shape[1]}
    if not choice.is_complete:  # mode 3 alone leaves out rows, those with place -1, and takes groups [1, R, H]
        outputs, mode = outputs.unsqueeze(0), 3
    y = torch.ops.npu.npu_moe_finalize_routing(
        outputs, result.addend, None, bias, weights, places, experts, drop_pad_mode=mode, **choices
    )
    return y.reshape([each if isinstance(each, int) else -1 for each in result.shape])
