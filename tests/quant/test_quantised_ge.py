"""A W8A8 block reaches GE IR through the vendor's own compiler, and computes the same there."""

from __future__ import annotations

import pytest

from tests.support.torch_npu_host import answer, requires_torch_npu

CHILD = """
import json, sys
sys.path[:0] = ["examples"]
import torch
from tests.support import ge
ge.install()
import deepseek_r1_w8a8 as example

torch.manual_seed(0)
state = example.converted(example.Attention().state_dict(), torch.bfloat16).state_dict()
exact, plain, fused = (example.converted(state, each) for each in (torch.float64, torch.bfloat16, torch.bfloat16))
_, inputs, start = list(example.steps())[1]
compiled = torch.compile(fused, backend="cann_fusion", options=dict(target="ascend910_93", lower="torchair"))
with torch.no_grad():
    truth, _ = exact(*(each.double() for each in inputs), start)
    errors = [example.error(block(*inputs, start)[0], truth) for block in (plain, compiled)]
    caches = [example.error(getattr(fused, name), getattr(exact, name)) for name in ("latents", "ropes")]
told = dict(operators=ge.operators(), copied=ge.converted()[-1].before["Assign"], errors=errors, caches=caches)
print(json.dumps(told))
"""


@pytest.mark.rotates
@requires_torch_npu
def test_a_token_converts_to_ge():
    told = answer(CHILD)
    wanted = ("AddRmsNormDynamicQuant", "MlaPrologV3", "FusedInferAttentionScore", "TransposeBatchMatMul",
              "DynamicQuant", "QuantBatchMatmulV3")  # fmt: skip
    assert {name: told["operators"].get(name) for name in wanted} == dict.fromkeys(wanted, 1), told["operators"]
    assert told["copied"] == 0, "caches are written, not assigned"
    assert max(told["caches"]) < 2e-2
    assert told["errors"][1] <= 1.5 * told["errors"][0]
