"""Untouched models of transformers: every norm, residual add, rotation and attention fuses, nothing else changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._inductor.decomposition import select_decomp_table

import fusion
from fusion._torch.functional import functional_graph
from fusion._torch.tracing import Boxed, boxed
from fusion.routes import cpu_gpu
from fusion.runtime.verification import relative_error

from .families import LAYERS, MODES, build, caches

pytestmark = pytest.mark.rotates(12)

# Per model of two layers: the first norm has no residual add before it, the last one has.
NORMS = Counter({"npu::npu_add_rms_norm": 2 * LAYERS, "npu::npu_rms_norm": 1, "npu::npu_swiglu": LAYERS})
LATENT = NORMS + Counter({"npu::npu_rms_norm": 2 * LAYERS})
EXPECTED = {
    "Qwen3": NORMS + Counter({"npu::npu_rms_norm": 2 * LAYERS, "npu::npu_apply_rotary_pos_emb": LAYERS}),
    "Llama": NORMS + Counter({"npu::npu_apply_rotary_pos_emb": LAYERS}),
    "DeepseekV2": LATENT + Counter({"npu::npu_rotary_mul": 2 * LAYERS}),
    "DeepseekV3": LATENT + Counter({"npu::npu_interleave_rope": 2 * LAYERS}),
}
LISTED = {"DeepseekV32", "GlmMoeDsa"}  # of sizes for which there is no prolog on a chip, but one elsewhere
LINE = "npu::npu_kv_rmsnorm_rope_cache_v2"  # a norm, a rotation and two writes of DeepSeek-V3
PROLOG = "npu::npu_mla_prolog_v3"  # two norms and two rotations, and on the host of any size
ATTENTION = {"npu::npu_fused_infer_attention_score_v2": LAYERS}
PAIRS = [("sdpa", torch.bfloat16, "ascend910_93"), ("eager", torch.float32, "host")]
OTHERS = [("eager", torch.bfloat16, "ascend910_93"), ("sdpa", torch.float32, "host")]

ROTATIONS = {"npu::npu_interleave_rope", "npu::npu_rotary_mul"}
"""Operators of a rotation, which a prolog and a write of rows with its norm contain."""


def check(family: str, mode: str, attention: str, dtype: torch.dtype, target: str, lower: str = "eager") -> None:
    torch._dynamo.reset()
    built = build(family, dtype, attention)
    options = {"target": target, "lower": lower}
    report = fusion.explain(built.model, **built.step(mode), options=options)
    writes = {name: count for name, count in report.ops.items() if "scatter" in name}
    attended = {name: count for name, count in report.ops.items() if "attention" in name}
    turned = {name: count for name, count in report.ops.items() if "transpose_batchmatmul" in name}
    lines, prologs = report.ops.get(LINE, 0), report.ops.get(PROLOG, 0)
    free = target == "host" and not attended  # where padding values costs more than it saves
    if family in LISTED:
        assert Counter(report.ops) >= NORMS, report
        assert sum(attended.values()) == LAYERS or free, report
    else:
        turns = ROTATIONS & EXPECTED[family].keys()
        taken = dict.fromkeys({"npu::npu_rms_norm", *turns}, lines + 2 * prologs)
        beside = Counter(writes) + Counter(attended) + Counter(turned) + Counter({LINE: lines, PROLOG: prologs})
        assert Counter(report.ops) - beside == EXPECTED[family] - Counter(taken), report
        assert attended == ATTENTION or free
    if mode == "decode_static" and not prologs:
        assert sum(writes.values()) == len(caches(built.step(mode))) - 2 * lines
        assert set(writes) <= {"npu::scatter_update_"}
    assert report.launches[1] < report.launches[0]
    left = {str(node.target) for graph in report.graphs for node in graph.graph.nodes}
    assert not left & {"aten.rsqrt.default", "aten.pow.Tensor_Scalar", "aten.view_as_complex.default"}
    check_results(family, mode, attention, dtype, options)


def check_results(family: str, mode: str, attention: str, dtype: torch.dtype, options: dict[str, Any]) -> None:
    """Logits and caches, against float64 and against the model as it came."""
    torch._dynamo.reset()
    built = build(family, dtype, attention)
    plain, fused = built.step(mode), built.step(mode)
    places = [cache.data_ptr() for cache in caches(fused)]
    compiled = torch.compile(built.model, backend="cann_fusion", options=options)
    with torch.no_grad():
        expected, result = built.model(**plain).logits, compiled(**fused).logits
        exact = build(family, torch.float64, attention)
        truth = exact.model(**exact.step(mode)).logits
    valid = ~(expected.isnan() | truth.isnan())  # eager attention gives NaN to a sequence with a row that sees nothing
    assert valid[1].all()
    error, own = relative_error(result[valid], truth[valid]), relative_error(expected[valid], truth[valid])
    assert error <= 1.5 * own + torch.finfo(dtype).eps
    for have, want in zip(caches(fused), caches(plain), strict=True):
        assert relative_error(have, want) <= (2e-2 if dtype == torch.bfloat16 else 1e-5)
    if mode == "decode_static":
        assert [cache.data_ptr() for cache in caches(fused)] == places


@pytest.mark.parametrize("mode", ["masked_prefill", "decode_static"])
@pytest.mark.parametrize("family", [*EXPECTED, *sorted(LISTED)])
def test_every_norm_add_rotation_and_attention_fuses(family, mode):
    check(family, mode, *PAIRS[([*EXPECTED, *sorted(LISTED)].index(family) + (mode == "decode_static")) % 2])


@pytest.mark.parametrize("mode", [mode for mode in MODES if mode not in ("masked_prefill", "decode_static")])
def test_every_mode(mode):
    check("Qwen3", mode, *PAIRS[0])


@pytest.mark.rotates(18)
@pytest.mark.parametrize(("attention", "dtype", "target"), PAIRS + OTHERS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", [*EXPECTED, *sorted(LISTED)])
def test_every_model_in_every_mode(family, mode, attention, dtype, target):
    check(family, mode, attention, dtype, target)


@pytest.mark.rotates(12)
def test_through_inductor():
    check("DeepseekV3", "decode_static", "sdpa", torch.bfloat16, "ascend910b", "inductor")


GIVEN = [(family, target) for family in [*EXPECTED, *sorted(LISTED)] for target in ("host", "ascend910_93")]
BY_DAY = {("Qwen3", "host"), ("DeepseekV32", "host"), ("DeepseekV3", "ascend910_93"), ("Qwen3", "ascend910_93")}


@pytest.mark.parametrize(
    ("family", "target"), [each if each in BY_DAY else pytest.param(*each, marks=pytest.mark.rotates) for each in GIVEN]
)
def test_what_inductor_is_given_computes_the_same(family, target, monkeypatch: pytest.MonkeyPatch):
    """Node by node: what Inductor makes of it is Inductor's."""

    def given(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Boxed:
        return boxed(functional_graph(gm, select_decomp_table()).forward)

    monkeypatch.setattr(cpu_gpu, "compile_repaired", given)
    check_results(family, "decode_static", "sdpa", torch.bfloat16, {"target": target, "lower": "inductor"})


@pytest.mark.rotates(12)
@pytest.mark.parametrize(
    ("family", "operators"),
    [
        (
            "Mistral",
            {
                "npu::npu_rms_norm": 1,
                "npu::npu_add_rms_norm": 4,
                "npu::npu_apply_rotary_pos_emb": 2,
                "npu::npu_swiglu": 2,
            },
        ),
        ("Gemma", {"npu::npu_gemma_rms_norm": 1, "npu::npu_add_rms_norm": 4, "npu::npu_apply_rotary_pos_emb": 2}),
        (
            "Phi3",
            {
                "npu::npu_rms_norm": 1,
                "npu::npu_add_rms_norm": 4,
                "npu::npu_apply_rotary_pos_emb": 2,
                "npu::npu_swiglu": 2,
            },
        ),
        (
            "Glm4",
            {"npu::npu_rms_norm": 5, "npu::npu_add_rms_norm": 4, "npu::npu_rotary_mul": 4, "npu::npu_swiglu": 2},
        ),
    ],
)
def test_other_families_fuse_as_well(family, operators):
    built = build(family, torch.bfloat16)
    report = fusion.explain(built.model, **built.step("prefill"), options={"target": "host"})
    assert dict(report.ops) == operators | ATTENTION


@pytest.mark.rotates(12)
def test_many_layers_share_the_plans():
    """Tables are prepared once per graph, not once per layer."""
    built = build("DeepseekV3", torch.bfloat16)
    report = fusion.explain(built.model, **built.step("prefill"), options={"target": "ascend910_93"})
    made = Counter(
        str(node.target)
        for graph in report.graphs
        for node in graph.graph.nodes
        if "fusion" in node.meta and "npu" not in str(node.target)
    )
    assert made["aten.clone.default"] == 2  # cos and sin for every sequence
