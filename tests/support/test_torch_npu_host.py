"""The real torch_npu imports behind the stubs, and brings real schemas and Meta kernels."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

pytestmark = requires_torch_npu


def answer(source: str) -> Any:
    return torch_npu_host.answer(f"import json, torch, torch_npu\n{source}")


def test_thread_local_init_functions_are_not_stubbed():
    names = torch_npu_host.missing_symbols()
    assert "aclInit" in names
    assert not [name for name in names if name.startswith("_ZTH")]


def test_the_stubs_are_built_once():
    folder = torch_npu_host.stubs()
    built = (folder / "libascendcl.so").stat().st_mtime_ns
    assert torch_npu_host.stubs() == folder
    assert (folder / "libascendcl.so").stat().st_mtime_ns == built


@pytest.mark.rotates(8)
def test_a_child_imports_torch_npu_and_torchair_with_one_device():
    assert answer("import torchair; print(json.dumps([torch_npu.__version__, torch.npu.device_count()]))") == [
        "2.13.0",
        1,
    ]


@pytest.mark.rotates(6)
def test_the_schema_is_the_vendors():
    schema = answer("print(json.dumps(str(torch.ops.npu.npu_rms_norm.default._schema)))")
    assert schema.startswith("npu::npu_rms_norm(Tensor input, Tensor gamma, float epsilon=")
    assert schema.endswith("-> (Tensor, Tensor)")


@pytest.mark.rotates(6)
def test_meta_kernels_run_on_meta_tensors():
    shapes = answer(
        "x, gamma = (torch.empty(s, dtype=torch.float16, device='meta') for s in ((2, 3, 8), (8,)))\n"
        "y, rstd = torch.ops.npu.npu_rms_norm(x, gamma)\n"
        "print(json.dumps([list(y.shape), str(y.dtype), list(rstd.shape), str(rstd.dtype)]))"
    )
    assert shapes == [[2, 3, 8], "torch.float16", [2, 3, 1], "torch.float32"]


@pytest.mark.rotates(6)
def test_attention_traces_on_a_fake_npu():
    targets = answer(
        "from torch._subclasses import FakeTensorMode\n"
        "from torch.fx.experimental.proxy_tensor import make_fx\n"
        "with FakeTensorMode():\n"
        "    q = torch.empty(1, 2, 16, 64, dtype=torch.float16, device='npu:0')\n"
        "    graph = make_fx(torch.nn.functional.scaled_dot_product_attention)(q, q, q)\n"
        "print(json.dumps([str(node.target) for node in graph.graph.nodes]))"
    )
    assert any(target.startswith("npu.npu_fusion_attention") for target in targets)


def test_a_child_that_fails_says_so():
    done = torch_npu_host.run("raise SystemExit(3)")
    assert done.returncode == 3
