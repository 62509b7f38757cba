"""Where the prologs are left out, the quantised front of latent attention is one call of atb, into the user's pages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import fusion
from tests.examples.caches import in_nz, viewed
from tests.examples.latent_model import Given
from tests.examples.mla_preprocess import INT8, STATIC, TOKEN, setting, tried
from tests.support.fused import call, calls, targets

pytestmark = pytest.mark.rotates(8)

MLAPO = "atb::npu_mla_preprocess"
PROLOGS = ("npu_mla_prolog_v3", "npu_mla_prolog_v2", "npu_mla_prolog")
OPTIONS = {"target": "ascend910_93", "lower": "eager", "plan_lower": "eager", "disable": frozenset(PROLOGS)}
KERNEL = dict(he=7168, hcq=1536, c=512, dr=64, d=128, e=128, n=32)
"""What the kernel takes: the sizes of DeepSeek-V3, with a quarter of its heads."""
PAGES = KERNEL | dict(size=128)
"""The same with pages as it takes them in lines of NZ."""
HALF = torch.bfloat16
FORWARD = tried("a token").function
CACHES = slice(len(Given._fields), None)


@pytest.fixture(scope="module")
def given() -> tuple[Tensor, ...]:
    return setting(**KERNEL)(HALF)


@pytest.mark.rotates(4)
def test_the_front_is_one_call_and_no_cache_is_copied(given: tuple[Tensor, ...]):
    with torch.no_grad():
        report = fusion.explain(FORWARD, *given, options=OPTIONS)
    assert report.ops == {
        MLAPO: 1, "npu::npu_gather_pa_kv_cache": 1, "npu::npu_fused_infer_attention_score_v2": 1,
        "npu::npu_transpose_batchmatmul": 1,
    }  # fmt: skip
    nodes = targets(report)
    assert not [name for name in nodes if "clone" in name or "copy_." in name or "index_put" in name]
    assert nodes["aten.empty.memory_format"] == 4  # for what the front gives, and for what is gathered
    front = call(report, "mla_preprocess")
    assert front.args[13] is front.kwargs["kv_cache_out0"]
    assert front.args[14] is front.kwargs["kv_cache_out1"]


@pytest.mark.rotates(4)
def test_pages_in_lines_of_nz_are_written_as_they_lie():
    given = setting(1, 16, **PAGES)(HALF)
    with torch.no_grad():
        report = fusion.explain(tried("a token in lines", write=in_nz).function, *given, options=OPTIONS)
    front = call(report, "mla_preprocess")
    assert front.kwargs["cache_mode"] == "nzcache"
    assert [list(front.args[place].meta["val"].shape) for place in (13, 14)] == [[9, 32, 128, 16], [9, 4, 128, 16]]
    assert not [name for name in targets(report) if "clone" in name or "copy_." in name or "index_put" in name]


@pytest.mark.parametrize("lined", [False, True], ids=["rows", "lines"])
def test_scales_and_zero_points_that_the_model_holds_are_told(lined: bool):
    given = setting(1, *([16] if lined else []), static=True, **PAGES)(HALF)
    function = tried("constants", STATIC, write=in_nz if lined else viewed).function
    with torch.no_grad():
        report = fusion.explain(function, *given, options=OPTIONS)
    front = call(report, "mla_preprocess")
    assert front.kwargs["quant_mode"] == "per_tensor_quant_asymm"
    assert front.kwargs["cache_mode"] == ("nzcache" if lined else "krope_ctkv")
    told = {name: front.kwargs[name].meta["val"] for name in ("quant_scale0", "quant_offset1", "bias0", "bias1")}
    assert {name: each.dtype for name, each in told.items()} == {
        "quant_scale0": HALF, "quant_offset1": torch.int8, "bias0": torch.int32, "bias1": torch.int32,
    }  # fmt: skip


@pytest.mark.parametrize("fixed", [False, True], ids=["scales of tokens", "constants"])
def test_whole_queries_and_a_whole_cache_come_from_one_call(fixed: bool):
    given = setting(1, 32, 16, static=fixed, int8_caches=(True, False), **PAGES)(HALF)
    function = tried("int8", STATIC if fixed else TOKEN, **INT8).function
    options = OPTIONS | {"lengths": "host"}
    with torch.no_grad():
        report = fusion.explain(function, *given, options=options)
    assert report.ops == {MLAPO: 1, "atb::npu_multi_head_latent_attention": 1}
    front, attention = calls(report, "atb")
    assert front.kwargs["cache_mode"] == attention.kwargs["cache_mode"] == "int8_nzcache"
    assert front.kwargs["quant_mode"] == ("per_tensor_quant_asymm" if fixed else "per_token_quant_symm")
    assert [list(front.args[place].meta["val"].shape) for place in (13, 14)] == [[9, 16, 128, 32], [9, 4, 128, 16]]


@pytest.mark.rotates
def test_float16_has_scales_of_another_form(given: tuple[Tensor, ...]):
    halves = [each.half() if each.dtype == HALF else each for each in given]
    with torch.no_grad():
        report = fusion.explain(FORWARD, *halves, options=OPTIONS)
    assert MLAPO not in report.ops
    assert "dtype(descale0) == 'int64'" in " ".join(map(str, report.refusals))


def test_it_is_as_exact_as_the_plain_block(given: tuple[Tensor, ...]):
    copies = [[each.clone() for each in given] for _ in range(2)]
    exact = [each.double() if each.dtype == HALF else each.clone() for each in given]
    compiled = torch.compile(FORWARD, backend="cann_fusion", options=OPTIONS)
    with torch.no_grad():
        results = [function(*of) for function, of in ((FORWARD, exact), (FORWARD, copies[0]), (compiled, copies[1]))]
    pages = [of[CACHES] for of in (exact, *copies)]
    for truth, plain, fused in zip(*([y, *caches] for y, caches in zip(results, pages, strict=True)), strict=True):
        before, after = ((each.double() - truth).norm() / truth.norm() for each in (plain, fused))
        assert after <= min(1.5 * before + torch.finfo(HALF).eps, 4e-2)
