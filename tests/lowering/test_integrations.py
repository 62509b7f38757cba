"""`fusion.integrations` by torch_npu's compilers: weights are prepared, and passes of the user see fused graphs."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = [requires_torch_npu, pytest.mark.rotates(24)]


@cache
def cases() -> dict[str, dict[str, Any]]:
    return torch_npu_host.answer("from tests.lowering import integrations_child\nintegrations_child.main()")


@pytest.mark.parametrize("compiler", ["torchair", "torchair captures", "npugraph_ex", "both"])
def test_the_model_is_fused_once_and_its_weights_are_prepared(compiler: str):
    case = cases()[compiler]
    assert case["far"] < 1e-6
    assert case["door"] == "backend"
    assert case["chosen"] == {"activation": 1, "rms_norm": 1}
    assert case["prepared"] == 1
    assert case["listed"] == 1 + list(cases()).index(compiler)  # no guest beside the backend is listed


@pytest.mark.parametrize("compiler", ["torchair", "torchair captures", "npugraph_ex"])
def test_passes_of_the_user_run_behind_the_fusion(compiler: str):
    assert cases()[compiler]["seen"] == ["npu.npu_rms_norm.default", "npu.npu_swiglu.default"]


@pytest.mark.rotates(12)
def test_torchair_converts_what_was_fused():
    converted = cases()["torchair"]["ge"]
    assert {name: converted[name] for name in ("RmsNorm", "SwiGlu", "MatMul")} == {
        "RmsNorm": 1,
        "SwiGlu": 1,
        "MatMul": 2,
    }


@pytest.mark.parametrize("page", ["torchair", "npugraph-ex"])
def test_the_code_of_a_page_runs(page: str, tmp_path: Path):
    text = (torch_npu_host.REPO / "docs" / f"{page}.md").read_text()
    (code,) = re.findall(r"^```py\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    file = tmp_path / "page.py"
    file.write_text(f"from tests.support import ge\nge.install()\n{code}")
    done = torch_npu_host.run(f"import runpy\nrunpy.run_path({str(file)!r})")
    assert done.returncode == 0, done.stderr[-4000:]
    assert "fused 1 x activation, 1 x rms_norm in Block.forward" in done.stdout
