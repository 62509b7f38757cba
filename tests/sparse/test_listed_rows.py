"""Attention over rows that a model gathers itself reads them in place; what only resembles it is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Level, Trial, emits_valid_calls, means_what_it_says, refuses, trial
from tests.latent.test_int8_readings import understood
from tests.support.grids import grid, named

from . import listed_rows
from .listed_rows import IN_PAGES, LARGE, LOOKALIKES, ONE, SMALL, SPELLINGS, Form, Sizes

RULE = next(each for each in installed().rules if each.name == "sparse_attention")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def tried(form: Form, z: Sizes, dtype: torch.dtype, level: Level = "composite", target: str = "host") -> Trial:
    def inputs(of: torch.dtype) -> tuple[Any, ...]:
        given = SPELLINGS.get(form, listed_rows.batched)(z)
        return tuple(each.to(of) if each.is_floating_point() else each for each in given)

    example = Example(form.__name__, form, inputs)
    return trial(RULE, example, dtype, level, Options(target=target, lower="eager"))


def reads_in_place(t: Trial, paged: bool) -> None:
    (form,) = (each.match.form for each in t.outcome.chosen if each.match.rule is RULE)
    assert form == f"by_gathered_rows[Latent{'Pages' if paged else 'Rows'}]"
    assert not t.outcome.failures
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.rotates(18)
@pytest.mark.parametrize(("form", "level", "dtype"), grid(named(SPELLINGS)))
def test_rows_are_read_in_place(form: Form, level: Level, dtype: torch.dtype):
    reads_in_place(tried(form, SMALL, dtype, level), form in IN_PAGES)


@pytest.mark.rotates
@pytest.mark.parametrize("form", SPELLINGS, ids=lambda each: each.__name__)
def test_one_query_of_one_sequence(form: Form):
    reads_in_place(tried(form, ONE, torch.bfloat16), form in IN_PAGES)


@pytest.mark.rotates
@pytest.mark.parametrize("form", SPELLINGS, ids=lambda each: each.__name__)
def test_rows_of_the_size_of_a_chip(form: Form):
    reads_in_place(tried(form, LARGE, torch.bfloat16, target="ascend910_93"), form in IN_PAGES)


SAID = {listed_rows.by_sdpa: (False, False), listed_rows.in_twos: (True, False), listed_rows.until: (True, True),
        listed_rows.behind: (True, False), listed_rows.all_of_it: (False, True), listed_rows.safely: (False, False),
        listed_rows.other_rows_for_none: (False, False)}  # fmt: skip
"""Spellings -> whether entries are hidden besides by their numbers, and whether hidden ones stand behind all others."""


@pytest.mark.parametrize("form", SAID, ids=lambda each: each.__name__)
@pytest.mark.rotates(3)
def test_what_hides_entries_is_said(form: Form):
    graph, _ = understood(form, SPELLINGS[form](SMALL))
    [(_, found)] = graph.readings.all("listed_attention")
    assert ("hidden" in found.captures, found.captures["ends"]) == SAID[form]


@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
@pytest.mark.rotates(3)
def test_look_alike_is_refused(form: Form):
    """For one reason."""
    t = tried(form, SMALL, torch.bfloat16)
    refuses(t, LOOKALIKES[form])
    assert len(t.outcome.refusals) == 1
    means_what_it_says(t)
