"""A fused model reaches GE IR through the vendor's own compiler, and computes the same there."""

from __future__ import annotations

import json

import pytest

from support.torch_npu_host import requires_torch_npu, run

CHILD = """
import json, sys
sys.path.insert(0, "tests")
import torch
from support import ge
ge.install()
from models.families import build, caches
from fusion.verification import relative_error

built = build({family!r}, torch.float16)
plain, fused = built.step({mode!r}), built.step({mode!r})
places = [cache.data_ptr() for cache in caches(fused)]
options = dict(target="ascend910_93", lower="torchair")
with torch.no_grad():
    expected = built.model(**plain).logits
    result = torch.compile(built.model, backend="cann_fusion", options=options)(**fused).logits
pairs = [(result, expected), *zip(caches(fused), caches(plain), strict=True)]
print(json.dumps(dict(
    operators=ge.operators(),
    copied=ge.converted()[-1].before["Assign"],
    written=len(ge.converted()[-1].written),
    error=max(relative_error(have, want) for have, want in pairs),
    in_place=[cache.data_ptr() for cache in caches(fused)] == places,
    caches=len(places),
)))
"""


@requires_torch_npu
@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Qwen3", {"RmsNorm": 5, "AddRmsNorm": 4, "ApplyRotaryPosEmb": 2, "FusedInferAttentionScore": 2}),
        ("DeepseekV32", {"RmsNorm": 5, "AddRmsNorm": 4, "InterleaveRope": 4, "ApplyRotaryPosEmb": 2}),
    ],
)
def test_decode_converts_to_ge(family, expected):
    child = run(CHILD.format(family=family, mode="decode_static"))
    assert child.returncode == 0, child.stderr[-3000:]
    told = json.loads(child.stdout.splitlines()[-1])
    assert {name: told["operators"].get(name) for name in expected} == expected
    assert not {"Rsqrt", "Pow", "Neg"} & set(told["operators"])
    assert told["error"] < 5e-3
    assert told["in_place"]
    assert told["operators"]["Scatter"] == told["caches"]
    assert told["copied"] < told["caches"], "caches are written, not assigned"
