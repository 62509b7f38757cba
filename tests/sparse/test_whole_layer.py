"""A layer of sparse attention over pages in one opt-in operator: what it needs, and that nothing is seen of it else."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fusion import Example
from fusion.options import Options
from fusion.pipeline import Outcome
from fusion.testing import captured, trial_of
from tests.examples.sparse_attention_pto import SETTING, Model, Packed, Setting
from tests.support.fused import launches, targets

NAME = "sparse_attention_pto"


def unset(number: int, *shape: int) -> torch.Tensor:
    """Memory of large tensors: nothing is computed with it."""
    return torch.empty(shape, dtype=torch.bfloat16)


LARGE = Setting(
    positions=(2099, 6, 700, 0), he=7168, hcq=1536, n=128, d=128, dr=64, c=512, e=128, m=64, di=128, made=unset
)  # fmt: skip


def fused(example: Example, **options) -> tuple[torch.fx.GraphModule, Outcome, int]:
    t = trial_of(captured(example, torch.bfloat16), Options(plan_cache="off", **options))
    assert not t.outcome.failures
    return t.fused, t.outcome, launches(t.captured.graph)


def of(setting: Setting, model: type[Model] = Model, **parts) -> Example:
    return Example("", model(setting, **parts), setting)


@pytest.mark.parametrize("absorbs", [False, True])
@pytest.mark.parametrize("model", [Model, Packed])
@pytest.mark.rotates(8)
def test_a_layer_is_one_call_that_writes_in_place(model: type[Model], absorbs: bool):
    example = of(LARGE, model, absorbs=absorbs)
    gm, outcome, before = fused(example, target="ascend910_93", lower="torchair", opt_in={NAME})
    found = targets(gm, "npu_")
    assert found["custom_pypto.npu_sparse_attention_pto.in_place"] == 1
    assert found["npu.npu_sparse_flash_attention.default"] == found["npu.npu_mla_prolog_v3.default"] == 0
    assert len(outcome.in_place) == 3
    after = launches(gm)
    without, *_ = fused(example, target="ascend910_93", lower="torchair")
    assert after <= 6 < launches(without) < before


@pytest.mark.rotates(4)
def test_the_scale_of_the_model_is_refused_with_that_reason():
    example = of(LARGE, scale=192**-0.5)
    gm, outcome, _ = fused(example, target="ascend910_93", lower="torchair", opt_in={NAME})
    assert "custom_pypto" not in str(gm.graph)
    assert targets(gm, "npu_")["npu.npu_sparse_flash_attention.default"] == 1
    reason = "scores are multiplied by 0.07216878364870322; npu_sparse_attention_pto requires 0.0416666"
    assert any(each.rule == NAME and reason in each.reason for each in outcome.refusals)


@pytest.mark.parametrize(
    ("setting", "options", "reason"),
    [
        (replace(LARGE, positions=(2099, 6)), {}, "requires B == 4"),
        (replace(LARGE, size=64, pages=34), {}, "requires Size == 128"),
        (replace(LARGE, n=64), {}, "requires N == 128"),
        (LARGE, {"lower": "npugraph_ex", "plan_lower": "npugraph_ex"}, "cannot be lowered by npugraph_ex"),
        (LARGE, {"target": "ascend910b"}, "does not exist on ascend910b"),
    ],
    ids=lambda each: str(each) if isinstance(each, str) else "",
)
@pytest.mark.rotates(8)
def test_what_the_chip_does_not_take_falls_to_the_operators_of_torch_npu(setting: Setting, options, reason: str):
    gm, outcome, _ = fused(of(setting), **{"target": "ascend910_93", "lower": "torchair", "opt_in": {NAME}, **options})
    assert "custom_pypto" not in str(gm.graph)
    assert any(each.rule == NAME and reason in each.reason for each in outcome.refusals)
    assert targets(gm, "npu_")["npu.npu_sparse_flash_attention.default"] == 1


@pytest.mark.rotates(4)
def test_it_is_not_mentioned_unless_it_is_named():
    for parts in ({}, {"scale": 192**-0.5}):
        gm, outcome, _ = fused(of(SETTING, **parts), target="host", lower="eager")
        assert "custom_pypto" not in str(gm.graph)
        assert NAME not in {each.rule for each in outcome.refusals}
