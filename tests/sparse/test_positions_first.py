"""Indexers that keep positions before sequences, as where both are the rows of a linear layer [S, B, ..]."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example
from fusion.frontend.library import installed
from fusion.testing import LEVELS, Level, Trial, means_what_it_says, trial
from patterns.attention.masks.masks import MOVED
from tests.engine.graphs import HOST, numbers

S, B, N, T, D = 3, 2, 4, 5, 8
RULE = next(each for each in installed().rules if each.name == "indexer_topk")


def scores(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return (F.relu(torch.einsum("sbnd,tbd->sbnt", q, k)) * weights.unsqueeze(-1)).sum(2)


def summed(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    return scores(q, k, weights).transpose(0, 1).topk(2).indices


def multiplied(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    rectified = F.relu(q @ k.permute(1, 2, 0))
    return (weights.unsqueeze(-2) @ rectified).squeeze(-2).transpose(0, 1).topk(2).indices


def hidden_before(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """Masks of positions, which stand where sequences do afterwards."""
    hides = torch.triu(torch.full((q.shape[0], k.shape[0]), -torch.inf), 3)
    return (scores(q, k, weights) + hides[:, None]).transpose(0, 1).topk(2).indices


def heads_before_sequences(q: Tensor, k: Tensor, weights: Tensor) -> Tensor:
    """[S, N, B, T]: what is summed stands where sequences are expected."""
    q, weights = q.transpose(1, 2), weights.transpose(1, 2)
    rectified = F.relu(torch.einsum("snbd,tbd->snbt", q, k)) * weights.unsqueeze(-1)
    return rectified.sum(1).transpose(0, 1).topk(2).indices


def tried(form, level: Level, positions: int = S, sequences: int = B) -> Trial:
    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        made = numbers(positions, sequences, N, D), numbers(T, sequences, D, seed=1)
        return tuple(each.to(dtype) for each in (*made, numbers(positions, sequences, N, seed=2)))

    return trial(RULE, Example("positions first", form, inputs), torch.float32, level, HOST)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("form", [summed, multiplied], ids=lambda each: each.__name__)
@pytest.mark.parametrize("sizes", [(S, B), (S, 1), (1, B), (B, B)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_they_list_what_the_operator_lists(form, sizes: tuple[int, int], level: Level):
    t = tried(form, level, *sizes)
    assert [each.match.rule.name for each in t.outcome.chosen] == ["indexer_topk"]
    means_what_it_says(t)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("sizes", [(S, B), (S, 1), (N, B), (N, N), (1, N)], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_heads_that_stand_before_sequences_are_not_taken_for_them(sizes: tuple[int, int], level: Level):
    means_what_it_says(tried(heads_before_sequences, level, *sizes))


@pytest.mark.parametrize("sizes", [(S, B), (B, B)], ids=str)
def test_masks_below_the_exchange_are_refused(sizes: tuple[int, int]):
    t = tried(hidden_before, "composite", *sizes)
    assert not t.outcome.chosen
    assert MOVED in [each.reason for each in t.outcome.refusals]
