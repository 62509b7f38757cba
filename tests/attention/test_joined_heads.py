"""Products that are computed head by head and joined are one product of all heads; others are not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import testing
from fusion.graph import Algebra
from fusion.testing import LEVELS, Level
from patterns.attention.core.joined_heads import with_all_heads
from patterns.attention.reasons.not_softmax import JOINED
from tests.engine.graphs import numbers
from tests.support.fused import launches

from .lowered import tried

B, N, S, T, D, C = 2, 4, 6, 16, 16, 32
HEADS = tuple(range(N))


def given(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    """Queries [B, S, N, D], keys and values [B, N, T, D], a latent [B, T, C] and what makes keys of it [N, D, C]."""
    shapes = ((B, S, N, D), (B, N, T, D), (B, N, T, D), (B, T, C), (N, D, C))
    return [numbers(*shape, seed=n).to(dtype) for n, shape in enumerate(shapes)]


def shares(scores: Tensor) -> Tensor:
    """Weights, in float32, of scores that are scaled and masked together."""
    hidden = torch.ones(S, T).tril(T - S) == 0
    return (scores / D**0.5).masked_fill(hidden, float("-inf")).float().softmax(-1).to(scores.dtype)


def heads_of(weights: Tensor, v: Tensor, order: tuple[int, ...] = HEADS) -> Tensor:
    """Results of the heads, side by side."""
    return torch.cat([weights[:, h] @ v[:, one] for h, one in enumerate(order)], -1)


def stacked(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(torch.stack([q[:, :, h] @ k[:, h].mT for h in HEADS], 1)), v)


def scores_alone(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return shares(torch.cat([q[:, None, :, h] @ k[:, h : h + 1].mT for h in HEADS], 1)) @ v


def results_alone(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(q.transpose(1, 2) @ k.mT), v)


def of_a_latent(q: Tensor, k: Tensor, v: Tensor, latent: Tensor, up: Tensor) -> Tensor:
    """Queries of each head are projected to the latent, which all share."""
    return heads_of(shares(torch.stack([(q[:, :, h] @ up[h]) @ latent.mT for h in HEADS], 1)), v)


def written(q: Tensor, k: Tensor, v: Tensor, latent: Tensor, up: Tensor) -> Tensor:
    """The same, with scores that are written into memory that stands ready."""
    scores = q.new_zeros(B, N, S, T)
    for h in HEADS:
        scores[:, h] = (q[:, :, h] @ up[h]) @ latent.mT
    return heads_of(shares(scores), v)


def keys_of_another_head(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(torch.stack([q[:, :, h] @ k[:, 3 - h].mT for h in HEADS], 1)), v)


def values_of_another_head(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(torch.stack([q[:, :, h] @ k[:, h].mT for h in HEADS], 1)), v, (1, 0, 2, 3))


def a_head_twice(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(torch.stack([q[:, :, h] @ k[:, h].mT for h in (0, 0, 1, 2)], 1)), v)


def a_head_made_larger(q: Tensor, k: Tensor, v: Tensor, *_: Tensor) -> Tensor:
    return heads_of(shares(torch.stack([q[:, :, h] @ k[:, h].mT * (2 if h == 1 else 1) for h in HEADS], 1)), v)


def a_head_turned(q: Tensor, k: Tensor, v: Tensor, latent: Tensor, up: Tensor) -> Tensor:
    """One head is multiplied by the transpose of what the others are multiplied by."""
    square = [up[h, :, :D] for h in HEADS]
    turned = [each.mT if h == 2 else each for h, each in enumerate(square)]
    return heads_of(shares(torch.stack([(q[:, :, h] @ turned[h]) @ k[:, h].mT for h in HEADS], 1)), v)


FORMS: tuple[Callable[..., Tensor], ...] = (stacked, scores_alone, results_alone, of_a_latent)
LOOKALIKES = (keys_of_another_head, a_head_twice, a_head_turned)
"""Of which the scores are none of one product."""
OTHERS = (values_of_another_head, a_head_made_larger)


def check(form: Callable[..., Tensor], level: Level, attentions: int) -> list[str]:
    """Hold numbers and launches; why attention was refused."""
    t = tried(form, given(), level)
    assert sum(each.match.rule.name == "attention" for each in t.outcome.chosen) == attentions
    testing.means_what_it_says(t)
    assert launches(t.fused) <= launches(t.captured.graph)
    return [each.reason for each in t.outcome.refusals if each.rule == "softmax_attention"]


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_products_of_single_heads_are_one(form: Callable[..., Tensor], level: Level):
    check(form, level, 1)


def test_scores_that_are_written_head_by_head_are_joined():
    check(written, "composite", 1)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda form: form.__name__)
@pytest.mark.parametrize("level", LEVELS)
def test_heads_that_are_not_those_of_one_tensor_in_order_stay(form: Callable[..., Tensor], level: Level):
    assert set(check(form, level, 0)) == {JOINED}


@pytest.mark.parametrize("form", OTHERS, ids=lambda form: form.__name__)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.rotates(4)
def test_heads_of_which_one_is_unlike_the_others_stay(form: Callable[..., Tensor], level: Level):
    assert check(form, level, 0)


def test_a_chain_in_which_each_value_stands_twice_is_walked_once():
    a = Algebra()
    scores, values = (a.make("input", (), (name, 0), (B, N, T, T), torch.float32) for name in ("scores", "values"))
    for _ in range(60):
        bounded = a.make("clip", (scores,), (-1.0, 1.0), scores.shape, scores.dtype)
        scores = a.make("add", (scores, bounded), (), scores.shape, scores.dtype)
    weights = a.softmax(scores, -1, "nan")
    assert with_all_heads(a, a.make("matmul", (weights, values), (), scores.shape, scores.dtype)) is None
