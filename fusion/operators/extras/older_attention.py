"""Softmax attention of the operators that npu_fused_infer_attention_score has replaced.

npu_incre_flash_attention takes one query of each sequence, and keys in rows or pages; npu_prompt_flash_attention takes
several queries, and keys in rows.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusion.operators.attention.fused_infer_attention import Attention, computed, empty_results, flops_of
from fusion.operators.attention.fused_infer_attention_limits import NO_RULE
from fusion.operators.attention.int8_numbers import both_grids, int8_result
from fusion.operators.attention.layouts import with_strides_of
from fusion.operators.attention.visibility import Band, mask_limits
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import BFLOAT16, FLOAT32, HALVES, INT8, INT32, INT64
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator, in_tensors

_MASKS = frozenset({torch.bool, torch.int8, torch.uint8})
_QUERY = "input_layout=BSND: B S N D / input_layout=BNSD: B N S D"
_BSH = "input_layout=BSH: B S H"
_INCRE_SCHEMA = (
    "npu::npu_incre_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? pse_shift=None, SymInt[]? actual_seq_lengths=None, "
    "Tensor? antiquant_scale=None, Tensor? antiquant_offset=None, Tensor? block_table=None, "
    "Tensor? dequant_scale1=None, Tensor? quant_scale1=None, Tensor? dequant_scale2=None, Tensor? quant_scale2=None, "
    "Tensor? quant_offset2=None, Tensor? kv_padding_size=None, int num_heads=1, float scale_value=1., "
    'str input_layout="BSH", int num_key_value_heads=0, int block_size=0, int inner_precise=1) -> Tensor'
)
_PROMPT_SCHEMA = (
    "npu::npu_prompt_flash_attention(Tensor query, Tensor key, Tensor value, *, Tensor? padding_mask=None, "
    "Tensor? atten_mask=None, Tensor? pse_shift=None, int[]? actual_seq_lengths=None, Tensor? deq_scale1=None, "
    "Tensor? quant_scale1=None, Tensor? deq_scale2=None, Tensor? quant_scale2=None, Tensor? quant_offset2=None, "
    "int num_heads=1, float scale_value=1., int pre_tokens=2147483647, int next_tokens=0, "
    'str input_layout="BSH", int num_key_value_heads=0, int[]? actual_seq_lengths_kv=None, int sparse_mode=0) '
    "-> Tensor"
)


def _incre(given: Given) -> Attention:
    mask, scale = given["atten_mask"], given["antiquant_scale"]
    return replace(
        _call(given, Band() if mask is None else Band(1, mask)),
        lengths=(None, given["actual_seq_lengths"]),
        table=given["block_table"],
        padding=(None, given["kv_padding_size"]),
        antiquant=None if scale is None else both_grids(scale, given["antiquant_offset"], 0),
    )


def _prompt(given: Given) -> Attention:
    mask = given["atten_mask"]
    # Without a mask all keys are visible, whatever the window of tokens.
    band = Band() if mask is None else Band(given["sparse_mode"], mask, given["pre_tokens"], given["next_tokens"])
    return replace(_call(given, band), lengths=(given["actual_seq_lengths"], given["actual_seq_lengths_kv"]))


def _call(given: Given, band: Band) -> Attention:
    """Return the arguments that both operators have as an `Attention` with the mask `band`, without lengths."""
    heads = given["num_heads"]
    return Attention(
        *(given[name] for name in ("query", "key", "value")),
        layout=given["input_layout"],
        heads=heads,
        kv_heads=given["num_key_value_heads"] or heads,
        scale=given["scale_value"],
        band=band,
        lengths=(None, None),
        bias=given["pse_shift"],
        int8_result=int8_result(given["quant_scale2"], given["quant_offset2"]),
    )


def _out(query: Tensor, call: Attention) -> Tensor:
    """Compute the output of `call`, with the strides of `query`, or contiguous in layout BNSD_BSND, which swaps two
    dims.
    """
    out = computed(call)[0]
    return out if call.layout == "BNSD_BSND" else with_strides_of(out, query)


def _empty(query: Tensor, call: Attention) -> Tensor:
    out = empty_results(call)[0]
    return out if call.layout == "BNSD_BSND" else torch.empty_like(query, dtype=out.dtype)


def _shared(lanes: str, width: str = "1") -> str:
    """Return the limit that the dim `lanes` is the number of heads of keys times `width`.

    The number of heads of keys is `num_key_value_heads`, or `num_heads` if that is 0.
    """
    by = "" if width == "1" else f" * {width}"
    return f"num_key_value_heads == 0 and {lanes} == num_heads{by} or {lanes} == num_key_value_heads{by}"


_PAGED, _ROWS, _MERGED = "given(block_table)", "not given(block_table)", "input_layout == 'BSH'"
_MASKED = "given(atten_mask)"
_GROUPS = "num_key_value_heads == 0 or num_key_value_heads > 0 and num_heads % num_key_value_heads == 0"
_WIDTH = "(H // num_heads)"
_HEADS: tuple[Limit | str, ...] = (
    "num_heads > 0",
    Limit("N == num_heads", when=f"not {_MERGED}"),
    Limit("H % num_heads == 0", when=_MERGED),
    _GROUPS,
    Limit("given(quant_scale2)", when="given(quant_offset2)", because="it is added to what the scale gives"),
    Limit("shape(quant_offset2) == shape(quant_scale2)", when="given(quant_offset2)"),
    Limit("numel(quant_scale2) in (1, N * D)", when=f"given(quant_scale2) and not {_MERGED}"),
    Limit("numel(quant_scale2) in (1, H)", when=f"given(quant_scale2) and {_MERGED}"),
    Limit("Np == num_heads and (Bp == 1 or Bp == B) and Sp >= S", when="given(pse_shift)"),
)
_KERNEL: tuple[Limit | str, ...] = (
    Limit("input_layout != 'BSH'", because=NO_RULE),
    *(Limit(f"not given({name})", because=NO_RULE) for name in ("pse_shift", "quant_scale2")),
    *(f"dtype({name}) == dtype(query)" for name in ("key", "value")),
    "num_heads <= 256",
    Limit("num_heads <= 64 * num_key_value_heads", when="num_key_value_heads > 0"),
    "D % 16 == 0 and D <= 512",
)
_INT8 = "dtype(key) == 'int8'"
_INCRE_HOST = (
    *_HEADS,
    Limit("S == 1", because="the operator is for one query of each sequence"),
    Limit("P == B and rank(key) == 4", when=f"{_ROWS} and not {_MERGED}"),
    Limit("P == B", when=f"{_ROWS} and {_MERGED}"),
    Limit(_shared("U"), when=f"{_ROWS} and input_layout == 'BSND'"),
    Limit(_shared("Q"), when="rank(key) == 4 and input_layout == 'BNSD'"),
    Limit(_shared("K", "D"), when=f"rank(key) == 3 and not {_MERGED}"),
    Limit(_shared("K", _WIDTH), when=_MERGED),
    Limit(
        "length(actual_seq_lengths) == 1 or length(actual_seq_lengths) >= B", when="given(actual_seq_lengths)"
    ),
    Limit("given(actual_seq_lengths)", when=_PAGED),
    Limit("E == B", when=_PAGED),
    Limit("Q == block_size", when=f"rank(key) == 3 and {_PAGED}"),
    Limit("U == block_size", when=f"{_PAGED} and rank(key) == 4"),
    *mask_limits(
        _MASKED,
        ("M * block_size", _PAGED),
        ("U", f"{_ROWS} and input_layout == 'BNSD'"),
        ("Q", f"{_ROWS} and input_layout != 'BNSD'"),
    ),
    Limit("Tp >= M * block_size", when=f"given(pse_shift) and {_PAGED}"),
    Limit("Tp >= U", when=f"given(pse_shift) and {_ROWS} and input_layout == 'BNSD'"),
    Limit("Tp >= Q", when=f"given(pse_shift) and {_ROWS} and input_layout != 'BNSD'"),
    Limit("given(antiquant_scale)", when=f"{_INT8} or given(antiquant_offset)"),
    Limit(f"{_INT8} and dtype(value) == 'int8'", when="given(antiquant_scale)", because="it restores int8"),
    Limit(
        "numel(antiquant_scale) in (2, 2 * K)", when="given(antiquant_scale) and rank(key) == 3",
        because="there is one of keys and one of values, or one of each channel of both",
    ),
    Limit(
        "numel(antiquant_scale) in (2, 2 * U * D)",
        when=f"given(antiquant_scale) and {_ROWS} and input_layout == 'BSND'",
    ),
    Limit(
        "numel(antiquant_scale) in (2, 2 * Q * D)",
        when="given(antiquant_scale) and rank(key) == 4 and input_layout == 'BNSD'",
    ),
    Limit("size(antiquant_scale, 0) == 2", when="given(antiquant_scale)"),
    Limit("shape(antiquant_offset) == shape(antiquant_scale)", when="given(antiquant_offset)"),
    Limit("given(actual_seq_lengths) and numel(kv_padding_size) == 1", when="given(kv_padding_size)"),
    Limit(f"{_ROWS} and not given(atten_mask) and not given(pse_shift)", when="given(kv_padding_size)",
          because="no page says to which rows masks and biases belong"),
)  # fmt: skip
_INCRE_KERNEL = (
    *(Limit(f"not given({name})", because=NO_RULE) for name in ("antiquant_scale", "kv_padding_size")),
    *_KERNEL,
    "B <= 65535",
    Limit("Q <= 262144", when=f"{_ROWS} and input_layout == 'BSND'"),
    Limit("U <= 262144", when=f"{_ROWS} and input_layout == 'BNSD'"),
    Limit("block_size % 16 == 0 and block_size <= 512", when=_PAGED),
    Limit("rank(key) == 3", when=f"{_PAGED} and input_layout == 'BSND'"),
    Limit("K <= 65535", when="rank(key) == 3"),
    Limit("size(atten_mask, 0) == B", when=_MASKED),
    "inner_precise in (0, 1)",
)
_ORDERED = "sparse_mode in (2, 3, 4)"
_BLIND = "what a query gives that a mask hides all keys from is not documented"
_FROM = "its pages disagree whether these orders count from the first keys or from the last"
_OF_ONE = "the page does not say of what a mask of one query has rows"
_LENGTHS = ("actual_seq_lengths", "actual_seq_lengths_kv")
_PROMPT_HOST = (
    *_HEADS,
    "sparse_mode in (0, 1, 2, 3, 4)",
    Limit("given(atten_mask)", when="sparse_mode in (1, 2, 3, 4)"),
    Limit(
        "T == S and not given(actual_seq_lengths) and not given(actual_seq_lengths_kv)", when="sparse_mode in (3, 4)",
        because=_FROM,
    ),
    *mask_limits(f"{_MASKED} and sparse_mode in (0, 1)", ("T", "T > 0")),
    Limit("rank(atten_mask) > 2 or S > 1 or B == 1", when=f"{_MASKED} and sparse_mode in (0, 1)", because=_OF_ONE),
    Limit(_shared("M"), when=f"not {_MERGED}"),
    Limit(_shared("K", _WIDTH), when=_MERGED),
    *(Limit(f"length({name}) == 1 or length({name}) >= B", when=f"given({name})") for name in _LENGTHS),
    Limit("Tp >= T", when="given(pse_shift)"),
)  # fmt: skip
_PROMPT_KERNEL = (
    *_KERNEL,
    Limit("not given(actual_seq_lengths)", because=NO_RULE),
    Limit("sparse_mode in (0, 2, 3, 4)", because=_BLIND),
    Limit("not given(atten_mask)", when="sparse_mode == 0", because=_BLIND),
    "B <= 65536",
    Limit("N * D < 65535", when="input_layout == 'BSND'"),
    "S <= 20971520 and T <= 20971520",
    Limit("size(atten_mask, -1) == 2048 and size(atten_mask, -2) == 2048", when=_ORDERED),
)
_SUMMARY = (
    "out = round(softmax(scale_value · q kᵀ + pse_shift, masked) v), in float32, with quant_scale2 rint(out · "
    "quant_scale2 + quant_offset2) in int8"
)

INCRE_FLASH_ATTENTION = Operator(
    schema=_INCRE_SCHEMA,
    compute=lambda query, given: _out(query, _incre(given)),
    uncomputed={
        "padding_mask": "it is reserved",
        "dequant_scale1 quant_scale1 dequant_scale2": "queries in int8 are not decomposed",
    },
    without_effect=frozenset({"block_size", "inner_precise"}),
    outputs=lambda query, given: _empty(query, _incre(given)),
    dims={
        "query": f"{_QUERY} / {_QUERY} / {_BSH}",
        "key value": "P Q U D / P Q U D / P Q K / P Q K / P Q K",
        "block_table": "E M",
        "pse_shift": "Bp Np Sp Tp",
    },
    dtypes={
        "query pse_shift": HALVES,
        "key value": HALVES | INT8,
        "atten_mask": _MASKS,
        "block_table": INT32,
        "actual_seq_lengths kv_padding_size": INT64,
        "quant_scale2 quant_offset2": FLOAT32 | BFLOAT16,
        "antiquant_scale antiquant_offset": HALVES,
    },
    limits={"host": _INCRE_HOST, "ascend910b": _INCRE_KERNEL},
    lowerings=frozenset({"eager", "torchair"}),
    flops=lambda given: flops_of(_incre(given)),
    source="op-plugin: torch_npu.npu_incre_flash_attention (A2); CANN: aclnnIncreFlashAttentionV4 and its "
    "kernel, which fills the result of a sequence without keys with 0; GE: IncreFlashAttention",
    summary=f"{_SUMMARY}, of one query of each sequence; a sequence without keys gives 0; int8 keys and values are "
    "(n + antiquant_offset) · antiquant_scale; with kv_padding_size, sequences end so many rows before the last",
)
INCRE_FLASH_ATTENTION_TENSOR_LENGTHS = in_tensors(
    INCRE_FLASH_ATTENTION, ("actual_seq_lengths",), INT64, lowerings=frozenset({"torchair"})
)
PROMPT_FLASH_ATTENTION = Operator(
    schema=_PROMPT_SCHEMA,
    compute=lambda query, given: _out(query, _prompt(given)),
    uncomputed={
        "padding_mask": "it is reserved",
        "deq_scale1 quant_scale1 deq_scale2": "queries in int8 are not decomposed",
    },
    outputs=lambda query, given: _empty(query, _prompt(given)),
    dims={
        "query": f"{_QUERY} / input_layout=BNSD_BSND: B N S D / {_BSH}",
        "key value": "B T M D / B M T D / B M T D / B T K",
        "pse_shift": "Bp Np Sp Tp",
    },
    dtypes={
        "query key value pse_shift": HALVES,
        "atten_mask": _MASKS,
        "quant_scale2 quant_offset2": FLOAT32 | BFLOAT16,
    },
    limits={"host": _PROMPT_HOST, **dict.fromkeys(A2_A3, _PROMPT_KERNEL)},
    lowerings=frozenset({"eager", "torchair"}),
    flops=lambda given: flops_of(_prompt(given)),
    source="op-plugin: torch_npu.npu_prompt_flash_attention (A2, A3); CANN: aclnnPromptFlashAttentionV3; "
    "GE: PromptFlashAttention",
    summary=_SUMMARY,
)
