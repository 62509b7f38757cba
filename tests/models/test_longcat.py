"""LongCat-Flash multiplies queries and latents by a number behind their norms: the prolog does it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LongcatFlashConfig, LongcatFlashForCausalLM, StaticCache
from transformers.models.longcat_flash.modeling_longcat_flash import LongcatFlashMLA

import fusion
from fusion.runtime.verification import relative_error

HIDDEN, CONTEXT = 1024, 64
OPTIONS = {"target": "ascend910_93", "lower": "eager"}


def attention(dtype: torch.dtype) -> LongcatFlashMLA:
    torch.manual_seed(0)
    config = LongcatFlashConfig(
        hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4, num_layers=1, q_lora_rank=1536,
        kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    model = LongcatFlashMLA(config, 0).eval().requires_grad_(False)
    assert model.mla_scale_q_lora != 1 != model.mla_scale_kv_lora
    return model.bfloat16().to(dtype)


def step(model: LongcatFlashMLA) -> Callable[..., Tensor]:
    """A token of each sequence, at a position of static caches [B, 1, T, ..]."""

    def forward(hidden: Tensor, cos: Tensor, sin: Tensor, latents: Tensor, ropes: Tensor, at: Tensor) -> Tensor:
        places = at.clamp(min=0) + torch.arange(hidden.shape[1])

        def update(latent: Tensor, rope: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
            return latents.index_copy_(2, places, latent), ropes.index_copy_(2, places, rope)

        seen = (torch.arange(CONTEXT)[None] <= places[:, None])[None, None]
        return model(hidden, (cos, sin), seen, past_key_values=SimpleNamespace(update=update))[0]

    return forward


def inputs(dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    angles = torch.rand(2, 1, 32, generator=generator)
    angles = torch.cat((angles, angles), dim=-1)
    shapes = ((2, 1, HIDDEN), (2, 1, CONTEXT, 512), (2, 1, CONTEXT, 64))
    hidden, *caches = (torch.randn(*shape, generator=generator) for shape in shapes)
    return [*(each.bfloat16().to(dtype) for each in (hidden, angles.cos(), angles.sin(), *caches)), torch.tensor(7)]


@pytest.mark.rotates(8)
def test_factors_of_queries_and_latents_are_the_prologs():
    torch.compiler.reset()
    model = attention(torch.bfloat16)
    report = fusion.explain(step(model), *inputs(torch.bfloat16), options=OPTIONS)
    assert Counter(report.ops) == {
        "npu::npu_mla_prolog_v3": 1,
        "npu::npu_fused_infer_attention_score_v2": 1,
        "npu::npu_transpose_batchmatmul": 1,
    }
    fused, plain, exact = inputs(torch.bfloat16), inputs(torch.bfloat16), inputs(torch.float64)
    with torch.no_grad():
        got = torch.compile(step(model), backend="cann_fusion", options=OPTIONS)(*fused)
        expected, truth = step(model)(*plain), step(attention(torch.float64))(*exact)
    for have, want, true in zip((got, *fused[3:5]), (expected, *plain[3:5]), (truth, *exact[3:5]), strict=True):
        assert relative_error(have, true) <= 1.5 * relative_error(want, true) + torch.finfo(torch.bfloat16).eps


@pytest.mark.rotates(8)
def test_a_whole_model_is_explained_whose_experts_are_looped_over():
    config = LongcatFlashConfig(
        vocab_size=128, hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=4, num_layers=1,
        q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128,
        ffn_hidden_size=64, expert_ffn_hidden_size=32, n_routed_experts=4, zero_expert_num=2, moe_topk=2,
    )  # fmt: skip
    model = LongcatFlashForCausalLM(config).bfloat16().eval().requires_grad_(False)
    cache = StaticCache(config=config, max_cache_len=64)
    tokens = torch.ones(2, 4, dtype=torch.int64)
    with torch.no_grad():
        model(tokens, past_key_values=cache)
    given = dict(input_ids=tokens[:, :1], past_key_values=cache)
    report = fusion.explain(model, **given, options={"target": "ascend910_93"})
    ops = ("npu_mla_prolog_v3", "npu_fused_infer_attention_score_v2")
    assert [report.ops[f"npu::{name}"] for name in ops] == [2, 2]
    assert any("modeling_longcat_flash.py" in place for place in report.guesses)
