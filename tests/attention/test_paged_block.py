"""A paged block of Qwen3 over a cache as it is and over one in int8: few launches, and as exact as it was."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

import fusion
from fusion.report.report import Report

EXAMPLES = Path(__file__).parents[2] / "examples"
AROUND = {
    "npu::npu_add_rms_norm": 1, "npu::npu_rms_norm": 2, "npu::npu_apply_rotary_pos_emb": 1,
    "npu::npu_scatter_pa_kv_cache_functional": 1, "npu::npu_fused_infer_attention_score_v2": 1,
}  # fmt: skip
OF_INT8 = {"npu::npu_quantize": 2}
WRITTEN_BACK = 2
"""Caches that a graph copies to its inputs, and that are written in place where it runs."""


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("qwen3_paged")


def explained(example: ModuleType, int8: bool, name: str) -> Report:
    model, inputs = example.model(int8, torch.bfloat16), example.step(*example.STEPS[name], torch.bfloat16)
    with torch.no_grad():
        return fusion.explain(model, *inputs, options=example.OPTIONS)


def attention(report: Report) -> torch.fx.Node:
    (call,) = [node for node in report.graphs[0].graph.nodes if "fused_infer_attention" in str(node.target)]
    return call


@pytest.mark.parametrize(("int8", "launches"), [(False, 8), (True, 10)])
def test_a_token_takes_so_many_launches(example: ModuleType, int8: bool, launches: int):
    report = explained(example, int8, "token")
    assert report.ops == Counter(AROUND | (OF_INT8 if int8 else {}))
    assert report.launches[1] == launches + WRITTEN_BACK


@pytest.mark.rotates(6)
def test_a_token_reads_int8_by_the_block_table(example: ModuleType):
    call = attention(explained(example, True, "token"))
    assert call.args[1].meta["val"].dtype == torch.int8  # type: ignore[union-attr]
    assert call.kwargs["block_table"] is not None
    assert call.kwargs["dequant_scale_key"].meta["val"].shape == (1, example.SHARED, 1, example.WIDTH)  # type: ignore[union-attr]


def test_a_prompt_attends_to_floats_that_are_at_hand(example: ModuleType):
    call = attention(explained(example, True, "prompt"))
    assert call.args[1].meta["val"].dtype == torch.bfloat16  # type: ignore[union-attr]


@pytest.mark.parametrize("int8", [pytest.param(False, marks=pytest.mark.rotates), True])
def test_results_and_caches_are_as_exact_as_they_were(example: ModuleType, int8: bool):
    torch._dynamo.reset()
    exact, plain, fused = (example.model(int8, each) for each in (torch.float64, torch.bfloat16, torch.bfloat16))
    compiled = torch.compile(fused, backend="cann_fusion", options=example.OPTIONS, dynamic=False)
    truth, before, after = (
        example.run(call, dtype)
        for call, dtype in ((exact, torch.float64), (plain, torch.bfloat16), (compiled, torch.bfloat16))
    )
    for want, old, new in zip(truth, before, after, strict=True):
        limit = 1.5 * (old.double() - want).norm() + torch.finfo(torch.bfloat16).eps * want.norm()
        assert (new.double() - want).norm() <= limit
    for name in ("keys", "values"):
        want, old, new = (getattr(each, name).double() for each in (exact, plain, fused))
        assert (new - want).norm() <= 1.5 * (old - want).norm() + torch.finfo(torch.bfloat16).eps * want.norm()
