"""Biases of experts are rows behind the first product, and an argument of the sum behind the second."""

from __future__ import annotations

import pytest
import torch

from tests.moe.biased_experts import FORMS, OTHERS, expected, inputs
from tests.moe.experts import FINISH, GROUPED, ROUTE
from tests.moe.test_experts import distance, left_alone, operators, run

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
EMITTED = {ROUTE: 1, GROUPED: 2, "npu::npu_clipped_swiglu": 1, FINISH: 1}
TOLERANCE = {BF16: 1e-2, F16: 2e-3, F32: 2e-6}
CASES = [(name, BF16) for name in FORMS] + [(name, dtype) for name in ("by einsum", "gathered") for dtype in (F16, F32)]


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("level", "dynamic"), [("composite", False), ("core", True), ("decomposed", False)])
@pytest.mark.parametrize(("name", "dtype"), CASES, ids=str)
def test_every_spelling_is_the_vendors_sequence(name: str, dtype: torch.dtype, level: str, dynamic: bool):
    args = inputs(dtype)
    plain, fused, gm, _ = run(FORMS[name], args, level, dynamic)
    assert operators(gm) == EMITTED
    (finish,) = [node for node in gm.graph.nodes if "finalize" in str(node.target)]
    assert finish.args[3] is not None
    assert finish.args[6] is not None
    wanted = expected(*args)
    assert fused.dtype == dtype
    assert distance(fused, wanted) < max(TOLERANCE[dtype], 1.5 * distance(plain, wanted))


@pytest.mark.parametrize("name", OTHERS)
def test_what_only_looks_like_biases_is_left_alone(name: str):
    form, reason = OTHERS[name]
    said = left_alone(form, inputs(BF16))
    assert any(reason in each for each in said), said
