"""Both sides of every limit, searched from its text or written where no search reaches them, and other refusals."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from fusion.errors import OperatorError
from fusion.operators import CHIPS, HOST, OPERATORS, Limit, Operator, refusal
from fusion.operators.limit_texts import all_hold, holds
from tests.operators.atb_limits_cases import EDGES as ATB_EDGES
from tests.operators.attention_limits_cases import FUSION_EDGES, FUSION_HOST_EDGES
from tests.operators.cases import BIASED
from tests.operators.compressed_cases import EDGES as COMPRESSED_EDGES
from tests.operators.expert_cases import EDGES as EXPERT_EDGES
from tests.operators.first_expert_cases import EDGES as FIRST_EXPERT_EDGES
from tests.operators.grouped_line_cases import EDGES as GROUPED_EDGES
from tests.operators.latent_line_cases import EDGES as LINE_EDGES
from tests.operators.latent_line_cases import call as line
from tests.operators.limit_cases import Search, starts, t, value, valued
from tests.operators.older_attention_cases import EDGES as OLDER_EDGES
from tests.operators.paged_atb_cases import EDGES as PAGED_ATB_EDGES
from tests.operators.pypto_cases import EDGES as PYPTO_EDGES
from tests.operators.quant_limits_cases import EDGES as QUANT_EDGES
from tests.operators.recurrent_cases import EDGES as RECURRENT_EDGES
from tests.operators.selection_cases import EDGES as SELECTION_EDGES
from tests.operators.sparse_limits_cases import EDGES as SPARSE_EDGES
from tests.operators.sparse_limits_cases import attention as listed
from tests.operators.sparse_limits_cases import indexer, prolog
from tests.operators.stream_cases import EDGES as STREAM_EDGES

A2, A3, A5 = CHIPS
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def rotary(x: tuple[int, ...], r: tuple[int, ...], mode: str = "half", dtype: torch.dtype = BF16, **more: Any) -> dict:
    return {
        "input": t(*x, dtype=dtype),
        "r1": t(*r, dtype=dtype),
        "r2": t(*r, dtype=dtype),
        "rotary_mode": mode,
        **more,
    }


def apply(
    n: int = 8,
    nkv: int = 2,
    d: int = 128,
    cos_b: int = 2,
    b: int = 2,
    s: int = 3,
    dtype: torch.dtype = BF16,
    **more: Any,
) -> dict:
    cos = t(cos_b, s, 1, d, dtype=dtype)
    query, key = t(b, s, n, d, dtype=dtype), t(b, s, nkv, d, dtype=dtype)
    return {"query": query, "key": key, "cos": cos, "sin": cos, **more}


def tnd(n: int = 8, d: int = 128) -> dict:
    return {"query": t(5, n, d), "key": t(5, 2, d), "cos": t(5, 1, d), "sin": t(5, 1, d), "layout": "TND"}


def bnsd(mode: str = "half") -> dict:
    cos = t(1, 1, 3, 128)
    call = {"query": t(2, 8, 3, 128), "key": t(2, 2, 3, 128), "cos": cos, "sin": cos}
    return call | {"layout": "BNSD", "rotary_mode": mode}


def rope(
    b: int = 2, n: int = 4, s: int = 3, d: int = 64, cos: tuple[int, ...] | None = None, dtype: torch.dtype = BF16
) -> dict:
    r = t(*(cos or (b, 1, s, d)), dtype=dtype)
    return {"x": t(b, n, s, d, dtype=dtype), "cos": r, "sin": r}


NZ = {"input": t(32, 64), "acl_format": 29}
GATE = {"x": t(7, 16), "k": 2}
TABLE = {"input_ids": t(7, dtype=torch.int64), "tid2eid": t(100, 8, dtype=torch.int32)}
SIGMOID = {
    "x": t(7, 256),
    "k": 8,
    "bias": t(256),
    "k_group": 4,
    "group_count": 8,
    "group_select_mode": 1,
    "norm_type": 1,
}
CLIPPED = {"x": t(2, 3, 64)}
GROUP = {"group_index": t(2, dtype=torch.int64)}
NORM = {"input": t(2, 3, 64), "gamma": t(64)}
ADD = {"x1": t(2, 3, 64), "x2": t(2, 3, 64), "gamma": t(64)}
IMAGE = {"input": t(2, 8, 3), "weight": t(8), "bias": t(8), "group": 4}
LAYER, ADD_CHIPS = {**ADD, "beta": t(64), "additional_output": True}, (HOST, A2, A3)
DEEP = (1, 1, 1, 1, 1, 1, 2, 3, 64)
HALF = ((2, 4, 3, 128), (1, 1, 3, 128))


# Operator, chips, a legal call, the same call beyond one limit, what the refusal says.
def scatter(coordinates: int, dtype: torch.dtype = BF16) -> dict[str, Any]:
    indices = torch.zeros(3, coordinates, dtype=torch.int64)
    return {"input": t(9, 4), "indices": indices, "updates": t(3, 4, dtype=dtype)}


def runs(length: int = 3, axis: int = -2, rank: int = 4, dtype: torch.dtype = BF16) -> dict[str, Any]:
    updates = t(2, 4, length, 8, dtype=dtype) if rank == 4 else t(2, length, 8, dtype=dtype)
    return {"input": t(2, 4, 5, 8), "indices": t(2, dtype=torch.int64), "updates": updates, "axis": axis}


def pages(mode: str = "Norm", line: int = 16, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    cache = t(3, 4, 2, 32) if mode == "Norm" else t(3, 64 // line, 4, line)
    key, slots = t(5, 2, 32, dtype=dtype), t(5, dtype=torch.int64)
    call = {"key": key, "value": key, "key_cache": cache, "value_cache": cache, "slot_mapping": slots}
    return call | {"cache_mode": mode} | more


def gathers(width: int = 32, dtype: torch.dtype = BF16, tokens: int = 6, **more: Any) -> dict[str, Any]:
    caches = {name: t(3, 4, 2, width, dtype=dtype) for name in ("key_cache", "value_cache")}
    rows = {name: t(tokens, 2, width, dtype=dtype) for name in ("key", "value")}
    whole = {"block_tables": t(2, 2, dtype=torch.int32), "seq_lens": t(2, dtype=torch.int32)}
    return caches | rows | whole | more


def atb_pages(**more: Any) -> dict[str, Any]:
    call = pages()
    del call["cache_mode"], call["slot_mapping"]
    return call | {"slot_indices": t(5, dtype=torch.int32)} | more


def merging(parts: int = 2, width: int = 128, dtype: torch.dtype = BF16, **more: Any) -> dict[str, Any]:
    lse, out = [t(7, dtype=F32)] * parts, [t(7, width, dtype=dtype)] * parts
    return {"lse": lse, "local_out": out, "update_type": 0} | more


MERGE = "npu_attention_update"
LENS = {name: t(5, dtype=torch.int32) for name in ("compress_lens", "compress_seq_offsets", "seq_lens")}
ND = ("npu_scatter_nd_update", "npu_scatter_nd_update_")
RUN = ("scatter_update", "scatter_update_")
ATB = ("atb::_npu_reshape_and_cache", "atb::_npu_reshape_and_cache.functional")
PA = ("npu_scatter_pa_kv_cache", "npu_scatter_pa_kv_cache_functional")
GATHER = ("npu_gather_pa_kv_cache", "npu_gather_pa_kv_cache_functional")
IN_LINES = {name: t(3, 4, 16, 16) for name in ("key_cache", "value_cache")}
SUMS = gathers(seq_lens=t(3, dtype=torch.int32), is_seq_lens_cumsum=True)
CASES = [
    *starts(NORM, name="npu_gemma_rms_norm"),
    *starts(ADD, name="npu_add_rms_norm"),
    *starts(
        rotary(*HALF, mode="quarter"),
        rotary(*HALF, rotate=t(128, 128)),
        rotary((1, 3, 4, 128), (1, 3, 1, 128), "interleave"),
        rotary((2, 4, 3, 894), (1, 1, 3, 894)),
        rotary((7, 999, 64), (7, 1, 64)),
        rotary((2, 4, 3, 128), (1, 4, 1, 128)),
        name="npu_rotary_mul",
    ),
    *starts(bnsd("quarter"), apply(), apply(n=150, dtype=F16), name="npu_apply_rotary_pos_emb"),
    *starts(rope(), name="npu_interleave_rope"),
    *starts({"input": t(3, 4), "dim": -1}, name="npu_swiglu"),
    *starts(NZ, name="npu_format_cast"),
    *starts({"input": t(3, 4), "approximate": "tanh"}, name="npu_gelu"),
    *starts({"input": t(3, 4)}, name="npu_fast_gelu"),
    *starts(IMAGE, IMAGE | {"weight": None}, IMAGE | {"bias": None}, name="npu_group_norm_silu"),
    *starts({"input": t(3, 4), "dim": -1}, name="npu_geglu"),
    *starts(CLIPPED | {"dim": 2}, CLIPPED | GROUP, {"x": t(1, 64)}, name="npu_clipped_swiglu"),
    *starts(SIGMOID, SIGMOID | {"k_group": 8}, name="npu_moe_gating_top_k"),
    *starts(SIGMOID, SIGMOID | {"k_group": 8}, SIGMOID | TABLE, name="_C_ascend::moe_gating_top_k_hash"),
    *starts(GATE | {"output_softmax": True}, {"x": t(7, 2048), "k": 1024}, name="npu_moe_gating_top_k_softmax_v2"),
    *starts(merging(1), name=MERGE),
    # npu_rms_norm
    ("npu_rms_norm", (HOST, *CHIPS), NORM, NORM | {"gamma": t(32)}, "D is [64], not [32] in [2, 3, 64]"),
    ("npu_rms_norm", (HOST, *CHIPS), NORM, NORM | {"gamma": t(2, 2, 3, 64)}, "there are only 3 dims in [2, 3, 64]"),
    # npu_gemma_rms_norm
    # npu_add_rms_norm
    (
        "npu_add_rms_norm",
        CHIPS,
        ADD | {"x1": t(*DEEP[1:]), "x2": t(*DEEP[1:])},
        ADD | {"x1": t(*DEEP), "x2": t(*DEEP)},
        "rank(x1) <= 8",
    ),
    ("npu_add_rms_norm", (HOST, *CHIPS), ADD, ADD | {"x2": t(1, 3, 64)}, "B is [1, 3], not [2, 3] in [1, 3, 64]"),
    # npu_add_rms_norm_cast
    (
        "npu_add_rms_norm_cast",
        CHIPS,
        ADD | {"x1": t(*DEEP[1:]), "x2": t(*DEEP[1:])},
        ADD | {"x1": t(*DEEP), "x2": t(*DEEP)},
        "rank(x1) <= 8",
    ),
    # npu_add_layer_norm
    ("npu_add_layer_norm", ADD_CHIPS, LAYER, LAYER | {"x2": t(1, 3, 64)}, "B is [1, 3], not [2, 3] in [1, 3, 64]"),
    ("npu_add_layer_norm", ADD_CHIPS, LAYER, LAYER | {"beta": t(63)}, "requires beta as [D]"),
    (
        "npu_add_layer_norm",
        ADD_CHIPS[1:],
        LAYER | {"x1": t(*(1,) * 7, 64), "x2": t(*(1,) * 7, 64)},
        LAYER | {"x1": t(*(1,) * 8, 64), "x2": t(*(1,) * 8, 64)},
        "rank(x1) <= 8",
    ),
    # npu_rotary_mul
    (
        "npu_rotary_mul",
        (A2, A3),
        rotary((2, 4, 1, 128), (1, 1, 1, 128)),
        rotary((2, 4, 3, 128), (1, 1, 1, 128)),
        "I == 1 or J == 1 or K == 1",
    ),
    (
        "npu_rotary_mul",
        (A2, A3),
        rotary((37, 3, 27, 64), (1, 3, 1, 64), "interleave"),
        rotary((40, 3, 25, 64), (1, 3, 1, 64), "interleave"),
        "interleave takes cos as S11D",
    ),
    (
        "npu_rotary_mul",
        (A2, A3),
        rotary((2, 3, 4, 64), (2, 1, 1, 64), "interleave"),
        rotary((2, 3, 4, 64), (2, 3, 1, 64), "interleave"),
        "interleave takes cos as S11D",
    ),
    (
        "npu_rotary_mul",
        (A2, A3),
        rotary((7, 4, 64), (7, 1, 64), "interleave"),
        rotary((7, 4, 64), (7, 4, 64), "interleave"),
        "interleave takes cos as T1D",
    ),
    ("npu_rotary_mul", (HOST, *CHIPS), rotary(*HALF), rotary((2, 4, 3, 128), (2, 2, 3, 128)), "1|J is 2, not 1 or 4"),
    ("npu_rotary_mul", (HOST, *CHIPS), rotary(*HALF), rotary((4, 128), (1, 128)), "there are only 2 dims in [4, 128]"),
    # npu_apply_rotary_pos_emb
    ("npu_apply_rotary_pos_emb", (A2, A3), tnd(), bnsd(), "layout in ('BSND', 'TND')"),
    ("npu_apply_rotary_pos_emb", (A2, A3), apply(b=1, cos_b=1), apply(b=0, cos_b=0), "size(query, 0) > 0"),
    (
        "npu_apply_rotary_pos_emb",
        (HOST, A5),
        bnsd(),
        bnsd() | {"layout": "BDNS"},
        "requires layout='BSND' or layout='SBND'",
    ),
    (
        "npu_apply_rotary_pos_emb",
        (HOST, *CHIPS),
        tnd(),
        tnd() | {"cos": t(5, 8, 128)},
        "a dim is 8, not 1 in [5, 8, 128]",
    ),
    # npu_interleave_rope
    ("npu_interleave_rope", CHIPS, rope(cos=(2, 1, 1, 64)), rope(cos=(2, 4, 3, 64)), "size(cos, 1) == 1"),
    # npu_swiglu
    # npu_scatter_nd_update
    # npu_format_cast
    # npu_gelu
    # npu_clipped_swiglu
    # npu_moe_gating_top_k
    (
        "npu_moe_gating_top_k",
        CHIPS,
        {"x": t(7, 192), "k": 1, "group_count": 64},
        {"x": t(7, 195), "k": 1, "group_count": 65},
        "<= 2048",
    ),
    # npu_moe_gating_top_k_softmax_v2
    (
        "npu_moe_gating_top_k_softmax_v2",
        (HOST, A2, A3),
        GATE | {"finished": t(7, dtype=torch.bool)},
        GATE | {"finished": t(6, dtype=torch.bool)},
        "requires finished as [*B]",
    ),
    # npu_fusion_attention
    *(("npu_fusion_attention", (HOST, A2, A5), *edge) for edge in FUSION_HOST_EDGES),
    *(("npu_fusion_attention", (A2, A5), *edge) for edge in FUSION_EDGES),
    *((name, (HOST, *CHIPS), scatter(1), scatter(3), "K <= rank(input)") for name in ND),
    # scatter_update
    *((name, (HOST, *CHIPS), runs(), runs(rank=3), "rank(input) == rank(updates)") for name in RUN),
    # npu_scatter_pa_kv_cache
    *(
        (name, (HOST, *CHIPS), pages(), pages(**{length: given}), f"not given({length})")
        for name in PA
        for length, given in LENS.items()
    ),
    *(
        (
            name,
            (HOST, *CHIPS),
            pages("PA_NZ"),
            pages("PA_NZ", key=t(5, 1, 32), value=t(5, 1, 32)),
            "A * L == N * D and C * M == N * E",
        )
        for name in PA
    ),
    # npu_gather_pa_kv_cache
    *((n, (HOST, *CHIPS), SUMS, SUMS | {"seq_lens": t(2, dtype=torch.int32)}, "L == B + 1") for n in GATHER),
    *(
        (n, chips, gathers(**lines), gathers(**(lines | {name: other})), text)
        for n in GATHER
        for chips, lines, name, other, text in (
            ((HOST, *CHIPS), IN_LINES, "key_cache", t(3, 5, 16, 16), "K2 == N and K3 == D or K1 * K3 == N * D"),
            ((HOST, *CHIPS), IN_LINES, "value_cache", t(3, 4, 32, 16), "V2 == K2 and V1 * V3 == N * E"),
            ((HOST, *CHIPS), {}, "value_cache", t(3, 5, 2, 32), "V1 == K1 and V2 == N and V3 == E"),
            (CHIPS, IN_LINES, "key_cache", t(3, 2, 16, 32), "K3 * itemsize(key_cache) == 32 and K2 % 16 == 0"),
            (CHIPS, IN_LINES, "value_cache", t(3, 2, 16, 32), "V3 * itemsize(value_cache) == 32 and V2 % 16 == 0"),
        )
    ),
    # _npu_reshape_and_cache
    *(
        (name, CHIPS, atb_pages(), atb_pages(key=t(5, 2, 32, dtype=F16)), "dtype(key_cache) == dtype(key)")
        for name in ATB
    ),
    # npu_attention_update
    (MERGE, (HOST, *CHIPS), merging(), merging(local_out=[t(7, 128), t(6, 128)]), "R is 6, not 7 in [6, 128]"),
    (MERGE, (HOST, *CHIPS), merging(), merging(local_out=[t(7, 128), t(7, 64)]), "D is 64, not 128 in [7, 64]"),
    # _C_ascend::npu_add_rms_norm_bias
    *starts(ADD, ADD | {"beta": t(64)}, name=BIASED),
    (
        BIASED,
        (A2, A3),
        {"x1": t(*DEEP[1:]), "x2": t(*DEEP[1:]), "gamma": t(64)},
        {"x1": t(*DEEP), "x2": t(*DEEP), "gamma": t(64)},
        "rank(x1) <= 8",
    ),
    *EXPERT_EDGES,
    *FIRST_EXPERT_EDGES,
    *SPARSE_EDGES,
    *LINE_EDGES,
    *GROUPED_EDGES,
    *QUANT_EDGES,
    *ATB_EDGES,
    *OLDER_EDGES,
    *PAGED_ATB_EDGES,
    *PYPTO_EDGES,
    *RECURRENT_EDGES,
    *SELECTION_EDGES,
    *STREAM_EDGES,
    *COMPRESSED_EDGES,
]
STARTS = [each for each in CASES if not each[4]]
"""Legal calls from which both sides of limits are searched."""
EDGES = [each for each in CASES if each[4]]
"""Operator, chips, a legal call, the same call beyond what the search does not reach, and what the refusal says."""


def qualified(name: str) -> str:
    return name if "::" in name else f"npu::{name}"


def label(edge: Any) -> str:
    return f"{edge[0]}: {edge[4]}"


@pytest.mark.rotates(8)
@pytest.mark.parametrize("edge", EDGES, ids=label)
def test_both_sides_of_a_limit(edge: Any):
    name, chips, legal, illegal, text = edge
    op = OPERATORS[qualified(name)]
    for chip in chips:
        assert refusal(op, chip, (), legal) is None
        said = refusal(op, chip, (), illegal)
        assert said is not None
        assert text in said
        assert f"{op.short} " in said
        assert "\n" not in said


def calls(name: str) -> list[dict[str, Any]]:
    """Return the legal calls of an operator: those that a search starts from, and those of its edges."""
    return [each[2] for each in (*STARTS, *EDGES) if qualified(each[0]) == name]


def declared() -> Iterator[Any]:
    """Yield each limit of an operator with the chips that have it; those of attention stand in another module."""
    for name, op in OPERATORS.items():
        chips = defaultdict[Limit, list[str]](list)
        for chip in op.limits:
            for limit in op.limits_on(chip) if "fused_infer_attention" not in name else ():
                chips[limit].append(chip)
        for limit, on in chips.items():
            when = f" when {limit.when}" if limit.when else ""
            yield pytest.param(name, limit, on, id=f"{name}: {limit.text}{when}")


@pytest.mark.rotates(12)
@pytest.mark.parametrize(("name", "limit", "chips"), declared())
def test_every_limit_refuses_what_is_beyond_it_alone(name: str, limit: Limit, chips: list[str]):
    op, own = OPERATORS[name], [each for each in EDGES if qualified(each[0]) == name]
    found = None
    for chip in chips:
        edges = (each for each in own if chip in each[1] or chip == HOST)
        if any(limit.text in str(refusal(op, chip, (), each[3], limit.lowering)) for each in edges):
            continue
        search = Search(op, chip, limit)
        if found is None or not (search.is_legal(found[0]) and search.is_beyond(found[1], alone=False)):
            found = search.sides(calls(name))
        assert found is not None, f"no edge on {chip}: write a call near it to start from, or both sides"
        legal, illegal = found
        assert value(limit.text, valued(op, legal)) is not False
        assert value(limit.text, valued(op, illegal)) is not True


def test_a_refusal_names_the_limit_and_the_value():
    said = refusal(OPERATORS["npu::npu_rotary_mul"], A3, (), rotary((2, 4, 3, 1024), (1, 1, 3, 1024)))
    assert said == "input: D (last dim) is 1024; npu_rotary_mul on ascend910_93 requires D < 896"


def test_an_operator_that_a_chip_lacks():
    said = refusal(OPERATORS["npu::npu_gemma_rms_norm"], A5, (), NORM)
    assert said == "npu_gemma_rms_norm does not exist on ascend950; it does on ascend910_93, ascend910b"


def test_what_a_lowering_cannot_take():
    gemma, mul = OPERATORS["npu::npu_gemma_rms_norm"], OPERATORS["npu::npu_rotary_mul"]
    assert refusal(gemma, A2, (), NORM, lowering="npugraph_ex") is None
    assert "cannot be lowered by torchair" in str(refusal(gemma, A2, (), NORM, lowering="torchair"))
    deep = {**NORM, "input": t(*DEEP)}  # which no other lowering would take either
    assert refusal(gemma, A2, (), deep, lowering="torchair") == refusal(gemma, A2, (), deep, lowering="eager")
    assert "cannot be lowered" not in str(refusal(gemma, A2, (), deep, lowering="torchair"))
    paired = rotary((1, 3, 4, 128), (1, 3, 1, 128), "interleave")
    for chip in (A2, A3):
        assert refusal(mul, chip, (), paired, lowering="eager") is None
        assert "under torchair requires rotary_mode == 'half'" in str(
            refusal(mul, chip, (), paired, lowering="torchair")
        )
    assert refusal(mul, A2, (), rotary(*HALF), lowering="torchair") is None
    for layout, takes in {"BSH": True, "BNSD": True, "BSND": False, "SBH": False}.items():
        sizes = (2, 3, 64) if "H" in layout else (2, 4, 4, 16)
        call = dict.fromkeys(("query", "key", "value"), t(*sizes)) | {"head_num": 4, "input_layout": layout}
        said = refusal(OPERATORS["npu::npu_fusion_attention"], A2, (), call, lowering="torchair")
        assert said is None if takes else "under torchair requires input_layout in ('BSH', 'BNSD')" in str(said)
    turn, rows = OPERATORS["npu::npu_rotate_quant"], {"x": t(5, 128), "rotation": t(128, 128)}
    assert refusal(turn, A2, (), rows | {"dst_dtype": 1}, lowering="torchair") is None
    assert refusal(turn, A2, (), rows, lowering="eager") is None
    assert "under torchair requires dst_dtype == 1" in str(refusal(turn, A2, (), rows, lowering="torchair"))
    assert refusal(mul, A5, (), paired, lowering="torchair") is None


def test_a_graph_packs_no_scale_of_a_product_in_int32():
    product = OPERATORS["npu::npu_quant_matmul"]
    call = {"x1": t(5, 48, dtype=torch.int8), "x2": t(48, 24, dtype=torch.int8), "scale": t(24, dtype=F32)}
    call |= {"output_dtype": 5}
    for chip in (A2, A3):
        assert "under torchair requires given(pertoken_scale)" in str(refusal(product, chip, (), call, "torchair"))
        assert refusal(product, chip, (), call | {"pertoken_scale": t(5, dtype=F32)}, "torchair") is None
        assert refusal(product, chip, (), call, "eager") is None


@pytest.mark.parametrize("lowering", ["torchair", "npugraph_ex"])
def test_graphs_take_no_values_of_the_indexer_and_no_statistics_of_attention(lowering: str):
    index, attention = OPERATORS["npu::npu_lightning_indexer"], OPERATORS["npu::npu_sparse_flash_attention"]
    values, statistics = indexer(return_value=True), listed("TND", "TND", return_softmax_lse=True)
    for chip in (A2, A3):
        assert f"under {lowering} requires return_value == False" in str(refusal(index, chip, (), values, lowering))
        assert refusal(index, chip, (), values, "eager") is None
    assert refusal(index, A5, (), values, lowering) is None
    for chip in CHIPS:
        assert "return_softmax_lse == False" in str(refusal(attention, chip, (), statistics, lowering))
        assert refusal(attention, chip, (), statistics, "eager") is None
        assert refusal(attention, chip, (), listed(), lowering) is None


@pytest.mark.parametrize(("name", "call"), [("npu_mla_prolog_v3", prolog()), ("npu_kv_rmsnorm_rope_cache_v2", line())])
def test_functional_forms_run_in_converted_graphs_alone(name: str, call: dict[str, Any]):
    in_place, functional = OPERATORS[f"npu::{name}"], OPERATORS[f"npu::{name}_functional"]
    for lowering in ("eager", "npugraph_ex", "torchair"):
        assert refusal(in_place, A3, (), call, lowering) is None
    for lowering in ("eager", "npugraph_ex"):
        assert f"cannot be lowered by {lowering}" in str(refusal(functional, A3, (), call, lowering))
    assert refusal(functional, A3, (), call, "torchair") is None


def test_positional_arguments_and_defaults_count():
    op = OPERATORS["npu::npu_swiglu"]
    assert refusal(op, A2, (t(4, 3),), {}) is not None
    assert refusal(op, A2, (t(4, 3), 0), {}) is None


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [((), {}, "input, gamma"), ((t(2), t(2), 1e-6, 1), {}, "4 positional"), ((t(2), t(2)), {"eps": 1}, "eps")],
)
def test_a_call_that_does_not_fit_the_schema(args: Any, kwargs: Any, text: str):
    with pytest.raises(OperatorError, match=text):
        refusal(OPERATORS["npu::npu_rms_norm"], A2, args, kwargs)


def test_unknown_names_are_answered_with_the_nearest():
    with pytest.raises(OperatorError, match="did you mean ascend910_93"):
        refusal(OPERATORS["npu::npu_rms_norm"], "ascend910_9391", (), NORM)
    with pytest.raises(OperatorError, match="did you mean torchair"):
        refusal(OPERATORS["npu::npu_rms_norm"], A2, (), NORM, lowering="torch_air")


@pytest.mark.parametrize(
    "text",
    [
        "A % B == 0 and A // B >= 2", "1 <= A < B", "A - B == -2 or not A + B * 2 > 9", "A in (4, B, 7)",
        "shape(x) == (4, A)", "rank(x) == 2 and size(x, 1) not in (A, B)", "dtype(x) in ('bfloat16', dtype(y))",
        "given(y) and not given(z)", "sizes == (A, 2)", "mode != 'TND'", "length(sizes) == itemsize(x)", "flag",
    ],
)  # fmt: skip
def test_limits_asked_together_are_those_asked_one_by_one(text: str):
    x, y = torch.empty(4, 3, dtype=BF16), torch.empty(2)
    for a, b in itertools.product((0, 3, 4, 7), (0, 1, 2)):
        for sizes, mode, flag in ([a, 2], "TND", True), ((b, 2), "BSND", False):
            values = {"A": a, "B": b, "x": x, "y": y, "z": None, "sizes": sizes, "mode": mode, "flag": flag}
            for when in ("", "flag"):
                asked = holds(text, values) or (bool(when) and not flag)
                assert all_hold([("A >= 0", ""), (text, when)])(values) is asked, (text, when, values)


def symbolic(*shape: int, dynamic: tuple[int, ...]) -> Tensor:
    """A fake tensor whose dims `dynamic` are symbols."""
    sizes = [DimDynamic.DYNAMIC if dim in dynamic else DimDynamic.STATIC for dim in range(len(shape))]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    context = StatelessSymbolicContext(dynamic_sizes=sizes)
    return mode.from_tensor(torch.empty(shape, dtype=BF16), symbolic_context=context)


def test_symbolic_sizes_that_the_limits_leave_open_are_legal():
    x = symbolic(3, 5, 64, dynamic=(0, 1))
    assert refusal(OPERATORS["npu::npu_rms_norm"], A2, (x, x.new_empty(64)), {}) is None
    x = symbolic(1, 5, 4, 64, dynamic=(1,))
    cos = x.new_empty(1, x.shape[1], 1, 64)
    assert refusal(OPERATORS["npu::npu_rotary_mul"], A2, (x, cos, cos), {}) is None
    assert refusal(OPERATORS["npu::npu_apply_rotary_pos_emb"], A2, (x, x[:, :, :1], cos, cos), {}) is None


def test_a_limit_that_the_traced_sizes_keep_to_becomes_a_guard():
    x = symbolic(3, 5, 4, 64, dynamic=(0, 1))
    cos = x.new_empty(1, x.shape[1], 1, 64)
    assert refusal(OPERATORS["npu::npu_rotary_mul"], A2, (x, cos, cos), {}) is None
    guards = [str(guard.expr) for guard in x.fake_mode.shape_env.guards]
    assert guards == [f"{x.shape[0].node.expr} < 1000"]


def test_a_symbolic_size_that_is_not_proven_is_a_refusal_that_says_so():
    x = symbolic(1003, 5, 4, 64, dynamic=(0, 1))
    cos = x.new_empty(1, x.shape[1], 1, 64)
    said = str(refusal(OPERATORS["npu::npu_rotary_mul"], A2, (x, cos, cos), {}))
    assert said.startswith("input: I (dim 0) is s")
    assert "npu_rotary_mul on ascend910b requires I < 1000, which is not proven" in said
    assert not x.fake_mode.shape_env.guards
    assert refusal(OPERATORS["npu::npu_rotary_mul"], HOST, (x, cos, cos), {}) is None
    x = symbolic(3, 5, 4, 64, dynamic=(0, 1))
    other = x.new_empty(1, x.shape[0], 1, 64)
    said = str(refusal(OPERATORS["npu::npu_rotary_mul"], HOST, (x, other, other), {}))
    assert "not proven to be 1 or s" in said


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"limits": {"ascend910c": ()}}, "ascend910c are not known chips"),
        ({"limits": {A2: ("Q < 4",)}}, "Q are not known names in the limit 'Q < 4'"),
        ({"limits": {A2: (Limit("D < 4", when="Q == 1"),)}}, "Q are not known"),
        ({"limits": {A2: ("__import__('os')",)}}, "not a call that limits know"),
        ({"limits": {A2: ("dim.real < 4",)}}, "Attribute is not part of the grammar"),
        ({"limits": {A2: ("dim <",)}}, "write one Python expression"),
        ({"lowerings": frozenset({"tvm"})}, "tvm are not known lowerings"),
        ({"dims": {"x": "*S"}}, "x are not known arguments"),
        ({"dims": {"input x": "*S"}}, "x are not known arguments"),
        ({"compute": lambda put, given, x: x}, "x are not known arguments"),
        ({"outputs": lambda input, x: x}, "x are not known arguments"),
    ],
)
def test_a_wrong_declaration_is_refused(change: dict, text: str):
    with pytest.raises(OperatorError, match=text.replace("(", r"\(").replace(")", r"\)")):
        replace(OPERATORS["npu::npu_swiglu"], **change).limits_on(A2)


@pytest.mark.parametrize("name", OPERATORS)
def test_every_limit_that_is_declared_can_be_read(name: str):
    for chip in (HOST, *CHIPS):
        OPERATORS[name].limits_on(chip)


def test_an_operator_is_frozen():
    with pytest.raises(AttributeError):
        OPERATORS["npu::npu_swiglu"].schema = ""  # type: ignore[misc]
    assert isinstance(OPERATORS["npu::npu_swiglu"], Operator)
