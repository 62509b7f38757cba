"""Attention of one query over one key: a score is a sum of elementwise products, as of a first token."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from fusion.options import Options
from fusion.testing import DTYPES, LEVELS, Level, capture, emits_valid_calls, means_what_it_says, trial_of
from patterns.attention.reasons.not_softmax import HIDDEN_ONE, ONE_KEY

NPU = Options(target="ascend910_93", lower="eager")
HOST = Options(target="host", lower="eager")
B, D = 2, 64


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(-1) @ v


def in_float32(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q.float() @ k.float().transpose(-1, -2) * D**-0.5).softmax(-1).to(q.dtype) @ v


def einsums(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bnsd,bntd->bnst", q, k) * D**-0.5
    return torch.einsum("bnst,bntd->bnsd", scores.softmax(-1), v)


def by_name(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return nn.functional.scaled_dot_product_attention(q, k, v)


def over_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) * D**-0.5).softmax(1) @ v


def rows(heads: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    made = torch.Generator().manual_seed(heads)
    return tuple(torch.randn(B, heads, 1, D, generator=made, dtype=torch.float64).to(dtype) for _ in range(3))


@pytest.mark.parametrize("form", [plain, in_float32, by_name])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("heads", [8, 1])
@pytest.mark.rotates(4)
def test_it_is_one_call(form: Callable[..., Tensor], level: Level, heads: int):
    outcome = trial_of(capture(form, rows(heads, torch.bfloat16), level), NPU).outcome
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"]


@pytest.mark.parametrize("form", [plain, in_float32])
@pytest.mark.parametrize("dtype", DTYPES)
def test_its_numbers_stay(form: Callable[..., Tensor], dtype: torch.dtype):
    t = trial_of(capture(form, rows(8, dtype), "decomposed"), HOST)
    assert [each.match.rule.name for each in t.outcome.chosen] == ["attention"]
    means_what_it_says(t)
    emits_valid_calls(t)


def test_a_softmax_over_heads_stays():
    t = trial_of(capture(over_heads, rows(8, torch.bfloat16)), NPU)
    assert not t.outcome.chosen
    [reason] = [each.reason for each in t.outcome.refusals]
    assert "it is taken over the queries" in reason


@pytest.mark.parametrize("level", LEVELS)
def test_of_products_that_torch_writes_without_a_sum_it_is_told(level: Level):
    outcome = trial_of(capture(einsums, rows(8, torch.bfloat16), level), NPU).outcome
    assert [each.match.rule.name for each in outcome.chosen] == (["attention"] if level == "composite" else [])
    assert [each.reason for each in outcome.refusals] == ([] if level == "composite" else [ONE_KEY])


def hidden(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """By what nobody knows, as XLM has it."""
    scores = (q @ k.mT / 8).masked_fill(v[..., :1] > 9, torch.finfo(q.dtype).min)
    return scores.float().softmax(-1).to(q.dtype) @ v


def lowered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """As the first GPT has it."""
    kept = (v[:1, :1, :, :1] > 9).to(q.dtype)
    return (q @ k.mT / 8 * kept - 1e4 * (1 - kept)).softmax(-1) @ v


@pytest.mark.parametrize("form", [hidden, lowered])
def test_what_hides_the_only_key_is_told(form: Callable[..., Tensor]):
    outcome = trial_of(capture(form, rows(8, torch.bfloat16)), NPU).outcome
    assert not outcome.chosen
    assert [each.reason for each in outcome.refusals] == [HIDDEN_ONE]
