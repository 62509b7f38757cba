"""What a W8A8 static layer behind a norm becomes on a chip, and why not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import fusion
from tests.norm.encoded_norm import Block, W8A8Static, _inputs, torch_norm

EAGER = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager"}
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32


def explained(dtype: torch.dtype, scale: torch.dtype | None = None, **options: Any) -> Any:
    """The report of a residual add, a norm and a layer, for any number of tokens."""
    x, residual, gain, bias, weight, held, zero = _inputs(2, 5)
    kept: list[Tensor] = [each.to(dtype) for each in (gain, bias)]
    block = Block(W8A8Static, torch_norm, *kept, weight, held.to(scale or dtype), zero).requires_grad_(False)
    given = [each.to(dtype) for each in (x, residual)]
    for each in given:
        torch._dynamo.mark_dynamic(each, 1)
    return fusion.explain(block, *given, options=EAGER | options)


def reasons(report: Any) -> str:
    """Why the rules were not used."""
    return "\n".join(each.reason for each in report.refusals if each.rule in ("encoded_norm", "quantisation"))


@pytest.mark.rotates(8)
@pytest.mark.parametrize(("dtype", "scale"), [(BF16, BF16), (F16, F16), (F16, F32)], ids=str)
def test_a_block_becomes_two_operators(dtype: torch.dtype, scale: torch.dtype):
    report = explained(dtype, scale)
    assert dict(report.ops) == {"npu::npu_add_rms_norm_quant": 1, "npu::npu_quant_matmul": 1}
    assert report.launches[1] == 2


def test_a_scale_that_bfloat16_may_not_hold_is_refused():
    report = explained(BF16, F32)
    assert dict(report.ops) == {"npu::npu_add_rms_norm": 1, "npu::npu_quant_matmul": 1}
    assert "requires dtype(scales) == dtype(input)" in reasons(report)  # nor is it, of the rows alone


def test_torchair_takes_it_by_the_operator_of_ge():
    report = explained(BF16, plan_lower="torchair")
    assert dict(report.ops) == {"npu::npu_add_rms_norm_quant": 1, "npu::npu_quant_matmul": 1}
