"""Writes into caches: cache[position] = rows, as a new tensor or in place.

A position outside the cache is an error on the host, as it is in eager's index_copy; it never reaches another row. The
in-place forms touch nothing but the rows that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import CHIPS, LOWERINGS, Limit, Operator, functional
from fusion.operators.dtypes import INT32, INT64
from fusion.operators.pages import Put, inside, paged, stored

_STORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool})
_PAGED = frozenset({torch.float16, torch.bfloat16, torch.int8})
_INDEX = INT32 | INT64
_SAME = dict.fromkeys(CHIPS, ("dtype(updates) == dtype(input)",))
_EVERYWHERE = frozenset(LOWERINGS)
_BOTH = ("dtype(key_cache) == dtype(key)", "dtype(value_cache) == dtype(value)")


def _coordinates(input: Tensor, indices: Tensor) -> list[Tensor]:
    return [inside(index, size) for index, size in zip(indices.unbind(-1), input.shape, strict=False)]


def _scatter_nd_update(put: Put, input: Tensor, indices: Tensor, updates: Tensor) -> tuple[Tensor]:
    return (put(input, _coordinates(input, indices), updates),)


SCATTER_ND_UPDATE_ = Operator(
    schema="npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    compute=_scatter_nd_update,
    dims={"input": "*D", "indices": "*I K", "updates": "*U"},
    dtypes={"input": _STORED, "indices": _INDEX, "updates": _STORED},
    limits={"host": ("K <= rank(input)",), **_SAME},
    source="op-plugin: torch_npu.npu_scatter_nd_update_; CANN: aclnnScatterNd; GE: ScatterNdUpdate, in place",
    summary="input[indices[i, 0], …, indices[i, K-1]] = updates[i]; equal indices in no fixed order",
)
SCATTER_ND_UPDATE = functional(
    SCATTER_ND_UPDATE_,
    "npu::npu_scatter_nd_update",
    "out = input with out[indices[i, 0], …, indices[i, K-1]] = updates[i]; equal indices in no fixed order",
    _EVERYWHERE,
)


def _scatter_update(put: Put, input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> tuple[Tensor]:
    """Consecutive positions: the places name batch and position, which come first in the rows too."""
    axis %= input.ndim
    batch, starts = torch.arange(updates.shape[0], device=input.device), indices
    if indices.ndim == 2:
        batch, starts = _coordinates(input, indices)
    positions = starts.long()[:, None] + torch.arange(updates.shape[axis], device=input.device)
    between = [None] * (axis - 1)
    places = [batch[:, None], *between, inside(positions, input.shape[axis])]
    return (put(input, places, updates.movedim(axis, 1)),)


SCATTER_UPDATE_ = Operator(
    schema="npu::scatter_update_(Tensor(a!) input, Tensor indices, Tensor updates, int axis) -> Tensor(a!)",
    compute=_scatter_update,
    dims={"updates": "B *U", "input": "C *D", "indices": "B / B 2"},
    dtypes={"input": _STORED, "indices": _INDEX, "updates": _STORED},
    limits={
        "host": (
            "rank(input) == rank(updates)",
            Limit("axis % rank(input) != 0", because="the first dim is the batch"),
            "size(updates, axis) <= size(input, axis)",
        ),
        **_SAME,
    },
    source="op-plugin: torch_npu.scatter_update_; GE: Scatter, in place",
    summary="input[b, …, indices[b] : indices[b] + size(updates, axis), …] = updates[b] along axis",
)
SCATTER_UPDATE = functional(
    SCATTER_UPDATE_,
    "npu::scatter_update",
    "out = input with out[b, …, indices[b] : indices[b] + size(updates, axis), …] = updates[b] along axis",
    _EVERYWHERE,
)


def _pa(
    put: Put, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor, cache_mode: str
) -> tuple[Tensor, ...]:
    pairs = ((key_cache, key), (value_cache, value))
    return tuple(put(cache, *paged(cache, slot_mapping, rows, cache_mode)) for cache, rows in pairs)


_PA_FORMULA = "[slot // Size, slot % Size] = key[t], value[t]; PA_NZ: [slot // Size, :, slot % Size, :]"
_PA_SAME = (
    *_BOTH,
    Limit("L * itemsize(key_cache) == 32", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 32 bytes"),
    Limit("M * itemsize(value_cache) == 32", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 32 bytes"),
)

SCATTER_PA_KV_CACHE = Operator(
    schema=(
        "npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, "
        'Tensor? seq_lens=None, str? cache_mode="PA_NZ") -> ()'
    ),
    compute=_pa,
    dims={
        "slot_mapping": "T",
        "key": "T N D",
        "value": "T N E",
        "key_cache": "cache_mode=Norm:Blocks Size N D / cache_mode=PA_NZ:Blocks A Size L",
        "value_cache": "cache_mode=Norm:Blocks Size N E / cache_mode=PA_NZ:Blocks C Size M",
    },
    dtypes=dict.fromkeys(("key", "value", "key_cache", "value_cache"), _PAGED) | {"slot_mapping": _INDEX},
    limits={
        "host": (
            *(
                Limit(f"not given({name})", because="compression is not decomposed")
                for name in ("compress_lens", "compress_seq_offsets", "seq_lens")
            ),
            Limit("A * L == N * D and C * M == N * E", when="cache_mode == 'PA_NZ'"),
        ),
        **dict.fromkeys(CHIPS, _PA_SAME),
    },
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="op-plugin: torch_npu.npu_scatter_pa_kv_cache; a negative slot is not documented",
    summary=f"both caches{_PA_FORMULA}",
)
SCATTER_PA_KV_CACHE_FUNCTIONAL = functional(
    SCATTER_PA_KV_CACHE,
    "npu::npu_scatter_pa_kv_cache_functional",
    f"copies of the caches with {_PA_FORMULA}",
    frozenset({"torchair"}),  # the in-place form runs in eager and captured graphs
)


def _reshape_and_cache(
    put: Put, key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> tuple[Tensor, ...]:
    return tuple(
        put(cache, *stored(cache, rows, slot_indices)) for cache, rows in ((key_cache, key), (value_cache, value))
    )


_RESHAPE_FORMULA = "[slot // Size, slot % Size] = key[t], value[t]; a negative slot is skipped"

RESHAPE_AND_CACHE = Operator(
    schema=(
        "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()"
    ),
    compute=_reshape_and_cache,
    dims={
        "slot_indices": "T",
        "key": "T N D",
        "value": "T N E",
        "key_cache": "Blocks Size N D",
        "value_cache": "Blocks Size N E",
    },
    dtypes={"key value key_cache value_cache": _PAGED, "slot_indices": INT32},
    limits=dict.fromkeys(CHIPS, _BOTH),
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="op-plugin: test_atb_reshape_and_cache.py (ND golden), ops/atb/ReshapeAndCachAtb.cpp; no Meta in 2.13.0",
    summary=f"both caches{_RESHAPE_FORMULA}",
)
RESHAPE_AND_CACHE_FUNCTIONAL = functional(  # an overload of ours: what runs is always the form in place
    RESHAPE_AND_CACHE, "atb::_npu_reshape_and_cache.functional", f"copies of the caches with {_RESHAPE_FORMULA}"
)
