"""Verification of whole models: none that is sound is accused, and a wrong rewrite is found in its layer."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import fusion
from fusion.errors import VerificationError

from ..engine.spoiled import Change, late_rows_larger, one_listed_twice, result, spoil, swapped
from .families import build

HALF, BRAIN = torch.float16, torch.bfloat16
SOUND = [("Qwen3", HALF, "masked_prefill", "eager")]
SOUND += [pytest.param(*each, marks=pytest.mark.rotates) for each in (
    ("Qwen3", BRAIN, "decode_static", "sdpa"),
    ("Llama", HALF, "masked_prefill", "sdpa"),
    ("Gemma", HALF, "prefill_static", "eager"),
    ("Phi3", BRAIN, "masked_prefill", "eager"),
    ("DeepseekV3", HALF, "masked_prefill", "eager"),
    ("DeepseekV32", BRAIN, "decode_dynamic", "sdpa"),
    ("DeepseekV32", HALF, "masked_prefill", "eager"),
    ("GlmMoeDsa", BRAIN, "prefill_static", "sdpa"),
    ("MiniMaxM3VL", BRAIN, "masked_prefill", "sdpa"),
    ("Doge", HALF, "prefill", "sdpa"),
)]  # fmt: skip


def run(model: Any, **call: Any) -> Any:
    torch.compiler.reset()
    options = {"target": "ascend910_93", "lower": "eager", "verify": True}
    with torch.no_grad():
        return torch.compile(model, backend="cann_fusion", options=options)(**call)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("family", "dtype", "mode", "attention"), SOUND)
def test_sound_models_are_not_accused(family: str, dtype: torch.dtype, mode: str, attention: str):
    built = build(family, dtype, attention)
    run(built.model, **built.step(mode, tokens=24))


def with_experts(dtype: torch.dtype) -> Any:
    """Qwen3-MoE whose routers hold equal experts, so that each token has ties, and a padding row of zeros."""
    torch.manual_seed(1)
    config = transformers.Qwen3MoeConfig(
        vocab_size=96, hidden_size=256, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        num_experts=8, num_experts_per_tok=2, moe_intermediate_size=64, decoder_sparse_step=1, pad_token_id=0,
        attn_implementation="eager", experts_implementation="grouped_mm",
    )  # fmt: skip
    model = transformers.Qwen3MoeForCausalLM(config).eval().requires_grad_(False).to(dtype)
    for layer in model.model.layers:
        layer.mlp.gate.weight[3] = layer.mlp.gate.weight[2]
        layer.mlp.gate.weight[5] = layer.mlp.gate.weight[4]
    return model


def padded() -> dict[str, Tensor]:
    ids = torch.arange(24).reshape(2, 12) + 11
    ids[0, :3] = 0
    return {"input_ids": ids, "attention_mask": (ids != 0).long()}


@pytest.mark.rotates(12)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, torch.float32])
def test_experts_with_ties_are_not_accused(dtype: torch.dtype):
    model = with_experts(dtype)
    with torch.no_grad():
        used = fusion.explain(model, options={"target": "ascend910_93"}, **padded(), use_cache=False).ops
    assert used["npu::npu_moe_gating_top_k_softmax_v2"] == 2
    run(model, **padded(), use_cache=False)


WRONG = [
    ("DeepseekV32", "prefill", "npu.npu_lightning_indexer.default", result(one_listed_twice), "sparse_attention"),
    ("Qwen3", "masked_prefill", "npu.npu_rotary_mul.default", swapped(1, 2), "rope"),
    ("Llama", "prefill", "npu.npu_fused_infer_attention_score_v2.default", result(late_rows_larger), "attention"),
]


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("family", "mode", "target", "change", "rule"), WRONG)
def test_a_wrong_rewrite_is_found_in_its_layer(
    family: str, mode: str, target: str, change: Change, rule: str, monkeypatch: pytest.MonkeyPatch
):
    spoil(monkeypatch, target, change, "layers.1")
    built = build(family, BRAIN)
    with pytest.raises(VerificationError, match=r"output\.logits") as raised:
        run(built.model, **built.step(mode, tokens=24))
    assert raised.value.culprit is not None
    assert raised.value.culprit.rule == rule
    assert raised.value.culprit.module.startswith("model.layers.1")


@pytest.mark.rotates
def test_a_wrong_rewrite_is_found_behind_experts_with_ties(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    spoil(monkeypatch, "npu.npu_apply_rotary_pos_emb.default", swapped(2, 3), "layers.1")
    with caplog.at_level(logging.WARNING), pytest.raises(VerificationError) as raised:
        run(with_experts(BRAIN), **padded(), use_cache=False)
    assert raised.value.culprit is not None
    assert (raised.value.culprit.rule, raised.value.culprit.module) == ("rope", "model.layers.1.self_attn")
