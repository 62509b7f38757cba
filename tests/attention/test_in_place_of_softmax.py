"""Attention whose weights are another function of the scores than their softmax: no operator does this; it is said."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion

B, N, S, D, E = 2, 4, 6, 32, 3
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
WHY = "they are {} of the scores, without a softmax"
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": lambda scores: torch.sigmoid(scores - 3.0),
    "relu": lambda scores: F.relu(scores).square() / S,
    "gelu": F.gelu,
}


def told(function: Callable[..., object], *given: Tensor) -> list[str]:
    report = fusion.explain(function, *given, options=OPTIONS)
    assert not any("attention" in name for name in report.ops)
    return [each.reason for each in report.refusals if each.rule == "softmax_attention"]


@pytest.mark.parametrize("name", FUNCTIONS)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_named(name: str, masked: bool):
    def form(q: Tensor, k: Tensor, v: Tensor, hidden: Tensor) -> Tensor:
        scores = q @ k.transpose(-1, -2) * D**-0.5
        weights = FUNCTIONS[name](scores.masked_fill(hidden, -1e4) if masked else scores)
        return (weights @ v).transpose(1, 2).flatten(2)

    heads = [torch.randn(B, N, S, D).bfloat16() for _ in range(3)]
    reasons = told(form, *heads, torch.ones(S, S, dtype=torch.bool).triu(1))
    assert len(reasons) == 1
    assert WHY.format(name) in reasons[0]


def test_silu_of_shared_keys_is_named():
    """HSTU: silu of the scores, grouped heads."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (each.repeat_interleave(2, 1) for each in (k, v))
        return F.silu(q @ k.transpose(-1, -2)) / S @ v

    q, k, v = (torch.randn(B, heads, S, D).bfloat16() for heads in (N, N // 2, N // 2))
    assert any(WHY.format("sigmoid") in each for each in told(form, q, k, v))


class Experts(nn.Module):
    """relu(x W) V of matrices of experts, all of them or those that each token chose."""

    def __init__(self, gathered: bool) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(torch.randn(E, D, D).bfloat16()) for _ in range(2))
        self.gathered = gathered

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        up, down = (each[chosen] if self.gathered else each for each in (self.up, self.down))
        return F.relu(x @ up) @ down


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_are_no_attention(gathered: bool):
    assert not told(Experts(gathered), torch.randn(E, S, D).bfloat16(), torch.arange(E))


def test_scores_that_an_indexer_sums_over_its_heads_are_no_attention():
    def form(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
        scores = F.relu(torch.einsum("bsnd,btd->bsnt", q, k))
        return (weights.unsqueeze(-2) @ scores).squeeze(-2)

    q, k, weights = (torch.randn(*shape).bfloat16() for shape in ((B, S, N, D), (B, S, D), (B, S, N)))
    assert not told(form, q, k, weights)
