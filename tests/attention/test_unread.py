"""Softmaxes over scores that are left: each has its reason, and none that is no attention is told of."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fusion
from patterns.attention.reasons.unclaimed import AMID, LEAVES, OF_A_LAYER, PASSED_IN

B, N, S, D = 2, 4, 24, 64
OPTIONS = {"target": "ascend910_93", "plan_cache": "off"}
Form = Callable[..., Tensor]


class Layers(nn.Module):
    """A layer beside code that is tried."""

    def __init__(self, form: Form, width: int) -> None:
        super().__init__()
        self.form, self.layer = form, nn.Linear(D, width, dtype=torch.bfloat16)

    def forward(self, *given: Tensor) -> Tensor:
        return self.form(self.layer, *given)


def kernels(layer: nn.Module, x: Tensor) -> Tensor:
    """ConvBERT: rows beside each other are weighed by a kernel that a layer computes from one row."""
    kernel = layer(x).reshape(-1, 9, 1).softmax(1)
    rows = F.unfold(x.transpose(1, 2).unsqueeze(-1), (9, 1), padding=(4, 0)).transpose(1, 2).reshape(B * S, -1, 9)
    return (rows @ kernel).reshape(B, S, -1)


def sampled(layer: nn.Module, x: Tensor) -> Tensor:
    """Deformable DETR: values at places that are sampled, weighed by a layer of the query alone."""
    weights = layer(x).softmax(-1)
    places = x.float().mean(-1, keepdim=True).view(B, 1, S, 1).expand(B, 9, S, 2)
    values = F.grid_sample(x.transpose(1, 2).reshape(B, D, 4, 6).float(), places, align_corners=False).to(x.dtype)
    return (values.permute(0, 3, 1, 2) * weights[:, :, None]).sum(-1)


def separable(layer: nn.Module, x: Tensor) -> Tensor:
    """MobileViT v2: one score for each row, over all rows."""
    return (x * layer(x)[..., :1].softmax(1)).sum(1, keepdim=True) * x


def by_diagonals(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Longformer: products of blocks, of which bands are copied into a buffer of scores."""
    scores = q.new_zeros(B, N, S, 8)
    for first in range(0, S, 4):
        part = q[:, :, first : first + 4] @ k[:, :, first : first + 4].mT
        scores[:, :, first : first + 4, 4:] = part
        scores[:, :, first : first + 4, :4] = part.flip(-1)
    return scores.softmax(-1) @ v[:, :, :8]


def given_away(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1)


def taken_over(scores: Tensor, v: Tensor) -> Tensor:
    return scores.softmax(-1) @ v


def masked(scores: Tensor, mask: Tensor) -> Tensor:
    """Scores of all heads, in a graph that begins behind the product and ends before that with values."""
    return (scores + mask).float().softmax(-1).to(scores.dtype)


def chosen(layer: nn.Module, x: Tensor) -> Tensor:
    weights, places = layer(x).softmax(-1).topk(2)
    return (x.unsqueeze(-2) * weights.unsqueeze(-1)).sum(-2) + places.sum(-1, keepdim=True)


def chosen_by_logits(layer: nn.Module, x: Tensor) -> Tensor:
    logits = layer(x)
    expert = logits.argmax(-1, keepdim=True)
    return logits.softmax(-1).take_along_dim(expert, -1) * x + expert


def classified(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).softmax(-1)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * D**-0.5).softmax(-1) @ v


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(3)).bfloat16()


def softmax_refusals(form: nn.Module | Form, *given: Tensor) -> list[str]:
    report = fusion.explain(form, *given, options=OPTIONS)
    assert not report.failures
    return [each.reason for each in report.refusals if each.rule == "softmax_attention"]


@pytest.mark.parametrize("form", [kernels, sampled, separable], ids=lambda each: each.__name__)
def test_scores_that_a_layer_computes_from_each_row_are_told_of(form: Form):
    assert softmax_refusals(Layers(form, 9), normal(B, S, D)) == [OF_A_LAYER]


@pytest.mark.parametrize("form", [chosen, chosen_by_logits, classified], ids=lambda each: each.__name__)
def test_routers_and_classifiers_are_not(form: Form):
    assert softmax_refusals(Layers(form, 9), normal(B, S, D)) == []


HEADS = tuple(normal(B, N, S, D) for _ in range(3))


def test_what_stands_between_products_and_a_softmax_is_named():
    reasons = softmax_refusals(by_diagonals, *HEADS)
    assert len(reasons) == 1
    assert reasons[0].startswith(AMID.partition("{}")[0])


def test_weights_that_leave_a_graph_and_scores_that_come_into_one_are_told_of():
    assert softmax_refusals(given_away, *HEADS) == [LEAVES]
    assert softmax_refusals(taken_over, normal(B, N, S, S), HEADS[2]) == [PASSED_IN]
    assert softmax_refusals(masked, normal(B, 2, N, S, S), normal(B, 1, 1, S, S)) == [PASSED_IN]
    assert softmax_refusals(attended, *HEADS) == []
