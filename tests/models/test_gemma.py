"""Gemma 3: a step of decoding takes nine launches from a residual add to the output projection, sixteen a layer."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
import transformers

import fusion
from fusion.report.report import Report
from tests.models import families
from tests.models.families import build

SIZES = dict(
    vocab_size=96, hidden_size=256, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    query_pre_attn_scalar=64, sliding_window=16, max_position_embeddings=1024, pad_token_id=0,
)  # fmt: skip
BLOCK = {  # beside the projection of queries, keys and values, and that of the output
    "npu::npu_add_rms_norm": 1, "npu::npu_rms_norm": 2, "npu::npu_apply_rotary_pos_emb": 1, "npu::scatter_update_": 2,
    "npu::npu_fused_infer_attention_score_v2": 1,
}  # fmt: skip
REST = {"npu::npu_rms_norm": 2, "npu::npu_add_rms_norm": 1}  # beside gate and up, gelu, their product, and down


@pytest.mark.rotates(9)
@pytest.mark.parametrize("kind", ["sliding_attention", "full_attention"])
def test_a_step_of_one_layer_more(kind: str, monkeypatch: pytest.MonkeyPatch):
    def report(layers: int) -> Report:
        config = transformers.Gemma3TextConfig(**SIZES, num_hidden_layers=layers, layer_types=[kind] * layers)
        monkeypatch.setitem(families.CONFIGS, "Gemma3", lambda: config)
        built = build("Gemma3", torch.bfloat16)
        options = {"target": "ascend910_93", "plan_cache": "off"}
        return fusion.explain(built.model, **built.step("decode_static"), options=options)

    less, more = report(3), report(4)
    assert Counter(more.ops) - Counter(less.ops) == Counter(BLOCK) + Counter(REST)
    assert sum(BLOCK.values()) + 2 == 9
    assert more.launches[1] - less.launches[1] == 9 + sum(REST.values()) + 4
    assert any("1 + weight is rounded once" in each.remark for each in more.matches)
