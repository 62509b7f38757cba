"""An attention block in int8 becomes what an expert would call, and stays as exact as it was."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import fusion

EXAMPLES = Path(__file__).parents[2] / "examples"
OPTIONS = {"target": "ascend910_93", "lower": "eager"}
OPERATORS = {
    "npu::npu_add_rms_norm_dynamic_quant", "npu::npu_mla_prolog_v3", "npu::npu_fused_infer_attention_score_v2",
    "npu::npu_transpose_batchmatmul", "npu::npu_dynamic_quant", "npu::npu_quant_matmul",
}  # fmt: skip


@pytest.fixture(scope="module")
def example() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        yield importlib.import_module("deepseek_r1_w8a8")


@pytest.mark.parametrize("step", [pytest.param(0, id="prompt", marks=pytest.mark.rotates), pytest.param(1, id="token")])
def test_a_block_becomes_six_operators(example: ModuleType, step: int):
    torch.manual_seed(0)
    block = example.converted(example.Attention().state_dict(), torch.bfloat16)
    _, inputs, start = list(example.steps())[step]
    with torch.no_grad():
        report = fusion.explain(block, *inputs, start, options=OPTIONS)
    assert set(report.ops) == OPERATORS
    assert report.launches[1] == len(OPERATORS)
    (call,) = [node for node in report.graphs[0].graph.nodes if "mla_prolog" in str(node.target)]
    assert call.kwargs["weight_quant_mode"] == 2


@pytest.mark.rotates
def test_the_fused_block_is_as_exact_as_the_plain_one(example: ModuleType):
    torch.manual_seed(0)
    state = example.converted(example.Attention().state_dict(), torch.bfloat16).state_dict()
    exact, plain, fused = (example.converted(state, each) for each in (torch.float64, torch.bfloat16, torch.bfloat16))
    compiled = torch.compile(fused, backend="cann_fusion", options=OPTIONS)
    for _, inputs, start in example.steps():
        with torch.no_grad():
            truth, total = exact(*(each.double() for each in inputs), start)
            (before, _), (after, kept) = (block(*inputs, start) for block in (plain, compiled))
        assert example.error(after, truth) <= 1.5 * example.error(before, truth)
        assert torch.equal(kept, total.bfloat16())
        for name in ("latents", "ropes"):
            caches = [getattr(block, name) for block in (plain, fused, exact)]
            assert example.error(caches[1], caches[2]) <= 1.5 * example.error(caches[0], caches[2])


def test_scales_in_16_bits_are_multiplied_by_a_number_in_float32():
    """Multiply scales of channels by the scale of all rows, a number of the source, without rounding to 16 bits."""

    def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return (torch._int_mm(x, weight.t()).float() * (scale.float() * 0.1)).half()

    options = OPTIONS | {"plan_lower": "eager"}
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randint(-128, 128, (32, 64), generator=generator).to(torch.int8) for _ in range(2))
    scale = (torch.rand(32, generator=generator) * 1e-3 + 1e-4).bfloat16()
    fixed = [nn.Parameter(each, requires_grad=False) for each in (weight, scale)]
    report = fusion.explain(layer, x, *fixed, options=options)
    assert dict(report.ops) == {"npu::npu_quant_matmul": 1}
    torch._dynamo.reset()
    got = torch.compile(layer, backend="cann_fusion", options=options)(x, *fixed)
    exact = x.double() @ weight.double().t() * (scale.double() * 0.1)
    assert ((got.double() - exact).abs() <= exact.abs() * 2.0**-10).all()
