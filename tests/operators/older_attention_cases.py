"""Calls of the operators that npu_fused_infer_attention_score has replaced, on both sides of their limits."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators import CHIPS, HOST
from tests.operators.attention_limits_cases import CAUSAL, FULL, HALF, Edge, mask, t

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


_SHARED = "num_key_value_heads == 0 and {0} == num_heads or {0} == num_key_value_heads"
_OLDER_UNUSED = ("padding_mask", "pse_shift", "quant_scale1", "quant_scale2", "quant_offset2")
INCRE_UNUSED = (
    *_OLDER_UNUSED,
    "antiquant_scale",
    "antiquant_offset",
    "dequant_scale1",
    "dequant_scale2",
    "kv_padding_size",
)
INCRE_HOST_EDGES: list[Edge] = [
    *((one(), one(**{name: t(2)}), f"not given({name})") for name in INCRE_UNUSED),
    (one(), one(num_heads=4), "N == num_heads"),
    (one(), one(num_key_value_heads=3), "num_key_value_heads == 0 or num_key_value_heads > 0 and"),
    (one(), older(s=2), "S == 1"),
    (one(), one() | {"key": t(1, 5, 8, 128), "value": t(1, 5, 8, 128)}, "P == B and rank(key) == 4"),
    (one(), one(num_key_value_heads=4), _SHARED.format("U")),
    (older_bnsd(s=1), older_bnsd(s=1) | {"num_key_value_heads": 4}, _SHARED.format("Q")),
    (in_pages(), in_pages() | {"num_key_value_heads": 4}, _SHARED.format("K // D")),
    (
        one(actual_seq_lengths=[3]),
        older(s=1, b=3) | {"actual_seq_lengths": [3, 3]},
        "length(actual_seq_lengths) == 1 or",
    ),
    (in_pages(), in_pages() | {"actual_seq_lengths": None}, "given(actual_seq_lengths)"),
    (in_pages(), in_pages() | {"block_table": t(3, 3, dtype=torch.int32), "actual_seq_lengths": [1, 2, 3]}, "E == B"),
    (in_pages(), in_pages() | {"block_size": 256}, "Q == block_size"),
    (in_pages(4, bnsd=True), in_pages(4, bnsd=True) | {"block_size": 256}, "U == block_size"),
]
_LONG = 262144
INCRE_EDGES: list[Edge] = [
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
    (one(atten_mask=t(2, 5, dtype=torch.bool)), one(atten_mask=t(1, 5, dtype=torch.bool)), "size(atten_mask, 0) == B"),
    (one(atten_mask=t(2, 5, dtype=torch.bool)), one(atten_mask=t(2, 4, dtype=torch.bool)), "size(atten_mask, -1) >= Q"),
    (
        older_bnsd(s=1) | {"atten_mask": t(2, 5, dtype=torch.bool)},
        older_bnsd(s=1) | {"atten_mask": t(2, 4, dtype=torch.bool)},
        "size(atten_mask, -1) >= U",
    ),
    (
        in_pages() | {"atten_mask": t(2, 384, dtype=torch.bool)},
        in_pages() | {"atten_mask": t(2, 383, dtype=torch.bool)},
        "size(atten_mask, -1) >= M * block_size",
    ),
    (one(inner_precise=1), one(inner_precise=2), "inner_precise in (0, 1)"),
]
PROMPT_UNUSED = (*_OLDER_UNUSED, "deq_scale1", "deq_scale2")
_DOWN = older() | CAUSAL
PROMPT_HOST_EDGES: list[Edge] = [
    *((older(), older() | {name: t(2)}, f"not given({name})") for name in PROMPT_UNUSED),
    (older(), older() | {"actual_seq_lengths": [5, 5]}, "not given(actual_seq_lengths)"),
    (older(), older() | {"num_heads": 4}, "N == num_heads"),
    (older(), older() | {"num_key_value_heads": 3}, "num_key_value_heads == 0 or num_key_value_heads > 0 and"),
    (older(), older() | {"sparse_mode": 1, "atten_mask": FULL}, "sparse_mode in (0, 2, 3, 4)"),
    (_DOWN, older() | {"sparse_mode": 3}, "given(atten_mask)"),
    (older(), older() | mask(5, 5), "not given(atten_mask)"),
    (_DOWN, older(keys=6) | CAUSAL, "T == S and not given(actual_seq_lengths_kv)"),
    (older(), older() | {"num_key_value_heads": 4}, _SHARED.format("M")),
    (
        older(b=3) | {"actual_seq_lengths_kv": [5]},
        older(b=3) | {"actual_seq_lengths_kv": [5, 5]},
        "length(actual_seq_lengths_kv) == 1 or",
    ),
]
_FAR = 20971520
PROMPT_EDGES: list[Edge] = [
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


_INCRE = [((HOST, A2), *edge) for edge in INCRE_HOST_EDGES] + [((A2,), *edge) for edge in INCRE_EDGES]
_PROMPT = [((HOST, A2, A3), *edge) for edge in PROMPT_HOST_EDGES] + [((A2, A3), *edge) for edge in PROMPT_EDGES]
EDGES = [
    *(("npu_incre_flash_attention", *edge) for edge in _INCRE),
    *(
        ("npu_incre_flash_attention.tensor_lengths", chips, _in_tensors(legal), _in_tensors(illegal), text)
        for chips, legal, illegal, text in _INCRE
    ),
    *(("npu_prompt_flash_attention", *edge) for edge in _PROMPT),
]
