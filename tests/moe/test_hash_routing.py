"""The experts of DeepSeek-V4, chosen by scores or listed by a table, for one token and for several."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from transformers import DeepseekV4Config
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4SparseMoeBlock

import fusion

OPTIONS = {"lower": "eager", "plan_lower": "eager", "progress": False, "plan_cache": "off", "packages": ["vllm_ascend"]}
FUSED = {"_C_ascend::moe_gating_top_k_hash", "npu::npu_moe_init_routing_v2", "npu::npu_moe_finalize_routing"}


def block(kind: str) -> nn.Module:
    config = DeepseekV4Config(
        vocab_size=32, hidden_size=128, num_hidden_layers=1, moe_intermediate_size=64, n_routed_experts=16,
        num_experts_per_tok=4, mlp_layer_types=[kind],
    )  # fmt: skip
    config._experts_implementation = "batched_mm"
    made = DeepseekV4SparseMoeBlock(config, 0).bfloat16().requires_grad_(False)
    for number, each in enumerate((*made.parameters(), *made.buffers())):
        generator = torch.Generator().manual_seed(number)
        drawn = torch.randn(each.shape, generator=generator) / 8
        each.data = torch.randint(0, 16, each.shape, generator=generator) if each.dtype == torch.int64 else drawn
        each.data = each.data if each.dtype == torch.int64 else each.data.bfloat16()
    if kind == "moe":  # steps so large that rounding scores to 16 bits changes no choice
        made.gate.e_score_correction_bias.copy_(torch.arange(16).mul(7).remainder(16) * 4.0)
    return made


def error(y: torch.Tensor, exact: torch.Tensor) -> float:
    return (y.double() - exact).square().mean().sqrt().item()


@pytest.mark.rotates(3)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize("kind", ["moe", "hash_moe"])
@torch.no_grad()
def test_router_and_experts_are_fused_and_compute_the_same(kind: str, tokens: int):
    model = block(kind)
    x = torch.randn(1, tokens, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    ids = torch.arange(tokens)[None]
    report = fusion.explain(model, x, ids, options={**OPTIONS, "target": "ascend910_93"})
    assert set(report.ops) >= FUSED
    fused = torch.compile(model, backend=fusion.FusionBackend({**OPTIONS, "target": "host"}))
    exact = copy.deepcopy(model).double()(x.double(), ids)
    assert error(fused(x, ids), exact) <= 1.5 * error(model(x, ids), exact)
