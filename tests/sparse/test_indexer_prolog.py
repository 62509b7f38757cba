"""What stands before an int8 indexer over pages in one opt-in operator: what it needs, and that all else is refused."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from fusion import Example
from fusion.runtime.verification import relative_error
from tests.examples.indexer_prolog import Model, Setting
from tests.sparse.test_whole_layer import fused, unset
from tests.support.fused import launches, targets

NAME = "lightning_indexer_prolog_pto"
CALL = f"custom_pypto.npu_{NAME}.in_place"
LARGE = Setting(slots=(5, 300, 70), he=7168, hcq=1536, n=64, d=128, dr=64, size=128, pages=3, made=unset)
A3 = {"target": "ascend910_93", "lower": "torchair", "opt_in": {NAME}}


def of(setting: Setting, **parts: Any) -> Example:
    return Example("", Model(setting, **parts), setting)


@pytest.mark.parametrize("sequences", [0, 3])
@pytest.mark.rotates(3)
def test_all_of_it_is_one_call_that_writes_in_place(sequences: int):
    gm, outcome, before = fused(of(replace(LARGE, sequences=sequences)), **A3)
    assert targets(gm, "npu_")[CALL] == 1
    assert not {name for name in targets(gm, "npu_") if "dynamic_quant" in name or "quant_matmul" in name}
    assert len(outcome.in_place) == 2
    after = launches(gm)
    assert after <= 3 < before  # both tables of halves, and the call


@pytest.mark.parametrize(
    ("setting", "options", "reason"),
    [
        (replace(LARGE, size=64), {}, "requires Size == 128"),
        (replace(LARGE, n=32), {}, "requires N == 64"),
        (replace(LARGE, he=1024), {}, "requires He == 7168"),
        (LARGE, {"lower": "npugraph_ex", "plan_lower": "npugraph_ex"}, "cannot be lowered by npugraph_ex"),
        (LARGE, {"target": "ascend910b"}, "does not exist on ascend910b"),
    ],
    ids=lambda each: str(each) if isinstance(each, str) else "",
)
@pytest.mark.rotates(4)
def test_what_the_chip_does_not_take_falls_to_the_operators_of_torch_npu(setting: Setting, options, reason: str):
    gm, outcome, _ = fused(of(setting), **{**A3, **options})
    assert "custom_pypto" not in str(gm.graph)
    assert any(each.rule == NAME and reason in each.reason for each in outcome.refusals)
    assert "npu.npu_quant_matmul.default" in targets(gm, "npu_")


def test_it_is_not_mentioned_unless_it_is_named():
    for parts in ({}, {"factor": 1.0}):
        gm, outcome, _ = fused(of(Setting(), **parts), target="host", lower="eager")
        assert "custom_pypto" not in str(gm.graph)
        assert NAME not in {each.rule for each in outcome.refusals}


# a whole block ------------------------------------------------------------------------------------------------------


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The block in W8A8C8 with pairs of lanes to rotate, and weights of heads as the operator gives them."""
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "examples")
    module = importlib.import_module("deepseek_v32_w8a8c8")

    class Weights(torch.nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            by = (self.out_features * module.SIZES.index) ** -0.5
            return (super().forward(x) * by).to(torch.float64 if x.dtype == torch.float64 else torch.float16)

    class Indexer(module.Indexer):
        rotated = staticmethod(module.pairs_rotated)

        def __init__(self, of: Any) -> None:
            super().__init__(of)
            self.weights = Weights(of.hidden, of.index_heads, bias=False)

    monkeypatch.setattr(module, "Indexer", Indexer)
    for each in (module, importlib.import_module("deepseek_v32")):
        monkeypatch.setattr(each, "SIZE", 128)
    return module


def built(example: ModuleType, **sizes: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return example.build(replace(example.SIZES, hidden=7168, index_heads=64, **sizes))


def explained(example: ModuleType, opt_in: set[str]) -> fusion.Report:
    serving, model = importlib.import_module("deepseek_v32"), built(example)
    given = serving.step(model.of, "a token each", torch.bfloat16, model.empty_caches(torch.bfloat16))
    with torch.inference_mode():
        return fusion.explain(model, *given, options={**serving.OPTIONS, "opt_in": opt_in})


@pytest.mark.rotates(8)
def test_a_block_is_as_few_launches_as_with_the_operator_by_hand(example: ModuleType):
    without, report = (explained(example, each) for each in (set(), {NAME}))
    assert report.ops[f"custom_pypto::npu_{NAME}"] == 1
    wanted = {"mla_prolog_v3", "quant_lightning_indexer", "kv_quant_sparse_flash_attention"}
    assert {f"npu::npu_{each}" for each in wanted} <= set(report.ops)
    assert (without.launches[1], report.launches[1]) == (23, 9)
    assert not report.refusals


@pytest.mark.rotates(12)
def test_a_block_computes_what_plain_code_does(example: ModuleType):
    """Where every key that is seen is listed, rounding is the only difference, of caches too."""
    serving, model = importlib.import_module("deepseek_v32"), built(example, listed=383)
    options = {**serving.OPTIONS, "opt_in": {NAME}}
    compiled = torch.compile(model, backend="cann_fusion", options=options, dynamic=False)
    with torch.inference_mode():
        plain, fused = (serving.run(call, model, torch.bfloat16) for call in (model, compiled))
        exact = serving.run(model.double(), model, torch.float64)
    for old, new, truth in zip(plain, fused, exact, strict=True):
        assert relative_error(new, truth) <= 1.5 * relative_error(old, truth) + torch.finfo(torch.bfloat16).eps
