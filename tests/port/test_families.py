"""Ports of models of transformers: numbers, caches, and one class for equal layers."""

from __future__ import annotations

import pytest
import torch

from fusion.frontend import hf

from .harness import check

pytestmark = pytest.mark.nightly

CALLS = {
    "qwen3 decode": ("qwen3", "decode", 4),
    "qwen3 prefill": ("qwen3", "prefill", 2),
    "deepseek_v3 decode": ("deepseek_v3", "decode", 3),
    "gpt_oss decode": ("gpt_oss", "decode", 2),
    "gpt_oss prefill": ("gpt_oss", "prefill", 2),
    "gemma3 decode": ("gemma3_text", "decode", 3),
    "glm4 decode": ("glm4", "decode", 3),
    "deepseek_v32 decode": ("deepseek_v32", "decode", 3),
    "mixtral decode": ("mixtral", "decode", 3),
    "gpt2 prefill": ("gpt2", "prefill", 3),
}


def test_latent_attention_with_experts():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128, "q_lora_rank": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": 3, "vocab_size": 512}
    experts = {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    }
    config = transformers.DeepseekV3Config(**sizes, **heads, **experts, pad_token_id=0)
    model = transformers.DeepseekV3ForCausalLM._from_config(config, dtype=torch.bfloat16).eval()
    cache = transformers.StaticCache(config=config, max_cache_len=16)
    ids = torch.randint(0, 500, (1, 6))
    with torch.no_grad():
        model(ids, past_key_values=cache, use_cache=True)
    source = check(model, input_ids=ids[:, :1], past_key_values=cache, use_cache=True)
    assert source.count("class DeepseekV3Attention") == source.count("class DeepseekV3MoE") == 1
    assert "torch.ops.npu.npu_moe_gating_top_k(" in source


@pytest.mark.parametrize("name", CALLS)
def test_family(name: str):
    torch.manual_seed(0)
    kind, mode, layers = CALLS[name]
    call = hf.build(hf.Request(kind, mode, layers, tiny=True, seq=8, context=16))
    call.kwargs["input_ids"].random_(0, 500)
    source = check(call.model, *call.args, **call.kwargs)
    assert ("VALID FOR ONE STEP ONLY" in source) == (kind in ("gpt_oss", "gemma3_text"))
    if name == "qwen3 decode":
        assert "for layer, past_key_value in zip(self.layers[1:], past_key_values.layers[1:], strict=False):" in source
