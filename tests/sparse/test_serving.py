"""Whole blocks over pages, as serving code spells them: what an expert launches, exact, and what is refused and why."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from fusion.options import Options
from fusion.testing import Trial, capture, emits_valid_calls, means_what_it_says, trial_of
from tests.models.latents import differences
from tests.support.fused import calls

from . import serving
from .serving import LOOKALIKES, SPELLINGS, Block, Form

pytestmark = pytest.mark.rotates(8)

OPTIONS = Options(target="ascend910_93", lower="eager", plan_lower="torchair")
ONE = {"mla_prolog_v3": 1, "lightning_indexer": 1, "sparse_flash_attention": 1}
EACH = {**ONE, "lightning_indexer": 3, "sparse_flash_attention": 3}
"""A call for each sequence that has tokens, where the model loops over them."""


def tried(form: Form, given: tuple[Any, ...], dtype: torch.dtype = torch.bfloat16) -> Trial:
    inputs = tuple(
        each.to(dtype) if isinstance(each, torch.Tensor) and each.is_floating_point() else each for each in given
    )
    return trial_of(capture(Block(form).to(dtype), inputs), OPTIONS)


def called(t: Trial) -> Counter[str]:
    return Counter(str(node.target).split(".")[1].removeprefix("npu_") for node in calls(t, "npu."))


def in_full(t: Trial, wanted: dict[str, int]) -> None:
    found = called(t)
    assert {name: found[name] for name in wanted} == wanted
    assert not calls(t, "softmax")
    assert not calls(t, "topk")
    assert not t.outcome.failures


@pytest.mark.parametrize("form", SPELLINGS, ids=lambda each: each.__name__)
def test_a_block_is_what_an_expert_launches(form: Form):
    t = tried(form, SPELLINGS[form])
    in_full(t, EACH if form is serving.one_after_the_other else ONE)
    assert max(differences(t)) < 1e-12
    emits_valid_calls(t)


@pytest.mark.rotates(3)
def test_a_norm_of_pytorch_rounds_what_is_seen_with_other_dims_behind_it(monkeypatch: pytest.MonkeyPatch):
    """Whose cast comes last, and stands above the dims in which the heads' layer reads it."""
    monkeypatch.setattr(serving, "norm", lambda x, gain: torch.nn.functional.rms_norm(x, gain.shape, gain, serving.EPS))
    form = next(iter(SPELLINGS))
    t = tried(form, SPELLINGS[form])
    in_full(t, ONE)
    assert max(differences(t)) < 1e-12


@pytest.mark.parametrize("form", SPELLINGS, ids=lambda each: each.__name__)
def test_where_every_key_is_listed_rounding_is_the_only_difference(form: Form, monkeypatch: pytest.MonkeyPatch):
    """Lists of all keys are equal, however their scores are rounded."""
    monkeypatch.setattr(serving, "LISTED", serving.TABLE.shape[1] * serving.SIZE)
    means_what_it_says(tried(form, SPELLINGS[form]))


@pytest.mark.rotates(3)
def test_a_list_from_elsewhere_is_cut_where_a_token_sees_no_more():
    t = tried(serving.by_own_list, serving.OWN_LIST)
    in_full(t, {**ONE, "lightning_indexer": 0})
    assert max(differences(t)) < 1e-12


@pytest.mark.rotates(3)
def test_ranges_of_keys_keep_the_list_of_the_model():
    """The indexer's operator sees all keys up to one, of which a range may not be the first."""
    t = tried(serving.by_ranges, serving.of_ranges(serving.MIXED))
    found = called(t)
    assert {name: found[name] for name in ONE} == {**ONE, "lightning_indexer": 0}
    assert max(differences(t)) < 1e-12
    emits_valid_calls(t)


@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
def test_what_only_looks_like_it_is_refused(form: Form):
    given, reason = LOOKALIKES[form]
    t = tried(form, given)
    assert not {"lightning_indexer", "sparse_flash_attention"} & set(called(t))
    assert any(reason in each.reason for each in t.outcome.refusals)
    assert max(differences(t)) < 1e-12
