"""Packed tokens whose segments data names are put to both operators in TND, and lists of other masks to neither."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from fusion.options import Options
from fusion.testing import LEVELS, Level, Trial, capture, emits_valid_calls, means_what_it_says, trial_of

from .segments import ATTENDED, LOOKALIKES, Form, by_own_list, inputs, listed

BF16, F16 = torch.bfloat16, torch.float16
INDEXER, ATTENTION = "npu.npu_lightning_indexer.default", "npu.npu_sparse_flash_attention.default"


def tried(form: Form, dtype: torch.dtype = BF16, level: Level = "composite") -> Trial:
    given = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs())
    t = trial_of(capture(form, given, level), Options(target="ascend910_93", lower="eager"))
    assert not t.outcome.failures
    return t


def called(t: Trial) -> Counter[str]:
    return Counter(str(node.target) for node in t.fused.graph.nodes if str(node.target).startswith("npu."))


def packed(t: Trial) -> bool:
    calls = [node for node in t.fused.graph.nodes if str(node.target) in (INDEXER, ATTENTION)]
    return all(node.kwargs["layout_query"] == "TND" for node in calls)


@pytest.mark.parametrize("form", ATTENDED[::4], ids=lambda each: each.__name__)
def test_segments_are_attended_to_in_one_call_of_each_operator(form: Form):
    t = tried(form, F16 if form is ATTENDED[-1] else BF16)
    assert called(t) == {INDEXER: 1, ATTENTION: 1}
    assert packed(t)
    means_what_it_says(t)
    emits_valid_calls(t)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ATTENDED, ids=lambda each: each.__name__)
def test_segments_at_every_level(form: Form, level: Level, dtype: torch.dtype):
    t = tried(form, dtype, level)
    assert called(t) == {INDEXER: 1, ATTENTION: 1}
    assert packed(t)
    means_what_it_says(t)


def test_a_list_names_tokens_of_all_segments():
    t = tried(listed)
    assert called(t) == {INDEXER: 1}
    assert packed(t)
    means_what_it_says(t)
    emits_valid_calls(t)


def test_a_list_of_the_model_is_counted_from_each_segment():
    t = tried(by_own_list)
    assert INDEXER not in called(t)
    means_what_it_says(t)


@pytest.mark.rotates(3)
@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
def test_other_masks_keep_the_list_of_the_model(form: Form):
    t = tried(form)
    assert INDEXER not in called(t)
    assert any(LOOKALIKES[form] in each.reason for each in t.outcome.refusals)
    means_what_it_says(t)
