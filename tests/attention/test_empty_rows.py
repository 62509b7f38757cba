"""Queries that see no key, in every spelling of a softmax: fused, they give what the code gives, or it is refused."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import Example, testing
from fusion.testing import Trial
from patterns.attention.attention import Attention

B, N, S, T, D = 2, 2, 4, 12, 16
Weights = Callable[[Tensor, Tensor], Tensor]
Masked = Callable[[Tensor, Tensor], Tensor]
LEAST = torch.finfo(torch.float32).min


def hidden() -> Tensor:
    """Padding of which two queries of one sequence see nothing, [B, 1, S, T]."""
    generator = torch.Generator().manual_seed(3)
    gone = torch.rand(B, 1, S, T, generator=generator) < 0.4
    gone[0, :, :, 0], gone[1, :, :2] = False, True
    gone[1, :, 2:, 1] = False
    return gone


def tried(weights: Weights, masked: Masked, dtype: torch.dtype) -> Trial:
    def attend(q: Tensor, k: Tensor, v: Tensor, gone: Tensor) -> Tensor:
        return weights(masked(q @ k.mT * D**-0.5, gone), gone).to(v.dtype) @ v

    def inputs(dtype: torch.dtype) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(5)
        rows = (torch.randn(B, N, size, D, generator=generator).to(dtype) for size in (S, T, T))
        return *rows, hidden()

    return testing.trial(Attention(), Example("", attend, inputs), dtype)


def fuses(t: Trial) -> bool:
    assert not t.outcome.failures, t.outcome.failures
    return [each.match.rule.name for each in t.outcome.chosen] == ["attention"]


# how keys are hidden -------------------------------------------------------------------------------------------------


def filled(number: float, dtype: torch.dtype | None = None) -> Masked:
    def mask(scores: Tensor, gone: Tensor) -> Tensor:
        wide = scores if dtype is None else scores.to(dtype)
        return wide.masked_fill(gone, max(number, torch.finfo(wide.dtype).min) if math.isfinite(number) else number)

    return mask


def added(number: float) -> Masked:
    def mask(scores: Tensor, gone: Tensor) -> Tensor:
        return scores + torch.zeros(gone.shape, dtype=scores.dtype).masked_fill(gone, max(number, lowest(scores)))

    return mask


def lowest(scores: Tensor) -> float:
    return torch.finfo(scores.dtype).min


INFINITE: dict[str, Masked] = {"-inf": filled(-math.inf)}
FINITE: dict[str, Masked] = {
    "the least": filled(LEAST),
    "the least of float32": filled(LEAST, torch.float32),
    "the least of bfloat16, in float32": filled(torch.finfo(torch.bfloat16).min, torch.float32),
    "-1e9": filled(-1e9, torch.float32),
    "-1e4": filled(-1e4),
    "the least, added": added(LEAST),
    "-1e4 times what is hidden": lambda scores, gone: (
        scores * (1 - gone.to(scores.dtype)) - 1e4 * gone.to(scores.dtype)
    ),
}
ADDED: dict[str, Masked] = {
    "the logarithm of what is seen": lambda scores, gone: scores + (~gone).to(scores.dtype).log(),
}
"""Infinities that are computed: what weights replace by 0 is not proven to be these."""
HOW = INFINITE | FINITE | ADDED


# how weights are written ---------------------------------------------------------------------------------------------


def shares(powers: Tensor) -> Tensor:
    return powers / powers.sum(-1, keepdim=True)


def less(scores: Tensor, top: Tensor) -> Tensor:
    return shares((scores - top).exp())


def greatest(scores: Tensor) -> Tensor:
    return scores.amax(-1, keepdim=True)


def finite(top: Tensor) -> Tensor:
    return torch.where(top == -math.inf, torch.zeros_like(top), top)


def guarded(scores: Tensor, by: Callable[[Tensor], Tensor]) -> Tensor:
    """Below the greatest, or 0 where that is -inf, and divided by a sum that `by` keeps from 0."""
    powers = (scores - finite(greatest(scores))).exp()
    return powers / by(powers.sum(-1, keepdim=True))


def base_two(scores: Tensor) -> Tensor:
    raised = scores * math.log2(math.e)
    powers = torch.exp2(raised - greatest(raised))
    return shares(powers)


MEAN: dict[str, Weights] = {
    "softmax": lambda s, gone: s.softmax(-1),
    "softmax in float32": lambda s, gone: F.softmax(s, -1, dtype=torch.float32),
    "safe softmax": lambda s, gone: torch.ops.aten._safe_softmax(s, -1),
    "log_softmax": lambda s, gone: s.log_softmax(-1).exp(),
    "softmin": lambda s, gone: F.softmin(-s, -1),
    "below the greatest": lambda s, gone: less(s, greatest(s)),
    "below the greatest, or 0": lambda s, gone: less(s, finite(greatest(s))),
    "below the largest": lambda s, gone: less(s, s.topk(1, -1).values),
    "below the greatest, by a log-sum-exp": lambda s, gone: (
        s - greatest(s) - (s - greatest(s)).logsumexp(-1, keepdim=True)
    ).exp(),
    "NaN made 0": lambda s, gone: s.softmax(-1).nan_to_num(0.0),
    "a number too small to count": lambda s, gone: guarded(s, lambda total: total + 1e-30),
    "a least sum": lambda s, gone: guarded(s, lambda total: total.clamp_min(1e-6)),
    "times a reciprocal": lambda s, gone: (
        (s - greatest(s)).exp() * (s - greatest(s)).exp().sum(-1, keepdim=True).reciprocal()
    ),
    "over columns": lambda s, gone: s.mT.softmax(-2).mT,
    "less a logarithm": lambda s, gone: (s - greatest(s) - (s - greatest(s)).exp().sum(-1, keepdim=True).log()).exp(),
    "1 for a sum of 0": lambda s, gone: guarded(s, lambda total: torch.where(total == 0, 1.0, total)),
}
"""The greatest score is subtracted first: rows of one number are shared out alike."""

SAME: dict[str, Weights] = {
    "exponentials as they are": lambda s, gone: shares(s.exp()),
    "over the exponential of a log-sum-exp": lambda s, gone: s.exp() / s.logsumexp(-1, keepdim=True).exp(),
    "base two as it is": lambda s, gone: shares(torch.exp2(s * math.log2(math.e))),
    "replaced by 0": lambda s, gone: s.softmax(-1).masked_fill(gone, 0.0),
    "replaced by 0 behind a log-sum-exp": lambda s, gone: (
        (s - s.logsumexp(-1, keepdim=True)).exp().masked_fill(gone, 0.0)
    ),
    "where a key is seen": lambda s, gone: torch.where((~gone).any(-1, keepdim=True), s.softmax(-1), 0.0),
    "where not all are hidden": lambda s, gone: s.softmax(-1).masked_fill(gone.all(-1, keepdim=True), 0.0),
    "times what is seen": lambda s, gone: s.softmax(-1) * (~gone),
}
"""Rows of one number give what rows of -inf give, or 0."""

SUM: dict[str, Weights] = {
    "log-sum-exp": lambda s, gone: (s - s.logsumexp(-1, keepdim=True)).exp(),
    "log-sum-exp of another shape": lambda s, gone: (s - s.logsumexp(-1)[..., None]).exp(),
    "log-sum-exp written out": lambda s, gone: (
        s - (greatest(s) + (s - greatest(s)).exp().sum(-1, keepdim=True).log())
    ).exp(),
    "log-sum-exp, or infinity": lambda s, gone: (
        s - s.logsumexp(-1, keepdim=True).masked_fill((s.logsumexp(-1, keepdim=True) == -math.inf), math.inf)
    ).exp(),
    "logarithm of a sum": lambda s, gone: (s - s.exp().sum(-1, keepdim=True).log()).exp(),
    "log-sum-exp to base two": lambda s, gone: torch.exp2(
        s * math.log2(math.e) - torch.exp2(s * math.log2(math.e)).sum(-1, keepdim=True).log2()
    ),
}
"""A number swallows the logarithm of how many keys there are: neither is what the operator gives."""


ALL = MEAN | SAME | SUM


def as_in_float64(t: Trial) -> None:
    """Where float64 gives what the code gives in its own dtype, so does the fused graph."""
    testing.means_what_it_says(t)
    wide = testing.widen(t.captured.graph)(*(testing.widened(each) for each in t.captured.inputs))
    results = t.captured.graph(*t.captured.inputs), t.fused(*t.inputs()), wide
    for eager, actual, exact in zip(*results, strict=True):
        room = 64 * torch.finfo(eager.dtype).eps
        agrees = torch.isclose(eager.double(), exact, rtol=room, atol=room, equal_nan=True)
        torch.testing.assert_close(actual[agrees].double(), exact[agrees], rtol=room, atol=room, equal_nan=True)


@pytest.mark.parametrize("name", MEAN | SAME)
@pytest.mark.rotates(6)
def test_a_row_that_a_number_hides_gives_what_the_code_gives(name: str):
    t = tried((MEAN | SAME)[name], HOW["the least"], torch.float32)
    assert fuses(t), t.outcome.refusals
    as_in_float64(t)


@pytest.mark.parametrize("name", SUM)
def test_a_row_that_gives_a_sum_is_refused(name: str):
    t = tried(SUM[name], HOW["the least"], torch.float32)
    assert not t.outcome.chosen
    assert any("gives neither 0, NaN nor the mean" in each.reason for each in t.outcome.refusals)


@pytest.mark.parametrize("name", ["log-sum-exp", "log-sum-exp, or infinity", "logarithm of a sum"])
def test_a_row_of_infinities_has_no_sum(name: str):
    t = tried(SUM[name], HOW["-inf"], torch.float32)
    assert fuses(t), t.outcome.refusals
    as_in_float64(t)


def test_a_log_sum_exp_of_rows_that_see_a_key_is_fused():
    def in_order(scores: Tensor, gone: Tensor) -> Tensor:
        return scores.masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), LEAST)

    t = tried(SUM["log-sum-exp"], in_order, torch.float32)
    assert fuses(t), t.outcome.refusals
    as_in_float64(t)


def test_a_log_sum_exp_beside_which_a_number_leaves_room_is_fused():
    assert fuses(tried(SUM["log-sum-exp"], HOW["-1e4"], torch.float32))
    assert not fuses(tried(SUM["log-sum-exp"], HOW["-1e4"], torch.bfloat16))


# what is subtracted from each row ------------------------------------------------------------------------------------

SWALLOWED: dict[str, Weights] = {
    "the first": lambda s, gone: (s - s[..., :1]).softmax(-1),
    "the mean": lambda s, gone: (s - s.mean(-1, keepdim=True)).softmax(-1),
    "the least": lambda s, gone: (s - s.amin(-1, keepdim=True)).softmax(-1),
    "the second": lambda s, gone: (s - s.topk(2, -1).values[..., 1:]).softmax(-1),
    "the greatest of others": lambda s, gone: less(s, greatest(s[..., ::2])),
}


@pytest.mark.parametrize("name", SWALLOWED)
def test_a_number_that_may_hide_a_key_is_subtracted_from_no_row(name: str):
    t = tried(SWALLOWED[name], HOW["the least"], torch.float32)
    assert not t.outcome.chosen
    assert any("may be the number that hides a key" in each.reason for each in t.outcome.refusals)


def test_without_a_mask_anything_is_subtracted():
    t = tried(SWALLOWED["the first"], lambda scores, gone: scores, torch.float32)
    assert fuses(t), t.outcome.refusals
    as_in_float64(t)


def test_what_the_greatest_is_raised_to_is_subtracted_where_no_row_is_lower():
    def raised(number: float) -> Weights:
        return lambda s, gone: less(s, greatest(s).clamp(min=number))

    for number in (LEAST, -100.0):
        t = tried(raised(number), HOW["the least"], torch.float32)
        assert fuses(t), t.outcome.refusals
        as_in_float64(t)


@pytest.mark.rotates
@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("dtype", testing.DTYPES, ids=str)
@pytest.mark.parametrize("name", ALL | SWALLOWED)
def test_every_spelling_behind_every_mask(name: str, dtype: torch.dtype, how: str):
    t = tried((ALL | SWALLOWED)[name], HOW[how], dtype)
    assert not t.outcome.failures
    if name in ALL and how in INFINITE:
        assert fuses(t), t.outcome.refusals
    as_in_float64(t)
