"""Log-sum-exps of scores: what is one of the scores that an attention sees, and what is of others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from fusion.language.rule import Refused
from patterns.attention.attention import Attention
from patterns.attention.results import OutputAndLse

B, N, S, T, D = 2, 3, 4, 6, 16
Parts = tuple[Tensor, Tensor]


def tried(function: Callable[..., Parts], *lead: int) -> testing.Trial:
    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return tuple(torch.randn(*(lead or (B, N)), rows, D, dtype=dtype) for rows in (S, T, T))

    def called(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        return function(q @ k.transpose(-2, -1), v)

    return testing.trial(Attention(), Example("", called, inputs), torch.float32)


def below_another_row(scores: Tensor, v: Tensor) -> Parts:
    """A softmax does not see what is taken from a row: the sum is that of the scores themselves."""
    lse = scores.logsumexp(-1)
    return (scores - scores[..., :1]).softmax(-1) @ v, lse


def divided_in_place(scores: Tensor, v: Tensor) -> Parts:
    """Weights and sums that are divided and logged after the product."""
    top = scores.amax(-1)
    weights = (scores - top[..., None]).exp()
    total = weights.sum(-1)
    return (weights @ v) / total[..., None], torch.log(total) + top


def first(scores: Tensor, v: Tensor) -> Parts:
    """The sum is needed to compute the weights."""
    lse = torch.logsumexp(scores, -1, keepdim=True)
    return torch.exp(scores - lse) @ v, lse


def shifted(scores: Tensor, v: Tensor) -> Parts:
    """The sum of scores from which something was taken."""
    scores = scores - scores.amax(-1, keepdim=True)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def shifted_and_scaled(scores: Tensor, v: Tensor) -> Parts:
    """The same with a factor behind it."""
    scores = (scores - scores.amax(-1, keepdim=True)) * 0.5
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def of_half(scores: Tensor, v: Tensor) -> Parts:
    """The sum over some of the keys."""
    return scores.softmax(-1) @ v, scores[..., : T // 2].logsumexp(-1)


def not_logged(scores: Tensor, v: Tensor) -> Parts:
    """The maximum and the sum, without a logarithm."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v, top + total


def another_top(scores: Tensor, v: Tensor) -> Parts:
    """A sum below one number, to which another is added."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total) @ v, scores.amin(-1, keepdim=True) + total.log()


def divided_by_another(scores: Tensor, v: Tensor) -> Parts:
    """A product that is divided by a sum of other weights."""
    weights, others = scores.exp(), (scores / 2).exp()
    return (weights @ v) / others.sum(-1, keepdim=True), scores.logsumexp(-1)


def of_all_rows(scores: Tensor, v: Tensor) -> Parts:
    """The sum of each row below the largest, with the largest of every row."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1)
    return (weights / total[..., None]) @ v, top + total.log()


@pytest.mark.parametrize("function", [below_another_row, divided_in_place, first])
def test_a_log_sum_of_the_scores_comes_with_the_attention(function: Callable[..., Parts]):
    t = tried(function)
    assert [each.match.form for each in t.outcome.chosen] == ["written[Rows, OutputAndLse]"]
    testing.means_what_it_says(t)


@pytest.mark.parametrize(
    "function",
    [shifted, shifted_and_scaled, of_half, not_logged, another_top, divided_by_another],
)
def test_what_is_a_log_sum_of_something_else_stays(function: Callable[..., Parts]):
    t = tried(function)
    assert not any("OutputAndLse" in each.match.form for each in t.outcome.chosen)
    testing.means_what_it_says(t)


@pytest.mark.parametrize("named", [True, False])
def test_a_log_sum_of_a_query_without_keys(named: bool):
    """By its name it is -inf, as the operator's is made; below the greatest score it is NaN."""

    def attend(scores: Tensor, v: Tensor) -> Parts:
        scores = scores.masked_fill(torch.arange(S)[:, None] + torch.arange(T) < T, -torch.inf)
        top = scores.amax(-1, keepdim=True)
        lse = scores.logsumexp(-1) if named else (top + (scores - top).exp().sum(-1, keepdim=True).log()).squeeze(-1)
        return scores.softmax(-1).nan_to_num(0.0) @ v, lse

    t = tried(attend)
    assert any("OutputAndLse" in each.match.form for each in t.outcome.chosen) == named
    assert any("it is NaN or a finite number" in each.reason for each in t.outcome.refusals) != named
    testing.means_what_it_says(t)


def test_a_log_sum_with_what_belongs_to_another_row_stays():
    t = tried(of_all_rows, 1, 1)
    assert [each.match.form for each in t.outcome.chosen] == ["written[Rows, Output]"]
    assert not any("the rewrite gives" in each.reason for each in t.outcome.refusals)
    testing.means_what_it_says(t)


@pytest.mark.parametrize("turned", [False, True])
def test_a_log_sum_of_grouped_heads_has_their_groups(turned: bool):
    """Two groups of two heads; `turned` are sums of the groups in another order, whose sizes are the same."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Parts:
        scores = q.unflatten(1, (2, 2)) @ k[:, :2].unsqueeze(2).mT
        summed = scores.transpose(1, 2) if turned else scores
        return (scores.softmax(-1) @ v[:, :2].unsqueeze(2)).flatten(1, 2), summed.logsumexp(-1)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        return tuple(torch.randn(B, 4, rows, D, dtype=dtype) for rows in (S, T, T))

    t = testing.trial(Attention(), Example("", attend, inputs), torch.float32)
    assert any("OutputAndLse" in each.match.form for each in t.outcome.chosen) != turned
    testing.means_what_it_says(t)


def test_a_log_sum_beside_a_bias_stays():
    with pytest.raises(Refused, match="it stands beside a bias"):
        OutputAndLse(None).refuse(None, bias=torch.ones(1))
