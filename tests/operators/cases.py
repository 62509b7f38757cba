"""Small legal calls of every operator, in the layouts that models use."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.operators import atb_cases as atb
from tests.operators import attention_cases as attention
from tests.operators import (
    compressed_cases,
    first_expert_cases,
    prolog_quant_cases,
    pypto_cases,
    recurrent_cases,
    selection_cases,
    stream_cases,
)
from tests.operators import expert_cases as experts
from tests.operators import grouped_line_cases as grouped
from tests.operators import latent_line_cases as line
from tests.operators import paged_atb_cases as paged_atb
from tests.operators import quant_cases as quant
from tests.operators import sparse_cases as sparse

BIASED = "_C_ascend::npu_add_rms_norm_bias"
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Case:
    """One call: the operator's short name, what is special about it, and its arguments for a dtype."""

    operator: str
    label: str
    make: Callable[[torch.dtype], dict[str, Any]]

    @property
    def name(self) -> str:
        return self.operator if "::" in self.operator else f"npu::{self.operator}"

    def arguments(self, dtype: torch.dtype) -> dict[str, Any]:
        torch.manual_seed(0)
        return self.make(dtype)

    def __str__(self) -> str:
        return f"{self.operator}-{self.label}"


def angles(*shape: int, pairs: str = "half") -> tuple[Tensor, Tensor]:
    """cos and sin of RoPE, in float64: `shape` ends in D, and both components of a pair have one angle."""
    angle = torch.rand(*shape[:-1], shape[-1] // 2, dtype=torch.float64) * 2 * math.pi
    wide = torch.cat((angle, angle), -1) if pairs == "half" else angle.repeat_interleave(2, -1)
    return wide.cos(), wide.sin()


def _norm(*shape: int, gamma: tuple[int, ...] | None = None, wide_gamma: bool = False, swap: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        weight = torch.randn(gamma or shape[-1:], dtype=torch.float64)
        kept = torch.promote_types(dtype, torch.float32) if wide_gamma else dtype
        return {"input": x.transpose(1, 2) if swap else x, "gamma": weight.to(kept), "epsilon": 1e-5}

    return make


def _add_norm(*shape: int, swap: bool = False, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x1, x2 = (torch.randn(*shape, dtype=torch.float64).to(dtype) for _ in range(2))
        gamma = torch.randn(shape[-1], dtype=torch.float64).to(dtype)
        x1, x2 = (x.transpose(1, 2) if swap else x for x in (x1, x2))
        return {"x1": x1, "x2": x2, "gamma": gamma, **more}

    return make


def _add_norm_bias(*shape: int, swap: bool = False, biased: bool = True, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = _add_norm(*shape, swap=swap, **more)(dtype)
        return call | ({"beta": torch.randn(shape[-1], dtype=torch.float64).to(dtype)} if biased else {})

    return make


def _add_layer_norm(*shape: int, swap: bool = False, wide: bool = False, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = _add_norm(*shape, swap=swap)(dtype) | {"beta": torch.randn(shape[-1], dtype=torch.float64).to(dtype)}
        kept = torch.promote_types(dtype, torch.float32) if wide else dtype
        lines = {name: call[name].to(kept) for name in ("gamma", "beta")}
        return call | lines | {"additional_output": True} | more

    return make


def _rotary_mul(
    *shape: int, cos: tuple[int, ...], mode: str = "half", swap: bool = False, matrix: bool = False, parts: int = 1
):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        r1, r2 = angles(*cos, pairs="interleave" if mode == "interleave" else "half")
        call = {"input": x.transpose(1, 2) if swap else x, "r1": r1.to(dtype), "r2": r2.to(dtype)}
        blocks = [turn_matrix(shape[-1] // parts, dtype)] * parts
        rotate = {"rotate": torch.block_diag(*blocks)} if matrix else {}
        return call | {"rotary_mode": mode} | rotate

    return make


def turn_matrix(d: int, dtype: torch.dtype) -> Tensor:
    """The D x D matrix of rotate_half: x @ M = cat(-x[D/2:], x[:D/2])."""
    matrix = torch.zeros(d, d)
    half = torch.arange(d // 2)
    matrix[half + d // 2, half] = -1
    matrix[half, half + d // 2] = 1
    return matrix.to(dtype)


def _apply(layout: str, *shape: int, heads: int, cos: tuple[int, ...], mode: str = "half", sliced: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        axis = layout.index("N")
        key_shape = (*shape[:axis], heads, *shape[axis + 1 :])
        extra = 16 if sliced else 0
        query, key = (torch.randn(*s[:-1], s[-1] + extra, dtype=torch.float64).to(dtype) for s in (shape, key_shape))
        c, s = angles(*cos, pairs="interleave" if mode == "interleave" else "half")
        d = shape[-1]
        call = {"query": query[..., :d], "key": key[..., :d], "cos": c.to(dtype), "sin": s.to(dtype)}
        return call | {"layout": layout, "rotary_mode": mode}

    return make


def _interleave_rope(b: int, n: int, s: int, d: int = 64, *, cos_s: int | None = None, swap: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(b, *((s, n) if swap else (n, s)), d + 32, dtype=torch.float64).to(dtype)[..., 32:]
        cos, sin = angles(b, 1, s if cos_s is None else cos_s, d)
        return {"x": x.transpose(1, 2) if swap else x, "cos": cos.to(dtype), "sin": sin.to(dtype)}

    return make


def _swiglu(*shape: int, dim: int = -1, swap: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": x.transpose(0, 1) if swap else x, "dim": dim}

    return make


def _merged(parts: int, rows: int, width: int, update_type: int = 0):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        lse = [4 * torch.randn(rows, dtype=torch.promote_types(dtype, torch.float32)) for _ in range(parts)]
        out = [torch.randn(rows, width, dtype=torch.float64).to(dtype) for _ in range(parts)]
        return {"lse": lse, "local_out": out, "update_type": update_type}

    return make


def _gating(*shape: int, **more: Any):
    # No two scores of a token are equal in any dtype, so that there is one order.
    return lambda dtype: {"x": (torch.rand(shape).argsort(-1) / 8).to(dtype), **more}


def _finished(*shape: int, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        return _gating(*shape, **more)(dtype) | {"finished": torch.rand(shape[:-1]) < 0.5}

    return make


def _gelu(*shape: int, approximate: str = "none", swap: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": x.transpose(0, 1) if swap else x, "approximate": approximate}

    return make


def _group_norm(*shape: int, affine: bool = True, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        lines = (torch.randn(shape[1], dtype=torch.float64).to(dtype) if affine else None for _ in range(2))
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": x, **dict(zip(("weight", "bias"), lines, strict=True)), **more}

    return make


def _geglu(*shape: int, swap: bool = False, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": x.transpose(0, 1) if swap else x, **more}

    return make


def _clipped(*shape: int, swap: bool = False, **more: Any):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = (6 * torch.randn(*shape, dtype=torch.float64)).to(dtype)
        return {"x": x.transpose(0, 1) if swap else x, **more}

    return make


def _grouped(tokens: int, experts: int, biased: bool = True, step: float = 0.125, **more: Any):
    """A bias of whole steps, some of them negative, so that every dtype chooses the same experts."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = (torch.rand(tokens, experts).argsort(-1) * step - 1).to(dtype)
        bias = {"bias": (torch.rand(experts).argsort() * 4.0 - experts).to(dtype)} if biased else {}
        return {"x": x, **bias, **more}

    return make


_HASH = "_C_ascend::moe_gating_top_k_hash"
_PAIRS = {"group_count": 4, "group_select_mode": 1}
_TABLE = {"tid2eid": torch.tensor([[1, 7], [0, 3], [5, 2], [6, 6], [4, 0]], dtype=torch.int32)}
_EIGHT = {"k": 6, "k_group": 3, "group_count": 8, "group_select_mode": 1, "norm_type": 1}


def _format(*shape: int, acl_format: int = 29, swap: bool = False):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        x = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": x.transpose(0, 1) if swap else x, "acl_format": acl_format}

    return make


def _scatter(*shape: int, rows: tuple[tuple[int, ...], ...]):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        updates = torch.randn(len(rows), *shape[len(rows[0]) :], dtype=torch.float64).to(dtype)
        cache = torch.randn(*shape, dtype=torch.float64).to(dtype)
        return {"input": cache, "indices": torch.tensor(rows), "updates": updates}

    return make


def _runs(*shape: int, length: int, starts: Any, axis: int):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        place = axis % len(shape)
        rows = (len(starts), *shape[1:place], length, *shape[place + 1 :])
        cache, updates = (torch.randn(*sizes, dtype=torch.float64).to(dtype) for sizes in (shape, rows))
        return {"input": cache, "indices": torch.tensor(starts), "updates": updates, "axis": axis}

    return make


def _pages(slots: tuple[int, ...], heads: int = 2, mode: str = "Norm", kind: torch.dtype = torch.int64):
    """Keys of 16 and values of 32 channels into 3 pages of 4 rows; NZ lines of 8 and 16."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        sizes = [(16, 8), (32, 16)]
        rows = [torch.randn(len(slots), heads, d, dtype=torch.float64).to(dtype) for d, _ in sizes]
        shapes = [(3, 4, heads, d) if mode == "Norm" else (3, heads * d // line, 4, line) for d, line in sizes]
        caches = [torch.randn(*shape, dtype=torch.float64).to(dtype) for shape in shapes]
        call = {"key": rows[0], "value": rows[1], "key_cache": caches[0], "value_cache": caches[1]}
        return call | {"slot_mapping": torch.tensor(slots, dtype=kind), "cache_mode": mode}

    return make


def _atb_pages(*slots: int):
    def make(dtype: torch.dtype) -> dict[str, Any]:
        call = _pages(slots, kind=torch.int32)(dtype)
        del call["cache_mode"]
        return {("slot_indices" if name == "slot_mapping" else name): value for name, value in call.items()}

    return make


def _gathered(
    lengths: tuple[int, ...],
    table: tuple[tuple[int, ...], ...],
    *,
    room: int | None = None,
    sums: bool = False,
    **more: Any,
):
    """Keys of 16 and values of 32 channels from 5 pages of 4 rows, into `room` rows that hold numbers before."""

    def make(dtype: torch.dtype) -> dict[str, Any]:
        caches = [torch.randn(5, 4, 2, d, dtype=torch.float64).to(dtype) for d in (16, 32)]
        count = sum(lengths) if room is None else room
        rows = [torch.randn(count, 2, d, dtype=torch.float64).to(dtype) for d in (16, 32)]
        told = [sum(lengths[:n]) for n in range(len(lengths) + 1)] if sums else list(lengths)
        call = {"key_cache": caches[0], "value_cache": caches[1], "key": rows[0], "value": rows[1]}
        call |= {name: torch.tensor(each, dtype=torch.int32) for name, each in more.items()}
        whole = {"block_tables": torch.tensor(table, dtype=torch.int32), "is_seq_lens_cumsum": sums}
        return call | whole | {"seq_lens": torch.tensor(told, dtype=torch.int32)}

    return make


def _in_lines(make: Callable[[torch.dtype], dict[str, Any]]) -> Callable[[torch.dtype], dict[str, Any]]:
    """The same of pages of 16 rows, in lines of NZ of which each holds 32 bytes."""

    def made(dtype: torch.dtype) -> dict[str, Any]:
        call = make(dtype)
        for name in ("key_cache", "value_cache"):
            pages = call[name].repeat(1, 4, 1, 1).flatten(2)
            call[name] = pages.unflatten(2, (-1, 32 // dtype.itemsize)).transpose(1, 2).contiguous()
        return call

    return made


def _both(names: tuple[str, ...], label: str, make: Callable[[torch.dtype], dict[str, Any]]) -> tuple[Case, ...]:
    return tuple(Case(name, label, make) for name in names)


_ND = ("npu_scatter_nd_update", "npu_scatter_nd_update_")
_RUN = ("scatter_update", "scatter_update_")
FIRST = ("npu_fused_infer_attention_score",)
_OF_GROUPS = {"group_index": torch.tensor([1, 4]), "interleaved": False}
_WITHOUT_SUM = {"additional_output": False, "epsilon": 0.5}
_PA = ("npu_scatter_pa_kv_cache", "npu_scatter_pa_kv_cache_functional")
_GATHER = ("npu_gather_pa_kv_cache", "npu_gather_pa_kv_cache_functional")
_PROLOG = ("npu_mla_prolog_v3", "npu_mla_prolog_v3_functional")
OLDER = tuple(f"npu_mla_prolog{which}.{form}" for which in ("", "_v2") for form in ("in_place", "functional"))
_ATB = ("atb::_npu_reshape_and_cache", "atb::_npu_reshape_and_cache.functional")

CASES = (
    Case("npu_rms_norm", "batch 1", _norm(1, 5, 64)),
    Case("npu_rms_norm", "tokens", _norm(7, 96)),
    Case("npu_rms_norm", "two trailing dims", _norm(2, 3, 4, 8, gamma=(4, 8))),
    Case("npu_rms_norm", "wide gamma", _norm(2, 3, 64, wide_gamma=True)),
    Case("npu_rms_norm", "transposed", _norm(2, 3, 4, 32, swap=True)),
    Case("npu_gemma_rms_norm", "batch 1", _norm(1, 5, 64)),
    Case("npu_gemma_rms_norm", "heads", _norm(2, 3, 4, 32)),
    Case("npu_gemma_rms_norm", "transposed", _norm(2, 3, 4, 32, swap=True)),
    Case("npu_add_rms_norm", "batch 1", _add_norm(1, 5, 64)),
    Case("npu_add_rms_norm", "tokens", _add_norm(7, 96)),
    Case("npu_add_rms_norm", "transposed", _add_norm(2, 3, 4, 32, swap=True)),
    Case("npu_add_rms_norm", "another epsilon", _add_norm(7, 64, epsilon=0.5)),
    Case("npu_add_rms_norm_cast", "batch 1", _add_norm(1, 5, 64)),
    Case("npu_add_rms_norm_cast", "another epsilon", _add_norm(7, 64, epsilon=0.5)),
    Case("npu_add_rms_norm_cast", "tokens", _add_norm(7, 96)),
    Case("npu_add_rms_norm_cast", "transposed", _add_norm(2, 3, 4, 32, swap=True)),
    Case("npu_add_layer_norm", "batch 1", _add_layer_norm(1, 5, 64)),
    Case("npu_add_layer_norm", "one token", _add_layer_norm(64)),
    Case("npu_add_layer_norm", "transposed", _add_layer_norm(2, 3, 4, 32, swap=True)),
    Case("npu_add_layer_norm", "a wide weight", _add_layer_norm(7, 96, wide=True)),
    Case("npu_add_layer_norm", "without the sum, another epsilon", _add_layer_norm(7, 64, **_WITHOUT_SUM)),
    Case("npu_rotary_mul", "BNSD 11SD", _rotary_mul(2, 3, 5, 32, cos=(1, 1, 5, 32))),
    Case("npu_rotary_mul", "BNSD B1SD, a view of BSND", _rotary_mul(2, 5, 3, 32, cos=(2, 1, 5, 32), swap=True)),
    Case("npu_rotary_mul", "BSND", _rotary_mul(1, 5, 3, 32, cos=(1, 5, 1, 32))),
    Case("npu_rotary_mul", "SBND", _rotary_mul(5, 2, 3, 32, cos=(5, 1, 1, 32))),
    Case("npu_rotary_mul", "TND", _rotary_mul(7, 3, 32, cos=(7, 1, 32))),
    Case("npu_rotary_mul", "one token", _rotary_mul(1, 4, 1, 32, cos=(1, 1, 1, 32))),
    Case("npu_rotary_mul", "interleave", _rotary_mul(2, 5, 3, 32, cos=(1, 5, 1, 32), mode="interleave")),
    Case("npu_rotary_mul", "quarter", _rotary_mul(2, 5, 3, 32, cos=(1, 5, 1, 32), mode="quarter")),
    Case("npu_rotary_mul", "interleave-half", _rotary_mul(2, 5, 3, 32, cos=(1, 5, 1, 32), mode="interleave-half")),
    Case("npu_rotary_mul", "matrix", _rotary_mul(2, 5, 3, 32, cos=(1, 1, 5, 32), matrix=True, swap=True)),
    Case("npu_rotary_mul", "a matrix of parts", _rotary_mul(2, 5, 3, 32, cos=(1, 5, 1, 32), matrix=True, parts=2)),
    Case("npu_apply_rotary_pos_emb", "BSND", _apply("BSND", 2, 5, 4, 64, heads=2, cos=(2, 5, 1, 64))),
    Case("npu_apply_rotary_pos_emb", "batch 1", _apply("BSND", 1, 5, 4, 64, heads=1, cos=(1, 5, 1, 64))),
    Case("npu_apply_rotary_pos_emb", "sliced", _apply("BSND", 2, 5, 4, 64, heads=2, cos=(2, 5, 1, 64), sliced=True)),
    Case("npu_apply_rotary_pos_emb", "TND", _apply("TND", 7, 4, 64, heads=2, cos=(7, 1, 64))),
    Case("npu_apply_rotary_pos_emb", "BNSD", _apply("BNSD", 2, 4, 5, 64, heads=2, cos=(1, 1, 5, 64))),
    Case("npu_apply_rotary_pos_emb", "SBND", _apply("SBND", 5, 2, 4, 64, heads=2, cos=(5, 1, 1, 64), mode="quarter")),
    Case(
        "npu_apply_rotary_pos_emb",
        "interleave",
        _apply("BSND", 2, 5, 4, 64, heads=2, cos=(2, 5, 1, 64), mode="interleave"),
    ),
    Case("npu_interleave_rope", "prefill", _interleave_rope(2, 3, 5)),
    Case("npu_interleave_rope", "a view of BSND", _interleave_rope(2, 3, 5, swap=True)),
    Case("npu_interleave_rope", "decode", _interleave_rope(4, 3, 1)),
    Case("npu_interleave_rope", "batch 1, one cos", _interleave_rope(1, 3, 5, cos_s=1)),
    Case("npu_swiglu", "last dim", _swiglu(2, 5, 64)),
    Case("npu_swiglu", "batch 1, middle dim", _swiglu(1, 6, 8, dim=1)),
    Case("npu_attention_update", "two parts", _merged(2, 7, 16)),
    Case("npu_attention_update", "five parts, with their sums", _merged(5, 3, 8, update_type=1)),
    Case("npu_attention_update", "one part", _merged(1, 3, 8)),
    Case("npu_swiglu", "transposed", _swiglu(5, 3, 64, swap=True)),
    *(Case("npu_fused_infer_attention_score_v2", label, attention.v2(call)) for label, call in attention.CALLS),
    *(Case("npu_fused_infer_attention_score_v2", label, attention.v2(call)) for label, call in attention.V2_ONLY),
    *(
        Case("npu_fused_infer_attention_score_v2.tensor_lengths", label, attention.in_tensors(attention.v2(call)))
        for label, call in (*attention.CALLS, *attention.V2_ONLY)
        if call.lengths != (None, None)
    ),
    *(Case("npu_fused_infer_attention_score_v2", label, attention.whole(call)) for label, call in attention.WHOLE),
    *(
        Case(name, label, attention.cache(call, first=name in FIRST, **how))
        for name in ("npu_fused_infer_attention_score_v2", *FIRST)
        for label, call, how in attention.CACHES
    ),
    *(
        Case("npu_fused_infer_attention_score_v2.tensor_lengths", label, attention.in_tensors(attention.whole(call)))
        for label, call in attention.WHOLE
        if call.lengths != (None, None)
    ),
    *(Case("npu_fused_infer_attention_score", label, attention.v1(call)) for label, call in attention.CALLS),
    *(
        Case("npu_fused_infer_attention_score.tensor_lengths", label, attention.in_tensors(attention.v1(call)))
        for label, call in attention.CALLS
        if call.lengths != (None, None)
    ),
    *(
        Case(name, label, attention.in_first(call) if name in FIRST else call)
        for name in ("npu_fused_infer_attention_score_v2", *FIRST)
        for label, call in attention.RESULTS
    ),
    *(Case(FIRST[0], label, call) for label, call in attention.FIRST_ONLY),
    *(Case("npu_fusion_attention", label, attention.fusion(call)) for label, call in attention.FUSION),
    *(Case("npu_incre_flash_attention", label, attention.incre(call)) for label, call in attention.INCRE),
    *(Case("npu_incre_flash_attention", label, call) for label, call in attention.INCRE_NUMBERS),
    *(
        Case("npu_incre_flash_attention.tensor_lengths", label, attention.in_tensors(attention.incre(call)))
        for label, call in attention.INCRE
        if call.lengths != (None, None)
    ),
    *(Case(name, label, call) for name in paged_atb.NAMES for label, call in paged_atb.CALLS),
    *(Case("npu_prompt_flash_attention", label, attention.prompt(call)) for label, call in attention.PROMPT),
    *(Case("npu_prompt_flash_attention", label, call) for label, call in attention.PROMPT_NUMBERS),
    Case("npu_moe_gating_top_k_softmax_v2", "softmax first", _gating(7, 16, k=3)),
    Case("npu_moe_gating_top_k_softmax_v2", "top-k first", _gating(7, 16, k=3, renorm=1)),
    Case("npu_moe_gating_top_k_softmax_v2", "3-D", _gating(2, 5, 16, k=2)),
    Case("npu_moe_gating_top_k_softmax_v2", "with the softmax", _gating(7, 16, k=3, output_softmax=True)),
    Case("npu_moe_gating_top_k_softmax_v2", "tokens that are done", _finished(7, 16, k=3)),
    Case("npu_moe_gating_top_k_softmax_v2", "tokens that are done, 3-D", _finished(2, 5, 16, k=2, renorm=1)),
    Case("npu_moe_gating_top_k", "sigmoid, groups", _grouped(7, 32, **_EIGHT)),
    Case("npu_moe_gating_top_k", "sigmoid, scaled", _grouped(1, 32, **_EIGHT, routed_scaling_factor=2.5, eps=0.5)),
    Case("npu_moe_gating_top_k", "sigmoid, no groups", _grouped(5, 24, k=4, norm_type=1, out_flag=True)),
    Case("npu_moe_gating_top_k", "of equals the first", lambda dtype: {"x": torch.zeros(3, 32, dtype=dtype), **_EIGHT}),
    Case("npu_moe_gating_top_k", "softmax, best of groups", _grouped(7, 32, False, k=5, k_group=2, group_count=4)),
    Case(_HASH, "roots of a softplus", _grouped(5, 24, k=4, norm_type=2, routed_scaling_factor=1.5, out_flag=True)),
    Case(_HASH, "sigmoid, groups", _grouped(7, 32, **_EIGHT, routed_scaling_factor=2.5, eps=0.5)),
    Case(_HASH, "softmax, best of groups", _grouped(7, 32, False, k=5, k_group=2, group_count=4)),
    Case(_HASH, "groups of pairs", _grouped(16, 32, False, k=5, k_group=2, norm_type=2, **_PAIRS)),
    Case(_HASH, "experts of a table", _grouped(3, 8, k=2, norm_type=2, input_ids=torch.tensor([4, 0, 2]), **_TABLE)),
    Case("npu_moe_gating_top_k", "softmax, renormalised", _grouped(3, 12, k=12, renorm=1, routed_scaling_factor=0.5)),
    *(Case(*call) for call in experts.CALLS),
    *(Case(*call) for call in first_expert_cases.CALLS),
    Case(BIASED, "rows", _add_norm_bias(5, 64)),
    Case(BIASED, "a view", _add_norm_bias(2, 3, 4, 64, swap=True)),
    Case(BIASED, "without a bias, another epsilon", _add_norm_bias(3, 64, biased=False, epsilon=0.5)),
    Case("npu_gelu", "erf", _gelu(2, 5, 64)),
    Case("npu_gelu", "tanh, transposed", _gelu(5, 3, 64, approximate="tanh", swap=True)),
    Case("npu_group_norm_silu", "an image", _group_norm(2, 12, 3, 5, group=4, eps=1e-6)),
    Case("npu_group_norm_silu", "one group, no weight", _group_norm(3, 8, group=1, affine=False)),
    Case("npu_fast_gelu", "rows", lambda dtype: {"input": torch.randn(2, 5, 64, dtype=torch.float64).to(dtype)}),
    Case("npu_geglu", "by tanh, the second half", _geglu(2, 5, 64)),
    Case("npu_geglu", "by erf, the first half", _geglu(3, 64, approximate=0, activate_left=True)),
    Case("npu_geglu", "halves of the first dim, transposed", _geglu(5, 6, dim=0, swap=True)),
    Case("npu_clipped_swiglu", "pairs", _clipped(2, 5, 64)),
    Case("npu_clipped_swiglu", "halves", _clipped(3, 64, alpha=1.0, limit=3.0, bias=0.0, interleaved=False)),
    Case("npu_clipped_swiglu", "halves of the first dim", _clipped(6, 8, dim=0, bias=-0.5, interleaved=False)),
    Case("npu_clipped_swiglu", "rows of groups", _clipped(7, 64, group_index=torch.tensor([2, 0, 3]))),
    Case("npu_clipped_swiglu", "rows of groups, halves of two dims", _clipped(2, 3, 4, 8, dim=2, **_OF_GROUPS)),
    Case("npu_clipped_swiglu", "pairs, transposed", _clipped(64, 5, dim=1, swap=True)),
    Case("npu_format_cast", "weight", _format(32, 64)),
    Case("npu_format_cast", "back, transposed", _format(32, 64, acl_format=2, swap=True)),
    *_both(_ND, "rows", _scatter(9, 16, rows=((2,), (7,), (0,)))),
    *_both(_ND, "one row", _scatter(9, 16, rows=((8,),))),
    *_both(_ND, "cache [B, N, S, D]", _scatter(2, 3, 5, 8, rows=((1, 2, 4), (0, 0, 1)))),
    *_both(_RUN, "BNTD", _runs(2, 3, 7, 8, length=3, starts=[1, 4], axis=-2)),
    *_both(_RUN, "BTND, one token", _runs(2, 7, 3, 8, length=1, starts=[6, 0], axis=1)),
    *_both(_RUN, "the whole axis", _runs(1, 3, 4, 8, length=4, starts=[0], axis=2)),
    *_both(_RUN, "rows of the batch", _runs(3, 2, 7, 8, length=2, starts=[[2, 1], [0, 5]], axis=2)),
    *_both(_PA, "Norm", _pages((5, 0, 11))),
    *_both(_PA, "one token", _pages((7,))),
    *_both(_PA, "NZ", _pages((5, 0, 11), mode="PA_NZ")),
    *_both(_PA, "no token", _pages(())),
    *_both(_ATB, "tokens", _atb_pages(5, 0, 11)),
    *_both(_ATB, "padding", _atb_pages(-1, 5, -1, 0)),
    *_both(_ATB, "padding alone", _atb_pages(-1, -1)),
    *_both(_ATB, "no token", _atb_pages()),
    *_both(_GATHER, "lengths", _gathered((6, 1, 8), ((3, 0), (2, 4), (4, 1)))),
    *_both(_GATHER, "sums, a sequence without rows", _gathered((3, 0, 8), ((3, 0), (2, 2), (4, 1)), sums=True)),
    *_both(_GATHER, "offsets", _gathered((4, 3), ((3, 0, 1), (2, 4, 0)), seq_offset=(4, 8))),
    *_both(_GATHER, "blocks that are none, and too few of them", _gathered((12, 2), ((3, -1), (7, 0)))),
    *_both(_GATHER, "lines of NZ", _in_lines(_gathered((18, 1, 30), ((3, 0), (2, 4), (4, 1))))),
    *_both(_GATHER, "room for more", _gathered((5, 2), ((3, 0), (2, 4)), room=9)),
    *(case for label, make in sparse.PROLOG for case in _both(_PROLOG, label, make)),
    *(case for of in (line, grouped) for label, make in of.CASES for case in _both(of.NAMES, label, make)),
    *(case for label, make in sparse.OLDER for case in _both(OLDER, label, make)),
    *(case for label, make in prolog_quant_cases.PROLOG for case in _both(_PROLOG, label, make)),
    *(Case("npu_transpose_batchmatmul", label, make) for label, make in (*sparse.PRODUCTS, sparse.TURNED_WEIGHT)),
    *(Case("npu_lightning_indexer", label, make) for label, make in sparse.INDEXER),
    *(Case("npu_sparse_flash_attention", label, make) for label, make in sparse.ATTENTION),
    *(Case("npu_quant_lightning_indexer", label, make) for label, make in sparse.QUANT_INDEXER),
    *(Case("npu_kv_quant_sparse_flash_attention", label, make) for label, make in sparse.QUANT_ATTENTION),
    *(Case("npu_dynamic_quant", label, make) for label, make in quant.QUANT),
    *(Case("npu_swiglu_quant", label, make) for label, make in quant.GATED),
    *(Case("npu_quantize", label, make) for label, make in quant.FIXED),
    *(Case("npu_quant_matmul", label, make) for label, make in quant.PRODUCTS),
    *(Case("npu_add_rms_norm_dynamic_quant", label, make) for label, make in quant.NORMS),
    *(Case("npu_add_rms_norm_quant", label, make) for label, make in quant.ADDED_STATIC),
    *(Case("npu_rms_norm_quant", label, make) for label, make in quant.STATIC),
    *(Case("npu_weight_quant_batchmatmul", label, make) for label, make in quant.WEIGHTED),
    *(Case("npu_rotate_quant", label, make) for label, make in quant.TURNED),
    *(Case(name, label, make) for name, label, make in atb.LATENT),
    *(Case(atb.RING, label, make) for label, make in atb.STEPS),
    *(case for label, make in atb.BEFORE for case in _both(atb.PREPROCESS, label, make)),
    *(case for label, make in pypto_cases.LAYERS for case in _both(pypto_cases.LAYER, label, make)),
    *(case for label, make in pypto_cases.BEFORES for case in _both(pypto_cases.BEFORE, label, make)),
    *(case for label, make in recurrent_cases.CASES for case in _both(recurrent_cases.STEP, label, make)),
    *(Case(compressed_cases.ATTENTION, label, make) for label, make in compressed_cases.CASES),
    *(Case(compressed_cases.SCHEDULE, label, make) for label, make in compressed_cases.SCHEDULES),
    *(case for label, make in selection_cases.CASES for case in _both(selection_cases.NAMES, label, make)),
    *(Case(*call) for call in stream_cases.CASES),
)


def flat(result: Any) -> tuple[Tensor, ...]:
    """The tensors of a result."""
    if result is None:
        return ()
    results = result if isinstance(result, tuple | list) else (result,)
    return tuple(each for each in results if isinstance(each, Tensor))


def described(tensor: Tensor) -> tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]:
    """Shape, dtype and strides; the stride of a dim of size 1, or of an empty tensor, moves nothing and counts as 0."""
    still = tensor.numel() == 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    strides = tuple(0 if still or size == 1 else stride for size, stride in pairs)
    return tuple(tensor.shape), tensor.dtype, strides
