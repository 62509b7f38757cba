"""Rows of caches from the pages that a block table names, the sequences one behind the other.

token j of sequence i = cache[block_tables[i, seq_offset[i] // Size + j // Size], j % Size]
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fusion.operators.contract import Limit, Operator
from fusion.operators.layouts import lying_as


def _found(
    cache: Tensor, rows: Tensor, tables: Tensor, lengths: Tensor, offset: Tensor | None, in_sums: bool
) -> tuple[Tensor, Tensor]:
    """The rows [T, N, D] of the pages of one cache, and which of them belong to a sequence [T]."""
    size, (batch, most) = cache.shape[1], tables.shape
    ends = lengths[1:] - lengths[:1] if in_sums else lengths.cumsum(0)
    tokens = torch.arange(rows.shape[0], device=cache.device)
    sequence = torch.searchsorted(ends.long(), tokens, right=True)
    used = sequence < batch
    sequence = sequence.clamp(max=batch - 1)
    counts = lengths.diff() if in_sums else lengths
    place = tokens - (ends - counts).long()[sequence]
    first = 0 if offset is None else offset.long()[sequence] // size
    column = first + place // size
    block = tables.long()[sequence, column.clamp(max=most - 1)]
    there = (column < most) & (block >= 0) & (block < cache.shape[0])
    found = cache[block.clamp(0, cache.shape[0] - 1), place % size]
    return torch.where(there[:, None, None], found, 0), used


def _functional(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    def gathered(cache: Tensor, rows: Tensor) -> Tensor:
        found, used = _found(cache, rows, block_tables, seq_lens, seq_offset, is_seq_lens_cumsum)
        return lying_as(torch.where(used[:, None, None], found, rows), rows)

    return gathered(key_cache, key), gathered(value_cache, value)


def _in_place(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> None:  # fmt: skip
    results = _functional(key_cache, value_cache, block_tables, seq_lens, key, value, seq_offset, is_seq_lens_cumsum)
    for rows, found in zip((key, value), results, strict=True):
        rows.copy_(found)


def _functional_meta(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return torch.empty_like(key), torch.empty_like(value)


def _in_place_meta(
    key_cache: Tensor, value_cache: Tensor, block_tables: Tensor, seq_lens: Tensor, key: Tensor, value: Tensor,
    seq_offset: Tensor | None = None, is_seq_lens_cumsum: bool = False,
) -> None:  # fmt: skip
    return None


_WHOLE = frozenset({torch.int32})
_STORED = frozenset({torch.float16, torch.bfloat16, torch.int8})
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
_SCHEMA = (
    "Tensor key_cache, Tensor value_cache, Tensor block_tables, Tensor seq_lens, {rows}, *, "
    "Tensor? seq_offset=None, bool is_seq_lens_cumsum=False"
)
_FORMULA = (
    "[token j of sequence i] = cache[block_tables[i, seq_offset[i] // Size + j // Size], j % Size], one sequence "
    "behind the other; 0 for a block that is none"
)

GATHER_PA_KV_CACHE = Operator(
    schema=f"npu::npu_gather_pa_kv_cache({_SCHEMA.format(rows='Tensor(a!) key, Tensor(b!) value')}) -> ()",
    fallback=_in_place,
    meta=_in_place_meta,
    dims={
        "key_cache": "Blocks Size N D",
        "value_cache": "Blocks Size N E",
        "block_tables": "B M",
        "seq_lens": "L",
        "key": "T N D",
        "value": "T N E",
        "seq_offset": "B",
    },
    dtypes={
        **dict.fromkeys(("key_cache", "value_cache", "key", "value"), _STORED),
        **dict.fromkeys(("block_tables", "seq_lens", "seq_offset"), _WHOLE),
    },
    limits={"host": _HOST, "ascend910b": _KERNEL, "ascend910_93": _KERNEL, "ascend950": _KERNEL},
    lowerings=frozenset({"eager", "npugraph_ex"}),  # torchair has no converter
    source=(
        "op-plugin: test_npu_gather_pa_kv_cache.py (run on Ascend 950); CANN: aclnnGatherPaKvCache (A2, A3); kernel: "
        "ops-transformer gather_pa_kv_cache, which copies pages without looking whether a block is one; pages in the "
        "storage format FRACTAL_NZ, which no shape shows, are not decomposed"
    ),
    summary=f"key, value{_FORMULA}",
)
GATHER_PA_KV_CACHE_FUNCTIONAL = replace(
    GATHER_PA_KV_CACHE,
    schema=(
        f"npu::npu_gather_pa_kv_cache_functional({_SCHEMA.format(rows='Tensor key, Tensor value')}) -> (Tensor, Tensor)"
    ),
    fallback=_functional,
    meta=_functional_meta,
    lowerings=frozenset(),  # it copies both results first; the in-place form runs in eager and captured graphs
    summary=f"copies of key and value with {_FORMULA}",
    in_place="npu::npu_gather_pa_kv_cache",
)
