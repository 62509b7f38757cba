"""Attention in every ordinary spelling is fused with the right words; what only resembles it is not."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import testing
from fusion.options import Options
from fusion.testing import LEVELS, Trial, capture
from patterns.attention.masks.visibility import Visibility
from tests.corpus.base import activations

from . import attention, attention_bias, attention_heads, attention_masks, attention_pieces, lookalikes_attention
from .attention_base import Entry

pytestmark = pytest.mark.rotates(20)

HOST = Options(target="host", lower="eager")
_EACH = (attention, attention_bias, attention_heads, attention_masks, attention_pieces)
SPELLINGS = tuple(spelling for each in _EACH for spelling in each.SPELLINGS)
LOOKALIKES = (
    *lookalikes_attention.LOOKALIKES,
    *attention_bias.LOOKALIKES,
    *attention_heads.LOOKALIKES,
    *attention_pieces.LOOKALIKES,
)


def settings(entries: tuple[Entry, ...]) -> Any:
    """Parametrise a test by every entry at every level."""
    chosen = [pytest.param(entry, level, id=f"{entry.name}-{level}") for entry in entries for level in LEVELS]
    return pytest.mark.parametrize(("entry", "level"), chosen)


def tried(form: Any, args: tuple[Any, ...], level: testing.Level, *, dynamic: bool = False) -> Trial:
    """The code before and after the pass with the whole library."""
    return testing.trial_of(capture(form, args, level, dynamic=dynamic), HOST)


def told(t: Trial) -> str:
    """What the attention operators of a fused graph are told."""
    said = []
    for each in t.outcome.chosen:
        if each.match.rule.name == "attention":
            seen = Visibility.bound("seen", each.match.captures)
            words = [seen.mask_kind]
            known = (("window", seen.window), ("kv_len", seen.kv_len))
            words += [f"{name} {number}" for name, number in known if number is not None]
            words += ["kv_lens"] if seen.kv_lens is not None else []
            said.append(" ".join(words))
    return ", ".join(said)


@pytest.mark.parametrize("entry", SPELLINGS, ids=lambda each: each.name)
def test_spelling_is_attention(entry: Entry):
    actual = entry.form(*entry.inputs(torch.float64))
    torch.testing.assert_close(actual, entry.expected(), rtol=0, atol=2e-6, check_dtype=False, equal_nan=True)


@settings(SPELLINGS)
def test_spelling_is_fused_and_told_what_is_seen(entry: Entry, level: testing.Level):
    dtype = torch.bfloat16 if level == "composite" else torch.float32
    t = tried(entry.form, entry.inputs(dtype), level)
    assert told(t) == entry.told, "\n".join(map(str, t.outcome.refusals))
    testing.means_what_it_says(t)
    testing.emits_valid_calls(t)


@pytest.mark.parametrize("level", ["decomposed", "core"])
@pytest.mark.parametrize("entry", attention_bias.SEVERAL, ids=lambda each: each.name)
def test_more_than_two_biases_are_one(entry: Entry, level: testing.Level):
    t = tried(entry.form, entry.inputs(torch.float32), level)
    assert told(t) == "none", "\n".join(map(str, t.outcome.refusals))
    testing.means_what_it_says(t)
    narrow = tried(entry.form, entry.inputs(torch.bfloat16), level)
    assert any("us slower than" in str(each.reason) for each in narrow.outcome.refusals)


@settings(LOOKALIKES)
def test_look_alike_is_refused_or_keeps_its_meaning(entry: Entry, level: testing.Level):
    t = tried(entry.form, entry.inputs(torch.float32), level)
    assert told(t) == entry.told, "\n".join(map(str, t.outcome.refusals))
    reasons = [str(each.reason) for each in t.outcome.refusals if each.rule in ("attention", "softmax_attention")]
    read = [each for each in t.outcome.refusals if each.rule == "softmax_attention"]
    assert any(entry.reason in each for each in reasons) if entry.reason else entry.told or not read, reasons
    assert not t.outcome.failures
    if t.outcome.chosen:
        testing.means_what_it_says(t)


OTHERS = ("npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2", "npu_prompt_flash_attention")
ENCODER = replace(HOST, disable=frozenset(OTHERS))


def up_to(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Some of the keys are hidden from all queries."""
    return (q @ k.mT).masked_fill(torch.arange(k.shape[2]) >= 4, -torch.inf).softmax(-1) @ v


def lengths(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of each sequence."""
    hidden = torch.arange(k.shape[2]) >= (v[:, 0, 0, 0].abs().long() + 1)[:, None, None, None]
    return (q @ k.mT).masked_fill(hidden, -torch.inf).softmax(-1) @ v


def told_encoders(form: Any, queries: int = 6, last: bool = False) -> list[str]:
    """The layouts that the operator for encoders is told."""

    def arranged(*qkv: Tensor) -> Tensor:
        return form(*(each.transpose(1, 2) for each in qkv)) if last else form(*qkv)

    sizes = ((2, rows, 4, 16) if last else (2, 4, rows, 16) for rows in (queries, 6, 6))
    captured = capture(arranged, tuple(activations(seed, *size).bfloat16() for seed, size in enumerate(sizes)))
    t = testing.trial_of(captured, ENCODER)
    testing.means_what_it_says(t)
    calls = [each for each in t.fused.graph.nodes if str(each.target) == "npu.npu_fusion_attention.default"]
    return [each.args[4] for each in calls]


def test_the_operator_for_encoders_reads_whole_sequences_as_they_lie():
    assert told_encoders(attention.sdpa) == ["BNSD"]
    assert told_encoders(attention.sdpa, last=True) == ["BSH"]
    assert told_encoders(attention.sdpa, queries=1) == []
    assert told_encoders(attention.sdpa_causal) == []
    assert told_encoders(up_to) == []
    assert told_encoders(lengths) == []
