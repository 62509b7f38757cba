"""Calls of npu_fused_infer_attention_score on both sides of limits that no kernel has: of what no rule gives."""

from __future__ import annotations

from typing import Any

import torch

from fusion.operators.attention.int8_cache_limits import CACHE
from tests.operators.attention_cases import FIRST
from tests.operators.attention_limits_cases import BIAS, CAUSAL, ONE_BYTE, Edge, bnsd, bsh, bsnd, mask, pages, t, tnd

_ONE = {"quant_scale_out": t(1, dtype=torch.float32)}
_SHIFTED = _ONE | {"quant_offset_out": t(1, dtype=torch.float32)}


def _scale(*sizes: int) -> dict[str, Any]:
    return {"quant_scale_out": t(*sizes)}


def _wide() -> dict[str, Any]:
    """Queries and keys of 128 lanes, values of 64."""
    return bsnd() | {"value": t(2, 7, 2, 64)}


def _equal_heads() -> dict[str, Any]:
    rows = t(2, 7, 1024)
    return bsh() | {"key": rows, "value": rows, "num_key_value_heads": 0}


COMPUTED_EDGES: list[Edge] = [
    (bsnd() | _SHIFTED, bsnd() | {"quant_offset_out": t(1)}, "given(quant_scale_out)"),
    (bsnd() | _SHIFTED, bsnd() | _ONE | {"quant_offset_out": t(2)}, "shape(quant_offset_out) == shape(quant_scale_out"),
    (_wide() | _scale(8, 64), _wide() | _scale(8, 128), "numel(quant_scale_out) in (1, num_query_heads * V)"),
    (
        bsh() | _scale(1024),
        bsh() | _scale(8),
        "numel(quant_scale_out) in (1, V // num_key_value_heads * num_query_heads)",
    ),
    (_equal_heads() | _scale(1024), _equal_heads() | _scale(8), "numel(quant_scale_out) in (1, V)"),
    (
        pages(bsnd(), form=5) | _scale(1024),
        pages(bsnd(), form=5) | _scale(8),
        "numel(quant_scale_out) in (1, num_query_heads * Cv * L)",
    ),
]
"""By the names of the second version."""


def first(call: dict[str, Any]) -> dict[str, Any]:
    return {FIRST.get(name, name): value for name, value in call.items()}


FIRST_CALL = first(bsnd())
_PADDINGS = {"query_padding_size": "actual_seq_lengths", "kv_padding_size": "actual_seq_lengths_kv"}
_ROW = t(1, dtype=torch.int64)


def _bias(columns: int) -> dict[str, Any]:
    return {"pse_shift": t(1, 8, 5, columns)}


def _prefix(key: tuple[int, ...], value: tuple[int, ...] | None = None) -> dict[str, Any]:
    return {"key_shared_prefix": t(*key), "value_shared_prefix": t(*(value or key))}


def _of_int8(*scale: int, m: int = 2) -> dict[str, Any]:
    rows = t(2, 7, m, 128, dtype=ONE_BYTE)
    return FIRST_CALL | {"key": rows, "value": rows, "antiquant_scale": t(*(scale or (2,)))}


def _of_padding(name: str, lengths: str) -> list[Edge]:
    padded = {name: _ROW, lengths: [3, 4]}
    legal = FIRST_CALL | padded
    packed = first(tnd()) | {name: _ROW}
    return [
        (legal, FIRST_CALL | {name: _ROW}, f"given({lengths})"),
        (legal, legal | {name: t(2, dtype=torch.int64)}, f"numel({name}) == 1"),
        (legal, packed, "input_layout in ('BSH', "),
        (legal, first(pages(bsnd())) | padded, "not given(block_table) and not given(key_shared_prefix)"),
        (legal, legal | BIAS, "not given(pse_shift)"),
        (legal | CAUSAL, legal | mask(1, 1, 5, 7), "not given(atten_mask) or sparse_mode in (2, 3, 4)"),
    ]


def _in_heads(last: int) -> dict[str, Any]:
    rows = t(2, 2, 7, 128, dtype=ONE_BYTE)
    return first(bnsd()) | {"key": rows, "value": rows, "antiquant_scale": t(2, 2, last), "antiquant_mode": 1}


def _in_pages(last: int) -> dict[str, Any]:
    rows = t(9, 128, 256, dtype=ONE_BYTE)
    return first(pages(bsnd())) | {"key": rows, "value": rows, "antiquant_scale": t(2, 2, last), "antiquant_mode": 1}


_SHARED = _prefix((1, 3, 2, 128))
_BEFORE = FIRST_CALL | _SHARED
_HEADS_BEFORE = first(bnsd()) | _prefix((1, 2, 3, 128))
_TOKENS = _of_int8(2, 2, 7) | {"antiquant_mode": 1}
FIRST_HOST_EDGES: list[Edge] = [
    *(edge for name, lengths in _PADDINGS.items() for edge in _of_padding(name, lengths)),
    (
        FIRST_CALL | {"query_padding_size": _ROW, "actual_seq_lengths": [3, 4]},
        first(bsnd(s=1)) | {"query_padding_size": _ROW, "actual_seq_lengths": [1, 1]},
        "S > 1",
    ),
    (_BEFORE, FIRST_CALL | {"key_shared_prefix": t(1, 3, 2, 128)}, "given(value_shared_prefix)"),
    (_BEFORE, FIRST_CALL | {"value_shared_prefix": t(1, 3, 2, 128)}, "given(key_shared_prefix)"),
    (_BEFORE, _BEFORE | {"actual_shared_prefix_len": [1, 2]}, "length(actual_shared_prefix_len) == 1"),
    (_BEFORE, first(tnd()) | _SHARED, "input_layout in ('BSH', "),
    (_BEFORE, first(pages(bsnd())) | _SHARED, "not given(block_table) and not given(query_rope)"),
    (_BEFORE, _of_int8() | _SHARED, f"not ({CACHE})"),
    *(
        (_BEFORE, _BEFORE | {f"{name}_shared_prefix": t(2, 3, 2, 128)}, f"rank({name}_shared_prefix) == rank({name})")
        for name in ("key", "value")
    ),
    *(
        (
            _HEADS_BEFORE,
            _HEADS_BEFORE | {f"{name}_shared_prefix": t(1, 1, 3, 128)},
            f"size({name}_shared_prefix, 1) == size({name}, 1)",
        )
        for name in ("key", "value")
    ),
    *(
        (
            _BEFORE,
            _BEFORE | {f"{name}_shared_prefix": t(1, 3, 1, 128)},
            f"size({name}_shared_prefix, 2) == size({name}, 2)",
        )
        for name in ("key", "value")
    ),
    (_BEFORE, FIRST_CALL | _prefix((1, 3, 2, 128), (1, 4, 2, 128)), "shape(value_shared_prefix) =="),
    (
        _HEADS_BEFORE | mask(1, 1, 5, 10),
        _HEADS_BEFORE | mask(1, 1, 5, 9),
        "size(atten_mask, -1) >= size(key_shared_prefix, 2) + U",
    ),
    (_BEFORE | mask(1, 1, 5, 10), _BEFORE | mask(1, 1, 5, 9), "size(atten_mask, -1) >= size(key_shared_prefix, 1) + Q"),
    (_HEADS_BEFORE | _bias(10), _HEADS_BEFORE | _bias(9), "Tp >= size(key_shared_prefix, 2) + U"),
    (_BEFORE | _bias(10), _BEFORE | _bias(9), "Tp >= size(key_shared_prefix, 1) + Q"),
    (_of_int8(), FIRST_CALL | {"antiquant_scale": t(2)}, CACHE),
    (_of_int8(), _of_int8() | {"key_antiquant_scale": t(1)}, "not given(key_antiquant_scale) and"),
    (_of_int8(), _of_int8() | {"key_antiquant_mode": 1, "value_antiquant_mode": 1}, "key_antiquant_mode == 0 and"),
    (
        _of_int8(),
        _of_int8() | {"antiquant_scale": None, "antiquant_offset": t(2)}
        | dict.fromkeys(("key_antiquant_scale", "value_antiquant_scale"), t(1)),
        "given(antiquant_scale)",
    ),
    (_of_int8(), _of_int8() | {"antiquant_mode": 2}, "antiquant_mode in (0, 1)"),
    (_of_int8(2, 256), _of_int8(2, 128), "shape(antiquant_scale) in ((2,), (2, num_key_value_heads, 1, D)"),
    (_TOKENS, _TOKENS | {"antiquant_scale": t(2, 1, 7)}, "size(antiquant_scale, 1) == B"),
    (_TOKENS, _TOKENS | {"antiquant_scale": t(2, 2, 6)}, "size(antiquant_scale, 2) >= Q"),
    (
        _in_heads(7),
        _in_heads(6),
        "size(antiquant_scale, 2) >= U",
    ),
    (_in_pages(384), _in_pages(383), "size(antiquant_scale, 2) >= M * block_size"),
    (
        _of_int8() | {"antiquant_offset": t(2)},
        _of_int8() | {"antiquant_offset": t(2, 1)},
        "shape(antiquant_offset) == shape(antiquant_scale)",
    ),
]  # fmt: skip
FIRST_KERNEL_EDGES: list[Edge] = [
    (FIRST_CALL, _of_int8(), "not given(antiquant_scale)"),
    *(
        (FIRST_CALL, FIRST_CALL | {name: _ROW, lengths: [3, 4]}, f"not given({name})")
        for name, lengths in _PADDINGS.items()
    ),
    (FIRST_CALL, _BEFORE, "not given(key_shared_prefix)"),
]
