"""A layer of experts of Qwen3-MoE: the same few launches in all three ways to write it, and as exact as it was."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusion

EXAMPLES = Path(__file__).parents[2] / "examples"
EMITTED = {
    "npu::npu_rms_norm": 1, "npu::npu_moe_gating_top_k_softmax_v2": 1, "npu::npu_moe_init_routing_v2": 1,
    "npu::npu_grouped_matmul": 2, "npu::npu_swiglu": 1, "npu::npu_moe_finalize_routing": 1,
}  # fmt: skip
LAUNCHES = 9
"""Beside these the router's projection and the residual add."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("qwen3_moe")


@pytest.mark.parametrize(("form", "before"), [("sorted", 17), ("gathered", 15), ("looped", 123)])
@pytest.mark.rotates(4)
def test_a_layer_takes_so_many_launches(example: ModuleType, form: str, before: int):
    with torch.no_grad():
        report = fusion.explain(
            example.model(form, torch.bfloat16), example.inputs(torch.bfloat16), options=example.OPTIONS
        )
    assert report.ops == Counter(EMITTED)
    assert report.launches == (before, LAUNCHES)


@pytest.mark.parametrize("form", ["sorted", "gathered", "looped"])
@pytest.mark.rotates(3)
def test_results_are_as_exact_as_they_were(example: ModuleType, form: str):
    torch._dynamo.reset()
    model = example.model(form, torch.bfloat16)
    compiled = torch.compile(model, backend="cann_fusion", options=example.OPTIONS, dynamic=False)
    truth = example.run(example.model(form, torch.float64), torch.float64)
    plain, fused = (example.run(call, torch.bfloat16) for call in (model, compiled))
    limit = 1.5 * (plain.double() - truth).norm() + torch.finfo(torch.bfloat16).eps * truth.norm()
    assert (fused.double() - truth).norm() <= limit
