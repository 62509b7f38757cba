"""Real models of transformers, small and random, with the head sizes of the published ones, one step of each mode."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from torch import Tensor, nn

LAYERS = 2
MODES = ("prefill", "masked_prefill", "prefill_static", "decode_static", "prefill_dynamic", "decode_dynamic")
CONTEXT = 48

_COMMON = dict(
    vocab_size=96, hidden_size=256, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=4,
    max_position_embeddings=1024, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
_GROUPED = dict(_COMMON, num_key_value_heads=2, head_dim=64)
_LATENT = dict(
    _COMMON, num_key_value_heads=4, q_lora_rank=96, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64,
    v_head_dim=128, n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1, moe_intermediate_size=32,
    n_group=1, topk_group=1,
)  # fmt: skip
_DENSE_FIRST = dict(_LATENT, first_k_dense_replace=LAYERS)
_INDEXED = dict(_LATENT, mlp_layer_types=["dense"] * LAYERS, index_head_dim=128, index_n_heads=4, index_topk=16)

CONFIGS: dict[str, Any] = {
    "Qwen3": lambda **sizes: transformers.Qwen3Config(**_GROUPED | sizes),
    "Llama": lambda **sizes: transformers.LlamaConfig(**_GROUPED | sizes),
    "DeepseekV2": lambda **sizes: transformers.DeepseekV2Config(**_DENSE_FIRST | sizes),
    "DeepseekV3": lambda **sizes: transformers.DeepseekV3Config(**_DENSE_FIRST | sizes),
    "DeepseekV32": lambda **sizes: transformers.DeepseekV32Config(**_INDEXED | sizes),
    "GlmMoeDsa": lambda **sizes: transformers.GlmMoeDsaConfig(
        **dict(_INDEXED, qk_nope_head_dim=192, v_head_dim=256) | sizes
    ),
    "Mistral4": lambda **sizes: transformers.Mistral4Config(**_DENSE_FIRST | sizes),
    "Mistral": lambda **sizes: transformers.MistralConfig(**_GROUPED | sizes),
    "Gemma": lambda **sizes: transformers.GemmaConfig(**_GROUPED | sizes),
    "Phi3": lambda **sizes: transformers.Phi3Config(**{k: v for k, v in _GROUPED.items() if k != "head_dim"} | sizes),
    "Glm4": lambda **sizes: transformers.Glm4Config(**_GROUPED | sizes),
}


_WITHOUT_RANK = {name: size for name, size in _INDEXED.items() if name != "q_lora_rank"}

OTHER_INDEXERS: dict[str, Any] = {
    "AXK2": lambda **sizes: transformers.AXK2Config(**_INDEXED | sizes),
    "HYV4": lambda **sizes: transformers.HYV4Config(**dict(_INDEXED, qk_nope_head_dim=192, v_head_dim=256) | sizes),
    "Dots3Note": lambda **sizes: transformers.Dots3NoteTextConfig(
        **dict(_INDEXED, layer_types=["full_attention"] * LAYERS) | sizes
    ),
    "MistralLarge4": lambda q_lora_rank=0, **sizes: transformers.MistralLarge4TextConfig(**_WITHOUT_RANK | sizes),
}
"""Families that differ from DeepSeek-V3.2 in their indexer or beside it."""

OTHER_SELECTIONS: dict[str, tuple[str, Any]] = {
    "DeepseekV4": (
        "eager",
        lambda **sizes: transformers.DeepseekV4Config(
            **dict(
                _COMMON, num_key_value_heads=1, head_dim=64, q_lora_rank=96, qk_rope_head_dim=32, o_lora_rank=32,
                o_groups=2, n_routed_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, sliding_window=8,
                layer_types=["sliding_attention", "compressed_sparse_attention"], index_head_dim=128, index_n_heads=4,
                index_topk=4,
            ) | sizes
        ),
    ),
    "MiniMaxM3VL": (
        "sdpa",
        lambda **sizes: transformers.MiniMaxM3VLTextConfig(
            **dict(
                _GROUPED, layer_types=["minimax_m3_sparse"] * LAYERS, mlp_layer_types=["dense"] * LAYERS,
                index_n_heads=2, index_head_dim=64, index_block_size=4, index_topk_blocks=2, index_local_blocks=1,
            ) | sizes
        ),
    ),
    "Doge": ("sdpa", lambda **sizes: transformers.DogeConfig(**_GROUPED | dict(keep_window_size=8) | sizes)),
    "Glm5Next": (
        "sdpa",
        lambda **sizes: transformers.Glm5NextTextConfig(
            **dict(_INDEXED, qk_rope_head_dim=0, index_kpool=4, layer_types=["full_attention"] * LAYERS) | sizes
        ),
    ),
    "Qwen4Exp": (
        "sdpa",
        lambda **sizes: transformers.Qwen4ExpTextConfig(
            **dict(
                _GROUPED, layer_types=["full_attention"] * LAYERS, num_experts=4, num_experts_per_tok=2,
                moe_intermediate_size=32, indexer_n_heads=4, indexer_kv_heads=1, indexer_head_dim=64, indexer_budget=8,
                indexer_compress_ratio=4,
            ) | sizes
        ),
    ),
}  # fmt: skip
"""Families that choose blocks, pools of keys, or keys of each group of heads, and the attention that each runs with."""


@dataclass(frozen=True)
class Built:
    """One model; every call of `step` gives fresh, equal inputs, with a filled cache of its own where it decodes."""

    model: nn.Module
    config: Any

    def step(self, mode: str, batch: int = 2, tokens: int = 12) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(7)
        ids = torch.randint(3, 90, (batch, tokens), generator=generator)
        if mode == "prefill":
            return dict(input_ids=ids, use_cache=False)
        if mode == "masked_prefill":
            mask = torch.ones_like(ids)
            mask[0, :3] = 0
            return dict(input_ids=ids, attention_mask=mask, use_cache=False)
        cache = self._cache(mode)
        call = dict(input_ids=ids, past_key_values=cache, use_cache=True)
        if mode.startswith("prefill"):
            return call
        with torch.no_grad():
            self.model(**call)
        return dict(call, input_ids=ids[:, -1:].contiguous())

    def _cache(self, mode: str) -> Any:
        if mode.endswith("static"):
            return transformers.StaticCache(config=self.config, max_cache_len=CONTEXT)
        return transformers.DynamicCache(config=self.config)


def build(family: str, dtype: torch.dtype, attention: str = "sdpa", **sizes: Any) -> Built:
    torch.manual_seed(3)
    chosen = {name: make for name, (_, make) in OTHER_SELECTIONS.items()}
    config = (CONFIGS | OTHER_INDEXERS | chosen)[family](**sizes)
    config._attn_implementation = attention
    whole = f"{family}ForCausalLM"
    kind = getattr(transformers, whole if hasattr(transformers, whole) else f"{family}TextModel")
    model = kind(config).eval().requires_grad_(False)
    with torch.no_grad():  # gains other than one, so that a gain that is lost or exchanged shows
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return Built(model.to(dtype), config)


def caches(call: dict[str, Any]) -> list[Tensor]:
    """The floating-point tensors of the cache of a call, in a fixed order."""
    layers = getattr(call.get("past_key_values"), "layers", [])
    return [
        value
        for layer in layers
        for _, value in sorted(vars(layer).items())
        if isinstance(value, Tensor) and value.is_floating_point()
    ]
