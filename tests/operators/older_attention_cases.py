"""Calls of the operators that npu_fused_infer_attention_score has replaced, on both sides of their limits."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators import CHIPS, HOST
from tests.operators.attention_limits_cases import CAUSAL, HALF, Edge, mask, t

A2, A3, _ = CHIPS


def older(s: int = 5, keys: int = 5, d: int = 128, n: int = 8, m: int = 8, b: int = 2) -> dict[str, Any]:
    kv = {"key": t(b, keys, m, d), "value": t(b, keys, m, d), "input_layout": "BSND"}
    return kv | {"query": t(b, s, n, d), "num_heads": n, "num_key_value_heads": m}


def older_bnsd(s: int = 5, keys: int = 5, m: int = 8) -> dict[str, Any]:
    kv = {"key": t(2, m, keys, 128), "value": t(2, m, keys, 128), "input_layout": "BNSD"}
    return kv | {"query": t(2, 8, s, 128), "num_heads": 8, "num_key_value_heads": m}


def one(**more: Any) -> dict[str, Any]:
    return older(s=1) | more


def in_pages(form: int = 3, block: int = 128, m: int = 8, bnsd: bool = False, d: int = 128) -> dict[str, Any]:
    cache = {3: t(9, block, m * d), 4: t(9, m, block, d)}[form]
    table = {"block_table": t(2, 3, dtype=torch.int32), "block_size": block, "actual_seq_lengths": [7, 9]}
    call = older_bnsd(s=1, m=m) if bnsd else older(s=1, n=m, m=m, d=d)
    return call | table | {"key": cache, "value": cache}


_JOINED = "num_key_value_heads == 0 and K == num_heads * {0} or K == num_key_value_heads * {0}"
_SHARED = "num_key_value_heads == 0 and {0} == num_heads or {0} == num_key_value_heads"


def merged(s: int = 5, keys: int = 5) -> dict[str, Any]:
    kv = {"key": t(2, keys, 1024), "value": t(2, keys, 1024), "input_layout": "BSH"}
    return kv | {"query": t(2, s, 1024), "num_heads": 8, "num_key_value_heads": 8}


def of_int8(call: dict[str, Any] | None = None) -> dict[str, Any]:
    """Keys and values in int8, with one scale each."""
    call = call or one()
    rows = t(*call["key"].shape, dtype=torch.int8)
    return call | {"key": rows, "value": rows, "antiquant_scale": t(2)}


def _biased(keys: int, rows: int = 1) -> dict[str, Any]:
    return {"pse_shift": t(2, 8, rows, keys)}


def _computed(call: dict[str, Any], in_rows: dict[str, Any]) -> list[Edge]:
    """Edges of arguments that decompositions of both operators compute, and no chip takes."""
    rows, scale = call["query"].shape[1], {"quant_scale2": t(1)}
    return [
        (in_rows, in_rows | {"query": t(2, rows, 1023)}, "H % num_heads == 0"),
        (call | scale | {"quant_offset2": t(1)}, call | scale | {"quant_offset2": t(2)}, "shape(quant_offset2) =="),
        (call | {"quant_scale2": t(1024)}, call | {"quant_scale2": t(8)}, "numel(quant_scale2) in (1, N * D)"),
        (in_rows | {"quant_scale2": t(1024)}, in_rows | {"quant_scale2": t(8)}, "numel(quant_scale2) in (1, H)"),
        (call | _biased(5, rows), call | {"pse_shift": t(2, 4, rows, 5)}, "Np == num_heads and"),
    ]


def _refused(call: dict[str, Any], in_rows: dict[str, Any]) -> list[Edge]:
    """Edges of what both decompositions compute, on chips."""
    given = {"pse_shift": t(2, 8, call["query"].shape[1], 5), "quant_scale2": t(1)}
    refused = ((call, call | {name: value}, f"not given({name})") for name, value in given.items())
    return [(call, in_rows, "input_layout != 'BSH'"), *refused]


_LEFT = one(actual_seq_lengths=[3], kv_padding_size=t(1, dtype=torch.int64))
INCRE_HOST_EDGES: list[Edge] = [
    (one(), one(num_heads=0), "num_heads > 0"),
    (one(), one(num_heads=4), "N == num_heads"),
    (one(), one(num_key_value_heads=3), "num_key_value_heads == 0 or num_key_value_heads > 0 and"),
    (one(), older(s=2), "S == 1"),
    (one(), one() | {"key": t(1, 5, 8, 128), "value": t(1, 5, 8, 128)}, "P == B and rank(key) == 4"),
    (one(), one(quant_offset2=t(1)), "given(quant_scale2)"),
    (one(), one(num_key_value_heads=4), _SHARED.format("U")),
    (older_bnsd(s=1), older_bnsd(s=1) | {"num_key_value_heads": 4}, _SHARED.format("Q")),
    (in_pages(), in_pages() | {"num_key_value_heads": 4}, _JOINED.format("D")),
    (
        one(actual_seq_lengths=[3]),
        older(s=1, b=3) | {"actual_seq_lengths": [3, 3]},
        "length(actual_seq_lengths) == 1 or",
    ),
    (in_pages(), in_pages() | {"actual_seq_lengths": None}, "given(actual_seq_lengths)"),
    (in_pages(), in_pages() | {"block_table": t(3, 3, dtype=torch.int32), "actual_seq_lengths": [1, 2, 3]}, "E == B"),
    (in_pages(), in_pages() | {"block_size": 256}, "Q == block_size"),
    (one() | mask(2, 5), one() | mask(5), "rank(atten_mask) in (2, 3, 4)"),
    (one() | mask(2, 5), one() | mask(1, 5), "size(atten_mask, 0) == B"),
    (one() | mask(2, 5), one() | mask(2, 4), "size(atten_mask, -1) >= Q"),
    (in_pages(4, bnsd=True), in_pages(4, bnsd=True) | {"block_size": 256}, "U == block_size"),
    (older_bnsd(s=1) | mask(2, 5), older_bnsd(s=1) | mask(2, 4), "size(atten_mask, -1) >= U"),
    (in_pages() | mask(2, 384), in_pages() | mask(2, 383), "size(atten_mask, -1) >= M * block_size"),
]
INCRE_HOST_ONLY: list[Edge] = [
    (one() | mask(2, 1, 5), one() | mask(3, 1, 5), "size(atten_mask, 0) in (1, B)"),
    (one() | mask(2, 1, 5), one() | mask(2, 0, 5), "size(atten_mask, -2) >= S"),
    (one() | mask(2, 1, 1, 5), one() | mask(2, 8, 1, 5), "size(atten_mask, 1) == 1"),
    *_computed(one(), merged(s=1)),
    (merged(s=1), merged(s=1) | {"key": t(1, 5, 1024), "value": t(1, 5, 1024)}, "P == B"),
    (merged(s=1), merged(s=1) | {"num_key_value_heads": 4}, _JOINED.format("(H // num_heads)")),
    (in_pages() | {"pse_shift": t(2, 8, 1, 384)}, in_pages() | {"pse_shift": t(2, 8, 1, 383)}, "Tp >= M * block_size"),
    (older_bnsd(s=1) | _biased(5), older_bnsd(s=1) | _biased(4), "Tp >= U"),
    (one(**_biased(5)), one(**_biased(4)), "Tp >= Q"),
    (of_int8(), of_int8() | {"antiquant_scale": None}, "given(antiquant_scale)"),
    (of_int8(), one(antiquant_scale=t(2)), "dtype(key) == 'int8' and dtype(value) == 'int8'"),
    (of_int8() | {"antiquant_scale": t(2, 1024)}, of_int8() | {"antiquant_scale": t(2, 8)}, "(2, 2 * U * D)"),
    (
        of_int8(call=older_bnsd(s=1)),
        of_int8(call=older_bnsd(s=1)) | {"antiquant_scale": t(2, 8)},
        "numel(antiquant_scale) in (2, 2 * Q * D)",
    ),
    (of_int8(call=in_pages()), of_int8(call=in_pages()) | {"antiquant_scale": t(2, 8)}, "(2, 2 * K)"),
    (of_int8(), of_int8() | {"antiquant_scale": t(1, 2)}, "size(antiquant_scale, 0) == 2"),
    (
        of_int8() | {"antiquant_offset": t(2)},
        of_int8() | {"antiquant_offset": t(2, 1)},
        "shape(antiquant_offset) == shape(antiquant_scale)",
    ),
    (_LEFT, _LEFT | {"kv_padding_size": t(2, dtype=torch.int64)}, "numel(kv_padding_size) == 1"),
    (_LEFT, _LEFT | _biased(5), "not given(atten_mask) and not given(pse_shift)"),
]
_LONG = 262144
INCRE_EDGES: list[Edge] = [
    *_refused(one(), merged(s=1)),
    (one(), of_int8(), "not given(antiquant_scale)"),
    (one(), _LEFT, "not given(kv_padding_size)"),
    *(
        (one(), one(**{name: t(2, 5, 8, 128, dtype=HALF)}), f"dtype({name}) == dtype(query)")
        for name in ("key", "value")
    ),
    (older(s=1, n=256, m=256), older(s=1, n=257, m=257), "num_heads <= 256"),
    (older(s=1, n=64, m=1), older(s=1, n=65, m=1), "num_heads <= 64 * num_key_value_heads"),
    (older(s=1, d=512), older(s=1, d=520), "D % 16 == 0 and D <= 512"),
    (older(s=1, b=65535), older(s=1, b=65536), "B <= 65535"),
    (older(s=1, keys=_LONG), older(s=1, keys=_LONG + 1), "Q <= 262144"),
    (older_bnsd(s=1, keys=_LONG), older_bnsd(s=1, keys=_LONG + 1), "U <= 262144"),
    (in_pages(block=512), in_pages(block=528), "block_size % 16 == 0 and block_size <= 512"),
    (in_pages(), in_pages(4), "rank(key) == 3"),
    (in_pages(m=8), in_pages(m=256, d=256), "K <= 65535"),
    (one(inner_precise=1), one(inner_precise=2), "inner_precise in (0, 1)"),
]
_DOWN = older() | CAUSAL
_ENDS = {"actual_seq_lengths": [5, 5]}
PROMPT_HOST_EDGES: list[Edge] = [
    (older(), older() | {"num_heads": 0}, "num_heads > 0"),
    (older(), older() | {"num_heads": 4}, "N == num_heads"),
    (older(), older() | {"num_key_value_heads": 3}, "num_key_value_heads == 0 or num_key_value_heads > 0 and"),
    (older(), older() | {"quant_offset2": t(1)}, "given(quant_scale2)"),
    (_DOWN, _DOWN | {"sparse_mode": 5}, "sparse_mode in (0, 1, 2, 3, 4)"),
    (_DOWN, older() | {"sparse_mode": 3}, "given(atten_mask)"),
    (_DOWN, older(keys=6) | CAUSAL, "T == S and not given(actual_seq_lengths)"),
    (older(), older() | {"num_key_value_heads": 4}, _SHARED.format("M")),
    (
        older(b=3) | {"actual_seq_lengths_kv": [5]},
        older(b=3) | {"actual_seq_lengths_kv": [5, 5]},
        "length(actual_seq_lengths_kv) == 1 or",
    ),
]
PROMPT_HOST_ONLY: list[Edge] = [
    *_computed(older(), merged()),
    (older(b=3) | {"actual_seq_lengths": [5]}, older(b=3) | _ENDS, "length(actual_seq_lengths) == 1 or"),
    (older() | mask(5, 5), older() | mask(5, 4), "size(atten_mask, -1) >= T"),
    (older() | mask(5, 5), older() | mask(4, 5), "size(atten_mask, -2) >= S"),
    (older() | mask(5, 5), older() | mask(5), "rank(atten_mask) in (2, 3, 4)"),
    (older() | mask(2, 5, 5), older() | mask(3, 5, 5), "size(atten_mask, 0) in (1, B)"),
    (older() | mask(2, 1, 5, 5), older() | mask(2, 8, 5, 5), "size(atten_mask, 1) == 1"),
    (older(s=1, b=1) | mask(1, 5), older(s=1, b=1) | mask(2, 5), "size(atten_mask, 0) == B"),
    (older(s=1) | mask(1, 1, 5), older(s=1) | mask(2, 5), "rank(atten_mask) > 2 or S > 1 or B == 1"),
    (merged(), merged() | {"num_key_value_heads": 4}, _JOINED.format("(H // num_heads)")),
    (older() | _biased(5, 5), older() | _biased(4, 5), "Tp >= T"),
]
_FAR = 20971520
PROMPT_EDGES: list[Edge] = [
    *_refused(older(), merged()),
    (older(), older() | _ENDS, "not given(actual_seq_lengths)"),
    (older(), older() | {"sparse_mode": 1} | mask(5, 5), "sparse_mode in (0, 2, 3, 4)"),
    (older(), older() | mask(5, 5), "not given(atten_mask)"),
    *(
        (older(), older() | {name: t(2, 5, 8, 128, dtype=HALF)}, f"dtype({name}) == dtype(query)")
        for name in ("key", "value")
    ),
    (older(n=256, m=256), older(n=257, m=257), "num_heads <= 256"),
    (older(n=64, m=1), older(n=65, m=1), "num_heads <= 64 * num_key_value_heads"),
    (older(d=512), older(d=520), "D % 16 == 0 and D <= 512"),
    (older(b=65536), older(b=65537), "B <= 65536"),
    (older(n=255, m=255, d=256), older(n=256, m=256, d=256), "N * D < 65535"),
    (older(s=_FAR), older(s=_FAR + 1), "S <= 20971520 and T <= 20971520"),
    (_DOWN, _DOWN | mask(5, 5), "size(atten_mask, -1) == 2048"),
]


def _in_tensors(call: dict[str, Any]) -> dict[str, Any]:
    return {name: torch.tensor(value) if isinstance(value, list) else value for name, value in call.items()}


_INCRE = [
    *(((HOST, A2), *edge) for edge in INCRE_HOST_EDGES),
    *(((HOST,), *edge) for edge in INCRE_HOST_ONLY),
    *(((A2,), *edge) for edge in INCRE_EDGES),
]
_PROMPT = [
    *(((HOST, A2, A3), *edge) for edge in PROMPT_HOST_EDGES),
    *(((HOST,), *edge) for edge in PROMPT_HOST_ONLY),
    *(((A2, A3), *edge) for edge in PROMPT_EDGES),
]
EDGES = [
    *(("npu_incre_flash_attention", *edge) for edge in _INCRE),
    *(
        ("npu_incre_flash_attention.tensor_lengths", chips, _in_tensors(legal), _in_tensors(illegal), text)
        for chips, legal, illegal, text in _INCRE
    ),
    *(("npu_prompt_flash_attention", *edge) for edge in _PROMPT),
]
