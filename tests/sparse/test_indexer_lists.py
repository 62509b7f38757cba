"""A list that a model uses itself is an indexer's where it has -1 for what a query does not see, or sees enough."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.language import Refused
from fusion.options import Options
from fusion.testing import Level, Trial, emits_valid_calls, means_what_it_says, refuses, trial
from patterns.sparse.attention.list_sources import IndexedRows
from tests.latent.test_int8_readings import understood
from tests.support.grids import grid, named

from . import indexer_lists
from .indexer_lists import GATHERED, LARGE, LOOKALIKES, RETURNED, Form

RULES = {rule.name: rule for rule in installed().rules}
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tried(form: Form, rule: str, dtype: torch.dtype, level: Level = "composite", target: str = "host") -> Trial:
    make: Callable[..., Any] = (RETURNED | GATHERED).get(form, indexer_lists.prompt)

    def inputs(of: torch.dtype) -> tuple[Any, ...]:
        given = make() if target == "host" else make(LARGE)
        return tuple(each.to(of) if each.is_floating_point() else each for each in given)

    options = Options(target=target, lower="eager")
    return trial(RULES[rule], Example(form.__name__, form, inputs), dtype, level, options)


def forms(t: Trial) -> list[str]:
    assert not t.outcome.failures
    return [each.match.form for each in t.outcome.chosen if each.match.rule is t.rule]


@pytest.mark.rotates(9)
@pytest.mark.parametrize(("form", "level", "dtype"), grid(named(RETURNED)))
def test_a_list_is_found_by_the_operator(form: Form, level: Level, dtype: torch.dtype):
    t = tried(form, "indexer_topk", dtype, level)
    assert forms(t) == ["listed[Indexer]"], "\n".join(map(str, t.outcome.refusals))
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", GATHERED, ids=lambda each: each.__name__)
def test_rows_of_a_list_are_attended_to(form: Form):
    t = tried(form, "sparse_attention", torch.bfloat16)
    own = form in (
        indexer_lists.gathered_and_returned, indexer_lists.gathered_and_lowered, indexer_lists.gathered_behind_a_window,
        indexer_lists.gathered_from_other_sequences,
    )  # fmt: skip
    assert forms(t) == ["by_gathered_rows[LatentRows]" if own else "by_indexed_rows[Indexer, LatentRows]"]
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.rotates
@pytest.mark.parametrize("form", [*RETURNED, *GATHERED], ids=lambda each: each.__name__)
def test_lists_of_the_size_of_a_chip(form: Form):
    rule = "indexer_topk" if form in RETURNED else "sparse_attention"
    t = tried(form, rule, torch.bfloat16, target="ascend910_93")
    assert len(forms(t)) == 1, "\n".join(map(str, t.outcome.refusals))
    assert form not in (indexer_lists.gathered, indexer_lists.gathered_in_line) or "indexed_rows" in forms(t)[0]
    emits_valid_calls(t)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
def test_look_alike_is_refused(form: Form):
    t = tried(form, "indexer_topk", torch.bfloat16)
    refuses(t, LOOKALIKES[form])
    assert [each.rule for each in t.outcome.refusals].count("indexer_topk") == 1
    means_what_it_says(t)


@pytest.mark.parametrize(
    "form",
    [
        lambda x: x.topk(2, -1).indices,
        lambda x: x.topk(2, -1).indices.masked_fill(x[..., :2] > 0, -1),
        lambda x: torch.where(x > 0, x.argsort(), x.argsort(descending=True)),
    ],
    ids=["largest numbers", "some of them", "orders"],
)
def test_other_choices_are_not_like_one(form: Callable[[torch.Tensor], torch.Tensor]):
    graph, _ = understood(form, (torch.randn(2, 4, 8),))
    assert not graph.readings.all("indexer_list")
    assert not graph.readings.missed("indexer_topk")


def test_a_chip_that_lists_in_no_order_is_refused():
    t = tried(indexer_lists.returned, "indexer_topk", torch.bfloat16, target="ascend950")
    refuses(t, "in no order")


def test_a_list_of_an_indexer_is_not_that_of_the_model():
    with pytest.raises(Refused, match="an indexer gives it"):
        IndexedRows().own(None)


def test_a_condition_of_many_shared_parts_is_read_part_by_part():
    """Not once for each way that leads to a part: there are 2⁶⁴ of them."""

    def form(q: torch.Tensor, k: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        best, places = indexer_lists.hidden(indexer_lists.by_einsum(q, k, w)).topk(indexer_lists.K, -1)
        shown = best.isfinite()
        for number in range(64):
            shown = shown & (shown | (best > number))
        return places.where(shown, -1)

    assert forms(tried(form, "indexer_topk", torch.float32, "composite")) == ["listed[Indexer]"]
