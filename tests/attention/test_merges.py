"""Merges of attention over parts of the keys: what is proven, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from patterns.attention.lse.attention_update import AttentionUpdate

B, N, S, T, D = 2, 3, 4, 6, 16


def attended(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    scores = q @ k.transpose(-2, -1)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def halves(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Both halves of few keys, whose own sums are left whole."""
    (x, a), (y, b) = (attended(q, *each) for each in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True))
    both = torch.logaddexp(a, b)
    return x * (a - both).exp().unsqueeze(-1) + y * (b - both).exp().unsqueeze(-1)


def gathered(outs: Tensor, sums: Tensor) -> Tensor:
    """Parts that come in one tensor."""
    return (outs * sums.softmax(0).unsqueeze(-1)).sum(0)


def along_the_last(outs: Tensor, sums: Tensor) -> Tensor:
    """Shares of two parts beside each other."""
    shares = torch.stack((sums[0], sums[1]), -1).softmax(-1)
    return outs[0] * shares[..., :1] + outs[1] * shares[..., 1:]


def twice(outs: Tensor, sums: Tensor) -> Tensor:
    """A merge that is multiplied, which stands before the product."""
    weights = sums.softmax(0).unsqueeze(-1)
    return (weights[0] * outs[0] + weights[1] * outs[1]) * 2


def raised(outs: Tensor, sums: Tensor) -> Tensor:
    """Weights that are shares of an exponential; without it, they are shares of one."""
    weights = sums.softmax(0).unsqueeze(-1)
    return (weights[0] * outs[0] + weights[1] * outs[1]) * sums[0].exp().unsqueeze(-1)


def of_another(outs: Tensor, sums: Tensor) -> Tensor:
    """Weights of three parts for two of them."""
    weights = sums.softmax(0).unsqueeze(-1)
    return weights[0] * outs[0] + weights[1] * outs[1]


def sums_of_two(outs: Tensor, sums: Tensor) -> Tensor:
    """What is only added up is one part."""
    weights = sums.softmax(0).unsqueeze(-1)
    return weights[0] * (outs[0] + outs[1]) + weights[1] * (outs[2] + outs[3])


def rounded_halves(outs: Tensor, sums: Tensor) -> Tensor:
    """Parts that are scaled before they are rounded."""
    return gathered((outs.double() / 3).to(outs.dtype), sums)


def turned(outs: Tensor, sums: Tensor) -> Tensor:
    """Parts whose dims have changed places."""
    weights = sums.softmax(0).unsqueeze(-1)
    return weights[0] * outs[0].transpose(0, 1) + weights[1] * outs[1].transpose(0, 1)


def cut_off(outs: Tensor, sums: Tensor) -> Tensor:
    """A part of which whole numbers are left once it is weighed."""
    weights = sums.softmax(0).unsqueeze(-1)
    return (weights[0] * outs[0]).int() + weights[1] * outs[1]


def times_nothing(outs: Tensor, sums: Tensor) -> Tensor:
    """A part that counts nothing."""
    weights = sums.softmax(0).unsqueeze(-1)
    return weights[0] * outs[0] * 0.0 + weights[1] * outs[1] + weights[2] * outs[2]


def by_columns(outs: Tensor, sums: Tensor) -> Tensor:
    """As many weights as rows, but of the columns."""
    return (outs * sums.softmax(0).unsqueeze(1)).sum(0)


def of_two_sums(outs: Tensor, sums: Tensor) -> Tensor:
    """The second part is weighed by the log-sum-exp of two numbers."""
    weights = torch.stack((sums[0], torch.logaddexp(sums[1], sums[2]))).softmax(0).unsqueeze(-1)
    return weights[0] * outs[0] + weights[1] * outs[1]


def cancelled(outs: Tensor, sums: Tensor) -> Tensor:
    """A part that is taken away again."""
    first, second = sums.softmax(0).unsqueeze(-1)
    return (first * outs[0] + first * outs[2]) + (second * outs[1] - first * outs[2])


def gate(outs: Tensor, sums: Tensor) -> Tensor:
    """One tensor, weighed."""
    return outs[0] * sums[0].exp().unsqueeze(-1)


def gate_beside(outs: Tensor, sums: Tensor) -> Tensor:
    """One tensor weighed beside another that is not."""
    return outs[1] + outs[0] * sums[0].sigmoid().unsqueeze(-1)


def raised_parts(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Parts that are divided by their sums, and weights that are no shares."""
    (x, a), (y, b) = (attended(q, *each) for each in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True))
    return x * a.exp().unsqueeze(-1) + y * b.exp().unsqueeze(-1)


def running(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Halves of the keys one after the other, divided at the end."""
    top = torch.full((B, N, S, 1), -torch.inf)
    total, out = torch.zeros(B, N, S, 1), torch.zeros(B, N, S, D)
    for keys, values in zip(k.chunk(2, 2), v.chunk(2, 2), strict=True):
        scores = q @ keys.transpose(-2, -1)
        now = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights, old = (scores - now).exp(), (top - now).exp()
        total, out, top = total * old + weights.sum(-1, keepdim=True), out * old + weights @ values, now
    return out / total


def random(*shapes: tuple[int, ...]) -> Callable[[torch.dtype], tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return lambda dtype: tuple(torch.randn(shape, dtype=dtype) for shape in shapes)


def tried(function: Callable[..., Tensor], *shapes: tuple[int, ...]) -> testing.Trial:
    return testing.trial(AttentionUpdate(), Example("", function, random(*shapes)), torch.float32)


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (halves, ((B, N, S, D), (B, N, 2 * T, D), (B, N, 2 * T, D))),
        (gathered, ((4, S, N, D), (4, S, N))),
        (gathered, ((8, S, D), (8, S))),
        (along_the_last, ((2, S, D), (2, S))),
        (twice, ((2, S, D), (2, S))),
        (sums_of_two, ((4, S, D), (2, S))),
        (rounded_halves, ((2, S, D), (2, S))),
        (turned, ((2, N, S, D), (2, S, N))),
    ],
)
def test_a_merge_is_one_operator(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]):
    t = tried(function, *shapes)
    targets = [str(node.target) for node in t.fused.graph.nodes]
    assert targets.count("npu.npu_attention_update.default") == 1
    testing.means_what_it_says(t)


@pytest.mark.parametrize(
    ("function", "shapes", "reason"),
    [
        (gathered, ((9, S, D), (9, S)), "more than 8 are merged"),
        (of_another, ((3, S, D), (3, S)), "they are not exp(lseᵢ - lse) with lse ="),
        (
            running,
            ((B, N, S, D), (B, N, 2 * T, D), (B, N, 2 * T, D)),
            "they are divided by the sum of all at the",
        ),
        (
            raised_parts,
            ((B, N, S, D), (B, N, 2 * T, D), (B, N, 2 * T, D)),
            "they are not exp(lseᵢ - lse) with lse =",
        ),
        (of_two_sums, ((2, S, D), (3, S)), "one has factors beside exp(lseᵢ - lse)"),
        (cancelled, ((3, S, D), (2, S)), "they are not exp(lseᵢ - lse) with lse ="),
    ],
)
def test_what_is_no_merge_stays(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], reason: str):
    t = tried(function, *shapes)
    assert not t.outcome.chosen
    assert not t.outcome.failures
    assert [each.reason for each in t.outcome.refusals if reason in each.reason]


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (cut_off, ((2, S, D), (2, S))),
        (times_nothing, ((3, S, D), (3, S))),
        (by_columns, ((2, D, D), (2, D))),
        (gate, ((2, S, D), (2, S))),
        (gate_beside, ((2, S, D), (2, S))),
    ],
)
def test_what_is_not_like_a_merge_tells_nothing(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...]):
    t = tried(function, *shapes)
    assert not t.outcome.chosen
    assert not t.outcome.failures
    assert not t.outcome.refusals


def test_a_merge_that_is_multiplied_is_one_inside():
    t = tried(raised, (2, S, D), (2, S))
    assert [each.match.rule.name for each in t.outcome.chosen] == ["attention_update"]
    assert any("they are not exp(lseᵢ - lse) with lse =" in each.reason for each in t.outcome.refusals)
    testing.means_what_it_says(t)
