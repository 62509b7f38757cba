"""First and last keys beside a list are one list for sparse attention; other keys are refused."""

from __future__ import annotations

import pytest
import torch

from fusion import testing

from .fixed_keys import LOOKALIKES, SPELLINGS
from .sparse_attention_base import Entry
from .test_sparse_attention import called, means_the_same, settings, tried


@settings(SPELLINGS)
@pytest.mark.rotates(12)
def test_one_list_holds_all_of_them(entry: Entry, mode: str, level: testing.Level):
    t = tried(entry.make(mode, torch.bfloat16), entry.inputs(mode, torch.bfloat16), level)
    assert called(t)[1:] == (entry.indexer, entry.sparse), "\n".join(map(str, t.outcome.refusals))
    means_the_same(t)
    testing.emits_valid_calls(t)


@pytest.mark.parametrize("entry", LOOKALIKES, ids=lambda each: each.name)
@pytest.mark.rotates(6)
def test_other_keys_are_refused(entry: Entry):
    t = tried(entry.make("chunk", torch.bfloat16), entry.inputs("chunk", torch.bfloat16), "composite")
    assert called(t)[1:] == (0, 0)
    assert any(entry.reason in each.reason for each in t.outcome.refusals if each.rule == "sparse_attention")
    means_the_same(t)
