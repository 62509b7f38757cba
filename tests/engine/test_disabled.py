"""Operators that the option `disable` leaves out: another one takes their place, or the reason is told."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import fusion
from fusion.errors import OptionError

NPU = {"target": "ascend910_93", "lower": "eager"}
Q, K = torch.randn(2, 4, 8, 128).bfloat16(), torch.randn(2, 2, 8, 128).bfloat16()
SHOWN = torch.rand(2, 1, 8, 8) > 0.3


def causal(q, k):
    return F.scaled_dot_product_attention(q, k, k, is_causal=True, enable_gqa=True)


def masked(q, k, mask):
    return F.scaled_dot_product_attention(q, k, k, attn_mask=mask, enable_gqa=True)


@pytest.mark.parametrize(("function", "args"), [(causal, (Q, K)), (masked, (Q, K, SHOWN))])
def test_the_first_version_where_the_second_is_left_out(function, args):
    torch.compiler.reset()
    options = {**NPU, "disable": {"npu_fused_infer_attention_score_v2"}}
    report = fusion.explain(function, *args, options=options)
    assert dict(report.ops) == {"npu::npu_fused_infer_attention_score": 1}
    run = torch.compile(function, backend="cann_fusion", options=options)
    with torch.no_grad():
        torch.testing.assert_close(run(*args), function(*args), rtol=2e-2, atol=2e-2)


def test_without_any_of_them_the_report_says_what_was_left_out():
    torch.compiler.reset()
    older = {"npu_fusion_attention", "npu_prompt_flash_attention"}
    names = {"npu_fused_infer_attention_score", "npu_fused_infer_attention_score_v2", *older}
    report = fusion.explain(causal, Q, K, options={**NPU, "disable": names})
    assert not report.ops
    assert any("the option disable names it" in each.reason for each in report.refusals)


def test_a_name_that_is_neither_is_refused():
    torch.compiler.reset()
    with pytest.raises(OptionError, match="npu_swiglo"):
        fusion.explain(causal, Q, K, options={**NPU, "disable": {"npu_swiglo"}})
