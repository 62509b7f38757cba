"""y_t = Σ_c w[t, c] · D_e · swiglu(U_e x_t) over the experts e = e(t, c) that token t chose  (Shazeer et al., 2017).

*Matches* rows that are sorted by expert and multiplied in groups, and rows that meet matrices gathered for them; gate
and up of an expert in one matrix or in two, the sum by a reshape, a product or additions. *Replaces with*
`npu_moe_init_routing_v2`, `npu_grouped_matmul`, `npu_swiglu`, `npu_grouped_matmul` and `npu_moe_finalize_routing`,
which weighs and adds in float32. Weights are rounded to the dtype of the rows. Biases behind the first product are
added as rows, as npu_grouped_matmul is documented to take one of one dim alone; those behind the second by the sum.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Group, Rule, attribute, lookalike, lowering, pattern, require, tensor, variants
from patterns.linear.gates import BOUNDS, Merged, activated


@dataclass(frozen=True)
class Choice(Group):
    """Which experts each token chose, how rows stand for them, and what each counts."""

    experts: Any = tensor("T K")
    weights: Any = tensor("T K")
    order: Any = tensor("R", optional=True)
    is_sorted: Any = attribute()

    def product(self, p, x, weight, bias, is_parameter_only):
        """Each row by the matrix of its expert, and perhaps its bias."""
        how = dict(is_sorted=self.is_sorted, is_parameter_only=is_parameter_only)
        return p.expert_product(x=x, weight=weight, bias=bias, experts=self.experts, **how)

    def in_order(self, places: Tensor) -> Tensor:
        """The expert of each sorted row [R], of the place that each pair has there."""
        listed = self.experts.flatten().to(torch.int64)
        return listed.new_zeros(listed.shape).scatter(0, places.to(torch.int64), listed)


@dataclass(frozen=True)
class MergedGate(Group):
    """Gate and up of an expert in one matrix."""

    weight: Any = tensor("E H J")
    bias: Any = tensor("E J", optional=True)
    is_parameter_only: Any = attribute()
    interleaved: Any = attribute()

    def terms(self, p, rows, choice):
        """Both, of all rows."""
        both = choice.product(p, rows, self.weight, self.bias, self.is_parameter_only)
        return Merged(both, self.interleaved).terms(p)

    def refuse(self) -> None:
        """They lie in one tensor already."""

    def joined(self) -> Tensor:
        """Both, [E, H, 2 · I]."""
        return self.weight

    def biases(self) -> Tensor | None:
        """Those of both, [E, 2 · I]."""
        return self.bias


@dataclass(frozen=True)
class TwoGates(Group):
    """Gate and up of an expert in a matrix each."""

    gate: Any = tensor("E H I")
    gate_bias: Any = tensor("E I", optional=True)
    gate_is_parameter_only: Any = attribute()
    up: Any = tensor("E H I")
    up_bias: Any = tensor("E I", optional=True)
    up_is_parameter_only: Any = attribute()
    interleaved = False

    def terms(self, p, rows, choice):
        """Both, of all rows."""
        wide = torch.float32
        gate = choice.product(p, rows, self.gate, self.gate_bias, self.gate_is_parameter_only)
        up = choice.product(p, rows, self.up, self.up_bias, self.up_is_parameter_only)
        return p.maybe_cast(gate, to=wide), p.maybe_cast(up, to=wide)

    def refuse(self) -> None:
        """Joining is free only where it is done once."""
        fixed = self.gate_is_parameter_only and self.up_is_parameter_only
        require(fixed, "the matrices of the experts do not come from Parameters alone: joining them would cost a copy")
        require((self.gate_bias is None) == (self.up_bias is None), "only one of gate and up has biases of the experts")

    def joined(self) -> Tensor:
        """Both, [E, H, 2 · I]."""
        return torch.cat([self.gate, self.up], dim=2)

    def biases(self) -> Tensor | None:
        """Those of both, [E, 2 · I]."""
        return None if self.gate_bias is None else torch.cat([self.gate_bias, self.up_bias], dim=1)


@dataclass(frozen=True)
class RoutedExperts(Rule):
    """What the experts that a token chose give of it, weighted and summed."""

    def reference(self, tokens: Tensor, experts: Tensor, weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        """The meaning: tokens [T, H], experts, weights [T, K], gate_up [E, H, 2 · I], down [E, I, H] → [T, H]."""
        gate, up = torch.einsum("th,tkhj->tkj", tokens, gate_up[experts]).chunk(2, dim=-1)
        rows = torch.einsum("tki,tkih->tkh", F.silu(gate) * up, down[experts])
        return torch.einsum("tkh,tk->th", rows, weights)

    @pattern
    @variants(gate=(MergedGate, TwoGates), bounds=BOUNDS)
    def summed(
        self, p, gate, bounds, tokens=tensor("T H"), choice: Any = Choice, down=tensor("E I H"),
        down_bias=tensor("E H", optional=True), down_is_parameter_only=attribute(), shape=attribute(),
    ):  # fmt: skip
        """Rows, two products with an activation between, and their sum."""
        rows = p.routed_rows(tokens=tokens, experts=choice.experts, order=choice.order)
        hidden = p.as_dtype(activated(p, bounds, gate.terms(p, rows, choice), tokens), like=tokens)
        given = choice.product(p, hidden, down, down_bias, down_is_parameter_only)
        return p.expert_sum(rows=given, weights=choice.weights, order=choice.order, shape=shape)

    @lookalike("what an expert computes between its two products is not a gated silu")
    def otherwise(
        self, p, hidden=tensor("*R I"), choice: Any = Choice, down=tensor("E I H"),
        down_bias=tensor("E H", optional=True), down_is_parameter_only=attribute(), shape=attribute(),
    ):  # fmt: skip
        """Any sum of what experts give."""
        given = choice.product(p, hidden, down, down_bias, down_is_parameter_only)
        return p.expert_sum(rows=given, weights=choice.weights, order=choice.order, shape=shape)

    def guard(self, gate: Any, bounds: Any, choice: Choice, shape: Any):
        """What the operators take, and that rows which are sorted are put back."""
        bounds.refuse(gate.interleaved)
        gate.refuse()
        require(
            choice.is_sorted == (choice.order is not None), "rows are sorted by expert for one of two products alone"
        )
        known = [each for each in shape if isinstance(each, int)]
        require(len(shape) - len(known) <= 1, "the result has several symbolic sizes")

    @lowering
    def npu(self, tokens: Tensor, choice: Choice, gate: Any, bounds: Any, down: Tensor, down_bias: Any, shape: Any):
        """Rows in order of their experts, two products of groups with an activation between, and the sum."""
        count = down.shape[0]
        rows, places, counts, _ = torch.ops.npu.npu_moe_init_routing_v2(
            tokens,
            choice.experts.to(torch.int32),
            active_num=0,
            expert_num=count,
            expert_tokens_num_type=1,
            expert_tokens_num_flag=True,
            active_expert_range=[0, count],
        )
        both, biases = _by_group(rows, gate.joined(), counts), gate.biases()
        if biases is not None:
            both = both + biases[choice.in_order(places)]
        given = _by_group(bounds.run(both, gate.interleaved), down, counts)
        weights, of = choice.weights.to(tokens.dtype), None if down_bias is None else choice.experts.to(torch.int32)
        y = torch.ops.npu.npu_moe_finalize_routing(given, None, None, down_bias, weights, places, of, drop_pad_mode=2)
        return y.reshape([each if isinstance(each, int) else -1 for each in shape])


def _by_group(rows: Tensor, matrices: Tensor, counts: Tensor) -> Tensor:
    """Sorted rows by the matrix of their expert, of which each has so many."""
    how = dict(group_list=counts, split_item=2, group_type=0, group_list_type=1)
    return torch.ops.npu.npu_grouped_matmul([rows], [matrices], **how)[0]
