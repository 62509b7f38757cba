"""Experts that are all computed for every token by stacked matrices, weighed by zeros off the list: it is told so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

T, H, INNER, EXPERTS, CHOICES = 16, 64, 128, 8, 2
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
WHY = "all experts are computed for every token, by products of stacked matrices"


def batched(x: Tensor, every: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Llama 4: one batched product, summed over its first dim."""
    gate, up = torch.bmm(x.unsqueeze(0).expand(EXPERTS, -1, -1), gate_up).chunk(2, -1)
    return (torch.bmm(F.silu(gate) * up, down) * every.t().unsqueeze(-1)).sum(0)


def by_einsum(x: Tensor, every: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    gate, up = torch.einsum("th,ehi->tei", x, gate_up).chunk(2, -1)
    return torch.einsum("teh,te->th", torch.einsum("tei,eih->teh", F.silu(gate) * up, down), every)


class Experts(nn.Module):
    """A router whose weights [T, K] are put among zeros [T, E], or all weights as they are."""

    def __init__(self, form: Callable[..., Tensor], chosen: bool) -> None:
        super().__init__()
        self.router = nn.Linear(H, EXPERTS, bias=False)
        self.gate_up, self.down = (
            nn.Parameter(torch.randn(EXPERTS, *shape) / 8) for shape in ((H, 2 * INNER), (INNER, H))
        )
        self.form, self.chosen = form, chosen

    def forward(self, x: Tensor) -> Tensor:
        weights = F.softmax(self.router(x), -1, dtype=torch.float32)
        if self.chosen:
            kept, listed = weights.topk(CHOICES, -1)
            weights = torch.zeros_like(weights).scatter(1, listed, kept / kept.sum(-1, keepdim=True))
        return self.form(x, weights.to(x.dtype), self.gate_up, self.down)


def told(form: Callable[..., Tensor], chosen: bool) -> list[str]:
    model = Experts(form, chosen).bfloat16().eval().requires_grad_(False)
    report = fusion.explain(model, torch.randn(T, H).bfloat16(), options=OPTIONS)
    assert not any("grouped" in name for name in report.ops)
    return [each.reason for each in report.refusals if each.rule == "routed_experts"]


@pytest.mark.parametrize("form", [batched, by_einsum])
def test_it_is_told_once(form: Callable[..., Tensor]):
    (reason,) = told(form, chosen=True)
    assert WHY in reason


@pytest.mark.parametrize("form", [batched, by_einsum])
def test_of_experts_that_all_count_nothing_is_said(form: Callable[..., Tensor]):
    assert not told(form, chosen=False)


def test_of_weights_that_are_added_up_nothing_is_said():
    """The loss that balances experts."""

    def balance(x: Tensor, every: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
        return ((x @ gate_up[0, :, :EXPERTS]) * every).sum(0)

    assert not told(balance, chosen=True)


def test_it_is_told_of_symbolic_tokens():
    model = Experts(by_einsum, chosen=True).bfloat16().eval().requires_grad_(False)
    x = torch.randn(T, H).bfloat16()
    torch._dynamo.mark_dynamic(x, 0)
    report = fusion.explain(model, x, options=OPTIONS)
    assert not report.failures
    assert [WHY in each.reason for each in report.refusals if each.rule == "routed_experts"] == [True]
