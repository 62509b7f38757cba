"""Attention of few query rows over a paged latent: out = softmax(qk_scale · (q kᵀ + q_rope k_ropeᵀ) + mask) k.

The operator is of atb. The latent k is its own value and serves all heads. The layout of pages depends on `cache_mode`:

    krope_ctkv        ctkv [Blocks, Size, 1, C]         k_rope [Blocks, Size, 1, Dr]
    nzcache           ctkv [Blocks, C/16, Size, 16]     k_rope [Blocks, Dr/16, Size, 16]
    int8_nzcache      ctkv [Blocks, C/32, Size, 32]     k_rope as before; q_nope and ctkv int8, with scales per head
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint, known_true
from fusion.operators.attention.layouts import with_strides_of
from fusion.operators.attention.softmax import Visible, rounded_softmax
from fusion.operators.attention.visibility import counted, packed_tokens
from fusion.operators.cache.pages import ATB_NZ, in_pages, pages_of
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import FLOAT32, HALVES, INT8, INT32, INT64, compute_dtype
from fusion.operators.flops import longest, scores
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator, in_tensors

_SPECULATIVE = "calc_type == 'calc_type_spec'"


def _rows(given: Given) -> tuple[Tensor, Tensor, Tensor]:
    """Return for each row [T] its segment id, its position among the rows of its sequence, and the length of the
    context, [T] each."""
    query = given["q_nope"]
    lengths = counted(given["context_lens"], query.device).long()
    if given["calc_type"] != "calc_type_spec":
        token = torch.arange(query.shape[0], device=query.device)
        return token, torch.zeros_like(token), lengths
    ends = counted(given["qseqlen"], query.device).long().cumsum(0)
    sequence, place, _, _ = packed_tokens(query.shape[0], ends)
    return sequence, place, lengths[sequence]


def _by_pages(cache: Tensor, mode: str) -> Tensor:
    """Permute a cache in the layout of `mode` to pages [Blocks, Size, 1, D]."""
    return cache.transpose(1, 2).flatten(2).unsqueeze(2) if mode in ATB_NZ else cache


def _bias(given: Given, place: Tensor, length: Tensor, keys: Any, size: Any) -> Tensor | None:
    """Return the part of the mask that is added to the scores of each row, [T, 1, 1, `keys`], None without a mask.

    With "mask_type_spec" query row t reads row t of the mask. Any other mask has a fixed shape, for the last page of
    each context: columns are positions in that page; the row is the position of the last token of the context in the
    page, plus that of the query row in its sequence. Keys of the page before have their row `size` further down, and
    earlier keys are not masked.

    Args:
        given: the arguments of the call.
        place: position of each row among the rows of its sequence [T].
        length: length of its context [T].
        keys: number of columns of the scores.
        size: rows of a page.
    """
    mask = given["mask"]
    if mask is None:
        return None
    key = torch.arange(keys, device=mask.device)
    if given["mask_type"] == "mask_type_spec":
        columns = mask.shape[1]
        return torch.where(key < columns, mask[:, key.clamp(max=columns - 1)], 0)[:, None, None]
    last = (length - 1).div(size, rounding_mode="floor")[:, None] * size
    row = (length[:, None] - last - 1) + place[:, None] + torch.where(key >= last, 0, size)
    column = key - torch.where(key >= last, last, last - size)
    read = (column >= 0) & (column < size) & (row < mask.shape[0])
    value = mask[torch.where(read, row, 0), torch.where(read, column, 0)]
    return torch.where(read, value, 0)[:, None, None]


def _attention(given: Given) -> tuple[Tensor, Tensor]:
    """Compute the output [T, N, C] and the log-sum-exp [T, N, 1] in the wide dtype."""
    query, rope, mode = given["q_nope"], given["q_rope"], given["cache_mode"]
    wide, narrow = compute_dtype(rope), mode == "int8_nzcache"
    caches = (_by_pages(given[name], mode) for name in ("ctkv", "k_rope"))
    table = given["block_tables"]
    latent, rotated = (pages_of(cache, table).unsqueeze(1).to(wide) for cache in caches)
    sequence, place, length = _rows(given)
    if not known_true(query.shape[0] == table.shape[0]):
        latent, rotated = latent.index_select(0, sequence), rotated.index_select(0, sequence)
    if narrow:
        query = query.to(wide) * given["qk_descale"].to(wide)[:, None]
    seen = torch.arange(latent.shape[2], device=query.device) < length[:, None]
    pairs = [(query.unsqueeze(2), latent), (rope.to(wide).unsqueeze(2), rotated)]
    size = given["ctkv"].shape[2 if mode in ATB_NZ else 1]
    out, top, total = rounded_softmax(
        pairs, latent, Visible(seen[:, None, None]), given["qk_scale"], torch.int8 if narrow else rope.dtype,
        _bias(given, place, length, latent.shape[2], size),
    )  # fmt: skip
    out = out.squeeze(2) * given["pv_descale"].to(wide)[:, None] if narrow else out.squeeze(2)
    return with_strides_of(out.to(rope.dtype), given["q_nope"]), (top + total.log()).squeeze(2)


_LSE_ARGUMENTS = {
    **dict.fromkeys(("mask", "mask_type", "qseqlen", "qk_descale", "pv_descale", "calc_type")),
    "cache_mode": "krope_ctkv",
}
"""Arguments of calls that return the log-sum-exp: one row of each sequence, no mask, row-major pages of floats."""


def _with_lse(given: Given) -> tuple[Tensor, Tensor]:
    out, lse = _attention({**given, **_LSE_ARGUMENTS})
    return out, lse.to(given["q_nope"].dtype)


def _output(q_nope: Tensor, q_rope: Tensor) -> Tensor:
    return torch.empty_like(q_nope, dtype=q_rope.dtype)


def _flops(given: Given) -> float:
    """Estimate the multiplications and additions: q · k and p · v of every query row with all keys of the longest
    context.
    """
    query, page = given["q_nope"], given["ctkv"].shape[2 if given["cache_mode"] in ATB_NZ else 1]
    keys = longest(given["context_lens"], given["block_tables"].shape[1] * page)
    return scores(count(query) / hint(query.shape[-1]) * keys, 2 * query.shape[-1] + given["q_rope"].shape[-1])


_LAID_OUT = f"cache_mode in {ATB_NZ}"
_INT8 = "cache_mode == 'int8_nzcache'"
_MASKED = "mask_type in ('mask_type_spec', 'mask_type_free')"
_ONE_ROW = "without speculative rows each sequence has one row"
_IMPLIED = "the kernel reads no mask of 128 heads or of int8 queries: a row sees its sequence up to itself"
_HOST = (
    "q_headnum == N",
    Limit("kv_headnum == 1", because="the latent serves all heads"),
    "length(context_lens) == B",
    Limit("A * L == C and R * M == Dr", when=_LAID_OUT),
)
_FEW_ROWS = (
    Limit("mask_type in (None, 'undefined', 'mask_type_spec', 'mask_type_free')"),
    Limit("given(qk_descale) and given(pv_descale)", when=_INT8),
    Limit("not given(qk_descale) and not given(pv_descale)", when="cache_mode != 'int8_nzcache'"),
    Limit("given(mask)", when=_MASKED),
    Limit("not given(mask)", when="mask_type in (None, 'undefined')"),
    Limit("Rows == T", when="mask_type == 'mask_type_spec'"),
    Limit("Columns == Size", when="mask_type == 'mask_type_free'"),
    Limit("Rows >= Size - 1 and (Rows - Size + 3) % 2 == 0", when="mask_type == 'mask_type_free'"),
    "calc_type in (None, 'calc_type_undefined', 'calc_type_spec')",
    Limit("given(qseqlen) and length(qseqlen) == B", when=_SPECULATIVE),
    Limit("not given(qseqlen)", when="calc_type != 'calc_type_spec'", because=_ONE_ROW),
    Limit("T == B", when="calc_type != 'calc_type_spec'", because=_ONE_ROW),
    Limit("mask_type in (None, 'undefined')", when="calc_type != 'calc_type_spec'", because="one row sees all"),
)
_RING = (
    "calc_type == 'calc_type_ring'",
    "return_lse == True",
    Limit("T == B", because=_ONE_ROW),
    Limit("mask_type in (None, 'undefined')", because="one row sees all"),
    Limit("cache_mode == 'krope_ctkv'", because="no other mode is documented to return the log-sum-exp"),
)
_KERNEL = (
    Limit("N in (8, 16, 32, 64, 128)", because="N is the number of query heads"),
    "C == 512",
    "Dr == 64",
    "Size == 128",
    "B <= 8192",
    "qk_scale > 0 and qk_scale <= 1",
    Limit("dtype(q_nope) == dtype(q_rope) and dtype(ctkv) == dtype(q_rope)", when="cache_mode != 'int8_nzcache'"),
    "dtype(k_rope) == dtype(q_rope)",
)
_KERNEL_OF_ROWS = (
    *_KERNEL,
    Limit("dtype(q_nope) == 'int8' and dtype(ctkv) == 'int8'", when=_INT8),
    Limit("dtype(mask) == dtype(q_rope)", when="given(mask)"),
    Limit("L * itemsize(ctkv) == 32 and M * itemsize(k_rope) == 32", when=_LAID_OUT, because="so is a line of NZ"),
    Limit("N != 128", when=_INT8),
    Limit("N != 128", when=f"{_SPECULATIVE} and mask_type != 'mask_type_free'", because=_IMPLIED),
    Limit("cache_mode != 'int8_nzcache'", when=f"{_SPECULATIVE} and mask_type != 'mask_type_free'", because=_IMPLIED),
    Limit("Rows <= 133", when="mask_type == 'mask_type_free'", because="a sequence has at most 4 rows"),
)
_SUMMARY = (
    "out = round(Σ round(p) k / Σ p), p = exp(s - max s), s = qk_scale · (q kᵀ + q_rope k_ropeᵀ) + mask, in float32, "
    "over the first context_lens[b] keys of a sequence; int8: q kᵀ times qk_descale, p in steps of 1/127, out times "
    "pv_descale. calc_type_spec: qseqlen[b] rows, which see all keys without a mask. mask_type_spec: columns as many "
    "as the longest context has keys; mask_type_free: as many rows in all sequences, read from the end of the context. "
    "An empty context is 0"
)


MULTI_HEAD_LATENT_ATTENTION = Operator(
    schema=(
        "atb::npu_multi_head_latent_attention(Tensor q_nope, Tensor q_rope, Tensor ctkv, Tensor k_rope, "
        "Tensor block_tables, SymInt[] context_lens, int q_headnum, float qk_scale, int kv_headnum, *, "
        "Tensor? mask=None, SymInt[]? qseqlen=None, Tensor? qk_descale=None, Tensor? pv_descale=None, "
        "str? mask_type=None, str? calc_type=None, str? cache_mode=None) -> Tensor"
    ),
    compute=lambda given: _attention(given)[0],
    without_effect=frozenset({"q_headnum", "kv_headnum"}),
    outputs=_output,
    dims={
        "q_nope": "T N C",
        "q_rope": "T N Dr",
        "ctkv": in_pages("Blocks Size 1 C", "Blocks A Size L"),
        "k_rope": in_pages("Blocks Size 1 Dr", "Blocks R Size M"),
        "block_tables": "B P",
        "mask": "Rows Columns",
        "qk_descale pv_descale": "N",
    },
    dtypes={
        "q_nope ctkv": HALVES | INT8,
        "q_rope k_rope mask": HALVES,
        "qk_descale pv_descale": FLOAT32,
        "block_tables": INT32,
    },
    limits={"host": (*_HOST, *_FEW_ROWS), **dict.fromkeys(A2_A3, _KERNEL_OF_ROWS)},
    lowerings=frozenset({"eager"}),
    source=(
        "ATB: MultiLatentAttentionOperation, its checks and kernel; op-plugin: "
        "ops/atb/MultiHeadLatentAttentionAtb.cpp, test_atb_mla_*.py"
    ),
    summary=_SUMMARY,
    flops=_flops,
)
MULTI_HEAD_LATENT_ATTENTION_TENSOR_LENGTHS = in_tensors(
    MULTI_HEAD_LATENT_ATTENTION, ("context_lens",), INT64 | INT32, lowerings=frozenset()
)
MULTI_HEAD_LATENT_ATTENTION_LSE = replace(
    MULTI_HEAD_LATENT_ATTENTION,
    schema=(
        MULTI_HEAD_LATENT_ATTENTION.schema.replace("(", ".lse(", 1)
        .replace("int kv_headnum", "int kv_headnum, bool return_lse")
        .replace(") -> Tensor", ", Tensor? workspace=None) -> (Tensor, Tensor)")
    ),
    compute=_with_lse,
    uncomputed={
        "workspace": "the operator allocates its own",
        "mask qseqlen": "with the log-sum-exp each sequence has one row, which sees all",
        "qk_descale pv_descale": "of int8 no log-sum-exp is documented",
    },
    without_effect=frozenset({"q_headnum", "kv_headnum", "return_lse", "calc_type", "cache_mode", "mask_type"}),
    outputs=lambda q_nope, q_rope: (_output(q_nope, q_rope), q_nope.new_empty([*q_nope.shape[:2], 1])),
    limits={
        "host": (*_HOST, *_RING),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    summary=f"with max s + log Σ p as the second result, in the dtype of q_nope: {_SUMMARY}",
)
