"""Sinks beside any number of keys: the column of the sink is cut off by its place from the end."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.testing import capture, trial_of
from tests.engine.graphs import numbers

N, D = 4, 16


def sunk(qkv: Tensor, sink: Tensor) -> Tensor:
    """Each head has a logit that no value belongs to; [S, N, D] each, as gpt-oss lays them."""
    q, k, v = qkv.unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
    scores = scores + torch.full((q.shape[0], k.shape[0]), -torch.inf).triu(1)
    column = sink.view(N, 1, 1).expand(-1, q.shape[0], 1)
    weights = torch.cat((scores, column), dim=-1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, v)


def first(qkv: Tensor, sink: Tensor) -> Tensor:
    """The sink stands first, and the last key is cut off instead."""
    q, k, v = qkv.unbind(1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
    column = sink.view(N, 1, 1).expand(-1, q.shape[0], 1)
    return torch.einsum("hqk,khd->qhd", torch.cat((column, scores), dim=-1).softmax(-1)[..., :-1], v)


def given(tokens: int) -> tuple[Tensor, Tensor]:
    qkv = numbers(tokens, 3, N, D)
    torch._dynamo.mark_dynamic(qkv, 0)
    return qkv, numbers(N, seed=1)


@pytest.mark.parametrize("form", [sunk, first])
@pytest.mark.rotates(3)
def test_any_number_of_keys_gives_what_plain_code_does(form):
    torch.compiler.reset()
    compiled = torch.compile(form, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    for tokens in (5, 9, 2, 17):
        inputs = given(tokens)
        torch.testing.assert_close(compiled(*inputs), form(*inputs))


@pytest.mark.rotates(3)
def test_a_sink_that_is_cut_off_is_told_to_the_operator():
    fused, other = (trial_of(capture(form, given(6), dynamic=None)).outcome for form in (sunk, first))
    assert [each.match.rule.name for each in fused.chosen] == ["attention"]
    assert "attention" not in [each.match.rule.name for each in other.chosen]
