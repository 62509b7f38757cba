"""Rows and the places that they go to, of sizes that are marked dynamic each by itself."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fusion.testing import capture, trial_of
from tests.engine.graphs import numbers
from tests.support.one_graph import one_graph

SIZE = 4


def by_slots(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache.view(-1, *rows.shape[1:])[slots] = rows * 3
    return cache * 2


def by_blocks(cache: Tensor, rows: Tensor, slots: Tensor) -> Tensor:
    cache[slots // SIZE, slots % SIZE] = rows * 3
    return cache * 2


def given(tokens: int, written: int | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """A cache in pages, rows of so many tokens, and as many slots, or one row for several slots."""
    slots = torch.randperm(5 * SIZE, generator=torch.Generator().manual_seed(tokens))[:tokens]
    return numbers(5, SIZE, 2, 8), numbers(written or tokens, 2, 8, seed=1), slots


def marked(*inputs: Tensor) -> tuple[Tensor, ...]:
    for each in inputs[1:]:
        torch._dynamo.mark_dynamic(each, 0)
    return inputs


@pytest.mark.parametrize("form", [by_slots, by_blocks])
def test_a_write_of_any_number_of_tokens_is_fused(form):
    outcome = trial_of(capture(form, marked(*given(6)), dynamic=None)).outcome
    assert [each.match.rule.name for each in outcome.chosen] == ["cache_write"]
    assert not outcome.refusals


@pytest.mark.parametrize("form", [by_slots, by_blocks])
def test_other_numbers_of_tokens_need_no_other_graph(form):
    with one_graph(form) as compiled:
        for tokens in (6, 9, 20):
            cache, *rest = marked(*given(tokens))
            plain = cache.clone()
            assert torch.equal(compiled(cache, *rest), form(plain, *rest))
            assert torch.equal(cache, plain)


def test_one_row_for_several_places_is_another_graph():
    torch.compiler.reset()
    compiled = torch.compile(by_slots, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    for inputs in (marked(*given(6)), given(6, written=1), marked(*given(7))):
        cache, *rest = inputs
        plain = cache.clone()
        assert torch.equal(compiled(cache, *rest), by_slots(plain, *rest))
        assert torch.equal(cache, plain)


def test_rows_that_are_not_as_many_as_places_are_an_error_as_in_eager():
    torch.compiler.reset()
    compiled = torch.compile(by_slots, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    compiled(*marked(*given(6)))
    with pytest.raises(Exception, match=r"shape mismatch|must match|broadcast"):
        compiled(*marked(*given(7, written=5)))
