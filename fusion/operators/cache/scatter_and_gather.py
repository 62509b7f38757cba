"""Writes into caches, cache[position] = rows, in place or into a copy; and gathers of rows from pages by a block table.

A position outside the cache is an error on the host, as in eager's index_copy; it never reaches another row. The
in-place forms touch only the rows that are written.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion._torch.tensors import known_true
from fusion.operators.attention.visibility import packed_tokens
from fusion.operators.cache.pages import Places, Put, negatives_out_of_bounds, page_places, stored
from fusion.operators.dtype_sets import HALVES, INT8, INT32, INT64
from fusion.operators.limits import CHIPS, LOWERINGS, Limit
from fusion.operators.operator import Operator, functional

_STORED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.int8, torch.int64, torch.bool})
_PAGED = frozenset({torch.float16, torch.bfloat16, torch.int8})
_INDEX = INT32 | INT64
_SAME = dict.fromkeys(CHIPS, ("dtype(updates) == dtype(input)",))
_EVERYWHERE = frozenset(LOWERINGS)
_BOTH = ("dtype(key_cache) == dtype(key)", "dtype(value_cache) == dtype(value)")


def _coordinates(indices: Tensor) -> list[Tensor]:
    return list(negatives_out_of_bounds(indices).unbind(-1))


def _scatter_nd_update(put: Put, input: Tensor, indices: Tensor, updates: Tensor) -> tuple[Tensor]:
    return (put(input, _coordinates(indices), updates),)


SCATTER_ND_UPDATE_ = Operator(
    schema="npu::npu_scatter_nd_update_(Tensor(a!) input, Tensor indices, Tensor updates) -> Tensor(a!)",
    compute=_scatter_nd_update,
    dims={"input": "*D", "indices": "*I K", "updates": "*U"},
    dtypes={"input": _STORED, "indices": _INDEX, "updates": _STORED},
    limits={
        "host": (
            "K <= rank(input)",
            "sizes(updates, 0, rank(indices) - 1) == sizes(indices, 0, rank(indices) - 1)",
            "sizes(updates, rank(indices) - 1, rank(updates)) == sizes(input, K, rank(input))",
        ),
        **_SAME,
    },
    moves=True,
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
    """Write `updates` by `put` to `input`, from position `indices`[b] on along dim `axis` for each b of the first dim.

    `indices` may also be pairs of an index in the first dim and a position.
    """
    axis %= input.ndim
    *batch, starts = _coordinates(indices) if indices.ndim == 2 else [negatives_out_of_bounds(indices)]
    one_position = known_true(updates.shape[axis] == 1)
    further = None if one_position else torch.arange(updates.shape[axis], device=input.device)
    if not batch and known_true(updates.shape[0] == 1) and known_true(input.shape[0] == 1):
        places: Places = [*[None] * axis, starts if further is None else starts + further]
        return (put(input, places, updates),)
    first = batch[0] if batch else torch.arange(updates.shape[0], device=input.device)
    positions = starts[:, None] if further is None else starts[:, None] + further
    return (put(input, [first[:, None], *[None] * (axis - 1), positions], updates.movedim(axis, 1)),)


_BEHIND = "sizes({0}, axis % rank(input) + 1, rank({0}))"
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
            "sizes(updates, 1, axis % rank(input)) == sizes(input, 1, axis % rank(input))",
            f"{_BEHIND.format('updates')} == {_BEHIND.format('input')}",
        ),
        **_SAME,
    },
    moves=True,
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
    return tuple(put(cache, *page_places(cache, slot_mapping, rows, cache_mode)) for cache, rows in pairs)


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
    uncomputed={"compress_lens compress_seq_offsets seq_lens": "compression is not decomposed"},
    dtypes=dict.fromkeys(("key", "value", "key_cache", "value_cache"), _PAGED) | {"slot_mapping": _INDEX},
    limits={
        "host": (Limit("A * L == N * D and C * M == N * E", when="cache_mode == 'PA_NZ'"),),
        **dict.fromkeys(CHIPS, _PA_SAME),
    },
    moves=True,
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
    moves=True,
    lowerings=frozenset({"eager", "npugraph_ex"}),
    source="op-plugin: test_atb_reshape_and_cache.py (ND golden), ops/atb/ReshapeAndCachAtb.cpp; no Meta in 2.13.0",
    summary=f"both caches{_RESHAPE_FORMULA}",
)
RESHAPE_AND_CACHE_FUNCTIONAL = functional(  # an overload of ours: only the in-place form is launched
    RESHAPE_AND_CACHE, "atb::_npu_reshape_and_cache.functional", f"copies of the caches with {_RESHAPE_FORMULA}"
)


def _gathered(
    cache: Tensor, rows: Tensor, tables: Tensor, lengths: Tensor, offset: Tensor | None, in_sums: bool
) -> tuple[Tensor, Tensor]:
    """Gather the rows of all sequences from the pages `cache`, in the shape of `rows` [T, N, D]; 0 for an invalid
    block.

    Args:
        cache: pages [Block, Size, N, D], or in NZ.
        rows: tensor for the result, of which only the shape is read.
        tables: block table [B, P].
        lengths: number of rows of each sequence [B], or if `in_sums` their prefix sums [B + 1].
        offset: first row of each sequence in its pages [B], None for 0.
        in_sums: True for prefix sums.

    Returns:
        The rows, and a mask [T] of those that belong to a sequence.
    """
    is_nz = _is_in_lines(cache, rows)
    cache = cache.transpose(1, 2) if is_nz else cache
    size, most = cache.shape[1], tables.shape[1]
    ends = lengths[1:] - lengths[:1] if in_sums else lengths.cumsum(0)
    sequence, place, _, used = packed_tokens(rows.shape[0], ends.long())
    first = 0 if offset is None else offset.long()[sequence] // size
    column = first + place // size
    block = tables.long()[sequence, column.clamp(max=most - 1)]
    valid = (column < most) & (block >= 0) & (block < cache.shape[0])
    gathered = cache[block.clamp(0, cache.shape[0] - 1), place % size]
    gathered = gathered.reshape(rows.shape) if is_nz else gathered
    return torch.where(valid[:, None, None], gathered, 0), used


def _is_in_lines(cache: Tensor, rows: Tensor) -> bool:
    """Return True if pages are in NZ, [Blocks, N · D / L, Size, L], and not in rows [Blocks, Size, N, D]."""
    return cache.shape[2:] != rows.shape[1:]


def _formats(key_cache: Tensor, value_cache: Tensor, key: Tensor, value: Tensor) -> dict[str, bool]:
    return {"key_cache": _is_in_lines(key_cache, key), "value_cache": _is_in_lines(value_cache, value)}


def _gather(
    put: Put, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor,
    value: Tensor, seq_offset: Tensor | None, is_seq_lens_cumsum: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def filled(cache: Tensor, rows: Tensor) -> Tensor:
        gathered, used = _gathered(cache, rows, block_tables, seq_lens, seq_offset, is_seq_lens_cumsum)
        return put(rows, None, torch.where(used[:, None, None], gathered, rows))

    return filled(key_cache, key), filled(value_cache, value)


_ONE_DTYPE = "one call copies keys and values; store both in one dtype"
_HOST = (
    Limit("L == B", when="not is_seq_lens_cumsum", because="each sequence has a length"),
    Limit("L == B + 1", when="is_seq_lens_cumsum", because="each sequence has a start and an end"),
    Limit("K2 == N and K3 == D or K1 * K3 == N * D", because="pages hold rows, or lines of NZ"),
    Limit("V1 == K1 and V2 == N and V3 == E", when="K2 == N and K3 == D", because="so do those of both caches"),
    Limit(
        "V2 == K2 and V1 * V3 == N * E and not (V2 == N and V3 == E)",
        when="K2 != N or K3 != D",
        because="so do those of both caches",
    ),
)
_KERNEL = (
    *(Limit(f"dtype({name}) == dtype(key_cache)", because=_ONE_DTYPE) for name in ("value_cache", "key", "value")),
    Limit("N * D * itemsize(key_cache) % 32 == 0", because="rows are copied in runs of 32 bytes"),
    Limit("N * E * itemsize(value_cache) % 32 == 0", because="rows are copied in runs of 32 bytes"),
    Limit("N * D * itemsize(key_cache) <= 151552", because="a row fits in the memory of a core"),
    Limit("N * E * itemsize(value_cache) <= 151552", because="a row fits in the memory of a core"),
    *(
        Limit(
            f"{rows} * itemsize({cache}) == 32 and {size} % 16 == 0",
            when=f"{size} != N or {rows} != {width}",
            because="lines of NZ hold 32 bytes, and pages a multiple of 16 of them",
        )
        for cache, size, rows, width in (("key_cache", "K2", "K3", "D"), ("value_cache", "V2", "V3", "E"))
    ),
    Limit("T > 0", because="no argument may be empty"),
)
_FORMULA = (
    "[token j of sequence i] = cache[block_tables[i, seq_offset[i] // Size + j // Size], j % Size], in FRACTAL_NZ "
    "cache[.., :, j % Size, :], one sequence behind the other; 0 for a block that is none"
)

GATHER_PA_KV_CACHE = Operator(
    schema=(
        "npu::npu_gather_pa_kv_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor(a!) key, Tensor(b!) value, *, Tensor? seq_offset=None, bool is_seq_lens_cumsum=False) -> ()"
    ),
    compute=_gather,
    dims={
        "key_cache": "Blocks K1 K2 K3",
        "value_cache": "Blocks V1 V2 V3",
        "block_tables": "B M",
        "seq_lens": "L",
        "key": "T N D",
        "value": "T N E",
        "seq_offset": "B",
    },
    dtypes={"key_cache value_cache key value": HALVES | INT8, "block_tables seq_lens seq_offset": INT32},
    limits={"host": _HOST, **dict.fromkeys(CHIPS, _KERNEL)},
    moves=True,
    lowerings=frozenset({"eager", "npugraph_ex"}),  # torchair has no converter
    fractal=_formats,
    source=(
        "op-plugin: test_npu_gather_pa_kv_cache.py (run on Ascend 950), ops/opapi/GatherPaKvCacheKernelNpuOpApi.cpp, "
        "which takes pages in lines of NZ exactly where their storage format is FRACTAL_NZ; CANN: aclnnGatherPaKvCache "
        "(A2, A3); kernel: ops-transformer gather_pa_kv_cache, which copies pages whether or not a block is one"
    ),
    summary=f"key, value{_FORMULA}",
)
GATHER_PA_KV_CACHE_FUNCTIONAL = functional(  # its kernel copies both first; eager and captured graphs run in place
    GATHER_PA_KV_CACHE, "npu::npu_gather_pa_kv_cache_functional", f"copies of key and value with {_FORMULA}"
)
