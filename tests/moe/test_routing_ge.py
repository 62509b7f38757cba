"""Routers reach GE IR through the vendor's own compiler, as one operator that is told what comes first."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.support.torch_npu_host import answer, requires_torch_npu

pytestmark = pytest.mark.rotates(6)

ROUTER = "MoeGatingTopKSoftmaxV2"


@cache
def told(by: str) -> dict[str, Any]:
    return answer(f"from tests.moe import ge_child\nge_child.{by}()")


@requires_torch_npu
@pytest.mark.parametrize(
    ("case", "renorm", "tolerance"),
    [
        ("chosen first", 1, 1e-6),
        ("divided", 1, 2**-8),
        ("widened", 1, 2**-11),
        ("shares", 0, 2**-11),
        ("one token", 0, 2**-8),
        ("any number of tokens", 1, 1e-6),
        ("sequences", 0, 1e-6),
        ("guest", 1, 1e-6),
    ],
)
@pytest.mark.rotates(12)
def test_a_router_converts_to_ge(case: str, renorm: int, tolerance: float):
    found = told("guest" if case == "guest" else "lowered")[case]
    assert found["operators"][ROUTER] == 1, found["operators"]
    assert not {"TopKV2", "SoftmaxV2"} & set(found["operators"])
    assert found["made"] == [[ROUTER, {"k": 4, "renorm": renorm}]]
    assert found["error"] < tolerance


@requires_torch_npu
@pytest.mark.rotates(12)
def test_a_call_of_the_model_for_the_whole_softmax_is_left_to_torchairs_own_converter():
    assert told("whole_softmax") == {"made": [], "raised": "got an unexpected keyword argument 'renorm'"}
