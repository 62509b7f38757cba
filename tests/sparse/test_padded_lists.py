"""Keys of a list that a mask hides are left out of what the operator is given, whatever the mask hides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion import Example
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.runtime.verification import relative_error
from fusion.testing import LEVELS, Trial, emits_valid_calls, trial, widen
from tests.examples.sparse_attention import S, indexed

from .padded_lists import LOOKALIKES, PADDINGS, SORTED, UNSORTED, Form, booleans, lowest

HOST = Options(target="host", lower="eager")
FORMS = (*SORTED, *UNSORTED)
RULE = next(rule for rule in installed().rules if rule.name == "sparse_attention")


def inputs(padding: str, dtype: torch.dtype, kind: torch.dtype = torch.int64) -> tuple[Any, ...]:
    """Whole numbers as scores, so that no two lists differ by rounding, and a mask of keys."""
    return (*indexed()(dtype), torch.tensor(PADDINGS[padding]).to(kind))


def tried(form: Form, dtype: torch.dtype, level: Any = "composite", kind: torch.dtype = torch.int64) -> Trial:
    example = Example(form.__name__, form, lambda of: inputs("left", of, kind))
    return trial(RULE, example, dtype, level, HOST)


def forms(t: Trial) -> list[str]:
    assert not t.outcome.failures
    found = [each for each in t.outcome.chosen if each.match.rule.name == "sparse_attention"]
    return [f"{each.match.form} {each.lowering}" for each in found]


def sorts(t: Trial) -> int:
    """How many sorts the lowering makes."""
    return sum("sort" in str(node.target) for node in t.fused.graph.nodes if "fusion" in node.meta)


def agrees(t: Trial, padding: str, kind: torch.dtype = torch.int64) -> None:
    """The same in float64 as the model, where that sees nothing as well."""
    t.fused.recompile()
    given = t.inputs(wide=True)
    wide = torch.float64 if kind.is_floating_point else kind
    mask = next(place for place, each in enumerate(given) if each.shape == (2, S) and each.dtype == wide)
    given[mask] = torch.tensor(PADDINGS[padding]).to(wide)
    own = len(t.captured.inputs)
    have, want = (graph(*each)[0] for graph, each in ((widen(t.fused), given), (widen(t.captured.graph), given[:own])))
    assert torch.equal(have.isnan(), want.isnan())
    assert relative_error(have.nan_to_num(), want.nan_to_num()) < 1e-12


@pytest.mark.rotates(8)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("form", FORMS, ids=lambda each: each.__name__)
def test_entries_are_looked_up_in_the_mask(form: Form, dtype: torch.dtype):
    level = LEVELS[(FORMS.index(form) + (dtype is torch.float32)) % len(LEVELS)]
    t = tried(form, dtype, level)
    assert forms(t) == ["by_places[LatentRows] listed[transposed]"], "\n".join(map(str, t.outcome.refusals))
    assert (sorts(t) > 0) == (form in UNSORTED)
    emits_valid_calls(t)
    for padding in PADDINGS:
        agrees(t, padding)


@pytest.mark.parametrize("kind", [torch.bool, torch.int32, torch.float32])
@pytest.mark.rotates(3)
def test_whatever_dtype_the_mask_has(kind: torch.dtype):
    t = tried(booleans, torch.bfloat16, kind=kind)
    assert len(forms(t)) == 1
    for padding in PADDINGS:
        agrees(t, padding, kind)


def test_a_query_without_keys_gives_the_mean_of_all_values():
    t = tried(lowest, torch.bfloat16)
    assert any("mean" in str(node.target) for node in t.fused.graph.nodes if "fusion" in node.meta)


@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
@pytest.mark.rotates(3)
def test_look_alike_is_refused(form: Form):
    t = tried(form, torch.bfloat16)
    assert not forms(t)
    reasons = [each.reason for each in t.outcome.refusals if each.rule == "sparse_attention"]
    assert any(LOOKALIKES[form] in each for each in reasons), reasons
    for padding in PADDINGS:
        agrees(t, padding)
