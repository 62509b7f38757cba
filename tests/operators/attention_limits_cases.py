"""Calls of npu_fused_infer_attention_score_v2 on both sides of its limits."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators.attention.int8_cache_limits import CACHE, FLOATS
from tests.operators.limit_cases import t

Edge = tuple[dict[str, Any], dict[str, Any], str]


FULL = t(2048, 2048, dtype=torch.bool)
HEADS: dict[str, Any] = {"num_query_heads": 8, "num_key_value_heads": 2}
SUMS: dict[str, Any] = {"return_softmax_lse": True}
BIAS: dict[str, Any] = {"pse_shift": t(2, 8, 5, 7)}
CAUSAL: dict[str, Any] = {"sparse_mode": 3, "atten_mask": FULL}


def bsnd(s: int = 5, d: int = 128, n: int = 8, m: int = 2, b: int = 2) -> dict[str, Any]:
    return {
        "query": t(b, s, n, d), "key": t(b, 7, m, d), "value": t(b, 7, m, d), "input_layout": "BSND",
        "num_query_heads": n, "num_key_value_heads": m,
    }  # fmt: skip


def bsh(d: int = 128) -> dict[str, Any]:
    return HEADS | {"query": t(2, 5, 8 * d), "key": t(2, 7, 2 * d), "value": t(2, 7, 2 * d), "input_layout": "BSH"}


def bnsd(layout: str = "BNSD", s: int = 5) -> dict[str, Any]:
    kv = {"key": t(2, 2, 7, 128), "value": t(2, 2, 7, 128)}
    return HEADS | kv | {"query": t(2, 8, s, 128), "input_layout": layout}


def tnd(d: int = 128, m: int = 2, v: int = 0, ntd: bool = False) -> dict[str, Any]:
    tensors = {"query": (9, 8, d), "key": (9, m, d), "value": (9, m, v or d)}
    turned = {name: t(*((s[1], s[0], s[2]) if ntd else s)) for name, s in tensors.items()}
    lengths = {"actual_seq_qlen": [3, 9], "actual_seq_kvlen": [4, 9]}
    heads = {"num_query_heads": 8, "num_key_value_heads": m}
    return turned | lengths | heads | {"input_layout": "NTD_TND" if ntd else "TND"}


def pages(call: dict[str, Any], block: int = 128, form: int = 3, m: int = 2, d: int = 128) -> dict[str, Any]:
    cache = {3: t(9, block, m * d), 4: t(9, m, block, d), 5: t(9, m, d // 16, block, 16)}[form]
    table = {"block_table": t(2, 3, dtype=torch.int32), "block_size": block, "actual_seq_kvlen": [7, 9]}
    return call | table | {"key": cache, "value": cache}


def latent(d: int = 512, rope: int = 64, n: int = 8, m: int = 1) -> dict[str, Any]:
    return bsnd(d=d, n=n, m=m) | {"query_rope": t(2, 5, n, rope), "key_rope": t(2, 7, m, rope)}


def latent_bsh(rope: int = 64, d: int = 128, n: int = 8) -> dict[str, Any]:
    kv = {"key": t(2, 7, d), "value": t(2, 7, d), "key_rope": t(2, 7, 64)}
    heads = {"num_query_heads": n, "num_key_value_heads": 1, "input_layout": "BSH"}
    return kv | heads | {"query": t(2, 5, n * d), "query_rope": t(2, 5, n * rope)}


def whole(s: int = 1, n: int = 8, **more: Any) -> dict[str, Any]:
    """A latent in lines of NZ, and its queries, in int8."""
    int8, single = torch.int8, torch.float32
    lines = t(9, 1, 16, 128, 32, dtype=int8)
    scales = {"dequant_scale_query": t(2, s, n, dtype=single), "dequant_scale_key": t(1, dtype=single)}
    rope = {"query_rope": t(2, s, n, 64), "key_rope": t(9, 1, 4, 128, 16)}
    table = {"block_table": t(2, 3, dtype=torch.int32), "block_size": 128, "actual_seq_kvlen": [7, 9]}
    heads = {"num_query_heads": n, "num_key_value_heads": 1, "input_layout": "BSND", "query_quant_mode": 3}
    call = {"query": t(2, s, n, 512, dtype=int8), "key": lines, "value": lines}
    return call | scales | {"dequant_scale_value": t(1, dtype=single)} | rope | table | heads | more


def whole_tnd() -> dict[str, Any]:
    rows = {"query": t(9, 8, 512, dtype=torch.int8), "query_rope": t(9, 8, 64)}
    ends = {"input_layout": "TND", "actual_seq_qlen": [3, 9], "dequant_scale_query": t(9, 8, dtype=torch.float32)}
    return whole(5) | rows | ends | CAUSAL


def whole_bnsd(layout: str = "BNSD", scales: tuple[int, ...] = (2, 8, 1)) -> dict[str, Any]:
    return whole(
        input_layout=layout, query=t(2, 8, 1, 512, dtype=torch.int8), query_rope=t(2, 8, 1, 64),
        dequant_scale_query=t(*scales, dtype=torch.float32),
    )  # fmt: skip


def whole_bsh(*scales: int) -> dict[str, Any]:
    rows = {"query": t(2, 1, 8 * 512, dtype=torch.int8), "query_rope": t(2, 1, 8 * 64), "input_layout": "BSH"}
    return whole() | rows | {"dequant_scale_query": t(*scales, dtype=torch.float32)}


def whole_pages(rank: int) -> dict[str, Any]:
    latent, rope = ((9, 128, 512), (9, 128, 64)) if rank == 3 else ((9, 1, 16, 128, 32), (9, 1, 4, 128, 16))
    return {"key": t(*latent, dtype=torch.int8), "value": t(*latent, dtype=torch.int8), "key_rope": t(*rope)}


SCALES = ("dequant_scale_key", "dequant_scale_value")
OFFSETS = ("dequant_offset_key", "dequant_offset_value")
ONE_BYTE = torch.int8


def c8(
    s: int = 1, d: int = 128, n: int = 8, m: int = 2, scale: tuple[int, ...] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Queries over int8 rows."""
    call = bsnd(s, d, n, m) | {"query": t(2, s, n, d, dtype=dtype)}
    shape = scale or ((1, m, 1, d) if s == 1 else (m, d))
    return call | dict.fromkeys(("key", "value"), t(2, 7, m, d, dtype=ONE_BYTE)) | dict.fromkeys(
        SCALES, t(*shape, dtype=dtype)
    )  # fmt: skip


def c8_heads(*scale: int) -> dict[str, Any]:
    return c8(scale=scale) | {"key_quant_mode": 2, "value_quant_mode": 2}


_BY_HEADS = {"key_quant_mode": 3, "value_quant_mode": 3}


def tokens(*scale: int, call: dict[str, Any] | None = None) -> dict[str, Any]:
    given = dict.fromkeys(SCALES, t(*(scale or (1, 2, 7)), dtype=torch.float32))
    return (call or c8()) | given | {"key_quant_mode": 1, "value_quant_mode": 1}


def tokens_bnsd(last: int) -> dict[str, Any]:
    rows = dict.fromkeys(("key", "value"), t(2, 2, 7, 128, dtype=ONE_BYTE))
    return tokens(1, 2, last, call=bnsd(s=1)) | rows


def tokens_paged(last: int) -> dict[str, Any]:
    return tokens(1, 2, last, call=c8_pages(128))


def c8_bsh() -> dict[str, Any]:
    rows = dict.fromkeys(("key", "value"), t(2, 7, 256, dtype=ONE_BYTE))
    return bsh() | rows | dict.fromkeys(SCALES, t(1))


def offset() -> dict[str, Any]:
    return dict.fromkeys(OFFSETS, t(1, 2, 1, 128))


def c8_pages(block: int, s: int = 1) -> dict[str, Any]:
    return pages(c8(s), block) | dict.fromkeys(("key", "value"), t(9, block, 256, dtype=ONE_BYTE))


def nz(
    layout: Any = "BSND", m: int = 8, *, s: int = 1, d: int = 128, block: int = 128, line: int = 32,
    scale: tuple[int, ...] | None = None, dtype: torch.dtype = torch.bfloat16,
) -> dict[str, Any]:  # fmt: skip
    """Queries over int8 pages in NZ; in place of the layout the heads of queries."""
    n, layout = (layout, "BSND") if isinstance(layout, int) else (64, layout)
    shape = scale or ((m, d) if layout == "BSND" else (m, 1, d))
    call = c8(s, d, n, m, shape, dtype) | {"input_layout": layout, "inner_precise": 1}
    query = t(2, s, n, d, dtype=dtype) if layout == "BSND" else t(2, n, s, d, dtype=dtype)
    cache = t(9, m, d // line, block, line, dtype=ONE_BYTE)
    table = {"block_table": t(2, 3, dtype=torch.int32), "block_size": block, "actual_seq_kvlen": [7, 9]}
    return call | table | {"query": query, "key": cache, "value": cache}


def without(call: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in call.items() if name not in names}


def mask(*shape: int) -> dict[str, Any]:
    return {"atten_mask": t(*shape, dtype=torch.bool)}


HALF = torch.float16
_BSH_PAGES = {form: pages(bsh(), form=form) for form in (3, 4, 5)}
_LATENT_PAGES = {
    form: pages(latent(), form=form, m=1, d=512) | {"key_rope": pages({}, form=form, m=1, d=64)["key"]}
    for form in (3, 4, 5)
}
_MERGED_PAGES = {
    form: pages(latent_bsh(d=512), form=form, m=1, d=512) | {"key_rope": pages({}, form=form, m=1, d=64)["key"]}
    for form in (3, 4, 5)
}
_NARROW_ROPE = {form: {"key_rope": pages({}, form=form, m=1, d=32)["key"]} for form in (3, 4, 5)}
WIDTH_EDGES: list[Edge] = [
    (bsnd(), bsnd() | {"key": t(2, 7, 2, 64)}, "K == D"),
    (bsh(), bsh() | {"key": t(2, 7, 128)}, "or K == num_key_value_heads * (H // num_query_heads)"),
    (pages(bsnd()), pages(bsnd(), d=64), "or K == num_key_value_heads * D"),
    (_BSH_PAGES[4], pages(bsh(), form=4, d=64), "K == H // num_query_heads"),
    (_LATENT_PAGES[5], pages(_LATENT_PAGES[5], form=5, m=1, d=256), "C * L == D"),
    (_MERGED_PAGES[5], pages(_MERGED_PAGES[5], form=5, m=1, d=256), "C * L == H // num_query_heads"),
    (latent(), latent() | {"key_rope": t(2, 7, 1, 32)}, "Kr == Dr"),
    (latent_bsh(), latent_bsh(32), "or Kr == num_key_value_heads * (Hr // num_query_heads)"),
    (_LATENT_PAGES[3], _LATENT_PAGES[3] | _NARROW_ROPE[3], "or Kr == num_key_value_heads * Dr"),
    (_MERGED_PAGES[4], _MERGED_PAGES[4] | _NARROW_ROPE[4], "Kr == Hr // num_query_heads"),
    (_LATENT_PAGES[5], _LATENT_PAGES[5] | _NARROW_ROPE[5], "Cr * Lr == Dr"),
    (_MERGED_PAGES[5], _MERGED_PAGES[5] | _NARROW_ROPE[5], "Cr * Lr == Hr // num_query_heads"),
    (bsh(), bsh() | {"value": t(2, 7, 257)}, "V % num_key_value_heads == 0"),
    (
        bsh() | {"num_key_value_heads": 0, "key": t(2, 7, 1024), "value": t(2, 7, 1024)},
        bsh() | {"num_key_value_heads": 0, "key": t(2, 7, 1024), "value": t(2, 7, 1025)},
        "V % num_query_heads == 0",
    ),
]
"""Keys, rotated keys and values of other widths than the heads have; the legal calls are legal on a host alone."""
HOST_EDGES: list[Edge] = [
    (bsnd(), bsnd() | {"num_query_heads": 0}, "num_query_heads > 0"),
    (bsnd(), bsnd() | {"num_key_value_heads": 3}, "num_key_value_heads == 0 or num_key_value_heads > 0"),
    (bsnd() | CAUSAL, bsnd() | CAUSAL | {"sparse_mode": 5}, "sparse_mode in (0, 1, 2, 3, 4)"),
    (bsh(), bsh() | {"query": t(2, 5, 1025)}, "H % num_query_heads == 0"),
    (bsnd(), bsnd() | {"num_query_heads": 4}, "N == num_query_heads"),
    (latent(), {n: v for n, v in latent().items() if n != "key_rope"}, "given(key_rope)"),
    (latent(), {n: v for n, v in latent().items() if n != "query_rope"}, "given(query_rope)"),
    (bsnd() | mask(1, 1, 5, 7) | {"sparse_mode": 1}, bsnd() | {"sparse_mode": 1}, "given(atten_mask)"),
    (tnd(), tnd() | mask(1, 1, 9, 9), "not given(atten_mask)"),
    (tnd(), tnd() | {"actual_seq_qlen": None}, "given(actual_seq_qlen) and given(actual_seq_kvlen)"),
    (bsnd(b=3), bsnd(b=3) | {"actual_seq_qlen": [1, 2]}, "length(actual_seq_qlen) >= B"),
    (bsnd(b=3), bsnd(b=3) | {"actual_seq_kvlen": [1, 2]}, "length(actual_seq_kvlen) >= B"),
    (tnd(), tnd() | {"actual_seq_qlen": [9]}, "length(actual_seq_qlen) == length(actual_seq_kvlen)"),
    (bsnd(), bsnd() | {"key": t(2, 7, 256), "value": t(2, 7, 256)}, "rank(key) == rank(query)"),
    (bsnd(), bsnd() | {"key": t(1, 7, 2, 128), "value": t(1, 7, 2, 128)}, "P == B"),
    (bsnd(), bsnd() | {"num_key_value_heads": 4}, "U == num_key_value_heads"),
    (bnsd(), bnsd() | {"num_key_value_heads": 4}, "Q == num_key_value_heads"),
    (tnd(), tnd() | {"num_key_value_heads": 4}, "Q == num_key_value_heads"),
    (tnd(ntd=True), tnd(ntd=True) | {"num_key_value_heads": 4}, "P == num_key_value_heads"),
    (pages(bsnd()), pages(bsnd()) | {"actual_seq_kvlen": None}, "given(actual_seq_kvlen)"),
    (pages(bsnd()), pages(bsnd()) | {"block_table": t(3, 3, dtype=torch.int32)}, "E == B"),
    (pages(tnd()), pages(tnd()) | {"block_table": t(3, 3, dtype=torch.int32)}, "E == length(actual_seq_kvlen)"),
    (pages(bsnd()), pages(bsnd()) | {"block_size": 256}, "Q == block_size"),
    (pages(bnsd(), form=4), pages(bnsd(), form=4) | {"block_size": 256}, "U == block_size"),
    (tnd() | {"learnable_sink": t(8)}, tnd() | {"learnable_sink": t(4)}, "Ns == num_query_heads"),
    (bsnd() | mask(5, 7), bsnd() | mask(4, 7), "size(atten_mask, -2) >= S"),
    (bsnd() | mask(5, 7), bsnd() | mask(5), "rank(atten_mask) in (2, 3, 4)"),
    (bsnd() | mask(2, 5, 7), bsnd() | mask(3, 5, 7), "size(atten_mask, 0) in (1, B)"),
    (latent_bsh(), latent_bsh() | {"query_rope": t(2, 5, 513)}, "Hr % num_query_heads == 0"),
    (bsnd() | BIAS, tnd() | {"pse_shift": t(1, 8, 9, 9)}, "packed sequences take no bias"),
    (bsnd() | BIAS, bsnd() | {"pse_shift": t(2, 2, 5, 7)}, "Np == num_query_heads"),
    (bsnd(b=3) | {"pse_shift": t(1, 8, 5, 7)}, bsnd(b=3) | BIAS, "Bp == 1 or Bp == B"),
    (bsnd() | {"pse_shift": t(2, 8, 9, 9)}, bsnd() | {"pse_shift": t(2, 8, 4, 7)}, "Sp >= S"),
    (bsnd() | BIAS, bsnd() | {"pse_shift": t(2, 8, 5, 6)}, "Tp >= Q"),
    (bsh() | BIAS, bsh() | {"pse_shift": t(2, 8, 5, 6)}, "Tp >= Q"),
    (bnsd() | BIAS, bnsd() | {"pse_shift": t(2, 8, 5, 6)}, "Tp >= U"),
    (pages(bsnd()) | {"pse_shift": t(2, 8, 5, 384)}, pages(bsnd()) | {"pse_shift": t(2, 8, 5, 383)}, "M * block_size"),
    (bsnd() | BIAS, bsnd() | BIAS | {"return_softmax_lse": True}, "whether it counts the bias"),
    (
        tnd() | {"learnable_sink": t(8)},
        tnd() | {"learnable_sink": t(8), "return_softmax_lse": True},
        "not return_softmax_lse",
    ),
]
F32 = torch.float32
WHOLE_HOST_EDGES: list[Edge] = [
    (whole(), whole() | {"query_quant_mode": 1}, "query_quant_mode in (0, 3)"),
    (whole(), whole() | {"key_quant_mode": 2, "value_quant_mode": 2}, "key_quant_mode == 0 and value_quant_mode == 0"),
    *(
        (whole(), without(whole(), name), f"given({name})")
        for name in ("dequant_scale_query", "dequant_scale_key", "dequant_scale_value")
    ),
    (latent(), latent() | {"dequant_scale_query": t(1, dtype=F32)}, "not given(dequant_scale_query)"),
    (whole(), whole() | {"query": t(2, 1, 8, 512)}, "dtype(query) == 'int8' and dtype(key) == 'int8'"),
    (bsnd(), bsnd() | {"query": t(2, 5, 8, 128, dtype=torch.int8)}, "dtype(query) != 'int8'"),
    (whole(), without(whole(), "query_rope", "key_rope"), "given(query_rope)"),
    (whole(), whole() | {"dequant_scale_query": t(2, 8, 1, dtype=F32)}, "shape(dequant_scale_query) == (B, S, N)"),
    (whole_bsh(2, 1, 8), whole_bsh(2, 8), "shape(dequant_scale_query) == (B, S, num_query_heads)"),
    (whole_tnd(), whole_tnd() | {"dequant_scale_query": t(9, 1, dtype=F32)}, "shape(dequant_scale_query) == (Tq, N)"),
    (whole(), whole() | {"dequant_scale_key": t(512, dtype=F32)}, "shape(dequant_scale_key) == (1,)"),
    (whole(), whole() | {"dequant_scale_value": t(1, 1, dtype=F32)}, "shape(dequant_scale_value) == (1,)"),
    (whole(), whole() | {"quant_scale_out": t(1)}, "not given(quant_scale_out)"),
]
WHOLE_HOST_ONLY: list[Edge] = [
    (whole_bnsd(), whole_bnsd(scales=(2, 1, 8)), "shape(dequant_scale_query) == (B, N, S)"),
    (
        whole_tnd() | {"input_layout": "NTD_TND", "query": t(8, 9, 512, dtype=torch.int8), "query_rope": t(8, 9, 64)}
        | {"dequant_scale_query": t(8, 9, dtype=F32)},
        whole_tnd() | {"input_layout": "NTD_TND", "query": t(8, 9, 512, dtype=torch.int8), "query_rope": t(8, 9, 64)},
        "shape(dequant_scale_query) == (N, Tq)",
    ),
]  # fmt: skip
CACHE_HOST_EDGES: list[Edge] = [
    (c8(), c8() | {"value": t(2, 7, 2, 128)}, "dtype(value) == dtype(key)"),
    (bsnd(), bsnd() | {"value": t(2, 7, 2, 128, dtype=torch.int8)}, FLOATS),
    (c8(), c8() | {"value": t(2, 7, 2, 64, dtype=torch.int8)}, "shape(value) == shape(key)"),
    *((c8(), without(c8(), name), f"given({name})") for name in SCALES),
    *((bsnd(), bsnd() | {name: t(1)}, CACHE) for name in SCALES),
    (bsnd(), bsnd() | dict.fromkeys(OFFSETS, t(1)), CACHE),
    *((c8() | offset(), without(c8() | offset(), name), f"given({name})") for name in OFFSETS),
    (c8(), c8() | {"key_quant_mode": 4, "value_quant_mode": 4}, "key_quant_mode in (0, 1, 2, 3)"),
    (tokens(), tokens(2, 7), "rank(dequant_scale_key) == 3"),
    (tokens(), tokens(1, 3, 7), "size(dequant_scale_key, 0) == 1 and size(dequant_scale_key, 1) == B"),
    (
        tokens(2, 2, 7) | _BY_HEADS,
        tokens(2, 8, 7) | _BY_HEADS,
        "size(dequant_scale_key, 0) == B and size(dequant_scale_key, 1)",
    ),
    (tokens(1, 2, 9), tokens(1, 2, 6), "size(dequant_scale_key, 2) >= Q"),
    (tokens_bnsd(7), tokens_bnsd(6), "size(dequant_scale_key, 2) >= U"),
    (tokens_paged(384), tokens_paged(383), "size(dequant_scale_key, 2) >= M * block_size"),
    (tokens(), tokens() | dict.fromkeys(OFFSETS, t(1, 2, 8)), "shape(dequant_offset_key) == shape(dequant_scale_key)"),
    (bsnd(), bsnd() | {"key_quant_mode": 2, "value_quant_mode": 2}, "key_quant_mode == 0"),
    (c8(), c8() | {"value_quant_mode": 1}, "value_quant_mode == key_quant_mode"),
    (c8(), c8(n=2) | {"num_key_value_heads": 0}, "num_key_value_heads > 0"),
    (c8(), c8() | {"query_rope": t(2, 1, 8, 64), "key_rope": t(2, 7, 2, 64)}, "not given(query_rope)"),
    (c8(), c8_bsh(), "input_layout in ('BSND', 'BSND_NBSD', 'BSND_BNSD')"),
    (c8(scale=(1,)), c8(scale=(2,)), "shape(dequant_scale_key) in ((1, num_key_value_heads, 1, D)"),
    (c8_heads(2), c8_heads(1, 2, 1, 128), "shape(dequant_scale_key) == (num_key_value_heads,)"),
    (c8(), c8() | {"dequant_scale_value": t(1)}, "shape(dequant_scale_value) == shape(dequant_scale_key)"),
    *(
        (c8() | offset(), c8() | offset() | {name: t(1)}, f"shape({name}) == shape(dequant_scale_key)")
        for name in OFFSETS
    ),
]


def float8_pages(block: int) -> dict[str, Any]:
    rows = dict.fromkeys(("key", "value"), t(9, block, 256, dtype=torch.float8_e4m3fn))
    return tokens(1, 2, 3 * block, call=pages(c8(), block)) | rows


FLOAT8 = dict.fromkeys(("key", "value"), t(2, 7, 2, 128, dtype=torch.float8_e4m3fn))
FLOAT8_EDGES: list[Edge] = [
    (tokens() | FLOAT8, tokens(), "dtype(key) == 'float8_e4m3fn'"),
    (tokens() | FLOAT8, tokens(2, 2, 7) | _BY_HEADS | FLOAT8, "key_quant_mode in (0, 1)"),
    (c8() | FLOAT8, c8(scale=(1,)) | FLOAT8, "shape(dequant_scale_key) != (1,)"),
    (tokens() | FLOAT8, tokens() | FLOAT8 | {"return_softmax_lse": True}, "not return_softmax_lse"),
    (c8() | FLOAT8, c8() | offset() | FLOAT8, "dtype(key) in ('int8',)"),
    *(
        (c8() | FLOAT8, c8() | FLOAT8 | {name: t(1, 2, 1, 128, dtype=HALF)}, f"dtype({name}) == dtype(query)")
        for name in SCALES
    ),
    (float8_pages(64), float8_pages(48), "block_size % 32 == 0"),
]
CACHE_EDGES: list[Edge] = [
    *(
        (c8(), c8() | {name: t(1, 2, 1, 128, dtype=HALF)}, f"dtype({name}) == dtype(query)") for name in SCALES
    ),
    *(
        (c8() | offset(), c8() | offset() | {name: t(1, 2, 1, 128, dtype=HALF)}, f"dtype({name}) == dtype(query)")
        for name in OFFSETS
    ),
    *((tokens(), tokens() | {name: t(1, 2, 7)}, f"dtype({name}) == 'float32'") for name in SCALES),
    (tokens(), tokens() | dict.fromkeys(OFFSETS, t(1, 2, 7)), "not given(dequant_offset_key)"),
    (c8(5), tokens(1, 2, 7, call=c8(5)), "key_quant_mode == 0"),
    (c8(5), c8(5) | {"input_layout": "BSND_NBSD"}, "input_layout in ('BSND', 'BNSD')"),
    (c8(d=96), c8(d=80), "D % 32 == 0"),
    (c8(), c8() | SUMS, "not return_softmax_lse"),
    (c8(16), c8(17), "S <= 16"),
    (tokens(), tokens() | FLOAT8, "dtype(key) != 'float8_e4m3fn'"),
    (c8_pages(96), c8_pages(48), "block_size % 32 == 0"),
    (c8(5), c8_pages(128, s=5), "not given(block_table)"),
    (c8(5), c8(5, dtype=HALF), "dtype(query) == 'bfloat16'"),
    (c8(), c8(scale=(2, 128)), "shape(dequant_scale_key) in ((1, num_key_value_heads, 1, D), (1,))"),
    (c8(5), c8(5, scale=(1,)), "shape(dequant_scale_key) in ((num_key_value_heads, 1, D), (num_key_value_heads, D))"),
    (nz(), nz(dtype=HALF), "dtype(query) == 'bfloat16'"),
    (nz(), nz(d=64), "D == 128"),
    (nz(), nz(line=16), "L == 32"),
    *((nz(*pair), nz(32, 8), "N == 10 and num_key_value_heads == 1 or") for pair in ((10, 1), (64, 8), (80, 8))),
    (nz(128, 16), nz(40, 8), "N == 10 and num_key_value_heads == 1 or"),
    (nz(block=512), nz(block=256), "block_size in (128, 512)"),
    (nz(), nz() | dict.fromkeys(OFFSETS, t(8, 128)), "not given(dequant_offset_key)"),
    (nz(), nz(scale=(8,)) | {"key_quant_mode": 2, "value_quant_mode": 2}, "key_quant_mode == 0"),
    (nz("BNSD"), nz("BNSD", scale=(8, 128)), "shape(dequant_scale_key) == (num_key_value_heads, 1, D)"),
    (nz(), nz(scale=(8, 1, 128)), "shape(dequant_scale_key) == (num_key_value_heads, D)"),
    (nz(), nz() | {"inner_precise": 0}, "inner_precise == 1"),
    (nz(), nz() | {"pse_shift": t(2, 64, 1, 384 * 4)}, "not given(pse_shift)"),
    (nz(), nz() | {"actual_seq_qlen": [1, 1]}, "not given(actual_seq_qlen)"),
    (nz(), nz() | mask(2, 1536), "sparse_mode == 0 and not given(atten_mask)"),
    (nz(s=5) | CAUSAL, nz(s=5), "sparse_mode == 3"),
    (nz(s=5) | CAUSAL, nz(s=5) | CAUSAL | {"atten_mask": FULL[None]}, "rank(atten_mask) == 2"),
]  # fmt: skip
WHOLE_EDGES: list[Edge] = [
    (whole(), whole_bnsd(), "input_layout in ('BSH', 'BSND', 'TND', 'BSH_NBSD', 'BSND_NBSD', 'TND_NTD')"),
    (
        whole(),
        whole() | {"query_rope": t(2, 1, 8, 64, dtype=HALF), "key_rope": t(9, 1, 4, 128, 16, dtype=HALF)},
        "dtype(query_rope) == 'bfloat16'",
    ),
    (whole(), whole() | whole_pages(3), "given(block_table) and rank(key) == 5"),
    (
        whole(),
        whole() | dict.fromkeys(("key", "value"), t(9, 1, 32, 128, 16, dtype=torch.int8)),
        "C * L == 512 and L == 32",
    ),
    (whole(), whole() | {"key_rope": t(9, 1, 2, 128, 32)}, "Cr * Lr == 64 and Lr == 16"),
    (
        whole(),
        whole() | dict.fromkeys(("key", "value"), t(9, 1, 16, 256, 32, dtype=torch.int8))
        | {"key_rope": t(9, 1, 4, 256, 16), "block_size": 256},
        "block_size == 128",
    ),
    (whole(5) | CAUSAL, whole(5) | CAUSAL | {"sparse_mode": 4}, "sparse_mode in (0, 3)"),
    (whole(), whole() | mask(2, 1, 1, 384), "not given(atten_mask)"),
    (whole(), whole() | CAUSAL, "sparse_mode == 0"),
    (whole(), whole() | {"return_softmax_lse": True}, "not return_softmax_lse"),
    (whole(5) | CAUSAL, whole(5), "sparse_mode == 3"),
    (whole(16) | CAUSAL, whole(17) | CAUSAL, "S <= 16"),
    (whole(), whole() | {"dequant_scale_query": t(2, 1, 8)}, "requires dequant_scale_query in float32"),
    *((whole(), whole() | {name: t(1)}, f"dtype({name}) == 'float32'") for name in SCALES),
]  # fmt: skip
KERNEL_EDGES: list[Edge] = [
    (bsnd(), bsnd() | {"quant_scale_out": t(1)}, "not given(quant_scale_out)"),
    (bsnd(), bsnd() | {"key": t(2, 7, 2, 128, dtype=HALF)}, "dtype(key) == dtype(query)"),
    (bsnd(), bsnd() | {"value": t(2, 7, 2, 128, dtype=HALF)}, "dtype(value) == dtype(query)"),
    (bsnd(), bsnd() | {"query": t(2, 5, 8, 128, dtype=torch.float32)}, "requires query in bfloat16, float16"),
    (bsnd(n=256, m=8), bsnd(n=264, m=8), "num_query_heads <= 256"),
    (bsnd(n=64, m=1), bsnd(n=128, m=1), "num_query_heads <= 64 * num_key_value_heads"),
    (bsnd(b=1), bsnd(b=65537), "B <= 65536"),
    (bsnd(d=80), bsnd(d=72), "D % 16 == 0 and D <= 512"),
    (bsnd(d=512), bsnd(d=528), "D % 16 == 0 and D <= 512"),
    (bsh(80), bsh(72), "H // num_query_heads % 16 == 0"),
    (bsnd(), bsnd() | {"value": t(2, 7, 2, 64)}, "shape(key) == shape(value)"),
    (bsnd() | CAUSAL, bsnd() | {"sparse_mode": 3}, "given(atten_mask)"),
    (bsnd() | CAUSAL, bsnd() | {"sparse_mode": 3} | mask(1, 1, 5, 7), "size(atten_mask, -1) == 2048"),
    (latent_bsh(), latent_bsh(d=256), "H // num_query_heads in (128, 512)"),
    (bsnd() | mask(5, 7), bsnd() | mask(5, 7) | {"input_layout": "BSND_NBSD"}, "rank(atten_mask) > 2"),
    (bsnd() | mask(5, 7), bsnd() | mask(6, 7), "size(atten_mask, 0) == S"),
    (bsnd(s=1) | mask(2, 7), bsnd(s=1) | mask(3, 7), "size(atten_mask, 0) == B"),
    (bsnd() | mask(2, 1, 5, 7), bsnd() | mask(2, 8, 5, 7), "size(atten_mask, 1) == 1"),
    (bsnd() | mask(2, 1, 5, 7), bsnd() | mask(2, 1, 5, 6), "size(atten_mask, -1) >= Q"),
    (bnsd() | mask(2, 1, 5, 7), bnsd() | mask(2, 1, 5, 6), "size(atten_mask, -1) >= U"),
    (pages(bsnd()) | mask(2, 1, 5, 384), pages(bsnd()) | mask(2, 1, 5, 383), "size(atten_mask, -1) >= M * block_size"),
    (bnsd("BNSD_BSND"), bnsd("BNSD_BSND", s=1), "S > 1"),
    (bnsd("BNSD_NBSD", s=16), bnsd("BNSD_NBSD", s=17), "1 < S and S <= 16"),
    (bsnd(s=1) | CAUSAL, bsnd(s=1) | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 1, 3)"),
    (bsnd(s=1) | mask(2, 7), bsnd(s=1) | mask(2, 7) | {"pre_tokens": 3}, "pre_tokens >= 2147483647"),
    (bsnd(s=1), bsnd(s=1) | {"inner_precise": 2}, "inner_precise in (0, 1)"),
    (bsnd() | {"inner_precise": 3}, bsnd() | {"inner_precise": 4}, "inner_precise in (0, 1, 2, 3)"),
    (pages(bsnd(s=1), 16), pages(bsnd(s=1), 24), "block_size % 16 == 0 and block_size <= 512"),
    (pages(bsnd()), pages(bsnd(), 64), "block_size % 128 == 0"),
    (pages(tnd(), 1024), pages(tnd(), 1040), "block_size % 16 == 0 and block_size <= 1024"),
    (pages(bnsd(), form=4), pages(bsnd(), form=4), "rank(key) == 3"),
    (pages(bnsd(), form=4), pages(bnsd(), form=5), "rank(key) < 5"),
    (pages(bsnd(n=8, m=8), m=8), pages(bsnd(n=128, m=128, d=512), m=128, d=512), "K <= 65535"),
    (tnd() | CAUSAL, tnd() | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 3, 4)"),
    (tnd(), tnd() | {"input_layout": "TND_NTD"}, "input_layout in ('TND', 'NTD_TND')"),
    (tnd(), tnd(d=64), "D in (128, 192)"),
    (tnd(d=64, m=8), tnd(d=64, m=8, v=128), "K == D and V == D"),
    (tnd(d=192, v=128), tnd(d=192, v=64), "K == D and V in (128, 192)"),
    (tnd(d=192, m=8, v=192), tnd(d=192, v=192), "V == 128 or num_key_value_heads == 0"),
    (tnd(d=192, m=8, v=128, ntd=True), tnd(d=192, m=8, v=192, ntd=True), "V == 128"),
    (pages(tnd(), form=4), pages(tnd(m=8), form=4, m=8), "rank(key) == 3"),
    (
        tnd() | {"actual_seq_qlen": [9] * 4096, "actual_seq_kvlen": [9] * 4096},
        tnd() | {"actual_seq_qlen": [9] * 4097, "actual_seq_kvlen": [9] * 4097},
        "length(actual_seq_qlen) <= 4096",
    ),
    (tnd(), tnd() | {"inner_precise": 2}, "inner_precise == 0"),
    (
        {n: v.half() if isinstance(v, Tensor) else v for n, v in tnd().items()} | {"inner_precise": 1},
        {n: v.half() if isinstance(v, Tensor) else v for n, v in tnd().items()} | {"inner_precise": 2},
        "inner_precise in (0, 1)",
    ),
    (tnd() | {"learnable_sink": t(8)}, bsnd() | {"learnable_sink": t(8)}, "input_layout in ('TND', 'NTD_TND') and D"),
    (
        tnd() | {"learnable_sink": t(8)},
        tnd() | {"learnable_sink": t(8), "query_rope": t(9, 8, 64), "key_rope": t(9, 2, 64)},
        "not given(query_rope)",
    ),
    (bsnd() | BIAS, bsnd() | {"pse_shift": t(2, 8, 5, 7, dtype=torch.float16)}, "dtype(pse_shift) == dtype(query)"),
    (bsnd() | BIAS, bsnd() | {"pse_shift": t(2, 8, 5, 7, dtype=torch.float32)}, "requires pse_shift in"),
    (bsnd(s=1) | {"pse_shift": t(2, 8, 1, 7)}, bsnd(s=1) | BIAS, "Sp == 1"),
    (bsnd() | BIAS, latent(d=128) | BIAS, "not given(query_rope)"),
    (latent(), latent(d=256), "D in (128, 512)"),
    (latent(), latent(rope=32), "Dr == 64"),
    (latent(n=128), latent(n=256), "num_query_heads in (1, 2, 4, 8, 16, 32, 64, 128)"),
    (latent(n=128), latent(n=128) | {"query_rope": None, "key_rope": None}, "<= 64 * num_key_value_heads"),
    (latent(), latent(n=8, m=2), "num_key_value_heads == 1 and num_query_heads in (1, 2, 4"),
    (latent() | CAUSAL, latent() | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 3, 4)"),
    (
        latent() | {"return_softmax_lse": True},
        latent() | {"return_softmax_lse": True, "input_layout": "BSND_NBSD"},
        "input_layout in ('BSND', 'BNSD')",
    ),
    (latent(d=128), latent() | {"input_layout": "BSND_BNSD"}, "input_layout in ('BSH', 'BSND', 'BNSD', 'BNSD_NBSD'"),
    (latent(d=128), latent(d=128) | {"input_layout": "BSND_NBSD"}, "input_layout in ('BSH', 'BSND', 'TND', 'BNSD'"),
    (latent(d=128) | CAUSAL, latent(d=128) | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 3, 4)"),
    (latent(d=128), latent(d=128) | mask(2, 1, 5, 7), "not given(atten_mask)"),
    (latent_bsh(), latent_bsh(32) | {"key_rope": t(2, 7, 32)}, "Hr == 64 * num_query_heads"),
    (latent_bsh(), latent_bsh() | {"input_layout": "BSH_NBSD"}, "input_layout in ('BSH', 'BSND', 'TND', 'BNSD'"),
    (latent_bsh() | CAUSAL, latent_bsh() | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 3, 4)"),
    (latent_bsh(), latent_bsh() | mask(2, 1, 5, 7), "not given(atten_mask)"),
    (latent_bsh(d=512), latent_bsh(d=512, n=6), "num_key_value_heads == 1 and num_query_heads in (1, 2, 4"),
    (latent_bsh(d=512) | CAUSAL, latent_bsh(d=512) | CAUSAL | {"sparse_mode": 2}, "sparse_mode in (0, 3, 4)"),
    (latent() | SUMS, latent_bsh(d=512) | SUMS, "input_layout in ('BSND', 'BNSD')"),
    (latent_bsh(), latent_bsh(d=512) | {"input_layout": "BSH_BNSD"}, "input_layout in ('BSH', 'BSND', 'BNSD', 'BNSD_"),
    (latent(), latent() | {"query_rope": t(2, 5, 8, 64, dtype=HALF)}, "dtype(query_rope) == dtype(query)"),
    (bsnd(), bsnd() | {"input_layout": "BSND_BNSD"}, "input_layout not in ('BSH_BNSD', 'BSND_BNSD')"),
]


def fused(layout: str = "BSND", n: int = 8, d: int = 128, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    sizes = {"BSND": (2, 5, n, d), "BSH": (2, 5, n * d), "TND": (9, n, d)}[layout]
    lengths = {"actual_seq_qlen": [3, 9], "actual_seq_kvlen": [4, 9]} if layout == "TND" else {}
    x = t(*sizes, dtype=dtype)
    return {"query": x, "key": x, "value": x, "head_num": n, "input_layout": layout} | lengths


_ROWS = mask(1, 1, 5, 5)
FUSION_HOST_EDGES: list[Edge] = [
    (fused("BSH"), fused("BSH") | {"value": t(2, 5, 1023)}, "V % (K // (H // head_num)) == 0"),
    (fused() | _ROWS, fused() | mask(1, 5, 5), "rank(atten_mask) in (2, 4)"),
    (fused() | _ROWS, fused() | mask(3, 1, 5, 5), "size(atten_mask, 0) in (1, B)"),
    (fused() | _ROWS, fused() | mask(2, 8, 5, 5), "size(atten_mask, 1) == 1"),
    (fused() | _ROWS, fused() | mask(1, 1, 5, 6), "size(atten_mask, -2) == S and size(atten_mask, -1) == U"),
    (fused(), fused() | {"pse": t(2, 8, 5, 5)}, "not given(pse)"),
    (fused(), fused() | {"keep_prob": 0.5}, "keep_prob == 1"),
    (fused(), fused() | {"softmax_layout": "TND"}, "softmax_layout == ''"),
    (fused(), fused() | {"sparse_mode": 5}, "sparse_mode in (0, 1, 2, 3, 4)"),
    (fused() | {"sparse_mode": 1} | mask(5, 5), fused() | {"sparse_mode": 1}, "given(atten_mask)"),
    (fused(), fused() | {"head_num": 4}, "N == head_num and head_num % M == 0"),
    (fused("BSH"), fused("BSH") | {"key": t(2, 5, 500)}, "H % head_num == 0 and K % (H // head_num) == 0"),
    (fused("TND"), fused("TND") | {"actual_seq_qlen": None}, "given(actual_seq_qlen) and given(actual_seq_kvlen)"),
    (fused(), fused() | {"actual_seq_qlen": [1, 2]}, "not given(actual_seq_qlen) and not given(actual_seq_kvlen)"),
    (fused("TND"), fused("TND") | mask(9, 9), "not given(atten_mask)"),
    (fused() | {"sink": t(8, dtype=torch.float32)}, fused() | {"sink": t(4, dtype=torch.float32)}, "Ns == head_num"),
]
FUSION_EDGES: list[Edge] = [
    (fused(), fused() | {"key": t(2, 5, 8, 128, dtype=HALF)}, "dtype(key) == dtype(query)"),
    (fused(), fused() | {"value": t(2, 5, 8, 128, dtype=HALF)}, "dtype(value) == dtype(query)"),
    (fused(n=256), fused(n=257), "head_num <= 256"),
    (fused(d=768), fused(d=769), "D <= 768"),
    (fused("BSH", d=768), fused("BSH", d=769), "H // head_num <= 768"),
    (fused() | CAUSAL, fused() | CAUSAL | mask(5, 5), "size(atten_mask, -1) == 2048"),
]
