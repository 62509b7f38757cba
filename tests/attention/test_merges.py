"""Merges of attention over parts of the keys: what is proven, and what stays as it is."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from patterns.attention.attention_update import AttentionUpdate

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
    """Weights that are shares of an exponential."""
    weights = sums.softmax(0).unsqueeze(-1)
    return (weights[0] * outs[0] + weights[1] * outs[1]) * sums[0].exp().unsqueeze(-1)


def of_another(outs: Tensor, sums: Tensor) -> Tensor:
    """Weights of three parts for two of them."""
    weights = sums.softmax(0).unsqueeze(-1)
    return weights[0] * outs[0] + weights[1] * outs[1]


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


@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (halves, ((B, N, S, D), (B, N, 2 * T, D), (B, N, 2 * T, D))),
        (gathered, ((4, S, N, D), (4, S, N))),
        (gathered, ((8, S, D), (8, S))),
        (along_the_last, ((2, S, D), (2, S))),
        (twice, ((2, S, D), (2, S))),
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
        (gathered, ((9, S, D), (9, S)), "more than 8 parts"),
        (raised, ((2, S, D), (2, S)), "not shares of one"),
        (of_another, ((3, S, D), (3, S)), "not shares of one"),
        (running, ((B, N, S, D), (B, N, 2 * T, D), (B, N, 2 * T, D)), "not divided by their own sums"),
    ],
)
def test_what_is_no_merge_stays(function: Callable[..., Tensor], shapes: tuple[tuple[int, ...], ...], reason: str):
    t = tried(function, *shapes)
    assert not t.outcome.chosen
    assert [each.reason for each in t.outcome.refusals if reason in each.reason]
