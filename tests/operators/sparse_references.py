"""What the latent prolog, the indexer and attention over listed keys compute, in float64, token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor


def prolog(
    token_x: Tensor, weight_dq: Tensor, weight_uq_qr: Tensor, weight_uk: Tensor, weight_dkv_kr: Tensor,
    rmsnorm_gamma_cq: Tensor, rmsnorm_gamma_ckv: Tensor, rope_sin: Tensor, rope_cos: Tensor, kv_cache: Tensor,
    kr_cache: Tensor, cache_mode: str, cache_index: Tensor | None = None, query_norm_flag: bool = False,
    qc_qr_scale: float = 1.0, kc_scale: float = 1.0, rmsnorm_epsilon_cq: float = 1e-5,
    rmsnorm_epsilon_ckv: float = 1e-5, stored: torch.dtype = torch.float64,
) -> tuple[Tensor, ...]:  # fmt: skip
    """`stored`: the dtype to which the kernel rounds what it stores."""

    def rounded(x: Tensor) -> Tensor:
        return x.to(stored).double()

    def norm(x: Tensor, gamma: Tensor, epsilon: float, scale: float) -> Tensor:
        return rounded(x / math.sqrt(sum(v * v for v in x.tolist()) / len(x) + epsilon) * gamma * scale)

    lead, heads = token_x.shape[:-1], weight_uk.shape[0]
    dn, width, dr = weight_uk.shape[1], weight_uk.shape[2], rope_sin.shape[-1]
    tokens, sines, cosines = (x.reshape(-1, x.shape[-1]) for x in (token_x, rope_sin, rope_cos))
    slots = range(len(tokens)) if cache_index is None else cache_index.flatten().tolist()
    kv, kr = kv_cache.clone(), kr_cache.clone()
    count = len(tokens)
    query, query_rope = torch.zeros(count, heads, width).double(), torch.zeros(count, heads, dr).double()
    latent = torch.zeros(count, len(rmsnorm_gamma_cq)).double()
    for t, (x, sin, cos, slot) in enumerate(zip(tokens, sines, cosines, slots, strict=True)):
        latent[t] = norm(rounded(x @ weight_dq), rmsnorm_gamma_cq, rmsnorm_epsilon_cq, qc_qr_scale)
        q = rounded(latent[t] @ weight_uq_qr).reshape(heads, dn + dr)
        for n in range(heads):
            query[t, n] = rounded(q[n, :dn] @ weight_uk[n])
            query_rope[t, n] = rounded(rope(q[n, dn:], sin, cos))
        k = rounded(x @ weight_dkv_kr)
        line = norm(k[:width], rmsnorm_gamma_ckv, rmsnorm_epsilon_ckv, kc_scale)
        for cache, row in ((kv, line), (kr, rounded(rope(k[width:], sin, cos)))):
            store(cache, row, slot, cache_mode)
    none = torch.zeros(1).double()
    queries = query.reshape(*lead, heads, width), query_rope.reshape(*lead, heads, dr)
    return *queries, none, latent.reshape(*lead, latent.shape[1]) if query_norm_flag else none, none, kv, kr


def older_prolog(**call: Any) -> tuple[Tensor, ...]:
    """What the older versions give of it."""
    query, query_rope, _, _, _, *caches = prolog(**call)
    return query, query_rope, *caches


def rope(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Component 2i and 2i + 1 turn together and part to i and i + Dr/2, each by the angle that stands there."""
    half = len(x) // 2
    out = torch.zeros_like(x)
    for i in range(half):
        a, b = x[2 * i], x[2 * i + 1]
        out[i] = a * cos[i] - b * sin[i]
        out[i + half] = b * cos[i + half] + a * sin[i + half]
    return out


def store(cache: Tensor, row: Tensor, slot: int, mode: str) -> None:
    if slot < 0:
        return
    if mode != "PA_NZ":
        cache.flatten(0, -3)[slot, 0] = row
        return
    blocks, size, _, width = cache.shape
    memory, line = cache.view(blocks, width * size), 32 if cache.dtype == torch.int8 else 16
    for c in range(width):
        memory[slot // size, c // line * size * line + slot % size * line + c % line] = row[c]


def product(input: Tensor, weight: Tensor, **more: Any) -> Tensor:
    x1 = input.transpose(0, 1) if more.get("perm_x1") == [1, 0, 2] else input
    w = weight.transpose(1, 2) if more.get("perm_x2") == [0, 2, 1] else weight
    y = torch.stack([torch.stack([x1[b, m] @ w[b] for b in range(len(w))]) for m in range(x1.shape[1])])
    parts = more.get("batch_split_factor", 1)
    return y if parts == 1 else torch.stack([each.flatten(1) for each in y.chunk(parts, 1)])


def sequences(x: Tensor, layout: str, lengths: Tensor | None, table: Tensor | None = None) -> list[Tensor]:
    """The tokens of every sequence."""
    if layout == "TND":
        return [x[start:end] for start, end in pairwise([0, *lengths.tolist()])]
    if layout == "BSND":
        sizes = [x.shape[1]] * len(x) if lengths is None else lengths.tolist()
        return [x[b, :size] for b, size in enumerate(sizes)]
    size, empty = x.shape[1], x.new_empty(0, *x.shape[2:])
    return [
        torch.stack([x[table[b, j // size], j % size] for j in range(count)]) if count else empty
        for b, count in enumerate(lengths.tolist())
    ]


def rows(of_query: list[Tensor], of_key: list[Tensor], mode: int) -> Iterator[tuple[int, int, int]]:
    """Sequence, row and number of visible keys of every row."""
    for b, (q, k) in enumerate(zip(of_query, of_key, strict=True)):
        for i in range(len(q)):
            yield b, i, max(0, len(k) - len(q) + i + 1) if mode == 3 else len(k)


def place(out: Tensor, layout: str, lengths: Tensor | None, b: int, i: int) -> Tensor:
    """Where the row `i` of sequence `b` stands in a result that lies like the query."""
    return out[i + ([0, *lengths.tolist()][b])] if layout == "TND" else out[b, i]


def indexer(
    query: Tensor, key: Tensor, weights: Tensor, sparse_count: int, layout_query: str, layout_key: str,
    actual_seq_lengths_query: Tensor | None = None, actual_seq_lengths_key: Tensor | None = None,
    block_table: Tensor | None = None, sparse_mode: int = 3, return_value: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    of_query, of_weights = (sequences(x, layout_query, actual_seq_lengths_query) for x in (query, weights))
    of_key = sequences(key, layout_key, actual_seq_lengths_key, block_table)
    shape = (*query.shape[:-2], 1, sparse_count)
    indices, values = torch.full(shape, -1.0).double(), torch.full(shape, -math.inf).double()
    for b, i, n in rows(of_query, of_key, sparse_mode):
        scores = []
        for j in range(n):
            products = [max(0.0, (head @ of_key[b][j, 0]).item()) for head in of_query[b][i]]
            scores.append(sum(w * p for w, p in zip(of_weights[b][i].tolist(), products, strict=True)))
        gaps = [x - y for x, y in pairwise(sorted(scores, reverse=True))]
        assert all(gap > 1e-5 for gap in gaps), "no order: choose other numbers"
        best = sorted(range(n), key=lambda j: -scores[j])[:sparse_count]
        for out, found in ((indices, best), (values, [scores[j] for j in best])):
            row = place(out, layout_query, actual_seq_lengths_query, b, i)
            row[0, : len(best)] = torch.tensor(found, dtype=torch.float64)
    return indices, values if return_value else query.new_empty(0)


def attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, attention_mode: int,
    layout_query: str, layout_kv: str, actual_seq_lengths_query: Tensor | None = None,
    actual_seq_lengths_kv: Tensor | None = None, block_table: Tensor | None = None, query_rope: Tensor | None = None,
    key_rope: Tensor | None = None, sparse_block_size: int = 1, sparse_mode: int = 3,
    return_softmax_lse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    if query_rope is not None:
        query, key = torch.cat((query, query_rope), -1), torch.cat((key, key_rope), -1)
    of_query, of_list = (sequences(x, layout_query, actual_seq_lengths_query) for x in (query, sparse_indices))
    of_key, of_value = (sequences(x, layout_kv, actual_seq_lengths_kv, block_table) for x in (key, value))
    out = torch.zeros(*query.shape[:-1], value.shape[-1]).double()
    top, total = torch.zeros(query.shape[:-1]).double(), torch.zeros(query.shape[:-1]).double()
    for b, i, n in rows(of_query, of_key, sparse_mode):
        tokens: list[int] = []
        for block in of_list[b][i, 0].tolist():
            if block < 0:
                break
            tokens += [j for j in range(block * sparse_block_size, (block + 1) * sparse_block_size) if j < n]
        for h in range(query.shape[-2] if tokens else 0):
            scores = torch.stack([of_query[b][i, h] @ of_key[b][j, 0] * scale_value for j in tokens])
            weights = scores.softmax(0)
            where = [place(each, layout_query, actual_seq_lengths_query, b, i) for each in (out, top, total)]
            where[0][h] = sum(w * of_value[b][j, 0] for w, j in zip(weights, tokens, strict=True))
            where[1][h] = scores.max()
            where[2][h] = (scores - scores.max()).exp().sum()
    if not return_softmax_lse:
        return out, query.new_empty(0), query.new_empty(0)
    return out, top.unsqueeze(-3), total.unsqueeze(-3)


def quant_indexer(
    query: Tensor, key: Tensor, weights: Tensor, query_dequant_scale: Tensor, key_dequant_scale: Tensor,
    query_quant_mode: int, key_quant_mode: int, **call: Any,
) -> Tensor:  # fmt: skip
    """Without what the kernel rounds."""
    assert query_quant_mode == key_quant_mode == 0
    scaled = (query.double() * query_dequant_scale[..., None], key.double() * key_dequant_scale[..., None])
    return indexer(*scaled, weights, **call)[0]


def quant_attention(
    query: Tensor, key: Tensor, value: Tensor, sparse_indices: Tensor, scale_value: float, key_quant_mode: int,
    value_quant_mode: int, tile_size: int, rope_head_dim: int, **call: Any,
) -> Tensor:  # fmt: skip
    """The same over rows that are unpacked, their rotated keys from bfloat16."""
    assert key_quant_mode == value_quant_mode == 2
    assert value is key
    width = query.shape[-1] - rope_head_dim
    latent, rope, scale = key.split([width, 2 * rope_head_dim, 4 * width // tile_size], dim=-1)
    scales = scale.contiguous().view(torch.float32).double().repeat_interleave(tile_size, dim=-1)
    keys = latent.double() * scales
    q, q_rope = query.double().split([width, rope_head_dim], dim=-1)
    k_rope = rope.contiguous().view(torch.bfloat16).double()
    return attention(q, keys, keys, sparse_indices, scale_value, query_rope=q_rope, key_rope=k_rope, **call)[0]
