"""Softmax attention of the operators that npu_fused_infer_attention_score has replaced: one for a single query of each
sequence, which reads rows or pages, one for several, which reads rows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators.attention import Attention, computed, flops_of, promised
from fusion.operators.calling import Given
from fusion.operators.contract import A2_A3, Limit, Operator, in_tensors, unused
from fusion.operators.dtypes import HALVES, INT32, INT64
from fusion.operators.layouts import lying_as
from fusion.operators.visibility import Band

_MASKS = frozenset({torch.bool, torch.int8, torch.uint8})
_QUERY = "input_layout=BSND: B S N D / input_layout=BNSD: B N S D"
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
    mask = given["atten_mask"]
    band = Band() if mask is None else Band(1, mask)
    return _call(given, band, given["actual_seq_lengths"], given["block_table"])


def _prompt(given: Given) -> Attention:
    mask = given["atten_mask"]
    # Without a mask nothing is masked, whatever the window of tokens.
    band = Band() if mask is None else Band(given["sparse_mode"], mask, given["pre_tokens"], given["next_tokens"])
    return _call(given, band, given["actual_seq_lengths_kv"])


def _call(given: Given, band: Band, lengths: Any, table: Tensor | None = None) -> Attention:
    """What both have alike."""
    heads = given["num_heads"]
    return Attention(
        *(given[name] for name in ("query", "key", "value")),
        layout=given["input_layout"],
        heads=heads,
        kv_heads=given["num_key_value_heads"] or heads,
        scale=given["scale_value"],
        band=band,
        lengths=(None, lengths),
        table=table,
    )


def _out(query: Tensor, call: Attention) -> Tensor:
    """As the Meta kernels promise it: lying as the query does, but where heads and positions change places."""
    out = computed(call)[0]
    return out if call.layout == "BNSD_BSND" else lying_as(out, query)


def _empty(query: Tensor, call: Attention) -> Tensor:
    return promised(call)[0] if call.layout == "BNSD_BSND" else torch.empty_like(query)


def _shared(heads: str) -> str:
    return f"num_key_value_heads == 0 and {heads} == num_heads or {heads} == num_key_value_heads"


_PAGED, _ROWS = "given(block_table)", "not given(block_table)"
_GROUPS = "num_key_value_heads == 0 or num_key_value_heads > 0 and num_heads % num_key_value_heads == 0"
_UNUSED = "neither biases nor scales of int8 are decomposed"
_HEADS: tuple[Limit | str, ...] = ("N == num_heads", _GROUPS)
_KERNEL: tuple[Limit | str, ...] = (
    *(f"dtype({name}) == dtype(query)" for name in ("key", "value")),
    "num_heads <= 256",
    Limit("num_heads <= 64 * num_key_value_heads", when="num_key_value_heads > 0"),
    "D % 16 == 0 and D <= 512",
)
_INCRE_HOST = (
    *unused(
        ("padding_mask", "pse_shift", "antiquant_scale", "antiquant_offset", "dequant_scale1", "quant_scale1",
         "dequant_scale2", "quant_scale2", "quant_offset2", "kv_padding_size"), _UNUSED,
    ),
    *_HEADS,
    Limit("S == 1", because="the operator is for one query of each sequence"),
    Limit("P == B and rank(key) == 4", when=_ROWS),
    Limit(_shared("U"), when=f"{_ROWS} and input_layout == 'BSND'"),
    Limit(_shared("Q"), when="rank(key) == 4 and input_layout == 'BNSD'"),
    Limit(_shared("K // D"), when="rank(key) == 3"),
    Limit(
        "length(actual_seq_lengths) == 1 or length(actual_seq_lengths) >= B", when="given(actual_seq_lengths)"
    ),
    Limit("given(actual_seq_lengths)", when=_PAGED),
    Limit("E == B", when=_PAGED),
    Limit("Q == block_size", when="rank(key) == 3"),
    Limit("U == block_size", when=f"{_PAGED} and rank(key) == 4"),
)  # fmt: skip
_MASKED = "given(atten_mask)"
_INCRE_KERNEL = (
    *_KERNEL,
    "B <= 65535",
    Limit("Q <= 262144", when=f"{_ROWS} and input_layout == 'BSND'"),
    Limit("U <= 262144", when=f"{_ROWS} and input_layout == 'BNSD'"),
    Limit("block_size % 16 == 0 and block_size <= 512", when=_PAGED),
    Limit("rank(key) == 3", when=f"{_PAGED} and input_layout == 'BSND'"),
    Limit("K <= 65535", when="rank(key) == 3"),
    Limit("size(atten_mask, 0) == B", when=_MASKED),
    Limit("size(atten_mask, -1) >= Q", when=f"{_MASKED} and {_ROWS} and input_layout == 'BSND'"),
    Limit("size(atten_mask, -1) >= U", when=f"{_MASKED} and {_ROWS} and input_layout == 'BNSD'"),
    Limit("size(atten_mask, -1) >= M * block_size", when=f"{_MASKED} and {_PAGED}"),
    "inner_precise in (0, 1)",
)
_ORDERED = "sparse_mode in (2, 3, 4)"
_BLIND = "what a query gives that a mask hides all keys from is not documented"
_FROM = "its pages disagree whether these orders count from the first keys or from the last"
_PROMPT_HOST = (
    *unused(
        ("padding_mask", "pse_shift", "actual_seq_lengths", "deq_scale1", "quant_scale1", "deq_scale2", "quant_scale2",
         "quant_offset2"), _UNUSED,
    ),
    *_HEADS,
    "sparse_mode in (0, 2, 3, 4)",
    Limit("given(atten_mask)", when=_ORDERED),
    Limit("not given(atten_mask)", when="sparse_mode == 0", because=_BLIND),
    Limit("T == S and not given(actual_seq_lengths_kv)", when="sparse_mode in (3, 4)", because=_FROM),
    Limit(_shared("M")),
    Limit(
        "length(actual_seq_lengths_kv) == 1 or length(actual_seq_lengths_kv) >= B", when="given(actual_seq_lengths_kv)"
    ),
)  # fmt: skip
_PROMPT_KERNEL = (
    *_KERNEL,
    "B <= 65536",
    Limit("N * D < 65535", when="input_layout == 'BSND'"),
    "S <= 20971520 and T <= 20971520",
    Limit("size(atten_mask, -1) == 2048 and size(atten_mask, -2) == 2048", when=_ORDERED),
)
_SUMMARY = "out = round(softmax(scale_value · q kᵀ, masked) v), in float32"

INCRE_FLASH_ATTENTION = Operator(
    schema=_INCRE_SCHEMA,
    compute=lambda query, given: _out(query, _incre(given)),
    outputs=lambda query, given: _empty(query, _incre(given)),
    dims={
        "query": f"{_QUERY} / {_QUERY}",
        "key value": "P Q U D / P Q U D / P Q K / P Q K",
        "block_table": "E M",
    },
    dtypes={"query key value": HALVES, "atten_mask": _MASKS, "block_table": INT32, "actual_seq_lengths": INT64},
    limits={"host": _INCRE_HOST, "ascend910b": _INCRE_KERNEL},
    lowerings=frozenset({"eager", "torchair"}),
    flops=lambda given: flops_of(_incre(given)),
    source="op-plugin: torch_npu.npu_incre_flash_attention (A2); CANN: aclnnIncreFlashAttentionV4 and its "
    "kernel, which fills the result of a sequence without keys with 0; GE: IncreFlashAttention",
    summary=f"{_SUMMARY}, of one query of each sequence; a sequence without keys gives 0",
)
INCRE_FLASH_ATTENTION_TENSOR_LENGTHS = in_tensors(
    INCRE_FLASH_ATTENTION, ("actual_seq_lengths",), INT64, lowerings=frozenset({"torchair"})
)
PROMPT_FLASH_ATTENTION = Operator(
    schema=_PROMPT_SCHEMA,
    compute=lambda query, given: _out(query, _prompt(given)),
    outputs=lambda query, given: _empty(query, _prompt(given)),
    dims={
        "query": f"{_QUERY} / input_layout=BNSD_BSND: B N S D",
        "key value": "B T M D / B M T D / B M T D",
    },
    dtypes={"query key value": HALVES, "atten_mask": _MASKS},
    limits={"host": _PROMPT_HOST, **dict.fromkeys(A2_A3, _PROMPT_KERNEL)},
    lowerings=frozenset({"eager", "torchair"}),
    flops=lambda given: flops_of(_prompt(given)),
    source="op-plugin: torch_npu.npu_prompt_flash_attention (A2, A3); CANN: aclnnPromptFlashAttentionV3; "
    "GE: PromptFlashAttention",
    summary=_SUMMARY,
)
