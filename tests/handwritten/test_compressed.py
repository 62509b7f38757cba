"""Hand-written pieces of DeepSeek-V4 agree with transformers', and with what the plain model is rewritten to."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import (
    DeepseekV4DecoderLayer,
    DeepseekV4HashRouter,
    DeepseekV4RotaryEmbedding,
    DeepseekV4TopKRouter,
)

import fusion

from . import compressed
from .test_handwritten import BF16, error, require_agreement

pytestmark = pytest.mark.rotates(6)

OPTIONS = {
    "target": "host", "lower": "eager", "plan_cache": "off", "progress": False, "opt_in": ["stream_gates_hf32"],
    "packages": ["cann_ops_transformer", "vllm_ascend"],
}  # fmt: skip
STRICT = ("attn_hc", "ffn_hc", "sinks", "e_score_correction_bias", "layernorm", "q_a_norm", "kv_norm")


def config() -> DeepseekV4Config:
    made = DeepseekV4Config(
        vocab_size=32, hidden_size=128, num_hidden_layers=1, moe_intermediate_size=32, num_attention_heads=4,
        head_dim=64, q_lora_rank=32, o_groups=2, o_lora_rank=16, n_routed_experts=8, num_experts_per_tok=2,
        layer_types=["sliding_attention"], mlp_layer_types=["moe"],
    )  # fmt: skip
    made._attn_implementation = "eager"
    return made


def filled(module: Any, dtype: torch.dtype) -> Any:
    """Fill the parameters of `module`, of which transformers leaves those of `STRICT` in float32."""
    for number, (name, each) in enumerate((*module.named_parameters(), *module.named_buffers())):
        generator = torch.Generator().manual_seed(number)
        if each.dtype == torch.int64:
            each.data = torch.randint(0, 8, each.shape, generator=generator)
            continue
        drawn = torch.randn(each.shape, generator=generator) / 8 + ("norm" in name)
        strict = torch.promote_types(dtype, torch.float32)
        each.data = drawn.to(BF16).to(strict if any(part in name for part in STRICT) else dtype)
    return module.requires_grad_(False).eval()


def half(layer: Any, streams: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Return the streams behind the attention, as `DeepseekV4DecoderLayer.forward` computes them."""
    rows, dtype = streams.shape[1], streams.dtype
    i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
    mask = torch.where((j <= i) & (j > i - 128), 0.0, -torch.inf).to(dtype).expand(streams.shape[0], 1, -1, -1)
    post, comb, mixed = layer.attn_hc(streams)
    out, _ = layer.self_attn(layer.input_layernorm(mixed), {"main": (cos, sin)}, None, mask)
    return post.to(dtype).unsqueeze(-1) * out.unsqueeze(-2) + comb.to(dtype).mT @ streams


def rewritten(call: Any) -> Any:
    torch._dynamo.reset()
    return torch.compile(call, backend=fusion.FusionBackend(OPTIONS), dynamic=False)


@torch.no_grad()
def test_the_attention_half_of_a_window_layer():
    def run(call: Any, dtype: torch.dtype) -> Tensor:
        layer = filled(DeepseekV4DecoderLayer(config(), 0), dtype)
        generator = torch.Generator().manual_seed(7)
        streams = torch.randn(1, 140, 4, 128, generator=generator).to(BF16).to(dtype)
        cos, sin = DeepseekV4RotaryEmbedding(config())(streams, torch.arange(140)[None], layer_type="main")
        return call(layer, streams, cos, sin)

    written = partial(run, compressed.v4_attention_half)
    fused = partial(run, lambda layer, *given: rewritten(half)(layer, *given))
    require_agreement(partial(run, half), written, fused, exact=2e-3)  # gates of a product in HF32


@pytest.mark.parametrize("listed", [False, True])
@torch.no_grad()
def test_routers(listed: bool):
    router = filled((DeepseekV4HashRouter if listed else DeepseekV4TopKRouter)(config()), torch.float32)
    x, ids = torch.randn(6, 128, generator=torch.Generator().manual_seed(8)), torch.arange(6)
    given = (x, ids) if listed else (x,)
    _, weights, experts = router(*given)
    order = experts.argsort()
    written, chosen = compressed.v4_routed(router, *given)
    assert torch.equal(chosen.sort()[0].long(), experts.sort()[0])
    assert error(written.gather(-1, chosen.argsort()), weights.gather(-1, order)) < 1e-6
    _, fused, named = rewritten(router)(*given)
    assert torch.equal(named.sort()[0], experts.sort()[0])
    assert error(fused.gather(-1, named.argsort()), weights.gather(-1, order)) < 1e-6
