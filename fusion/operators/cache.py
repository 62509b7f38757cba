"""Writes into caches: cache[position] = rows, as a new tensor or in place.

A position outside the cache is an error on the host, as it is in eager's index_copy; it never reaches another row. The
in-place forms touch nothing but the rows that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import Limit, Operator
from fusion.operators.pages import Places, inside, paged, stored, write, written

_STORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool})
_PAGED = frozenset({torch.float16, torch.bfloat16, torch.int8})
_INDEX = frozenset({torch.int32, torch.int64})
_SAME = ("dtype(updates) == dtype(input)",)
_EVERYWHERE = frozenset({"eager", "torchair", "npugraph_ex"})


# coordinates -----------------------------------------------------------------------------------------------------


def _coordinates(input: Tensor, indices: Tensor) -> list[Tensor]:
    return [inside(index, size) for index, size in zip(indices.unbind(-1), input.shape, strict=False)]


def _scatter_nd_update(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return written(input, _coordinates(input, indices), updates)


def _scatter_nd_update_meta(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return torch.empty_like(input)


def _scatter_nd_update_in_place(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return write(input, _coordinates(input, indices), updates)


def _scatter_nd_update_in_place_meta(input: Tensor, indices: Tensor, updates: Tensor) -> Tensor:
    return input


_ND_DIMS = {"input": "*D", "indices": "*I K", "updates": "*U"}
_ND_DTYPES = {"input": _STORED, "indices": _INDEX, "updates": _STORED}
_ND_LIMITS = {"host": ("K <= rank(input)",), "ascend910b": _SAME, "ascend910_93": _SAME, "ascend950": _SAME}
_ND_SOURCE = "op-plugin: torch_npu.npu_scatter_nd_update_; CANN: aclnnScatterNd; GE: ScatterNdUpdate, in place"

SCATTER_ND_UPDATE = Operator(
    schema="npu::npu_scatter_nd_update(Tensor input, Tensor indices, Tensor updates) -> Tensor",
    fallback=_scatter_nd_update,
    meta=_scatter_nd_update_meta,
    dims=_ND_DIMS,
    dtypes=_ND_DTYPES,
    limits=_ND_LIMITS,
    lowerings=_EVERYWHERE,
    source=_ND_SOURCE,
    summary="out = input with out[indices[i, 0], …, indices[i, K-1]] = updates[i]; equal indices in no fixed order",
    in_place="npu::npu_scatter_nd_update_",
)
SCATTER_ND_UPDATE_ = Operator(
    schema="npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    fallback=_scatter_nd_update_in_place,
    meta=_scatter_nd_update_in_place_meta,
    dims=_ND_DIMS,
    dtypes=_ND_DTYPES,
    limits=_ND_LIMITS,
    lowerings=_EVERYWHERE,
    source=_ND_SOURCE,
    summary="input[indices[i, 0], …, indices[i, K-1]] = updates[i]; equal indices in no fixed order",
)


# consecutive positions ---------------------------------------------------------------------------------------------


def _runs(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> tuple[Places, Tensor]:
    """Where the rows of `updates` go, batch and position first, and those rows."""
    axis %= input.ndim
    batch, starts = torch.arange(updates.shape[0], device=input.device), indices
    if indices.ndim == 2:
        batch, starts = (inside(column, size) for column, size in zip(indices.unbind(-1), input.shape, strict=False))
    positions = starts.long()[:, None] + torch.arange(updates.shape[axis], device=input.device)
    between = [None] * (axis - 1)
    return [batch[:, None], *between, inside(positions, input.shape[axis])], updates.movedim(axis, 1)


def _scatter_update(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return written(input, *_runs(input, indices, updates, axis))


def _scatter_update_meta(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return torch.empty_like(input)


def _scatter_update_in_place(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return write(input, *_runs(input, indices, updates, axis))


def _scatter_update_in_place_meta(input: Tensor, indices: Tensor, updates: Tensor, axis: int) -> Tensor:
    return input


_RUN_DIMS = {"updates": "B *U", "input": "C *D", "indices": "B / B 2"}
_RUN_DTYPES = {"input": _STORED, "indices": _INDEX, "updates": _STORED}
_RUN_LIMITS = {
    "host": (
        "rank(input) == rank(updates)",
        Limit("axis % rank(input) != 0", because="the first dim is the batch"),
        "size(updates, axis) <= size(input, axis)",
    ),
    "ascend910b": _SAME,
    "ascend910_93": _SAME,
    "ascend950": _SAME,
}
_RUN_SOURCE = "op-plugin: torch_npu.scatter_update_; GE: Scatter, in place"

SCATTER_UPDATE = Operator(
    schema="npu::scatter_update(Tensor input, Tensor indices, Tensor updates, int axis) -> Tensor",
    fallback=_scatter_update,
    meta=_scatter_update_meta,
    dims=_RUN_DIMS,
    dtypes=_RUN_DTYPES,
    limits=_RUN_LIMITS,
    lowerings=_EVERYWHERE,
    source=_RUN_SOURCE,
    summary="out = input with out[b, …, indices[b] : indices[b] + size(updates, axis), …] = updates[b] along axis",
    in_place="npu::scatter_update_",
)
SCATTER_UPDATE_ = Operator(
    schema="npu::scatter_update_(Tensor(a!) input, Tensor indices, Tensor updates, int axis) -> Tensor(a!)",
    fallback=_scatter_update_in_place,
    meta=_scatter_update_in_place_meta,
    dims=_RUN_DIMS,
    dtypes=_RUN_DTYPES,
    limits=_RUN_LIMITS,
    lowerings=_EVERYWHERE,
    source=_RUN_SOURCE,
    summary="input[b, …, indices[b] : indices[b] + size(updates, axis), …] = updates[b] along axis",
)


# pages -------------------------------------------------------------------------------------------------------------


def _pa_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None, seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    pairs = ((key_cache, key), (value_cache, value))
    keys, values = (written(cache, *paged(cache, slot_mapping, rows, cache_mode)) for cache, rows in pairs)
    return keys, values


def _pa_functional_meta(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None, seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


def _pa(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None, seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:  # fmt: skip
    for cache, rows in ((key_cache, key), (value_cache, value)):
        write(cache, *paged(cache, slot_mapping, rows, cache_mode))


def _pa_meta(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_mapping: Tensor,
    compress_lens: Tensor | None = None, compress_seq_offsets: Tensor | None = None, seq_lens: Tensor | None = None,
    cache_mode: str | None = "PA_NZ",
) -> None:  # fmt: skip
    return None


_PA_DIMS = {
    "slot_mapping": "T",
    "key": "T N D",
    "value": "T N E",
    "key_cache": "cache_mode=Norm:Blocks Size N D / cache_mode=PA_NZ:Blocks A Size L",
    "value_cache": "cache_mode=Norm:Blocks Size N E / cache_mode=PA_NZ:Blocks C Size M",
}
_PA_DTYPES = {
    "key": _PAGED, "value": _PAGED, "key_cache": _PAGED, "value_cache": _PAGED, "slot_mapping": _INDEX,
}  # fmt: skip
_PA_SAME = (
    "dtype(key_cache) == dtype(key)",
    "dtype(value_cache) == dtype(value)",
    Limit("L * itemsize(key_cache) == 32", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 32 bytes"),
    Limit("M * itemsize(value_cache) == 32", when="cache_mode == 'PA_NZ'", because="a line of NZ holds 32 bytes"),
)
_PA_LIMITS = {
    "host": (
        Limit("not given(compress_lens)", because="compression is not decomposed"),
        Limit("not given(compress_seq_offsets)", because="compression is not decomposed"),
        Limit("not given(seq_lens)", because="compression is not decomposed"),
        Limit("A * L == N * D and C * M == N * E", when="cache_mode == 'PA_NZ'"),
    ),
    "ascend910b": _PA_SAME,
    "ascend910_93": _PA_SAME,
    "ascend950": _PA_SAME,
}
_PA_SCHEMA = (
    "Tensor slot_mapping, *, Tensor? compress_lens=None, Tensor? compress_seq_offsets=None, Tensor? seq_lens=None, "
    'str? cache_mode="PA_NZ"'
)
_PA_SOURCE = "op-plugin: torch_npu.npu_scatter_pa_kv_cache; a negative slot is not documented"
_PA_FORMULA = "[slot // Size, slot % Size] = key[t], value[t]; PA_NZ: [slot // Size, :, slot % Size, :]"

SCATTER_PA_KV_CACHE_FUNCTIONAL = Operator(
    schema=(
        "npu::npu_scatter_pa_kv_cache_functional(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
        f"{_PA_SCHEMA}) -> (Tensor, Tensor)"
    ),
    fallback=_pa_functional,
    meta=_pa_functional_meta,
    dims=_PA_DIMS,
    dtypes=_PA_DTYPES,
    limits=_PA_LIMITS,
    lowerings=frozenset({"torchair"}),  # the in-place form runs in eager and captured graphs
    source=_PA_SOURCE,
    summary=f"copies of the caches with {_PA_FORMULA}",
    in_place="npu::npu_scatter_pa_kv_cache",
)
SCATTER_PA_KV_CACHE = Operator(
    schema=(
        "npu::npu_scatter_pa_kv_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        f"{_PA_SCHEMA}) -> ()"
    ),
    fallback=_pa,
    meta=_pa_meta,
    dims=_PA_DIMS,
    dtypes=_PA_DTYPES,
    limits=_PA_LIMITS,
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source=_PA_SOURCE,
    summary=f"both caches{_PA_FORMULA}",
)


def _reshape_and_cache(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    for cache, rows in ((key_cache, key), (value_cache, value)):
        write(cache, *stored(cache, rows, slot_indices))


def _reshape_and_cache_meta(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> None:
    return None


def _reshape_and_cache_functional(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> tuple[Tensor, Tensor]:
    pairs = ((key_cache, key), (value_cache, value))
    keys, values = (written(cache, *stored(cache, rows, slot_indices)) for cache, rows in pairs)
    return keys, values


def _reshape_and_cache_functional_meta(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slot_indices: Tensor
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(key_cache), torch.empty_like(value_cache)


_RESHAPE_DIMS = {
    "slot_indices": "T",
    "key": "T N D",
    "value": "T N E",
    "key_cache": "Blocks Size N D",
    "value_cache": "Blocks Size N E",
}
_RESHAPE_DTYPES = {
    "key": _PAGED,
    "value": _PAGED,
    "key_cache": _PAGED,
    "value_cache": _PAGED,
    "slot_indices": frozenset({torch.int32}),
}
_RESHAPE_SAME = ("dtype(key_cache) == dtype(key)", "dtype(value_cache) == dtype(value)")
_RESHAPE_LIMITS = {"ascend910b": _RESHAPE_SAME, "ascend910_93": _RESHAPE_SAME, "ascend950": _RESHAPE_SAME}
_RESHAPE_SOURCE = (
    "op-plugin: test_atb_reshape_and_cache.py (ND golden), ops/atb/ReshapeAndCachAtb.cpp; no Meta in 2.13.0"
)
_RESHAPE_FORMULA = "[slot // Size, slot % Size] = key[t], value[t]; a negative slot is skipped"

RESHAPE_AND_CACHE = Operator(
    schema=(
        "atb::_npu_reshape_and_cache(Tensor key, Tensor value, Tensor(a!) key_cache, Tensor(b!) value_cache, "
        "Tensor slot_indices) -> ()"
    ),
    fallback=_reshape_and_cache,
    meta=_reshape_and_cache_meta,
    dims=_RESHAPE_DIMS,
    dtypes=_RESHAPE_DTYPES,
    limits=_RESHAPE_LIMITS,
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source=_RESHAPE_SOURCE,
    summary=f"both caches{_RESHAPE_FORMULA}",
)
RESHAPE_AND_CACHE_FUNCTIONAL = Operator(
    schema=(
        "atb::_npu_reshape_and_cache.functional(Tensor key, Tensor value, Tensor key_cache, Tensor value_cache, "
        "Tensor slot_indices) -> (Tensor, Tensor)"
    ),
    fallback=_reshape_and_cache_functional,
    meta=_reshape_and_cache_functional_meta,
    dims=_RESHAPE_DIMS,
    dtypes=_RESHAPE_DTYPES,
    limits=_RESHAPE_LIMITS,
    lowerings=frozenset(),  # an overload of ours: what runs is always the form in place
    source=_RESHAPE_SOURCE,
    summary=f"copies of the caches with {_RESHAPE_FORMULA}",
    in_place="atb::_npu_reshape_and_cache",
)
