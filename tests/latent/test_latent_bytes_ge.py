"""Blocks with latent caches in int8 reach GE IR through the vendor's own compiler, and compute the same there."""

from __future__ import annotations

import pytest

from tests.support.torch_npu_host import answer, requires_torch_npu

CHILD = """
import json, sys
sys.path[:0] = ["examples"]
import torch
from tests.support import ge
ge.install()
import deepseek_r1_w8a8 as blocks
from tests.latent import test_latent_bytes as latents

kind = {**latents.KINDS, **latents.SPLIT}[NAME]
dtypes = (torch.float64, torch.bfloat16, torch.bfloat16)
exact, plain, fused = latents.made(blocks, kind, *dtypes)
compiled = torch.compile(fused, backend="cann_fusion", options=dict(target="ascend910_93", lower="torchair"))
with torch.no_grad():
    calls = zip((exact, plain, compiled), dtypes)
    truth, *found = [call(*latents.step(0, 1, dtype)) for call, dtype in calls]
rows = [block.cache.rows(latents.TABLE) for block in (exact, plain, fused)]
pairs = [(truth, *found), *zip(*rows)]
errors = [[blocks.error(each, want) for each in others] for want, *others in pairs]
print(json.dumps(dict(operators=ge.operators(), copied=ge.converted()[-1].before["Assign"], errors=errors)))
"""


@pytest.mark.rotates
@requires_torch_npu
@pytest.mark.parametrize(
    ("name", "operator"),
    [
        ("(1, 2, 0)", "MlaPrologV3"),
        ("(1, 3, 0)", "MlaPrologV3"),
        ("(2, 3, 0) by block", "MlaPrologV3"),
        ("12 heads", "KvRmsNormRopeCache"),
    ],
)
def test_a_token_converts_to_ge(name: str, operator: str):
    told = answer(f"NAME = {name!r}\n{CHILD}")
    assert told["operators"].get(operator) == 1, told["operators"]
    assert told["copied"] == 0, "caches are written, not assigned"
    for before, after in told["errors"]:
        assert after <= 1.5 * before
