"""What fake tensors are told is what comes out, also when batch and sequence are symbols."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_map_only

from fusion.operators import OPERATORS, decompositions, ensure
from tests.operators.cases import CASES, DTYPES, Case, described, flat
from tests.operators.expert_cases import finishing, groups, routing
from tests.operators.latent_line_cases import line
from tests.operators.quant_cases import added_static, fixed, product, static
from tests.operators.sparse_cases import Sparse, attention, indexer, prolog

pytestmark = pytest.mark.rotates(32)


def moved(arguments: dict[str, Any], to: Any) -> dict[str, Any]:
    return tree_map_only(Tensor, to, arguments)


@pytest.mark.rotates(48)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_registered_meta_equals_the_fallback_on_fake_tensors(case: Case, dtype: torch.dtype):
    ensure()
    op = OPERATORS[case.name]
    with FakeTensorMode() as mode:
        fake = moved(case.arguments(dtype), mode.from_tensor)
        told = flat(op.overload()(**fake))
        computed = flat(op.fallback(**fake))
    assert list(map(described, told)) == list(map(described, computed))


def traced(function: Any, arguments: dict[str, Any], **options: Any) -> torch.fx.GraphModule:
    tensors = {name: value for name, value in arguments.items() if isinstance(value, Tensor)}
    rest = {name: value for name, value in arguments.items() if not isinstance(value, Tensor)}

    def positional(*values: Tensor) -> Any:
        return function(**dict(zip(tensors, values, strict=True)), **rest)

    return make_fx(positional, tracing_mode="symbolic", **options)(*tensors.values())


def operators_in(graph: torch.fx.GraphModule) -> set[str]:
    return {str(node.target).split(".")[0] for node in graph.graph.nodes if node.op == "call_function"}


def called(graph: torch.fx.GraphModule, arguments: dict[str, Any]) -> Any:
    return graph(*(value for value in arguments.values() if isinstance(value, Tensor)))


def attending(b: int, s: int) -> dict[str, Any]:
    key = torch.randn(b, s + 4, 2, 16)
    heads = {"num_query_heads": 8, "num_key_value_heads": 2, "softmax_scale": 0.25}
    return {"query": torch.randn(b, s, 8, 16), "key": key, "value": key, "input_layout": "BSND"} | heads


def test_attention_is_inlined_without_a_mask_or_keys_per_head():
    ensure()
    b, s, t, m, d = 2, 3, 7, 2, 16
    call = attending(b, s) | {"sparse_mode": 3, "actual_seq_kvlen": torch.tensor([5, 7])}
    op = OPERATORS["npu::npu_fused_infer_attention_score_v2.tensor_lengths"].overload()
    graph = traced(op, call, decomposition_table=decompositions())
    made = [node.meta["val"] for node in graph.graph.nodes if isinstance(node.meta.get("val"), Tensor)]
    assert not [tuple(x.shape) for x in made if x.dtype == torch.bool and x.numel() > b * s * t]
    assert not [tuple(x.shape) for x in made if x.shape[-2:] == (t, d) and x.numel() > b * m * t * d]


def made(make: Any) -> dict[str, Any]:
    return make(torch.float32)


def decoding(b: int, s: int) -> Sparse:
    return Sparse(("TND", "PA_BSND"), rows=(1,) * b, keys=tuple(4 * s - n for n in range(b)))


def prefilling(b: int, s: int) -> Sparse:
    return Sparse(("TND", "PA_BSND"), rows=(s * 9,) * b, keys=(s * 9,) * b)


def batched(b: int, s: int) -> Sparse:
    return Sparse(rows=(s,) * b, keys=(s + 4,) * b)


# Two sizes of one call: a graph traced with the first must serve the second.
GROWING = [
    ("npu_rms_norm", lambda b, s: {"input": torch.randn(b, s, 16), "gamma": torch.randn(16)}),
    ("npu_gemma_rms_norm", lambda b, s: {"input": torch.randn(b, s, 16), "gamma": torch.randn(16)}),
    (
        "npu_add_rms_norm",
        lambda b, s: {"x1": torch.randn(b, s, 16), "x2": torch.randn(b, s, 16), "gamma": torch.randn(16)},
    ),
    (
        "npu_rotary_mul",
        lambda b, s: {
            "input": torch.randn(b, s, 4, 16).transpose(1, 2),
            "r1": torch.randn(1, 1, s, 16),
            "r2": torch.randn(1, 1, s, 16),
        },
    ),
    (
        "npu_apply_rotary_pos_emb",
        lambda b, s: {
            "query": torch.randn(b, s, 4, 64),
            "key": torch.randn(b, s, 2, 64),
            "cos": torch.randn(b, s, 1, 64),
            "sin": torch.randn(b, s, 1, 64),
        },
    ),
    (
        "npu_interleave_rope",
        lambda b, s: {
            "x": torch.randn(b, s, 4, 96).transpose(1, 2)[..., 32:],
            "cos": torch.randn(b, 1, s, 64),
            "sin": torch.randn(b, 1, s, 64),
        },
    ),
    ("npu_swiglu", lambda b, s: {"input": torch.randn(b, s, 32)}),
    ("npu_clipped_swiglu", lambda b, s: {"x": torch.randn(b, s, 32)}),
    ("npu_moe_gating_top_k", lambda b, s: {"x": torch.randn(b * s, 32), "k": 4, "group_count": 4, "k_group": 2}),
    ("npu_moe_init_routing_v2", lambda b, s: routing(b * s, 2, 6)(torch.float32)),
    ("npu_grouped_matmul", lambda b, s: groups(b, 0, s, 1)(torch.float32)),
    ("npu_grouped_matmul", lambda b, s: groups(b, s, 1, turned=True)(torch.bfloat16)),
    ("npu_moe_finalize_routing", lambda b, s: finishing(b * s, 2)(torch.float32)),
    ("npu_dynamic_quant", lambda b, s: {"input": torch.randn(b, s, 32)}),
    ("npu_quantize", lambda b, s: fixed(b, s, 16)(torch.float32)),
    ("npu_quant_matmul", lambda b, s: product(b * s)(torch.bfloat16)),
    (
        "npu_add_rms_norm_dynamic_quant",
        lambda b, s: {"x1": torch.randn(b, s, 16), "x2": torch.randn(b, s, 16), "gamma": torch.randn(16)},
    ),
    ("npu_add_rms_norm_quant", lambda b, s: added_static(b, s, 16)(torch.float32)),
    ("npu_rms_norm_quant", lambda b, s: static(b, s, 16)(torch.float32)),
    ("npu_fused_infer_attention_score_v2", lambda b, s: attending(b, s) | {"sparse_mode": 3}),
    (
        "npu_fused_infer_attention_score_v2.tensor_lengths",
        lambda b, s: attending(b, s) | {"sparse_mode": 3, "actual_seq_kvlen": torch.arange(b) + 2},
    ),
    (
        "scatter_update",
        lambda b, s: {
            "input": torch.randn(b, 4, s + 2, 8),
            "indices": torch.zeros(b, dtype=torch.int64),
            "updates": torch.randn(b, 4, s, 8),
            "axis": -2,
        },
    ),
    (
        "npu_scatter_pa_kv_cache_functional",
        lambda b, s: {
            "key": torch.randn(b, 2, 8),
            "value": torch.randn(b, 2, 8),
            "key_cache": torch.randn(s, 4, 2, 8),
            "value_cache": torch.randn(s, 4, 2, 8),
            "slot_mapping": torch.arange(b),
            "cache_mode": "Norm",
        },
    ),
    (
        "npu_gather_pa_kv_cache_functional",
        lambda b, s: {
            "key_cache": torch.randn(4, 4, 2, 8),
            "value_cache": torch.randn(4, 4, 2, 8),
            "block_tables": torch.arange(b * 2, dtype=torch.int32).view(b, 2) % 4,
            "seq_lens": torch.full((b,), s, dtype=torch.int32),
            "key": torch.zeros(b * s, 2, 8),
            "value": torch.zeros(b * s, 2, 8),
        },
    ),
    (
        "npu_scatter_nd_update",
        lambda b, s: {
            "input": torch.randn(b, s, 8),
            "indices": torch.zeros(1, 2, dtype=torch.int64),
            "updates": torch.randn(1, 8),
        },
    ),
    ("npu_mla_prolog_v3_functional", lambda b, s: made(prolog(b, slots=range(b), query_norm_flag=True))),
    ("npu_mla_prolog_v3_functional", lambda b, s: made(prolog(b, 2, slots=torch.arange(b * 2).view(b, 2).tolist()))),
    ("npu_mla_prolog_v3_functional", lambda b, s: made(prolog(b, s, mode="BSND"))),
    *(
        ("npu_kv_rmsnorm_rope_cache_v2_functional", lambda b, s, make=make: made(make(b, s)))
        for make in (
            lambda b, s: line(b, 1, torch.arange(b).view(b, 1).tolist(), "Norm"),
            lambda b, s: line(b, 2, list(range(b * 2)), "PA_NZ", is_output_kv=True),
            lambda b, s: line(2, s, [4, 0, 12, 8][: 2 * -(-s // 4)], "PA_BLK_BNSD"),
        )
    ),
    ("npu_transpose_batchmatmul", lambda b, s: {"input": torch.randn(4, s, 8), "weight": torch.randn(4, 8, 16)}),
    *(
        ("npu_lightning_indexer", lambda b, s, shape=shape, count=count: made(indexer(shape(b, s), count=count)))
        for shape in (decoding, prefilling, batched)
        for count in (2, 40)
    ),
    *(
        ("npu_sparse_flash_attention", lambda b, s, shape=shape: made(attention(shape(b, s))))
        for shape in (decoding, prefilling, batched)
    ),
]


@pytest.mark.parametrize(("name", "make"), GROWING, ids=[f"{name} {index}" for index, (name, _) in enumerate(GROWING)])
def test_one_symbolic_graph_serves_other_sizes(name: str, make: Any):
    ensure()
    op = OPERATORS[f"npu::{name}"]
    small, large = make(2, 3), make(5, 7)
    kept = traced(op.overload(), small)
    inlined = traced(op.overload(), small, decomposition_table=decompositions())
    assert "npu" in operators_in(kept)
    assert "npu" not in operators_in(inlined)
    expected = flat(op.fallback(**large))
    for graph in (kept, inlined):
        got = flat(called(graph, large))
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b)
            assert described(a) == described(b)
