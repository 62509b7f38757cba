"""Models with an indexer at their published sizes: launches of a block of attention, from its norm to the last."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

import fusion
from fusion.frontend import hf

MOST = {"deepseek_v32": 15, "glm_moe_dsa": 14}
"""With 128 heads and with 64."""
STEPS: tuple[dict[str, Any], ...] = (
    dict(mode="decode"), dict(mode="decode", batch=4), dict(mode="prefill", seq=4096, context=8192),
)  # fmt: skip


@pytest.mark.rotates(8)
@pytest.mark.parametrize(("model", "attention", "step"), product(MOST, ("sdpa", "eager"), STEPS))
def test_a_block_costs_no_more_than_an_expert_launches(model: str, attention: str, step: dict[str, Any]):
    call = hf.build(hf.Request(model, **{"context": 4096, "layers": 3, "attention": attention} | step))
    report = fusion.explain(call.model, **call.kwargs, options={"target": "ascend910_93"})
    assert report.ops["npu::npu_mla_prolog_v3"] == report.ops["npu::npu_sparse_flash_attention"] == 3
    last = ("layers.2.self_attn", "layers.2.input_layernorm")
    block = [layer.after.launches for path, layer in report.layers.items() if any(each in path for each in last)]
    assert sum(block) <= MOST[model]
