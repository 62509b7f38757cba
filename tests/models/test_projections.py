"""Joined projections and routers in real models: how many launches are left, and weights that change later."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import transformers

import fusion
from fusion.runtime.verification import relative_error

from .families import _GROUPED, CONFIGS, LAYERS, MODES, build

pytestmark = pytest.mark.rotates(12)

ROUTED = dict(_GROUPED, sliding_window=16, num_local_experts=4, num_experts_per_tok=2)
ROUTING = "npu::npu_moe_gating_top_k_softmax_v2"
ON_A3 = {"target": "ascend910_93"}
BLOCKS = {"Qwen3": 9, "Llama": 7, "GptOss": 7}  # norm, projections, (two norms,) rope, two writes, attention, output


@pytest.fixture(autouse=True)
def configurations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(CONFIGS, "GptOss", lambda: transformers.GptOssConfig(**ROUTED))
    monkeypatch.setitem(
        CONFIGS,
        "Qwen3Moe",
        lambda: transformers.Qwen3MoeConfig(
            **_GROUPED, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True
        ),
    )
    torch.compiler.reset()


def model(family: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return build(family, dtype, "eager" if family == "GptOss" else "sdpa")


def rules(report: fusion.Report) -> Counter[str]:
    return Counter(each.rule for each in report.matches)


@pytest.mark.parametrize("family", BLOCKS)
def test_launches_of_an_attention_block(family):
    built = model(family)
    report = fusion.explain(built.model, **built.step("decode_static"), options=ON_A3)
    assert rules(report)["joined_projections"] == LAYERS
    last = f"model.layers.{LAYERS - 1}.self_attn"  # the first layer makes the tables that all of them share
    attention = sum(each.after.launches for path, each in report.layers.items() if path.startswith(last))
    assert attention + 1 == BLOCKS[family], "the norm before it is that of the residual add"


@pytest.mark.parametrize("family", ["Qwen3", "Llama"])
def test_gate_and_up_are_one(family):
    built = model(family)
    report = fusion.explain(built.model, **built.step("prefill"), options=dict(ON_A3, prepack="copy"))
    assert rules(report)["activation"] == LAYERS
    mlp = [each.after.launches for path, each in report.layers.items() if path.endswith(".mlp")]
    assert mlp == [2] * LAYERS
    gate_and_up = 2 * built.config.intermediate_size * built.config.hidden_size
    heads = (built.config.num_attention_heads + 2 * built.config.num_key_value_heads) * built.config.head_dim
    weights = sum(each.bytes for each in report.prepared if each.sources)
    assert weights == LAYERS * 2 * (gate_and_up + heads * built.config.hidden_size)


@pytest.mark.parametrize("mode", MODES)
def test_the_router_of_gpt_oss_is_one_operator(mode):
    built = model("GptOss")
    report = fusion.explain(built.model, **built.step(mode), options=ON_A3)
    assert report.ops[ROUTING] == LAYERS
    left = {str(node.target) for graph in report.graphs for node in graph.graph.nodes}
    assert not {name for name in left if "topk" in name or ("softmax" in name and "npu" not in name)}


@pytest.mark.parametrize("family", ["GptOss", "Qwen3Moe"])
def test_routed_models_keep_their_numbers(family):
    built, exact = model(family, torch.float32), model(family, torch.float32)
    compiled = torch.compile(built.model, backend="cann_fusion", options={"target": "host", "lower": "eager"})
    report = fusion.explain(built.model, **built.step("prefill"), options={"target": "host"})
    assert report.ops[ROUTING] == LAYERS
    with torch.no_grad():
        have, want = compiled(**built.step("prefill")).logits, exact.model(**exact.step("prefill")).logits
    assert relative_error(have, want) <= 1e-5


@pytest.mark.parametrize("family", ["Qwen3", "GptOss"])
@pytest.mark.parametrize("prepack", ["share", "copy"])
def test_weights_that_change_later_are_seen(family, prepack):
    built, other, plain = (model(family, torch.float32) for _ in range(3))
    options = {"target": "host", "lower": "eager", "prepack": prepack}
    compiled = torch.compile(built.model, backend="cann_fusion", options=options)
    with torch.no_grad():
        for parameter in other.model.parameters():
            parameter.mul_(1.25)

        def agree():
            have, want = compiled(**built.step("prefill")).logits, plain.model(**plain.step("prefill")).logits
            assert relative_error(have, want) <= 1e-5

        agree()
        for each in (built, plain):
            each.model.load_state_dict(other.model.state_dict())
        agree()
        for each in (built, plain):
            attention = each.model.model.layers[0].self_attn
            attention.k_proj.weight.mul_(-1.5)
            attention.v_proj.weight.add_(0.01)
        agree()
        for each in (built, plain):
            each.model.model.layers[1].self_attn.q_proj.weight.data.mul_(2)
        agree()
