"""What a compiler makes of a write in place: no buffer as large as the cache."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from tests.support import torch_npu_host
from tests.support.torch_npu_host import requires_torch_npu

ROOM = 64


def step(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.index_copy_(2, start + torch.arange(rows.shape[2]), rows)
    return cache.sum(-1)


def paged(cache: Tensor, rows: Tensor, start: Tensor) -> Tensor:
    cache.view(-1, 16)[start + torch.arange(rows.shape[0])] = rows
    return cache.sum(-1)


def inputs(form) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(2, 3, ROOM, 16), (2, 3, 4, 16)] if form is step else [(4, ROOM, 16), (5, 16)]
    return [*(torch.randn(*shape, generator=generator) for shape in shapes), torch.tensor(7)]


@pytest.mark.rotates(8)
@pytest.mark.parametrize("form", [step, paged])
def test_inductor_allocates_no_cache(form):
    torch.compiler.reset()
    options = {"target": "host", "lower": "inductor"}
    compiled = torch.compile(form, backend="cann_fusion", options=options, dynamic=False)
    plain, fused = inputs(form), inputs(form)
    expected, place = form(*plain), fused[0].data_ptr()
    with torch.no_grad():
        got, code = run_and_get_code(compiled, *fused)
    torch.testing.assert_close(got, expected)
    assert torch.equal(fused[0], plain[0])
    assert fused[0].data_ptr() == place
    sizes = re.findall(r"empty_strided_cpu\(\(([^)]*)\)", "\n".join(code))
    assert sizes, "the code was not looked at"
    numbers = [torch.Size(int(each) for each in size.split(",") if each.strip()).numel() for size in sizes]
    assert max(numbers) < fused[0].numel()
    assert "npu" not in "\n".join(code).replace("input", "")


@pytest.mark.rotates(8)
@requires_torch_npu
def test_npugraph_ex_writes_caches_in_place_by_operators_that_the_model_calls():
    told = torch_npu_host.answer("from tests.lowering import cache_child\ncache_child.called_by_the_model()")
    assert "npu.npu_scatter_pa_kv_cache.default" in told["operators"]
    assert not any(name.startswith(COPIES) or "functional" in name for name in told["operators"])
    assert told["written"] == [48.0, 96.0]
    assert told["result"] == 144.0


VENDORS = [
    (
        "npugraph_ex",
        {
            "npu.scatter_update_.default",
            "atb._npu_reshape_and_cache.default",
            "npu.npu_kv_rmsnorm_rope_cache_v2.default",
        },
    ),
    ("torchair", {"Scatter", "ScatterPaKvCache", "KvRmsNormRopeCache"}),
]
COPIES = ("aten.copy_", "aten.clone", "aten.index_put", "TensorMove", "Assign")


@pytest.mark.rotates(8)
@requires_torch_npu
@pytest.mark.parametrize(("route", "expected"), VENDORS)
def test_vendors_write_in_place(route: str, expected: set[str]):
    told = torch_npu_host.answer(f"from tests.lowering import cache_child\ncache_child.{route}()")
    assert told["results"]
    assert told["caches"]
    assert told["in_place"]
    assert expected <= set(told["operators"])
    assert not any(name.startswith(COPIES) for name in told["operators"])
