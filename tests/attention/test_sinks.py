"""Sinks in every way in which people write them: of weights, of sums, of log-sum-exps, and of what attention gives."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion import Example, testing
from fusion.testing import Trial
from patterns.attention.attention import Attention

from .test_empty_rows import HOW, B, D, N, S, T, as_in_float64, finite, greatest, hidden

Form = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Scores [B, N, S, T], sinks [N] and values [B, N, T, D] to [B, N, S, D]."""


def tried(form: Form, dtype: torch.dtype, how: str = "", wide: bool = False) -> Trial:
    def attend(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, gone: Tensor) -> Tensor:
        q, k, v, sink = (each.float() if wide else each for each in (q, k, v, sink))
        scores = q @ k.mT * D**-0.5
        scores = HOW[how](scores, gone) if how else scores
        return form(scores, sink.to(scores.dtype), v.to(scores.dtype)).to(dtype)

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        rows = (torch.randn(B, N, size, D, generator=generator).to(dtype) for size in (S, T, T))
        return *rows, torch.randn(N, generator=generator).to(dtype), hidden()

    return testing.trial(Attention(), Example("", attend, inputs), dtype)


def takes_a_sink(t: Trial) -> bool:
    """Whether one rewrite has the sink, in whichever lowering, and nothing of it is left."""
    assert not t.outcome.failures, t.outcome.failures
    return [each.match.captures.get("sink") is not None for each in t.outcome.chosen] == [True]


def wide(sink: Tensor) -> Tensor:
    return sink.view(1, N, 1, 1).expand(B, N, S, 1)


def shared(scores: Tensor, top: Tensor, sink: Tensor) -> Tensor:
    """Shares of scores below a number of each row, beside the sink below the same."""
    powers = (scores - top).exp()
    return powers / (powers.sum(-1, keepdim=True) + (sink.view(N, 1, 1) - top).exp())


def reduced(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    """As DeepSeek-V4 has it."""
    top = scores.amax(-1)
    powers = (scores - top[..., None]).exp()
    return (powers / (powers.sum(-1) + (sink.view(1, -1, 1) - top).exp())[..., None]) @ v


def reduced_late(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    top = scores.amax(-1)
    powers = (scores - top[..., None]).exp()
    return (powers @ v) / (powers.sum(-1) + (sink.view(1, -1, 1) - top).exp())[..., None]


def base_two(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    scores, sink = (each * math.log2(math.e) for each in (scores, sink))
    top = scores.amax(-1)
    powers = torch.exp2(scores - top[..., None])
    return (powers @ v) / (powers.sum(-1) + torch.exp2(sink.view(N, 1) - top))[..., None]


def last(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    return torch.cat([scores, wide(sink)], -1).softmax(-1)[..., :-1] @ v


def first(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    return torch.cat([wide(sink), scores], -1).softmax(-1)[..., 1:] @ v


def last_below_the_greatest(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    joined = torch.cat([scores, wide(sink)], -1)
    return (joined - joined.amax(-1, keepdim=True)).softmax(-1)[..., :-1] @ v


def by_all(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    """The log-sum-exp of scores and sink."""
    return (scores - torch.cat([scores, wide(sink)], -1).logsumexp(-1, keepdim=True)).exp() @ v


def by_both(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    return (scores - torch.logaddexp(scores.logsumexp(-1), sink.view(N, 1))[..., None]).exp() @ v


def behind(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    """As FlashAttention's result is scaled, with heads behind positions."""
    lse = scores.logsumexp(-1).transpose(1, 2)
    return ((scores.softmax(-1) @ v).transpose(1, 2) * torch.sigmoid(lse - sink)[..., None]).transpose(1, 2)


def divided_behind(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores.softmax(-1) @ v) / (1 + torch.exp(sink.view(N, 1, 1) - lse))


def share_behind(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores.softmax(-1) @ v) * torch.exp(lse - torch.logaddexp(lse, sink.view(N, 1, 1)))


SINKS: dict[str, Form] = {
    "last": last,
    "first": first,
    "last, below the greatest": last_below_the_greatest,
    "in the sum": lambda s, sink, v: shared(s, greatest(s), sink) @ v,
    "in the sum, below the greatest of both": lambda s, sink, v: (
        shared(s, torch.maximum(greatest(s), sink.view(N, 1, 1)), sink) @ v
    ),
    "in the sum, below nothing": lambda s, sink, v: s.exp() / (s.exp().sum(-1, True) + sink.view(N, 1, 1).exp()) @ v,
    "in the sum, below the greatest or 0": lambda s, sink, v: shared(s, finite(greatest(s)), sink) @ v,
    "in a reduced sum": reduced,
    "in a reduced sum, late": reduced_late,
    "to base two": base_two,
    "in the log-sum-exp": by_all,
    "added to the log-sum-exp": by_both,
    "behind, by a sigmoid": behind,
    "behind, by a sum": divided_behind,
    "behind, by a share": share_behind,
    "a sigmoid of each row": lambda s, sink, v: (
        s.softmax(-1) * torch.sigmoid(s.logsumexp(-1, True) - sink.view(N, 1, 1)) @ v
    ),
    "a score of 0": lambda s, sink, v: shared(s, greatest(s), torch.zeros(N)) @ v,
    "1 in the sum": lambda s, sink, v: s.exp() / (s.exp().sum(-1, True) + 1) @ v,
    "one for all heads": lambda s, sink, v: last(s, sink[:1].expand(N), v),
}


@pytest.mark.rotates(8)
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_is_told(name: str):
    t = tried(SINKS[name], torch.float32, "the least")
    assert takes_a_sink(t), t.outcome.refusals
    as_in_float64(t)


@pytest.mark.rotates
@pytest.mark.parametrize("wide", [False, True], ids=["narrow", "in float32"])
@pytest.mark.parametrize("how", ["", *HOW])
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("name", SINKS)
def test_a_sink_beside_every_mask(name: str, dtype: torch.dtype, how: str, wide: bool):
    t = tried(SINKS[name], dtype, how, wide)
    assert not t.outcome.failures
    if not how:
        assert takes_a_sink(t), t.outcome.refusals
    as_in_float64(t)


OTHERS: dict[str, Form] = {
    "of each query": lambda s, sink, v: (
        (s - greatest(s)).exp() / ((s - greatest(s)).exp().sum(-1, True) + (s[..., :1] - greatest(s)).exp()) @ v
    ),
    "not below what scores are": lambda s, sink, v: (
        (s - greatest(s)).exp() / ((s - greatest(s)).exp().sum(-1, True) + sink.view(N, 1, 1).exp()) @ v
    ),
    "twice": lambda s, sink, v: s.exp() / (s.exp().sum(-1, True) + 2 * sink.view(N, 1, 1).exp()) @ v,
    "the other way round": lambda s, sink, v: (
        (s.softmax(-1) @ v) * torch.sigmoid(sink.view(N, 1) - s.logsumexp(-1))[..., None]
    ),
    "of other rows": lambda s, sink, v: (
        (s.softmax(-1) @ v) * torch.sigmoid(s.logsumexp(-1).flip(-1) - sink.view(N, 1))[..., None]
    ),
    "a gate": lambda s, sink, v: (s.softmax(-1) @ v) * torch.sigmoid(sink.view(N, 1, 1)),
    "of half of the keys": lambda s, sink, v: (
        (s - torch.logaddexp(s[..., : T // 2].logsumexp(-1), sink.view(N, 1))[..., None]).exp() @ v
    ),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.rotates(3)
def test_what_resembles_a_sink_is_none(name: str):
    t = tried(OTHERS[name], torch.float32)
    assert not any(each.match.captures.get("sink") is not None for each in t.outcome.chosen)
    testing.means_what_it_says(t)


def test_a_sink_with_a_value_is_named():
    def valued(scores: Tensor, sink: Tensor, v: Tensor) -> Tensor:
        return torch.cat([scores, wide(sink)], -1).softmax(-1) @ torch.cat([v, v[..., :1, :]], -2)

    assert any("it has a value of its own" in each.reason for each in tried(valued, torch.float32).outcome.refusals)
