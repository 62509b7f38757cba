"""Mixture of experts as Megatron writes it: tokens permuted by expert, and the rows of each token summed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fusion.operators.dtype_sets import FLOATS, INT32, INT64, compute_dtype
from fusion.operators.limits import A2_A3, HOST, Limit
from fusion.operators.operator import Operator

_COMPILERS = frozenset({"eager", "npugraph_ex"})
_PADDED = "rows of experts with a capacity are not decomposed"
_SOURCE = "op-plugin: test_npu_moe_token_permute_and_unpermute.py and the Meta kernels of torch_npu 2.13.0"


def _permute(tokens: Tensor, indices: Tensor, num_out_tokens: int | None) -> tuple[Tensor, Tensor]:
    order = indices.flatten().sort(stable=True)[1]
    rows = tokens[order[:num_out_tokens] // (indices.numel() // tokens.shape[0])]
    place = torch.arange(order.shape[0], dtype=torch.int32, device=tokens.device)
    return rows, torch.empty_like(place).scatter(0, order, place)


def _permuted(tokens: Tensor, indices: Tensor, num_out_tokens: int | None) -> tuple[Tensor, Tensor]:
    count = indices.numel()
    rows: Any = count if num_out_tokens is None else torch.sym_min(num_out_tokens, count)
    return tokens.new_empty((rows, tokens.shape[1])), indices.new_empty(count, dtype=torch.int32)


MOE_TOKEN_PERMUTE = Operator(
    schema=(
        "npu::npu_moe_token_permute(Tensor tokens, Tensor indices, int? num_out_tokens=None, bool padded_mode=False) "
        "-> (Tensor, Tensor)"
    ),
    compute=_permute,
    uncomputed={"padded_mode": _PADDED},
    outputs=_permuted,
    dims={"tokens": "T H", "indices": "T K / T"},
    dtypes={"tokens": FLOATS, "indices": INT32 | INT64},
    limits={
        HOST: (
            Limit("num_out_tokens > 0", when="given(num_out_tokens)", because="no page says what other counts are"),
        ),
        **dict.fromkeys(A2_A3, ()),
    },
    lowerings=_COMPILERS,
    moves=True,
    source=_SOURCE,
    summary=(
        "order = stable sort of indices [T · K]; out[i] = tokens[order[i] / K] for the first num_out_tokens; "
        "sorted_indices[order[i]] = i"
    ),
)


def _unpermute(permuted_tokens: Tensor, sorted_indices: Tensor, probs: Tensor | None) -> Tensor:
    rows = permuted_tokens[sorted_indices.long()].to(compute_dtype(permuted_tokens))
    if probs is not None:
        rows = (rows.unflatten(0, probs.shape) * probs.to(rows.dtype).unsqueeze(-1)).sum(1)
    return rows.to(permuted_tokens.dtype)


MOE_TOKEN_UNPERMUTE = Operator(
    schema=(
        "npu::npu_moe_token_unpermute(Tensor permuted_tokens, Tensor sorted_indices, Tensor? probs=None, "
        "bool padded_mode=False, int[]? restore_shape=None) -> Tensor"
    ),
    compute=_unpermute,
    uncomputed={"padded_mode restore_shape": _PADDED},
    outputs=lambda permuted_tokens, probs: permuted_tokens.new_empty(
        permuted_tokens.shape if probs is None else (probs.shape[0], permuted_tokens.shape[1])
    ),
    dims={"permuted_tokens": "I H", "sorted_indices": "I", "probs": "T K"},
    dtypes={"permuted_tokens probs": FLOATS, "sorted_indices": INT32},
    limits={
        HOST: (Limit("T * K == I", when="given(probs)", because="rows that were dropped are not decomposed"),),
        **dict.fromkeys(A2_A3, ()),
    },
    lowerings=_COMPILERS,
    source=_SOURCE,
    summary=(
        "out[t] = round(Σ_k probs[t, k] · permuted_tokens[sorted_indices[t · K + k]]), in float32; without probs the "
        "rows in that order"
    ),
)
