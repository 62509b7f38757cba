"""Packed tokens whose segments data names are put to both operators in TND, and lists of other masks to neither."""

from __future__ import annotations

import pytest
import torch

from fusion.options import Options
from fusion.testing import LEVELS, Level, Trial, capture, means_what_it_says, trial_of
from tests.support.fused import calls, checked, targets

from .segments import ATTENDED, LOOKALIKES, Form, by_own_list, inputs, listed

BF16, F16 = torch.bfloat16, torch.float16
INDEXER, ATTENTION = "npu.npu_lightning_indexer.default", "npu.npu_sparse_flash_attention.default"


def tried(form: Form, dtype: torch.dtype = BF16, level: Level = "composite") -> Trial:
    given = tuple(each.to(dtype) if each.is_floating_point() else each for each in inputs())
    t = trial_of(capture(form, given, level), Options(target="ascend910_93", lower="eager"))
    assert not t.outcome.failures
    return t


def packed(t: Trial) -> bool:
    return all(node.kwargs["layout_query"] == "TND" for name in (INDEXER, ATTENTION) for node in calls(t, name))


@pytest.mark.parametrize("form", ATTENDED[::4], ids=lambda each: each.__name__)
def test_segments_are_attended_to_in_one_call_of_each_operator(form: Form):
    t = tried(form, F16 if form is ATTENDED[-1] else BF16)
    assert targets(t, "npu.") == {INDEXER: 1, ATTENTION: 1}
    assert packed(t)
    checked(t)


@pytest.mark.rotates
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("form", ATTENDED, ids=lambda each: each.__name__)
def test_segments_at_every_level(form: Form, level: Level, dtype: torch.dtype):
    t = tried(form, dtype, level)
    assert targets(t, "npu.") == {INDEXER: 1, ATTENTION: 1}
    assert packed(t)
    means_what_it_says(t)


def test_a_list_names_tokens_of_all_segments():
    t = tried(listed)
    assert targets(t, "npu.") == {INDEXER: 1}
    assert packed(t)
    checked(t)


def test_a_list_of_the_model_is_counted_from_each_segment():
    t = tried(by_own_list)
    assert INDEXER not in targets(t, "npu.")
    means_what_it_says(t)


@pytest.mark.rotates(6)
@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
def test_other_masks_keep_the_list_of_the_model(form: Form):
    t = tried(form)
    assert INDEXER not in targets(t, "npu.")
    assert any(LOOKALIKES[form] in each.reason for each in t.outcome.refusals)
    means_what_it_says(t)
