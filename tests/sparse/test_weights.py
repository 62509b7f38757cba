"""Weights of an indexer: one for each token and head, or shared by tokens or by sequences."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from fusion.frontend.library import installed
from fusion.testing import means_what_it_says, trial
from tests.engine.graphs import HOST, numbers

B, S, N, T, D = 2, 3, 2, 5, 8
RULE = next(each for each in installed().rules if each.name == "indexer_topk")


def chosen(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return (F.relu(q @ k.mT.unsqueeze(1)) * weights).sum(2).topk(2).indices


@pytest.mark.parametrize("shape", [(B, S, N, 1), (N, 1), (1, N, 1), (S, N, 1), (B, 1, N, 1), (B, S, 1, 1)])
def test_an_indexer_weighs_each_token(shape: tuple[int, ...]):
    """As many heads as sequences: shapes do not tell them apart, their places do."""

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = numbers(B, S, N, D), numbers(B, T, D, seed=1), numbers(*shape, seed=2)
        return tuple(each.to(dtype) for each in made)

    t = trial(RULE, Example("weighed", chosen, inputs), torch.float32, "composite", HOST)
    assert [each.match.rule.name for each in t.outcome.chosen] == ["indexer_topk"]
    means_what_it_says(t)
