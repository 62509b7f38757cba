"""Rows of caches from the pages that a block table names, the sequences one behind the other.

token j of sequence i = cache[block_tables[i, seq_offset[i] // Size + j // Size], j % Size]
"""

from __future__ import annotations

import torch
from torch import Tensor

from fusion.operators.contract import CHIPS, Limit, Operator, functional
from fusion.operators.dtypes import HALVES, INT8, INT32
from fusion.operators.pages import Put
from fusion.operators.sequences import packed


def _found(
    cache: Tensor, rows: Tensor, tables: Tensor, lengths: Tensor, offset: Tensor | None, in_sums: bool
) -> tuple[Tensor, Tensor]:
    """The rows [T, N, D] of the pages of one cache, and which of them belong to a sequence [T]."""
    size, most = cache.shape[1], tables.shape[1]
    ends = lengths[1:] - lengths[:1] if in_sums else lengths.cumsum(0)
    sequence, place, _, used = packed(rows.shape[0], ends.long())
    first = 0 if offset is None else offset.long()[sequence] // size
    column = first + place // size
    block = tables.long()[sequence, column.clamp(max=most - 1)]
    there = (column < most) & (block >= 0) & (block < cache.shape[0])
    found = cache[block.clamp(0, cache.shape[0] - 1), place % size]
    return torch.where(there[:, None, None], found, 0), used


def _gather(
    put: Put, key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor,
    value: Tensor, seq_offset: Tensor | None, is_seq_lens_cumsum: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    def gathered(cache: Tensor, rows: Tensor) -> Tensor:
        found, used = _found(cache, rows, block_tables, seq_lens, seq_offset, is_seq_lens_cumsum)
        return put(rows, None, torch.where(used[:, None, None], found, rows))

    return gathered(key_cache, key), gathered(value_cache, value)


_HOST = (
    Limit("L == B", when="not is_seq_lens_cumsum", because="each sequence has a length"),
    Limit("L == B + 1", when="is_seq_lens_cumsum", because="each sequence has a start and an end"),
)
_KERNEL = (
    *(f"dtype({name}) == dtype(key_cache)" for name in ("value_cache", "key", "value")),
    Limit("N * D * itemsize(key_cache) % 32 == 0", because="rows are copied in runs of 32 bytes"),
    Limit("N * E * itemsize(value_cache) % 32 == 0", because="rows are copied in runs of 32 bytes"),
    Limit("N * D * itemsize(key_cache) <= 151552", because="a row fits in the memory of a core"),
    Limit("N * E * itemsize(value_cache) <= 151552", because="a row fits in the memory of a core"),
    Limit("T > 0", because="no argument may be empty"),
)
_FORMULA = (
    "[token j of sequence i] = cache[block_tables[i, seq_offset[i] // Size + j // Size], j % Size], one sequence "
    "behind the other; 0 for a block that is none"
)

GATHER_PA_KV_CACHE = Operator(
    schema=(
        "npu::npu_gather_pa_kv_cache(Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, "
        "Tensor(a!) key, Tensor(b!) value, *, Tensor? seq_offset=None, bool is_seq_lens_cumsum=False) -> ()"
    ),
    compute=_gather,
    dims={
        "key_cache": "Blocks Size N D",
        "value_cache": "Blocks Size N E",
        "block_tables": "B M",
        "seq_lens": "L",
        "key": "T N D",
        "value": "T N E",
        "seq_offset": "B",
    },
    dtypes={"key_cache value_cache key value": HALVES | INT8, "block_tables seq_lens seq_offset": INT32},
    limits={"host": _HOST, **dict.fromkeys(CHIPS, _KERNEL)},
    lowerings=frozenset({"eager", "npugraph_ex"}),  # torchair has no converter
    source=(
        "op-plugin: test_npu_gather_pa_kv_cache.py (run on Ascend 950); CANN: aclnnGatherPaKvCache (A2, A3); kernel: "
        "ops-transformer gather_pa_kv_cache, which copies pages without looking whether a block is one; pages in the "
        "storage format FRACTAL_NZ, which no shape shows, are not decomposed"
    ),
    summary=f"key, value{_FORMULA}",
)
GATHER_PA_KV_CACHE_FUNCTIONAL = functional(  # it copies both first: what runs in eager and captured graphs writes
    GATHER_PA_KV_CACHE, "npu::npu_gather_pa_kv_cache_functional", f"copies of key and value with {_FORMULA}"
)
