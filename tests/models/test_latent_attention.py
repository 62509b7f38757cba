"""Dense latent attention of transformers, untouched: absorbed in decode, expanded where that costs less."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import fx

import fusion
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.runtime.verification import relative_error
from fusion.testing import Trial, capture

from .families import LAYERS, Built, build, caches
from .latents import call, differences, padded, steps

TARGET = "ascend910_93"
LEGAL = dict(hidden_size=1024, q_lora_rank=1536)
ATTENTION = {"npu::npu_fused_infer_attention_score_v2": LAYERS, "npu::npu_transpose_batchmatmul": LAYERS}
PROLOG = "npu::npu_mla_prolog_v3"
LINE = "npu::npu_kv_rmsnorm_rope_cache_v2"
FAMILIES = {
    "DeepseekV3": LEGAL,
    "DeepseekV3, no q_lora": dict(LEGAL, q_lora_rank=None),
    "DeepseekV3, small": {},
    "DeepseekV2": LEGAL,
    "Mistral4": dict(hidden_size=256, kv_lora_rank=256, qk_nope_head_dim=64),
}


def built(family: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa", **sizes: Any) -> Built:
    return build(family.partition(",")[0], dtype, attention, **{**FAMILIES[family], **sizes})


def block(report: fusion.Report) -> int:
    """Launches of the attention of the second layer, with the norm before it."""
    layers = {path: layer.after for path, layer in report.layers.items() if ".1." in path and "mlp" not in path}
    return sum(each.launches for each in layers.values())


def named(report: fusion.Report) -> str:
    return " ".join(str(node.target) for graph in report.graphs for node in graph.graph.nodes)


@pytest.mark.rotates(12)
@pytest.mark.parametrize(
    ("family", "operator", "most"),
    [
        ("DeepseekV3", PROLOG, 6),  # with the norm behind the attention, which is of the next block
        ("DeepseekV3, no q_lora", LINE, 11),
        ("DeepseekV3, small", LINE, 12),
        ("DeepseekV2", PROLOG, 10),
        ("Mistral4", "npu::npu_interleave_rope", 25),
    ],
)
@pytest.mark.parametrize("attention", ["sdpa", pytest.param("eager", marks=pytest.mark.rotates)])
def test_decode_reads_the_latent(family, operator, most, attention):
    of = built(family, attention=attention)
    report = fusion.explain(of.model, **call(of, "decode_static"), options={"target": TARGET})
    assert {name: report.ops.get(name) for name in ATTENTION} == ATTENTION, report
    assert report.ops.get(operator), report
    left = named(report)
    assert not [name for name in ("softmax", "scaled_dot_product", "index_put", "slice_scatter") if name in left], left
    up = [node for graph in report.graphs for node in graph.graph.nodes if _expands(node, of)]
    assert not up, up
    assert block(report) <= most, report


@pytest.mark.rotates(12)
def test_heads_that_are_no_power_of_two_read_the_latent_beside_heads_of_zeros():
    of = built("DeepseekV3", num_attention_heads=12, num_key_value_heads=12)
    report = fusion.explain(of.model, **call(of, "decode_static", room=512), options={"target": TARGET})
    calls = [node for graph in report.graphs for node in graph.graph.nodes if "fused_infer" in str(node.target)]
    assert [each.kwargs["num_query_heads"] for each in calls] == [16, 16]
    assert not [node for graph in report.graphs for node in graph.graph.nodes if _expands(node, of)]
    assert block(report) <= 14, report


@pytest.mark.rotates(12)
def test_heads_that_the_kernel_cannot_turn_cost_no_launch_more():
    """128 heads: norm, prolog, attention, the product behind it and the projection, with the norm of the next block."""
    of = built("DeepseekV3", num_attention_heads=128, num_key_value_heads=128)
    report = fusion.explain(of.model, **call(of, "decode_static"), options={"target": TARGET})
    assert {name: report.ops.get(name) for name in (*ATTENTION, PROLOG)} == {**ATTENTION, PROLOG: LAYERS}, report
    assert block(report) == 6, report


def _expands(node: fx.Node, of: Built) -> bool:
    """Whether a node holds keys or values of every head for every place of the cache."""
    val = node.meta.get("val")
    heads = of.config.num_attention_heads
    return isinstance(val, torch.Tensor) and val.dim() == 4 and val.shape[1:3] == (heads, 96) and val.shape[-1] > 1


@pytest.mark.parametrize("family", ["DeepseekV3", pytest.param("DeepseekV3, no q_lora", marks=pytest.mark.rotates)])
def test_the_formulas_are_the_same_in_float64(family):
    of = built(family)
    captured = capture(of.model, (), **call(of, "decode_static"))
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    outcome = fuse_graph(
        fused.graph, installed(), Options(target=TARGET, lower="eager", plan_lower="eager"), captured.facts
    )
    assert "latent_attention" in {each.match.rule.name for each in outcome.chosen}
    fused.recompile()
    errors = differences(Trial(installed(), captured, fused, outcome))
    assert max(errors) < 1e-12, errors


@pytest.mark.parametrize(
    "family", ["DeepseekV3", *(pytest.param(each, marks=pytest.mark.rotates) for each in list(FAMILIES)[1:])]
)
def test_a_prompt_and_many_steps(family):
    of, exact = built(family), built(family, torch.float64)
    torch._dynamo.reset()
    compiled = torch.compile(of.model, backend="cann_fusion", options={"target": TARGET, "lower": "eager"})
    truth, kept = steps(exact.model, exact.model, exact.config, 32)
    plain, before = steps(of.model, of.model, of.config, 32)
    fused, after = steps(of.model, compiled, of.config, 32)
    for want, own, have in zip(truth, plain, fused, strict=True):
        assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps
    tensors = [caches(dict(past_key_values=each)) for each in (kept, before, after)]
    for want, own, have in zip(*tensors, strict=True):
        assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps


STEPS = [("static", 4, "left"), ("static", 16, ""), ("static", 1, "right"), ("dynamic", 1, "left"), ("dynamic", 32, "")]


@pytest.mark.parametrize(
    ("cache", "tokens", "side"), [STEPS[0], *(pytest.param(*each, marks=pytest.mark.rotates) for each in STEPS[1:])]
)
@pytest.mark.parametrize("family", ["DeepseekV3", pytest.param("Mistral4", marks=pytest.mark.rotates)])
def test_several_tokens_and_padded_prompts(family, cache, tokens, side):
    """Speculative queries, a chunk behind others, prompts padded on either side."""
    of, exact = built(family), built(family, torch.float64)
    options = {"target": TARGET, "lower": "eager"}
    report = fusion.explain(of.model, **padded(of, cache, tokens, side), options=options)
    assert report.ops.get("npu::npu_fused_infer_attention_score_v2") == LAYERS, report
    left = named(report)
    assert not [name for name in ("softmax", "scaled_dot_product", "index_put") if name in left], left
    torch._dynamo.reset()
    fused = torch.compile(of.model, backend="cann_fusion", options=options)
    with torch.no_grad():
        want = exact.model(**padded(exact, cache, tokens, side)).logits
        own = of.model(**padded(of, cache, tokens, side)).logits
        have = fused(**padded(of, cache, tokens, side)).logits
    assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("tokens", "absorbed"), [(16, True), (4096, False)])
def test_the_cost_decides_which_form_a_prompt_takes(tokens, absorbed):
    of = built("DeepseekV3", num_attention_heads=16, num_key_value_heads=16)
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    report = fusion.explain(of.model, input_ids=ids, use_cache=False, options={"target": TARGET})
    assert bool(report.ops.get(PROLOG)) is absorbed, report
    assert report.ops["npu::npu_fused_infer_attention_score_v2"] == LAYERS
    assert absorbed or block(report) <= 14, report  # two of them are tables that layers share
    said = {each.remark for each in report.matches if each.rule == "latent_attention"}
    form = "absorbed" if absorbed else "expanded"
    assert said == {f"{form}: behind a long context, on {TARGET}, expanding costs less from about 184 queries on"}
    assert form in str(report)


@pytest.mark.rotates(12)
def test_the_first_version_of_the_operator_takes_over():
    of = built("DeepseekV3")
    options = {"target": TARGET, "disable": {"npu_fused_infer_attention_score_v2"}}
    report = fusion.explain(of.model, **call(of, "decode_static"), options=options)
    assert report.ops["npu::npu_fused_infer_attention_score"] == LAYERS, report
