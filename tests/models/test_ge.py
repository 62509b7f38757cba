"""A fused model reaches GE IR through the vendor's own compiler, and computes the same there."""

from __future__ import annotations

import pytest

from tests.support.torch_npu_host import answer, requires_torch_npu

CHILD = """
import json
import torch
from tests.support import ge
ge.install()
from tests.models.families import build, caches
from fusion.runtime.verification import relative_error

built = build({family!r}, torch.{dtype}, **{sizes!r})
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


LEGAL = dict(hidden_size=1024, q_lora_rank=1536)


@pytest.mark.rotates(12)
@requires_torch_npu
@pytest.mark.parametrize(
    ("family", "dtype", "sizes", "expected"),
    [
        (
            "Qwen3", "float16", {},
            {"RmsNorm": 5, "AddRmsNorm": 4, "ApplyRotaryPosEmb": 2, "FusedInferAttentionScore": 2, "Scatter": 4},
        ),
        (
            "DeepseekV32", "bfloat16", LEGAL,
            {
                "MlaPrologV3": 2, "LightningIndexer": 2, "SparseFlashAttention": 2, "TransposeBatchMatMul": 2,
                "Scatter": 2,
            },
        ),
    ],
)  # fmt: skip
def test_decode_converts_to_ge(family, dtype, sizes, expected):
    told = answer(CHILD.format(family=family, mode="decode_static", dtype=dtype, sizes=sizes))
    assert {name: told["operators"].get(name) for name in expected} == expected, told["operators"]
    assert not {"Rsqrt", "Pow", "Neg", "TopKV2", "SoftmaxV2"} & set(told["operators"])
    assert told["error"] < (5e-3 if dtype == "float16" else 2e-2)
    assert told["in_place"]
    assert told["copied"] < told["caches"], "caches are written, not assigned"
