"""Attention over selected keys that are their own values: out[i] = softmax(scale · (q kᵀ + q_rope k_ropeᵀ)) k.

Each row reads the keys that its list of indices names, and nothing else of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from fusion._torch.tensors import count, hint, known_true
from fusion.operators.attention.softmax import Visible, rounded_softmax
from fusion.operators.attention.visibility import Rows, rows_of
from fusion.operators.calling import Given
from fusion.operators.dtype_sets import HALVES, INT32, compute_dtype
from fusion.operators.flops import scores, unlisted
from fusion.operators.limits import A2_A3, Limit
from fusion.operators.operator import Operator
from fusion.operators.sparse import sparse_limits

_PART = 1 << 26
"""Number of elements of gathered keys (256 MiB in float32) above which rows are computed in parts."""


@dataclass(frozen=True)
class KeyRows:
    """Gathered rows of a cache in the dtype of computation: keys [R, K, D + Dr], rotated lanes last, and values
    [R, K, D]."""

    keys: Tensor
    values: Tensor


Read = Callable[[Sequence[Tensor]], KeyRows]
"""Function that gathers keys and values at places [R, K], one tensor of indices for each leading dim of the keys."""


def _sparse_flash_attention(given: Given) -> tuple[Tensor, ...]:
    query, rope = given["query"], given["query_rope"]
    full = query if rope is None else torch.cat((query, rope), dim=-1)
    out, top, total = listed_attention(given, full, partial(_read, given))
    _, *statistics = _outputs(query, given["return_softmax_lse"])
    if given["return_softmax_lse"]:
        statistics = [each.reshape(query.shape[:-1]).unsqueeze(-3) for each in (top, total)]
    return out, *statistics


def listed_attention(given: Given, query: Tensor, read: Read) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention of `query` [.., N, D + Dr], rotated lanes last, over the keys that the lists of a call name.

    Args:
        given: the arguments of the call.
        query: the queries.
        read: function that gathers keys and values at given indices.

    Returns:
        The output [.., N, D]; and the largest score and the sum of exp(score - largest), [R, N, 1] each for all R rows.
    """
    rows = rows_of(given, "kv")
    tokens, used = _tokens(given["sparse_indices"].squeeze(-2), given["sparse_block_size"], rows)
    lists = [each.flatten(0, -2) for each in (used, *_places(given, rows, tokens))]
    flat, size = query.flatten(0, -3), _rows_at_once(tokens, given)
    if known_true(flat.shape[0] <= size):
        out, top, total = _attended(given, read, flat, *lists)
    else:
        parts = zip(*(each.split(size) for each in (flat, *lists)), strict=True)
        out, top, total = map(torch.cat, zip(*(_attended(given, read, *part) for part in parts), strict=True))
    return out.reshape(*query.shape[:-1], out.shape[-1]), top, total


def _tokens(indices: Tensor, size: int, rows: Rows) -> tuple[Tensor, Tensor]:
    """Expand lists `indices` [*rows, K] of blocks of `size` tokens to tokens [*rows, K · size], and a mask of those in
    use.

    A list ends before its first negative entry. Not in use are tokens behind that end, and those that the row does not
    see by `rows`; they are replaced by token 0, which exists for every row that sees any.
    """
    entry, tokens = torch.arange(indices.shape[-1], device=indices.device), indices.long()
    listed = entry < torch.where(indices < 0, entry, indices.shape[-1]).amin(-1, keepdim=True)
    if size != 1:
        inner = torch.arange(size, device=indices.device)
        tokens = (tokens[..., None] * size + inner).flatten(-2)
        listed = listed.repeat_interleave(size, -1)
    used = listed & (tokens < rows.seen[..., None])
    return torch.where(used, tokens, 0), used


def _places(given: Given, rows: Rows, tokens: Tensor) -> list[Tensor]:
    """Return the indices of `tokens`, positions in the sequence of each row, into the leading dims of the keys.

    There is one tensor of indices for each dim: for rows and for pages two, for packed keys one.
    """
    sequence, layout, key = rows.sequence[..., None], given["layout_kv"], given["key"]
    if layout == "TND":
        assert rows.first is not None
        return [(rows.first[..., None] + tokens).clamp(max=key.shape[0] - 1)]
    if layout == "BSND":
        return [sequence.expand_as(tokens), tokens]
    size = key.shape[1]
    blocks = given["block_table"][sequence, tokens.div(size, rounding_mode="floor")].long()
    return [blocks.clamp(0, key.shape[0] - 1), tokens % size]  # the table of an empty sequence may hold anything


def _rows_at_once(tokens: Tensor, given: Given) -> int:
    """Return the number of rows to compute at once, so that gathered keys have at most `_PART` elements; all rows if a
    size is symbolic."""
    count, width = math.prod(given["query"].shape[:-2]), given["key"].shape[-1]
    sizes = (count, tokens.shape[-1], width)
    if any(isinstance(size, torch.SymInt) for size in sizes):
        return count
    return min(max(_PART // max(tokens.shape[-1] * width, 1), 1), max(count, 1))


def _attended(given: Given, read: Read, query: Tensor, used: Tensor, *places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the output [R, N, D], the largest score and the sum [R, N, 1] of R rows, with keys at `places` [R, K], of
    which `used` [R, K] are visible."""
    rows = read(places)
    pair, visible = (query.to(rows.keys.dtype), rows.keys), Visible(used[:, None])
    out, top, total = rounded_softmax([pair], rows.values, visible, given["scale_value"], query.dtype)
    return out.to(query.dtype), top, total


def _read(given: Given, places: Sequence[Tensor]) -> KeyRows:
    key, value, rope = given["key"], given["value"], given["key_rope"]
    wide, keys = compute_dtype(given["query"]), gather_rows(key, places)
    keys = (keys if rope is None else torch.cat((keys, gather_rows(rope, places)), dim=-1)).to(wide)
    if value is None or value is key:
        return KeyRows(keys, keys[..., : key.shape[-1]])
    return KeyRows(keys, gather_rows(value, places).to(wide))


def gather_rows(cache: Tensor, places: Sequence[Tensor]) -> Tensor:
    """Gather the rows [R, K, D] of `cache` [.., 1, D] at the indices `places`, one tensor [R, K] for each leading
    dim.
    """
    rows = cache.select(-2, 0)
    if len(places) == 2 and known_true(rows.stride(0) == rows.shape[1] * rows.stride(1)):
        first, second = places
        rows, places = rows.flatten(0, 1), [first * rows.shape[1] + second]
    if len(places) == 2:
        return torch.ops.aten.index.Tensor(rows, list(places))
    (place,) = places
    return rows.index_select(0, place.flatten()).reshape(*place.shape, rows.shape[-1])  # index is slower on a CPU


def _outputs(query: Tensor, return_softmax_lse: bool) -> tuple[Tensor, ...]:
    """Return the empty output, and the empty largest score and sum of each row, [B, 1, S, N] or [1, T, N] each, or [0]
    unless `return_softmax_lse`."""
    *batch, tokens, heads, _ = query.shape
    sizes = [*batch, 1, tokens, heads] if return_softmax_lse else [0]
    wide = torch.promote_types(query.dtype, torch.float32) if return_softmax_lse else torch.float32
    return query.new_empty(query.shape), *(query.new_empty(sizes, dtype=wide) for _ in range(2))


def _flops(given: Given) -> float:
    """Estimate the multiplications and additions: q · k and p · v of every query with each key that its list has room
    for.
    """
    query, listed, rope = given["query"], given["sparse_indices"].shape[-1], given["query_rope"]
    keys = hint(listed) * hint(given["sparse_block_size"])
    width = 2 * query.shape[-1] + (0 if rope is None else rope.shape[-1])
    return scores(count(query) / hint(query.shape[-1]) * keys, width)


def _skipped_bytes(given: Given) -> float:
    """Estimate how many bytes of keys, values and rotated keys no list can name."""
    named = count(given["sparse_indices"]) * hint(given["sparse_block_size"])
    return sum(unlisted(given[name], named) for name in ("key", "value", "key_rope"))


BLOCKS = (1, 2, 4, 8, 16, 32, 64, 128)
_KERNEL = (
    *sparse_limits.kernel("kv"),
    Limit("given(value)", because="CANN takes calls without a value from 9.2 on; pass the key"),
    "dtype(value) == dtype(query)",
    "given(query_rope) and given(key_rope)",
    "dtype(query_rope) == dtype(query) and dtype(key_rope) == dtype(query)",
    Limit("D == 512", because="D is the width of the latent, kv_lora_rank"),
    "Dr == 64",
    *sparse_limits.in_graphs("return_softmax_lse == False", "graphs return no statistics of the softmax"),
)
_A2 = (
    *_KERNEL,
    f"N in {BLOCKS}",
    f"sparse_block_size in {BLOCKS}",
    Limit("Size % sparse_block_size == 0", when="layout_kv == 'PA_BSND'"),
)

SPARSE_FLASH_ATTENTION = Operator(
    schema=(
        "npu::npu_sparse_flash_attention(Tensor query, Tensor key, Tensor? value, Tensor sparse_indices, "
        "float scale_value, *, Tensor? block_table=None, Tensor? actual_seq_lengths_query=None, "
        "Tensor? actual_seq_lengths_kv=None, Tensor? query_rope=None, Tensor? key_rope=None, int sparse_block_size=1, "
        'str layout_query="BSND", str layout_kv="BSND", int sparse_mode=3, int pre_tokens=9223372036854775807, '
        "int next_tokens=9223372036854775807, int attention_mode=0, bool return_softmax_lse=False, Tensor? sinks=None) "
        "-> (Tensor, Tensor, Tensor)"
    ),
    compute=_sparse_flash_attention,
    uncomputed={"sinks": "sinks are not decomposed"},
    without_effect=frozenset({"pre_tokens", "next_tokens", "attention_mode"}),
    outputs=_outputs,
    dims={
        "query": sparse_limits.by_layout("B S N D", "T N D"),
        "query_rope": sparse_limits.by_layout("B S N Dr", "T N Dr"),
        "sparse_indices": sparse_limits.by_layout("B S 1 K", "T 1 K"),
        **sparse_limits.dims("kv", {"key": "D", "value": "D", "key_rope": "Dr"}),
    },
    dtypes={"query key value query_rope key_rope": HALVES, "sparse_indices": INT32, **sparse_limits.dtypes("kv")},
    limits={
        "host": (
            *sparse_limits.host("kv"),
            Limit("attention_mode == 2", because="there is no other mode, not even the default"),
            "sparse_block_size >= 1",
            "given(query_rope) and given(key_rope) or not given(query_rope) and not given(key_rope)",
            Limit("return_softmax_lse == False", when="layout_kv == 'PA_BSND'", because="its Meta kernel is wrong"),
        ),
        **dict.fromkeys(A2_A3, _A2),
        "ascend950": (*_KERNEL, "N <= 128", "sparse_block_size == 1"),
    },
    flops=_flops,
    skipped_bytes=_skipped_bytes,
    older="custom::npu_sparse_flash_attention",
    older_means={"attention_mode": 2},
    source="op-plugin: torch_npu.npu_sparse_flash_attention; kernel: ops-transformer sparse_flash_attention",
    summary=(
        "out = round(round(p) k / Σ p), p = exp(s - max s), s = scale_value · (q kᵀ + q_rope k_ropeᵀ) over the listed "
        "keys, in float32; value must be the key itself; a list ends before its first negative entry, causal rows "
        "(sparse_mode 3) skip later tokens, and a row without keys is 0"
    ),
)
