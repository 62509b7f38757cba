"""The examples of sparse attention in serving code: how many launches a block becomes, and how exact it is."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import fusion
from fusion.runtime.verification import relative_error

pytestmark = pytest.mark.rotates(6)

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHES = {"deepseek_v32": 13, "glm5": 14 + 5, "deepseek_v32_w8a8c8": 21}
"""Of one block; of one and another that shares its list."""


@pytest.fixture(autouse=True)
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(EXAMPLES)


def built(name: str, **sizes: Any) -> Any:
    torch.manual_seed(0)
    module = importlib.import_module(name)
    return module.build(replace(module.SIZES, **sizes))


def explained(name: str, step: str, target: str = "ascend910_93", **sizes: Any) -> fusion.Report:
    serving, model = importlib.import_module("deepseek_v32"), built(name, **sizes)
    given = serving.step(model.of, step, torch.bfloat16, model.empty_caches(torch.bfloat16))
    with torch.inference_mode():
        return fusion.explain(model, *given, options={**serving.OPTIONS, "target": target})


@pytest.mark.parametrize("step", ["a chunk, a token, nothing", "two tokens each", "a token each"])
@pytest.mark.parametrize("name", LAUNCHES)
def test_a_block_is_as_few_launches_as_an_expert_writes(name: str, step: str):
    report = explained(name, step)
    assert report.launches[1] == LAUNCHES[name]
    assert not report.refusals


@pytest.mark.parametrize("step", ["prompts", "a token each"])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v32_w8a8c8"])
def test_a_block_is_as_few_on_the_host(name: str, step: str):
    """Where products cost most: those in int8 cost the fused operators no more than the model's own."""
    report = explained(name, step, "host")
    assert report.launches[1] == LAUNCHES[name]
    assert not report.refusals


@pytest.mark.parametrize(("heads", "most"), [(64, 13), (128, 15)])
def test_a_block_of_many_heads_is_no_more(heads: int, most: int):
    report = explained("deepseek_v32", "a token each", heads=heads, index_heads=64)
    assert {"npu::npu_mla_prolog_v3", "npu::npu_sparse_flash_attention"} <= set(report.ops)
    assert report.launches[1] <= most


@pytest.mark.rotates(3)
def test_the_same_of_glm_in_int8_is_one_rotation_more(monkeypatch: pytest.MonkeyPatch):
    name, sizes = "deepseek_v32_w8a8c8", dict(q_lora=2048, nope=192, value=256)
    pairs = importlib.import_module("deepseek_v32").pairs_rotated
    monkeypatch.setattr(importlib.import_module(name).Indexer, "rotated", staticmethod(pairs))
    report = explained(name, "a token each", **sizes)
    assert report.launches[1] == LAUNCHES[name] + 1
    assert {"npu::npu_mla_prolog_v3", "npu::npu_kv_quant_sparse_flash_attention"} <= set(report.ops)


@pytest.mark.parametrize("name", LAUNCHES)
def test_where_every_key_is_listed_rounding_is_the_only_difference(name: str):
    """Lists of all keys are equal, however their scores are rounded."""
    serving, model = importlib.import_module("deepseek_v32"), built(name, listed=48)
    compiled = torch.compile(model, backend="cann_fusion", options=serving.OPTIONS, dynamic=False)
    with torch.inference_mode():
        plain, fused = (serving.run(call, model, torch.bfloat16) for call in (model, compiled))
        exact = serving.run(model.double(), model, torch.float64)
    for old, new, truth in zip(plain, fused, exact, strict=True):
        assert relative_error(new, truth) <= 1.5 * relative_error(old, truth) + torch.finfo(torch.bfloat16).eps
