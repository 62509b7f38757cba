"""Attention over selected keys in packed rows of bytes: int8 latents with a scale per tile, and rotated keys.

A row of C + Dr · size + C / tile · 4 bytes is [int8(latent / scale) | bits(rope) | bits(scale)]: 656 for DeepSeek-V3.2.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import HALVES, INT8, INT32, compute_dtype
from fusion.operators.flops import scores, unlisted
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.sparse import sparse_limits
from fusion.operators.sparse.sparse_flash_attention import BLOCKS, KeyRows, gather_rows, listed_attention

_SCALE = 4
"""Bytes of a scale, a float32."""


def _attention(given: Given) -> Tensor:
    out, _, _ = listed_attention(given, given["query"], partial(_read, given))
    return out


def _read(given: Given, places: Sequence[Tensor]) -> KeyRows:
    """Gather the rows of bytes at `places`, unpacked to keys, rotated lanes last, and values, in the wide dtype."""
    query, width = given["query"], given["query"].shape[-1] - given["rope_head_dim"]
    keys = torch.cat(_unpacked(given, gather_rows(given["key"], places)), dim=-1).to(compute_dtype(query))
    if given["value"] is given["key"]:
        return KeyRows(keys, keys[..., :width])
    latent, _ = _unpacked(given, gather_rows(given["value"], places))
    return KeyRows(keys, latent.to(keys.dtype))


def _unpacked(given: Given, row: Tensor) -> tuple[Tensor, Tensor]:
    """Unpack rows of bytes to latents and rotated keys, both rounded to the dtype of the query."""
    query, lanes, tile = given["query"], given["rope_head_dim"], given["tile_size"]
    width, stored = query.shape[-1] - lanes, query.dtype if query.dtype in HALVES else torch.bfloat16
    quantised, rope, scale = row.split([width, lanes * stored.itemsize, width // tile * _SCALE], dim=-1)
    wide = compute_dtype(query)
    scales = scale.contiguous().view(torch.float32).to(wide)
    latent = (quantised.unflatten(-1, (-1, tile)).to(wide) * scales.unsqueeze(-1)).flatten(-2).to(query.dtype)
    return latent, rope.contiguous().view(stored).to(query.dtype)


def _outputs(query: Tensor, rope_head_dim: int) -> Tensor:
    return query.new_empty((*query.shape[:-1], query.shape[-1] - rope_head_dim))


def _flops(given: Given) -> float:
    """Estimate the multiplications and additions: q · k and p · v of every query with each key that its list has room
    for.
    """
    query = given["query"]
    keys = hint(given["sparse_indices"].shape[-1]) * hint(given["sparse_block_size"])
    return scores(count(query) / hint(query.shape[-1]) * keys, 2 * query.shape[-1] - given["rope_head_dim"])


def _skipped_bytes(given: Given) -> float:
    """Estimate how many bytes of keys and values no list can name."""
    named = count(given["sparse_indices"]) * hint(given["sparse_block_size"])
    return sum(unlisted(given[name], named) for name in ("key", "value"))


_MODES = (
    Limit("attention_mode == 2", because="there is no other mode, not even the default"),
    Limit("key_quant_mode == 2 and value_quant_mode == 2", because="rows are packed by tiles in no other mode"),
    Limit("quant_scale_repo_mode == 1", because="the scales lie in the rows"),
)
_ROWS = (
    "tile_size >= 1",
    "0 < rope_head_dim and rope_head_dim < D and (D - rope_head_dim) % tile_size == 0",
    Limit("Row == D + rope_head_dim + 4 * ((D - rope_head_dim) // tile_size)", because="bytes, halves, then floats"),
    "W == Row",
)
_KERNEL = (
    *sparse_limits.pages("kv"),
    "D == 576",
    "rope_head_dim == 64",
    "tile_size == 128",
    f"N in {BLOCKS}",
    "sparse_block_size in (1, 2, 4, 8, 16)",
)

KV_QUANT_SPARSE_FLASH_ATTENTION = Operator(
    schema=(
        "npu::npu_kv_quant_sparse_flash_attention(Tensor query, Tensor key, Tensor value, Tensor sparse_indices, "
        "float scale_value, int key_quant_mode, int value_quant_mode, *, Tensor? key_dequant_scale=None, "
        "Tensor? value_dequant_scale=None, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        'Tensor? actual_seq_lengths_kv=None, int sparse_block_size=1, str layout_query="BSND", '
        'str layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807, '
        "int next_tokens=9223372036854775807, int attention_mode=0, int quant_scale_repo_mode=1, int tile_size=128, "
        "int rope_head_dim=64, int? key_dtype=None, int? value_dtype=None) -> Tensor"
    ),
    compute=_attention,
    uncomputed={
        "key_dequant_scale value_dequant_scale": "the scales lie in the rows",
        "key_dtype value_dtype": "floats of 8 bits are not decomposed",
    },
    without_effect=frozenset(
        {"pre_tokens", "next_tokens", "attention_mode", "key_quant_mode", "value_quant_mode", "quant_scale_repo_mode"}
    ),
    outputs=_outputs,
    dims={
        "query": sparse_limits.by_layout("B S N D", "T N D"),
        "sparse_indices": sparse_limits.by_layout("B S 1 K", "T 1 K"),
        **sparse_limits.dims("kv", {"key": "Row", "value": "W"}),
    },
    dtypes={"query": HALVES, "key value": INT8, "sparse_indices": INT32, **sparse_limits.dtypes("kv")},
    limits={
        "host": (*sparse_limits.host("kv"), *_MODES, *_ROWS, "sparse_block_size >= 1"),
        **dict.fromkeys(A2_A3, _KERNEL),
    },
    flops=_flops,
    skipped_bytes=_skipped_bytes,
    older="custom::npu_sparse_flash_attention_antiquant",
    source=(
        "op-plugin: torch_npu.npu_kv_quant_sparse_flash_attention; rows as npu_mla_prolog_v3 writes them with "
        "kv_cache_quant_mode=3; on ascend950 they hold float8, of which this contract says nothing"
    ),
    summary=(
        "npu_sparse_flash_attention over keys round(int8 · scale of the tile), rounded as the query is stored, and "
        "rotated keys whose bits have the query's dtype; values are the latents of value, which a kernel takes for "
        "those of key; a list must name no key twice, "
        "else the kernel cuts it short"
    ),
)
