"""DeepSeek-V3.2 and GLM-5 of transformers, untouched: prolog, indexer and sparse attention, with lists that cross k."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, fx

import fusion
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.runtime.verification import relative_error
from fusion.testing import Trial, capture

from .families import LAYERS, OTHER_INDEXERS, OTHER_SELECTIONS, Built, build, caches
from .indexers import INDEXED, SIZES
from .latents import PROMPT, ROOM, call, differences, padded, steps
from .test_models import check_results

pytestmark = pytest.mark.rotates(8)

TARGET = "ascend910_93"
FAMILIES = ("DeepseekV32", "GlmMoeDsa", "GlmMoeDsa, lists shared")
SPARSE = {
    "npu::npu_mla_prolog_v3": LAYERS,
    "npu::npu_lightning_indexer": LAYERS,
    "npu::npu_sparse_flash_attention": LAYERS,
    "npu::npu_transpose_batchmatmul": LAYERS,
    "npu::npu_add_rms_norm": 2 * LAYERS,
    "npu::npu_rms_norm": 1,
}
GONE = ("topk", "softmax", "scaled_dot_product_attention", "scatter.value", "slice_scatter", "masked_fill", "where")


def built(family: str, dtype: torch.dtype = torch.bfloat16, attention: str = "sdpa", **sizes: Any) -> Built:
    of = INDEXED[family]
    return build(of.family, dtype, attention, **{**of.sizes, **sizes})


def operators(report: fusion.Report) -> Counter[str]:
    return Counter({name: count for name, count in report.ops.items() if name in SPARSE})


def named(report: fusion.Report) -> str:
    return " ".join(str(node.target) for graph in report.graphs for node in graph.graph.nodes)


MODES = ("prefill_static", "decode_static", "prefill_dynamic", "decode_dynamic")


@pytest.mark.rotates(40)
@pytest.mark.parametrize(("family", "mode", "attention"), product(FAMILIES, MODES, ("sdpa", "eager")))
def test_the_experts_sequence(family, mode, attention):
    of = built(family, attention=attention)
    report = fusion.explain(of.model, **call(of, mode), options={"target": TARGET})
    lists = LAYERS - ("shared" in family)  # layers that share a list share the call that makes it
    assert operators(report) == SPARSE | {"npu::npu_lightning_indexer": lists}, report
    left = named(report)
    assert not [name for name in GONE if name in left], left
    blocks = {path: layer.after for path, layer in report.layers.items() if ".1." in path and "mlp" not in path}
    assert sum(each.launches for each in blocks.values()) <= 15 + 3 * mode.endswith("dynamic")
    if mode == "decode_static":
        assert sum(each.bookkeeping for path, each in blocks.items() if not path.endswith("self_attn")) <= 2


@pytest.mark.parametrize(
    ("family", "mode"), [("DeepseekV32", "prefill_static"), ("GlmMoeDsa, lists shared", "decode_static")]
)
def test_the_formulas_are_the_same_in_float64(family, mode):
    of = built(family)
    captured = capture(of.model, (), **call(of, mode))
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    options = Options(target=TARGET, lower="eager", plan_lower="eager")
    outcome = fuse_graph(fused.graph, installed(), options, captured.facts)
    assert {"sparse_attention", "mla_prolog"} <= {each.match.rule.name for each in outcome.chosen}
    fused.recompile()
    errors = differences(Trial(installed(), captured, fused, outcome))
    assert max(errors) < 1e-12, errors


@pytest.mark.parametrize(("family", "attention"), [("DeepseekV32", "eager"), ("GlmMoeDsa", "sdpa")])
def test_where_every_key_is_listed_rounding_is_the_only_difference(family, attention):
    """Lists of all keys are equal, however their scores are rounded."""
    of = built(family, attention=attention, index_topk=ROOM)
    exact = built(family, torch.float64, attention, index_topk=ROOM)
    torch._dynamo.reset()
    compiled = torch.compile(of.model, backend="cann_fusion", options={"target": TARGET, "lower": "eager"})
    truth, kept = steps(exact.model, exact.model, exact.config)
    plain, before = steps(of.model, of.model, of.config)
    fused, after = steps(of.model, compiled, of.config)
    for want, own, have in zip(truth, plain, fused, strict=True):
        assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps
    tensors = [caches(dict(past_key_values=each)) for each in (kept, before, after)]
    for want, own, have in zip(*tensors, strict=True):
        assert relative_error(have, want) <= 1.5 * relative_error(own, want) + torch.finfo(torch.bfloat16).eps


@pytest.mark.rotates(12)
def test_the_lists_hold_the_keys_of_the_highest_scores():
    """Compared as sets: what only one of two lists holds differs in score by rounding alone."""
    of = built("DeepseekV32")
    captured = capture(of.model, (), **call(of, "prefill_static"))
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    fuse_graph(fused.graph, installed(), Options(target=TARGET, lower="eager", plan_lower="eager"))
    plain = _first(captured.graph, "aten.topk.default", captured.inputs)
    scores, (_, places) = plain[0][0], plain[1]
    listed = _first(fused, "npu.npu_lightning_indexer.default", captured.inputs)[1][0].squeeze(2).long()
    for row, ours, theirs in zip(scores.flatten(0, 1), listed.flatten(0, 1), places.flatten(0, 1), strict=True):
        seen = theirs[row[theirs] > -torch.inf]
        ours = ours[ours >= 0]
        assert len(set(ours.tolist())) == len(ours) == len(seen)
        least = row[seen].min()
        assert (row[ours] >= least - 2e-2 * row[seen].abs().max()).all()


def _first(graph: fx.GraphModule, name: str, inputs: Any) -> tuple[Any, Any]:
    """Arguments and result of the first call of an operator."""
    found: list[tuple[Any, Any]] = []

    class Watch(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            found.extend([(args, result)] if str(target) == name and not found else [])
            return result

    Watch(graph).run(*(each.clone() if isinstance(each, Tensor) else each for each in inputs))
    return found[0]


PADDED = {"sdpa": 65, "eager": 76}
"""Launches of two layers of which attention is dense over the latent, behind the mask of the list and of padding."""


def paddings() -> Iterator[Any]:
    """Yield prompt, step and several tokens over both caches."""
    every = product(("sdpa", "eager"), ("static", "dynamic"), (0, 1, 4), ("", "left", "right"), (5, PROMPT - 1, PROMPT))
    for *each, side, count in every:
        whole = count == PROMPT and not each[2]  # transformers asks for a token
        if not (whole or (side == "" and count != 5)):
            yield (*each, side, count)


@pytest.mark.rotates(48)
@pytest.mark.parametrize(("attention", "cache", "tokens", "side", "count"), paddings())
def test_padding_keeps_sparse_attention(attention, cache, tokens, side, count):
    """The model's own list, looked up in the mask; no launch more than dense attention needs, and the same numbers."""
    of = built("DeepseekV32", attention=attention)
    captured = capture(of.model, (), **padded(of, cache, tokens, side, count))
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    options = Options(target=TARGET, lower="eager", plan_lower="eager")
    outcome = fuse_graph(fused.graph, installed(), options, captured.facts)
    fused.recompile()
    form = "by_places[LatentRows]" if side else "by_indexer[Indexer, LatentRows]"
    forms = [each.match.form for each in outcome.chosen if each.match.rule.name == "sparse_attention"]
    assert forms == [form] * LAYERS, "\n".join(map(str, outcome.refusals))
    assert max(differences(Trial(installed(), captured, fused, outcome))) < 1e-12


@pytest.mark.parametrize(("cache", "tokens"), [("static", 0), pytest.param("dynamic", 4, marks=pytest.mark.rotates)])
def test_padding_keeps_sparse_attention_of_every_layer_that_shares_a_list(cache, tokens):
    """As many rows are listed as there are: both ways read as much, and the list computes less."""
    of = built("GlmMoeDsa, lists shared")
    report = fusion.explain(of.model, **padded(of, cache, tokens, "left"), options={"target": TARGET})
    assert report.ops["npu::npu_sparse_flash_attention"] == LAYERS


@pytest.mark.parametrize("attention", PADDED)
def test_padding_costs_no_launches(attention):
    of = built("DeepseekV32", attention=attention)
    report = fusion.explain(of.model, **padded(of, "static", 1, "left"), options={"target": TARGET})
    assert report.launches[1] <= PADDED[attention]


@pytest.mark.parametrize(("attention", "cache"), [("sdpa", "static"), ("eager", "dynamic")])
def test_padding_where_every_key_is_listed_leaves_no_indexer(attention, cache):
    of = built("DeepseekV32", attention=attention, index_topk=ROOM)
    report = fusion.explain(of.model, **padded(of, cache, 0, "left"), options={"target": TARGET})
    left = named(report)
    assert not [name for name in ("topk", "relu", "scatter.value") if name in left], left


def passed_in(kind: str, dtype: torch.dtype, tokens: int, hidden: int = 0) -> Tensor:
    """A causal mask [2, 1, S, T] of the last tokens of those that are there, of which the first keys may be hidden."""
    first = 0 if tokens == PROMPT else PROMPT
    shown = (torch.arange(ROOM) <= torch.arange(first, first + tokens)[:, None]).repeat(2, 1, 1, 1)
    shown[0, ..., :hidden] = False
    lowest = torch.finfo(dtype).min
    return shown if kind == "bool" else torch.zeros(shown.shape, dtype=dtype).masked_fill(~shown, lowest)


OWN, LISTED = "by_indexer[Indexer, LatentRows]", "by_places[LatentRows]"
MASKS = [
    ("bool", None, 0, LISTED), ("bool", None, 5, LISTED), ("bool", "causal", 0, OWN),
    ("bool", "padding", 5, LISTED),
    ("float", "causal", 0, OWN), ("float", None, 0, "(name a mask that is passed in by the"),
    ("float", "padding", 5, "it is not proven to be a causal order or a"),
]  # fmt: skip


@pytest.mark.rotates(24)
@pytest.mark.parametrize("family", ["DeepseekV32", pytest.param("GlmMoeDsa", marks=pytest.mark.rotates)])
@pytest.mark.parametrize("mode", ["decode_static", "prefill_static"])
@pytest.mark.parametrize(("kind", "assumed", "hidden", "expected"), MASKS)
def test_masks_that_are_passed_in(family, mode, kind, assumed, hidden, expected):
    of = built(family)
    tokens = PROMPT if mode.startswith("prefill") else 1
    given = dict(call(of, mode), attention_mask=passed_in(kind, torch.bfloat16, tokens, hidden))
    assume = {} if assumed is None else {"assume": {"attention_mask": assumed}}
    report = fusion.explain(of.model, **given, options={"target": TARGET, **assume})
    listed = report.ops.get("npu::npu_sparse_flash_attention", 0), report.ops.get("npu::npu_lightning_indexer", 0)
    if expected in (OWN, LISTED):
        assert listed == (LAYERS, LAYERS if expected == OWN else 0), report
    else:
        assert listed == (0, 0)
        assert any(expected in each.reason for each in report.refusals), report


VARIANTS = {
    "AXK2": (LAYERS, LAYERS, None),
    "MistralLarge4": (LAYERS, LAYERS, None),
    "Dots3Note": (
        0,
        LAYERS,
        "query: it is float32; npu_lightning_indexer on ascend910_93 requires query in bfloat16, float16",
    ),
    "HYV4": (0, 0, "it stands beside scores of listed rows"),
}
"""How often indexer and sparse attention are called, and why not."""


@pytest.mark.parametrize("family", OTHER_INDEXERS)
@pytest.mark.parametrize("mode", ["prefill_static", "decode_static"])
def test_other_families_with_an_indexer(family, mode):
    indexers, attentions, why = VARIANTS[family]
    of = build(family, torch.bfloat16, "eager" if family == "HYV4" else "sdpa", **SIZES)
    report = fusion.explain(of.model, **call(of, mode), options={"target": TARGET})
    assert report.ops.get("npu::npu_lightning_indexer", 0) == indexers, report
    assert report.ops.get("npu::npu_sparse_flash_attention", 0) == attentions
    assert why is None or any(why in each.reason for each in report.refusals), report


ATTENTION = "npu::npu_fused_infer_attention_score_v2"
SELECTIONS = {
    "DeepseekV4": ({"npu::npu_lightning_indexer": 1, ATTENTION: LAYERS}, None),
    "MiniMaxM3VL": ({ATTENTION: LAYERS}, None),
    "Doge": ({ATTENTION: LAYERS}, None),
    "Glm5Next": ({ATTENTION: 1}, "not the topk of one row of scores"),  # of one graph, in which both layers attend
    "Qwen4Exp": ({ATTENTION: 1}, None),
}
"""What the attention of a prompt becomes, of several graphs each once, and why it is refused."""


@pytest.mark.rotates(24)
@pytest.mark.parametrize("family", OTHER_SELECTIONS)
def test_families_that_choose_otherwise(family):
    """Pooled keys are indexed as keys are, by how many of them are whole; attention to pools or blocks is dense.

    What heads choose each by itself, and hide by finite numbers, is a bias of dense attention.
    """
    expected, why = SELECTIONS[family]
    of = build(family, torch.bfloat16, OTHER_SELECTIONS[family][0])
    tokens = 40 if family == "Glm5Next" else 64  # as many as lanes of a head; 16 pooled keys make a page
    report = fusion.explain(of.model, **of.step("prefill", tokens=tokens), options={"target": TARGET})
    named = (ATTENTION, "npu::npu_lightning_indexer", "npu::npu_sparse_flash_attention")
    assert {name: count for name, count in report.ops.items() if name in named} == expected, report
    reasons = [str(each) for each in report.refusals if each.rule in ("softmax_attention", "sparse_attention")]
    if why is None:
        assert not reasons
    else:
        assert len(reasons) == expected.get(ATTENTION, LAYERS)
        assert all(why in each and f"modeling_{of.config.model_type.removesuffix('_text')}" in each for each in reasons)


@pytest.mark.parametrize("family", ["Doge", "MiniMaxM3VL"])
def test_keys_that_heads_choose_by_a_bias_compute_the_same(family):
    check_results(family, "prefill", "sdpa", torch.float32, {"target": "host", "lower": "eager"})


@pytest.mark.parametrize(
    ("sizes", "expected", "limit"),
    [
        (
            dict(hidden_size=256),
            {"npu::npu_lightning_indexer": LAYERS, "npu::npu_sparse_flash_attention": LAYERS},
            "He",
        ),
        (
            dict(index_head_dim=96),
            {"npu::npu_mla_prolog_v3": LAYERS, "npu::npu_sparse_flash_attention": LAYERS},
            "D",
        ),
        (dict(kv_lora_rank=256), {"npu::npu_fused_infer_attention_score_v2": LAYERS}, "D"),
    ],
)
def test_illegal_sizes_fall_to_the_next_best_cover(sizes, expected, limit):
    of = built("DeepseekV32", **sizes)
    report = fusion.explain(of.model, **call(of, "decode_static"), options={"target": TARGET})
    wanted = (*SPARSE, "npu::npu_fused_infer_attention_score_v2")
    have = {
        name: count for name, count in report.ops.items() if name in wanted and name in (*expected, *list(SPARSE)[:3])
    }
    assert have == expected, report
    reasons = [each for each in report.refusals if each.rule in ("mla_prolog", "sparse_attention")]
    assert any(limit in each.reason for each in reasons), [str(each) for each in report.refusals]


@pytest.mark.rotates(12)
def test_greedy_tokens_are_the_same():
    of = built("DeepseekV32", torch.float32)
    prompt = torch.randint(3, 90, (2, PROMPT), generator=torch.Generator().manual_seed(2))
    arguments = dict(max_new_tokens=12, do_sample=False, cache_implementation="static", disable_compile=True)
    with torch.no_grad():
        plain = of.model.generate(prompt, **arguments)
        torch._dynamo.reset()
        of.model.forward = torch.compile(of.model.forward, backend="cann_fusion", options={"target": "host"})
        assert torch.equal(of.model.generate(prompt, **arguments), plain)


@pytest.mark.rotates(12)
def test_a_prompt_of_any_length_keeps_indexer_and_sparse_attention():
    """No length is known, nor which positions are given: the model asks whether they go on by one."""
    of = built("DeepseekV32")
    step = of.step("prefill", tokens=40)
    for axis in range(2):
        torch._dynamo.mark_dynamic(step["input_ids"], axis)
    captured = capture(of.model, (), dynamic=None, **step)
    fused = fx.GraphModule(captured.graph, copy.deepcopy(captured.graph.graph))
    options = Options(target=TARGET, lower="eager", plan_lower="eager")
    outcome = fuse_graph(fused.graph, installed(), options, captured.facts)
    fused.recompile()
    left = Counter(str(node.target) for node in fused.graph.nodes)
    assert {name: left[name.replace("::", ".") + ".default"] for name in SPARSE} == SPARSE, outcome.refusals
    assert not [name for name in GONE if name in " ".join(left)], left
    errors = differences(Trial(installed(), captured, fused, outcome))
    assert max(errors) < 1e-12, errors
