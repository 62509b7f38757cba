"""Attention over parts of the keys: partial outputs, merged by the log-sum-exps of their scores.

    out = Σᵢ exp(lseᵢ - lse') local_outᵢ        lse' = m + log Σᵢ exp(lseᵢ - m), m = max lseᵢ

One step, of atb, attends over rows of packed sequences, and merges the result with that of earlier keys:

    out, lse = softmax(qk_scale · (q_nope k_nopeᵀ + q_rope k_ropeᵀ)) value, log-sum-exp
    calc_type_default: lse' = log(exp(prev_lse) + exp(lse)), out' = exp(prev_lse - lse') pre_out + exp(lse - lse') out
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint
from fusion.operators.attention.softmax import rounded_softmax
from fusion.operators.attention.visibility import Band, visible
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, FLOATS, HALVES, INT32, compute_dtype
from fusion.operators.flops import scores
from fusion.operators.limits import A2_A3, CHIPS, Limit
from fusion.operators.operator import Operator


def _attention_update(lse: Sequence[Tensor], local_out: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    sums = torch.stack([each.to(compute_dtype(each)) for each in lse])
    both = sums.logsumexp(0)
    out = sum(
        (part - both).exp().unsqueeze(-1) * each.to(compute_dtype(each))
        for part, each in zip(sums, local_out, strict=True)
    )
    assert isinstance(out, Tensor)
    return out.to(local_out[0].dtype).contiguous(), both.to(lse[0].dtype)


_UPDATE = (
    "length(lse) <= 16",
    "dtype(local_out) in ('float32', 'float16', 'bfloat16')",
    "D >= 8",
    "D <= 512",
    "D % 8 == 0",
)

ATTENTION_UPDATE = Operator(
    schema="npu::npu_attention_update(Tensor[] lse, Tensor[] local_out, int update_type) -> (Tensor, Tensor)",
    compute=_attention_update,
    without_effect=frozenset({"update_type"}),  # selects whether a device writes the second result
    outputs=lambda lse, local_out: tuple(each[0].new_empty(each[0].shape) for each in (local_out, lse)),
    dims={"lse": "R", "local_out": "R D"},
    dtypes={"lse": FLOAT32, "local_out": FLOATS},
    limits={
        "host": ("length(lse) >= 1", "length(lse) == length(local_out)", "update_type in (0, 1)"),
        **dict.fromkeys(CHIPS, _UPDATE),
    },
    source="op-plugin: torch_npu.npu_attention_update, test_npu_attention_update.py; CANN: aclnnAttentionUpdate",
    summary=(
        "out = round(Σ exp(lse_i - lse') local_out_i), lse' = log Σ exp(lse_i), over tensors lse_i [R] and local_out_i "
        "[R, D] in float32; lse' is told where update_type is 1, and means nothing on a device where it is 0"
    ),
)


_MERGING = "calc_type == 'calc_type_default'"


def _ring_mla(given: Given) -> tuple[Tensor, Tensor]:
    names = ("q_nope", "q_rope", "k_nope", "k_rope", "value")
    query, query_rope, key, key_rope, value = (given[name].transpose(0, 1).unsqueeze(0) for name in names)
    seqlen = given["seqlen"] if given["seqlen"].dim() == 2 else given["seqlen"].unsqueeze(0)
    seqlen = seqlen.long().to(query.device)
    ends = tuple(each.cumsum(0) for each in (seqlen[0], seqlen[-1]))
    band = Band(2) if given["mask_type"] == "mask_type_triu" else Band()
    seen = visible(query, key, ends, band, packed=True, table=None)
    stored = given["q_nope"].dtype
    out, top, total = rounded_softmax([(query, key), (query_rope, key_rope)], value, seen, given["qk_scale"], stored)
    out, lse, blind = out[0].transpose(0, 1), (top + total.log())[0, :, :, 0], (total == 0)[0, :, :, 0]
    if given["calc_type"] == "calc_type_default":
        out, lse = _merged(out, lse, given["pre_out"].to(out.dtype), given["prev_lse"].to(lse.dtype))
    out, lse = out.masked_fill(blind.t().unsqueeze(-1), 0.0), lse.masked_fill(blind, 0.0)
    return out.to(stored).contiguous(), lse.to(_lse_dtype(given["q_nope"])).contiguous()


def _merged(out: Tensor, lse: Tensor, old: Tensor, old_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Merge `out` [T, N, E] with log-sum-exp `lse` [N, T] and `old` with `old_lse`, of other keys, to those over
    both.
    """
    both = torch.logaddexp(old_lse, lse)
    new, before = ((each - both).exp().t().unsqueeze(-1) for each in (lse, old_lse))
    return out * new + old * before, both


def _lse_dtype(query: Tensor) -> torch.dtype:
    return torch.promote_types(compute_dtype(query), torch.float32)


def _outputs(q_nope: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    rows, heads, _ = q_nope.shape
    lse = q_nope.new_empty([heads, rows], dtype=_lse_dtype(q_nope))
    return q_nope.new_empty([rows, heads, value.shape[2]]), lse


def _flops(given: Given) -> float:
    """Estimate the operations of every row over the keys of an average sequence, half of them if causal."""
    query, sequences = given["q_nope"], hint(given["seqlen"].shape[-1])
    keys = hint(given["k_nope"].shape[0]) / sequences / (2 if given["mask_type"] == "mask_type_triu" else 1)
    width = query.shape[-1] + given["q_rope"].shape[-1] + given["value"].shape[-1]
    return scores(count(query) / hint(query.shape[-1]) * keys, width)


_KERNEL = (
    Limit("D == 128", because="D is the width of a head without its rotated lanes"),
    "Dr == 64",
    "E == 128",
    *(Limit(f"dtype({name}) == dtype(q_nope)") for name in ("q_rope", "k_nope", "k_rope", "value", "mask")),
    Limit("dtype(pre_out) == dtype(q_nope)", when=_MERGING),
    Limit(
        "H == 512 and W == 512",
        when="mask_type == 'mask_type_triu'",
        because="the triangle has this size for sequences of any length",
    ),
)

RING_MLA = Operator(
    schema=(
        "atb::npu_ring_mla(Tensor q_nope, Tensor q_rope, Tensor k_nope, Tensor k_rope, Tensor value, Tensor mask, "
        "Tensor seqlen, int head_num, int kv_head_num, *, Tensor? pre_out=None, Tensor? prev_lse=None, "
        "float qk_scale=1., str? kernel_type=None, str? mask_type=None, str? input_layout=None, str? calc_type=None) "
        "-> (Tensor, Tensor)"
    ),
    compute=_ring_mla,
    # By its page, `mask` must be the triangle that mask_type selects.
    without_effect=frozenset({"mask", "head_num", "kv_head_num", "kernel_type", "input_layout"}),
    outputs=_outputs,
    dims={
        "q_nope": "T N D",
        "q_rope": "T N Dr",
        "k_nope": "K M D",
        "k_rope": "K M Dr",
        "value": "K M E",
        "mask": "H W",
        "seqlen": "*R B",
        "pre_out": "T N E",
        "prev_lse": "N T",
    },
    dtypes={"q_nope q_rope k_nope k_rope value mask pre_out": HALVES, "prev_lse": FLOAT32, "seqlen": INT32},
    limits={
        "host": (
            "head_num == N",
            "kv_head_num == M",
            "N % M == 0",
            "rank(seqlen) in (1, 2)",
            Limit("size(seqlen, 0) == 2", when="rank(seqlen) == 2"),
            "kernel_type in (None, 'kernel_type_high_precision')",
            "input_layout in (None, 'type_bsnd')",
            "mask_type in (None, 'no_mask', 'mask_type_triu')",
            "calc_type in (None, 'calc_type_first_ring', 'calc_type_default')",
            Limit("given(pre_out) and given(prev_lse)", when=_MERGING),
            Limit("not given(pre_out) and not given(prev_lse)", when="calc_type != 'calc_type_default'"),
            Limit(
                "rank(seqlen) == 1 and T == K",
                when="mask_type == 'mask_type_triu'",
                because="where the diagonal of other sequences begins is not documented",
            ),
        ),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    lowerings=frozenset({"eager"}),
    flops=_flops,
    source="ATB: RingMLAOperation, its checks and kernel; op-plugin: ops/atb/RingMlaAtb.cpp, test_atb_ring_mla.py",
    summary=(
        "out = round(Σ round(p) value / Σ p), p = exp(s - max s), lse = max s + log Σ p, s = qk_scale · "
        "(q_nope k_nopeᵀ + q_rope k_ropeᵀ) in float32, inside each sequence of seqlen [B] or [2, B] (rows, keys; on "
        "the host); mask_type_triu: causal, by a triangle of fixed size; calc_type_default: merged with pre_out and "
        "prev_lse before it is rounded; rows of a sequence without keys give 0"
    ),
)
