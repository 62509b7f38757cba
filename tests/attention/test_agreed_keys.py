"""Keys, values and masks of torch's own attention, of sizes that are marked dynamic each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as sdpa

from fusion.testing import capture, trial_of
from tests.engine.graphs import numbers
from tests.support.one_graph import one_graph

N, D = 4, 16


def step(q: Tensor, k: Tensor, v: Tensor, old_k: Tensor, old_v: Tensor) -> Tensor:
    """A step behind keys and values that are passed in."""
    return sdpa(q, torch.cat((old_k, k), 2), torch.cat((old_v, v), 2))


def under_a_mask(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return sdpa(q, k, v, mask)


def behind(keys: int) -> tuple[Tensor, ...]:
    fresh = (numbers(2, N, 1, D, seed=seed) for seed in range(3))
    return *marked((0,), *fresh), *marked((0, 2), *(numbers(2, N, keys, D, seed=seed) for seed in (3, 4)))


def masked(keys: int) -> tuple[Tensor, ...]:
    mask = torch.arange(keys) > torch.tensor([[[[0]]], [[[1]]]])
    rows = marked((0, 2), *(numbers(2, N, keys, D, seed=seed) for seed in (1, 2)))
    return *marked((0,), numbers(2, N, 5, D)), *rows, *marked((0, 3), mask)


def marked(axes: tuple[int, ...], *inputs: Tensor) -> tuple[Tensor, ...]:
    for each in inputs:
        for axis in axes:
            torch._dynamo.mark_dynamic(each, axis)
    return inputs


@pytest.mark.parametrize(("form", "given"), [(step, behind), (under_a_mask, masked)])
@pytest.mark.rotates(3)
def test_attention_to_any_number_of_keys_is_one_graph(form, given):
    outcome = trial_of(capture(form, given(6), dynamic=None)).outcome
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"]
    with one_graph(form) as compiled:
        for keys in (6, 9, 20):
            torch.testing.assert_close(compiled(*given(keys)), form(*given(keys)))


def test_another_number_of_values_is_another_graph_that_is_left_alone():
    given = numbers(2, N, 5, D), *marked((2,), numbers(2, N, 6, D), numbers(2, N, 7, D))
    outcome = trial_of(capture(lambda q, k, v: sdpa(q, k, v), given, dynamic=None)).outcome
    assert not outcome.chosen
    assert "there are not as many as keys, so that" in outcome.refusals[0].reason


def test_a_mask_of_one_row_for_all_sequences_is_broadcast():
    q, k, v, mask = masked(6)
    given = q, k, v, *marked((3,), mask[:1].clone())
    outcome = trial_of(capture(under_a_mask, given, dynamic=None)).outcome
    assert [each.match.rule.name for each in outcome.chosen] == ["attention"]
