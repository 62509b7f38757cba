"""Softmax attention with the statistics that training needs: npu_fusion_attention."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators.attention.fused_infer_attention import Attention, computed, empty_results, flops_of
from fusion.operators.attention.layouts import heads_first, is_packed, lse_shape
from fusion.operators.attention.softmax import softmax_statistics
from fusion.operators.attention.visibility import Band, visible
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, FLOATS
from fusion.operators.limits import Limit
from fusion.operators.operator import Operator

_LANES = 8
"""Number of times that each statistic is repeated, along the last dim."""

_SCHEMA = (
    "npu::npu_fusion_attention(Tensor query, Tensor key, Tensor value, int head_num, str input_layout, "
    "Tensor? pse=None, Tensor? padding_mask=None, Tensor? atten_mask=None, float scale=1., float keep_prob=1., "
    "int pre_tockens=2147483647, int next_tockens=2147483647, int inner_precise=0, int[]? prefix=None, "
    "int[]? actual_seq_qlen=None, int[]? actual_seq_kvlen=None, int sparse_mode=0, bool gen_mask_parallel=True, "
    'bool sync=False, str softmax_layout="", Tensor? sink=None, Tensor? dropout_mask=None, int seed=0, int offset=0) '
    "-> (Tensor, Tensor, Tensor, Tensor, int, int, int)"
)


def _read(given: Given) -> Attention:
    query, key, mask = given["query"], given["key"], given["atten_mask"]
    heads, layout = given["head_num"], given["input_layout"]
    merged = layout in ("BSH", "SBH")
    return Attention(
        query,
        key,
        given["value"],
        layout=layout,
        heads=heads,
        kv_heads=key.shape[2] * heads // query.shape[2] if merged else key.shape[layout.index("N")],
        scale=given["scale"],
        # Without a mask all keys are visible, whatever the window of tokens.
        band=Band() if mask is None else Band(given["sparse_mode"], mask, given["pre_tockens"], given["next_tockens"]),
        lengths=(given["actual_seq_qlen"], given["actual_seq_kvlen"]),
        sink=given["sink"],
    )


def _computed(given: Given) -> tuple[Any, ...]:
    call = _read(given)
    out, _ = computed(call)
    query, key = heads_first(call.query, call.layout, call.heads), call.heads_of(call.key)
    seen = visible(query, key, call.lengths, call.band, packed=is_packed(call.layout), table=None)
    statistics = softmax_statistics([(query, key)], seen, call.scale, call.sink)
    lanes = (each.to(torch.float32).expand(*each.shape[:-1], _LANES) for each in statistics)
    top, total = (each[0].transpose(0, 1) if is_packed(call.layout) else each for each in lanes)
    return out, top.contiguous(), total.contiguous(), call.query.new_empty([0]), 0, 0, 0


def _outputs(given: Given) -> tuple[Any, ...]:
    call = _read(given)
    out, _ = empty_results(call)
    sizes = [*lse_shape(call.query, call.layout, call.heads)[:-1], _LANES]
    top, total = (call.query.new_empty(sizes, dtype=torch.float32) for _ in range(2))
    return out, top, total, call.query.new_empty([0]), 0, 0, 0


_KERNEL = (
    "dtype(key) == dtype(query)",
    "dtype(value) == dtype(query)",
    "head_num <= 256",
    Limit("D <= 768", when="input_layout in ('BSND', 'BNSD', 'TND')"),
    Limit("H // head_num <= 768", when="input_layout in ('BSH', 'SBH')"),
    Limit(
        "size(atten_mask, -1) == 2048 and size(atten_mask, -2) == 2048",
        when="given(atten_mask) and sparse_mode in (2, 3, 4)",
    ),
)
_MASKED = "given(atten_mask) and sparse_mode in (0, 1) and input_layout != 'TND'"
_QUERY = (
    "input_layout=BSH: B S H / input_layout=SBH: S B H / input_layout=BSND: B S N D / "
    "input_layout=BNSD: B N S D / input_layout=TND: T N D"
)
_KEY = "B U K / U B K / B U M D / B M U D / U M D"
_VALUE = "B U V / U B V / B U M Dv / B M U Dv / U M Dv"

FUSION_ATTENTION = Operator(
    schema=_SCHEMA,
    compute=_computed,
    uncomputed={
        "pse": "its page multiplies it by the scale in its formula, and does not in its example",
        "padding_mask": "the page takes none",
        "prefix": "the orders with a prefix are not decomposed",
        "dropout_mask": "what is dropped is random",
        "softmax_layout": "statistics in another order are not decomposed",
    },
    without_effect=frozenset({"keep_prob", "inner_precise", "gen_mask_parallel", "sync", "seed", "offset"}),
    outputs=_outputs,
    dims={"query": _QUERY, "key": _KEY, "value": _VALUE, "sink": "Ns"},
    dtypes={"query key value": FLOATS, "atten_mask": frozenset({torch.bool, torch.uint8}), "sink": FLOAT32},
    limits={
        "host": (
            Limit("keep_prob == 1", because="what is dropped is random"),
            "sparse_mode in (0, 1, 2, 3, 4)",
            Limit("given(atten_mask)", when="sparse_mode in (1, 2, 3, 4)", because="without, nothing is hidden"),
            Limit("N == head_num and head_num % M == 0", when="input_layout in ('BSND', 'BNSD', 'TND')"),
            Limit("H % head_num == 0 and K % (H // head_num) == 0", when="input_layout in ('BSH', 'SBH')"),
            Limit("given(actual_seq_qlen) and given(actual_seq_kvlen)", when="input_layout == 'TND'"),
            Limit("not given(actual_seq_qlen) and not given(actual_seq_kvlen)", when="input_layout != 'TND'"),
            Limit("not given(atten_mask)", when="input_layout == 'TND' and sparse_mode in (0, 1)"),
            Limit("V % (K // (H // head_num)) == 0", when="input_layout in ('BSH', 'SBH')"),
            Limit("rank(atten_mask) in (2, 4)", when=_MASKED),
            Limit("size(atten_mask, 0) in (1, B)", when=f"{_MASKED} and rank(atten_mask) == 4"),
            Limit("size(atten_mask, 1) == 1", when=f"{_MASKED} and rank(atten_mask) == 4", because="heads share masks"),
            Limit("size(atten_mask, -2) == S and size(atten_mask, -1) == U", when=_MASKED),
            Limit("Ns == head_num", when="given(sink)"),
            Limit(
                "input_layout in ('BSH', 'BNSD')", lowering="torchair", because="its GE converter takes no other layout"
            ),
        ),
        "ascend910b": _KERNEL,
        "ascend950": _KERNEL,
    },
    lowerings=frozenset({"eager", "torchair"}),
    flops=lambda given: flops_of(_read(given)),
    source="op-plugin: torch_npu.npu_fusion_attention (A2, for training); GE: FlashAttentionScore",
    summary="out = round(softmax(scale · q kᵀ, masked) v), and max and sum of the softmax, eight times each",
)
