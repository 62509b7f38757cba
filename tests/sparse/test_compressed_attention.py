"""Attention of DeepSeek-V4 over a window and compressed keys is one call; its numbers are no worse than the model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DeepseekV4Config, DynamicCache
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4Model

import fusion

CALL = "cann_ops_transformer::sparse_flash_mla"
SLIDING, HEAVY, SPARSE = "sliding_attention", "heavily_compressed_attention", "compressed_sparse_attention"
TOKENS = 150
OPTIONS = {
    "target": "host", "lower": "eager", "progress": False, "plan_cache": "off", "packages": ["cann_ops_transformer"],
}  # fmt: skip


def config(kind: str, **more: Any) -> DeepseekV4Config:
    sizes = {"head_dim": 64, "index_n_heads": 8, "index_head_dim": 64, "index_topk": 16, **more}
    return DeepseekV4Config(
        vocab_size=32, hidden_size=64, num_hidden_layers=1, moe_intermediate_size=32, intermediate_size=32,
        num_attention_heads=8, q_lora_rank=32, o_groups=2, o_lora_rank=32, n_routed_experts=4, num_local_experts=4,
        num_experts_per_tok=2, layer_types=[kind], mlp_layer_types=["moe"], max_position_embeddings=512, **sizes,
    )  # fmt: skip


class Attention(nn.Module):
    """The attention of one layer, with the mask of a window and positions from `start` on."""

    def __init__(self, kind: str, **more: Any) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.config = config(kind, **more)
        model = DeepseekV4Model(self.config).eval()
        self.attention, self.rotary = model.layers[0].self_attn, model.rotary_emb
        self.to(torch.bfloat16)
        for name, each in self.named_parameters():
            if name.endswith(("sinks", "position_bias")):
                each.data = torch.randn(each.shape)

    def forward(self, x: Tensor, past: DynamicCache | None = None, start: int = 0) -> Tensor:
        rows = x.shape[1]
        at = (torch.arange(rows) + start)[None].expand(x.shape[0], -1)
        tables = {kind: self.rotary(x, position_ids=at, layer_type=kind) for kind in ("main", "compress")}
        i, j = torch.arange(rows)[:, None], torch.arange(rows)[None]
        mask = torch.where((j <= i) & (j > i - 128), 0.0, -torch.inf).to(x.dtype).expand(x.shape[0], 1, -1, -1)
        return self.attention(x, tables, at, None if rows == 1 else mask, past_key_values=past)[0]


def step(model: Attention, x: Tensor) -> tuple[Tensor, DynamicCache, int]:
    """The last token of `x`, behind a cache of all others."""
    past = DynamicCache(config=model.config)
    model(x[:, :-1], past)
    return x[:, -1:], past, x.shape[1] - 1


def error(y: Tensor, exact: Tensor) -> float:
    return (y.double() - exact).square().mean().sqrt().item()


@pytest.mark.rotates(6)
@pytest.mark.parametrize("kind", [HEAVY, SPARSE])
@pytest.mark.parametrize("how", ["prefill", "step"])
@torch.no_grad()
def test_one_call_computes_what_the_model_computes(kind: str, how: str):
    plain = Attention(kind)
    exact = copy.deepcopy(plain).double()
    x = torch.randn(2, TOKENS, 64, generator=torch.Generator().manual_seed(4)).bfloat16()
    given = [(x,), (x,), (x.double(),)]
    if how == "step":
        given = [step(plain, x), step(plain, x), step(exact, x.double())]
    assert fusion.explain(plain, *copy.deepcopy(given[0]), options=OPTIONS).ops[CALL] == 1
    fused = torch.compile(plain, backend=fusion.FusionBackend(OPTIONS))(*given[0])
    expected = exact(*given[2])
    assert error(fused, expected) <= 1.2 * error(plain(*given[1]), expected)


@pytest.mark.rotates(4)
def test_the_chip_takes_heads_of_its_width_in_a_package_that_is_named():
    x = torch.randn(1, TOKENS, 64).bfloat16()
    chip = OPTIONS | {"target": "ascend910_93", "plan_lower": "eager"}
    wide = Attention(SLIDING, head_dim=512)
    assert fusion.explain(wide, x, options=chip).ops[CALL] == 1
    unnamed = fusion.explain(wide, x, options=chip | {"packages": []})
    assert CALL not in unnamed.ops
    assert any("needs the package cann_ops_transformer" in each.reason for each in unnamed.refusals)


@pytest.mark.rotates(4)
@pytest.mark.parametrize("kind", [SLIDING, HEAVY, SPARSE])
def test_ascend_950_takes_entries_of_all_its_keys(kind: str):
    chip = OPTIONS | {"target": "ascend950", "plan_lower": "eager"}
    model = Attention(kind, head_dim=512, index_head_dim=128)
    x = torch.randn(1, TOKENS, 64).bfloat16()
    assert fusion.explain(model, x, options=chip).ops[CALL] == 1
    report = fusion.explain(model, *step(model, torch.cat([x, x], 1)), options=chip)  # the cache keeps 127 keys
    assert report.ops[CALL] == (kind == SLIDING)
    if kind != SLIDING:
        assert any("entries stand for the keys of the window" in each.reason for each in report.refusals)


def pooled(kv: Tensor, gate: Tensor, bias: Tensor, dim: int) -> Tensor:
    weights = (gate.unflatten(1, (-1, bias.shape[0])) + bias).softmax(dim, dtype=torch.float32)
    return (kv.unflatten(1, (-1, bias.shape[0])) * weights.to(kv.dtype)).sum(2)


@pytest.mark.parametrize(("dim", "count"), [(2, 1), (-1, 0)])
def test_a_compressor_gives_one_reason(dim: int, count: int):
    given = torch.randn(2, 12, 16).bfloat16(), torch.randn(2, 12, 16).bfloat16(), torch.randn(4, 16), dim
    report = fusion.explain(pooled, *given, options=OPTIONS)
    told = [each.reason for each in report.refusals if "pools windows of 4 tokens; compressor of" in each.reason]
    assert len(told) == count
