"""Every cell of the facets of attention: it is fused with right numbers, or refused with the operator's own reason."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.testing import Trial, trial
from tests.examples import attention_pages, latent_attention_int8, latent_attention_paged
from tests.support.fused import FIA, call, calls, checked

from . import facets
from .facets import LARGE, SMALL

RULES = {rule.name: rule for rule in installed().rules}
FORMS = {"rows": "Rows", "pages": "Pages", "pages of heads": "Pages", "NZ pages": "PagesNZ"}
UNPROVEN = "it is not proven to be causal, a window or"
UNREAD = {"attention": {"NZ pages"}, "latent_attention": set[str]()}
"""Sources that no chip reads in place, whose rows are gathered before."""


def cells(s: facets.Sizes) -> Iterator[Any]:
    """Yield the product for both rules."""
    both = (("attention", facets.attention, ()), ("latent_attention", facets.latent, (facets.ENCODINGS,)))
    for rule, of, encodings in both:
        for example in facets.cells(of, *encodings, s=s):
            yield pytest.param(rule, example, id=f"{rule}-{example.name}")


def tried(rule: str, example: Example, target: str) -> Trial:
    options = Options(target=target, lower="eager", disable=frozenset({"npu_multi_head_latent_attention"}))
    return checked(trial(RULES[rule], example, torch.bfloat16, options=options))


def chosen(t: Trial) -> str:
    """The form that was rewritten, "" for none."""
    return next((each.match.form for each in t.outcome.chosen if each.match.rule is t.rule), "")


def result_of(example: Example) -> str:
    """What the operator gives of a cell: the sums of int8 scores stay the model's own."""
    return "OutputAndLse" if "lse" in example.name and "int8" not in example.name else "Output"


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("rule", "example"), cells(SMALL))
def test_a_cell_on_the_host(rule: str, example: Example):
    t = tried(rule, example, "host")
    *encoding, source, visibility, _ = example.name.split(", ")
    form, is_int8 = chosen(t), encoding == ["int8"]
    if is_int8 and source == "rows" and visibility == "dense":
        assert any(UNPROVEN in each.reason for each in t.outcome.refusals)
    in_floats = not is_int8 or "lse" in example.name or (source == "rows" and visibility == "dense")
    assert f"[{FORMS['rows' if is_int8 and in_floats else source]}" in form  # rows are dequantised behind their gather
    assert ("OutputAndLse" in form) == ("lse" in example.name)
    assert ("int8" in form) == (not in_floats)


@pytest.mark.rotates(8)
@pytest.mark.parametrize("source", ["rows", "pages"])
@pytest.mark.parametrize("rule", ["attention", "plain", "int8"])
def test_a_sequence_without_keys_gives_the_mean_where_keys_are_lowered(rule: str, source: str):
    """Its queries are 0 and see all keys, so that lengths are told; its log-sum-exp, which is finite, is not."""
    name = "attention" if rule == "attention" else "latent_attention"
    alone, summed = (
        facets.attention(source, facets.LOWERED, result, SMALL)
        if rule == "attention"
        else facets.latent(rule, source, facets.LOWERED, result, SMALL)
        for result in facets.RESULTS
    )
    t = tried(name, alone, "host")
    assert any("seen.count" in each.match.captures for each in t.outcome.chosen if each.match.rule is t.rule)
    assert all("Structured" in each.lowering for each in t.outcome.chosen if each.match.rule is t.rule)
    assert "OutputAndLse" not in chosen(tried(name, summed, "host"))


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("rule", "example"), cells(LARGE))
def test_a_cell_on_a_chip(rule: str, example: Example):
    t = tried(rule, example, "ascend910_93")
    *encoding, source, visibility, _ = example.name.split(", ")
    read = source == "NZ pages" and visibility == "causal" and "lse" not in example.name
    if encoding == ["int8"] and not read:
        assert not chosen(t)
        reasons = [each.reason for each in t.outcome.refusals if each.rule == rule]
        assert reasons
        assert all(UNPROVEN in each or "npu_fused_infer_attention_score_v2" in each for each in reasons)
        return
    form = chosen(t)
    assert f"[{'Rows' if source in UNREAD[rule] else FORMS[source]}" in form
    assert ("OutputAndLse" in form) == (result_of(example) == "OutputAndLse")


GATHERING = (
    ("attention", attention_pages),
    ("latent_attention", latent_attention_paged),
    ("latent_attention", latent_attention_int8),
)
GATHERED = [
    pytest.param(rule, example, reason, id=f"{rule}-{example.name}")
    for rule, of in GATHERING
    for example, reason in of.GATHERED
]


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("rule", "example", "reason"), GATHERED)
def test_pages_that_cannot_be_read_in_place_are_gathered(rule: str, example: Example, reason: str):
    assert "Rows" in chosen(tried(rule, example, "host"))
    nothing = Options(target="host", lower="eager", fuel=0)  # so that what was refused of a place is told
    refusals = trial(RULES[rule], example, torch.bfloat16, options=nothing).outcome.refusals
    assert any(reason in each.reason for each in refusals if each.rule == rule)


@cache
def paged(rule: str) -> Trial:
    """A step up to lengths, of which one is 0, over pages of which the log-sum-exp is used."""
    example = {
        "attention": facets.attention("pages", "count", "y and lse", LARGE),
        "latent_attention": facets.latent("plain", "pages", "count", "y and lse", LARGE),
    }[rule]
    return tried(rule, example, "ascend910_93")


@pytest.mark.parametrize("rule", ["attention", "latent_attention"])
def test_the_log_sum_exp_comes_by_the_block_table(rule: str):
    t = paged(rule)
    attention = call(t, FIA)
    assert attention.kwargs["return_softmax_lse"]
    assert attention.kwargs["block_table"] is not None
    assert not calls(t, "aten.logsumexp")
