"""How attention of few queries over a latent is put to atb: pages, lengths, masks of fixed shape."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fusion import require
from patterns.attention.calls import MaskSpec, laid
from patterns.latent import latent_calls

HIDDEN = -10000.0
"""What is added to the score of a hidden key: its weight is 0."""
ROWS = 4
"""The most queries of a sequence."""
LINES = (0, 2, 1, 3)
"""How pages in NZ [Blocks, D/L, Size, L] are turned to be read, one row after the other."""


@dataclass(frozen=True)
class Pages:
    """Pages of the latent and its rotated lanes, how they lie, how many rows one has, and how many a sequence has."""

    latents: Tensor
    ropes: Tensor
    mode: str
    size: Any
    room: Any
    table: Tensor | None = None


@dataclass(frozen=True)
class Queries:
    """Absorbed queries [B, N, S, C], or int8 ones with scales of scores and of values, and rotated [B, N, S, Dr]."""

    absorbed: Tensor
    rope: Tensor
    scale: float
    scales: dict[str, Tensor] = field(default_factory=dict[str, Tensor])


def in_nz(batch: Any, latents: Tensor, ropes: Tensor, mode: str) -> Pages:
    """Pages in NZ, in their own order, as many for each sequence."""
    blocks: Any = latents.shape[0]
    size = latents.shape[2]
    require(all(each.is_contiguous() for each in (latents, ropes)), "the lines of the pages do not lie together")
    shared = isinstance(blocks, int) and isinstance(batch, int) and blocks % batch != 0
    require(not shared, "{blocks} pages are not as many for each of {batch} sequences", blocks=blocks, batch=batch)
    return Pages(latents, ropes, mode, size, blocks * size // batch)


def in_rows(batch: Any, latent: Tensor, k_rope: Tensor) -> Pages:
    """The latent [.., C] with its rotated lanes [.., Dr], contiguous, as pages [Blocks, Size, 1, ..]."""
    rows = (each.reshape(batch, -1, each.shape[-1]) for each in (latent, k_rope))
    latents, ropes = (latent_calls.pages(each, 1) for each in rows)
    size = latents.shape[1]
    return Pages(latents, ropes, "krope_ctkv", size, latents.shape[0] * size // batch)


def by_table(caches: tuple[Tensor, Tensor], table: Tensor, size: Any, mode: str) -> Pages:
    """Pages of two caches that a block table names; in NZ in every mode but one."""
    latents, ropes = (_laid(each, size, mode) for each in caches)
    return Pages(latents, ropes, mode, size, table.shape[1] * size, table.int())


def _laid(pages: Tensor, size: Any, mode: str) -> Tensor:
    if mode == "krope_ctkv":
        return laid(pages, size).unsqueeze(2)
    return laid(pages, size, "lines").squeeze(1)


def structured(q: Queries, pages: Pages, seen: MaskSpec) -> Tensor:
    """Attention [B, S, N, C] over keys that lengths and an order tell."""
    known = seen.kind != "mask" and seen.window is None
    require(known, "what the mask lets through is not proven to be causal or a length")
    batch, _, queries = q.absorbed.shape[:3]
    rows: dict[str, Any] = {} if queries == 1 else dict(calc_type="calc_type_spec", qseqlen=[queries] * batch)
    if queries > 1 and seen.kind != "full":
        rows |= dict(mask_type="mask_type_free", mask=_free(queries, pages.size, q.rope))
    count: Any = queries if seen.kind == "left" else pages.room if seen.kv_len is None else seen.kv_len
    require(seen.kv_lens is not None or count <= pages.room, "there are fewer keys than queries")
    return attended(q, pages, [count] * batch if seen.kv_lens is None else seen.kv_lens, rows)


def _free(queries: int, size: int, like: Tensor) -> Tensor:
    """The mask of fixed shape for so many queries, [Size - 3 + 2 · queries, Size]."""
    shape = (size - 3 + 2 * queries, size)
    return torch.full(shape, HIDDEN, dtype=like.dtype, device=like.device).triu(2 - queries)


def dense(q: Queries, pages: Pages, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Attention [B, S, N, C] under a mask [B | 1, 1, S, T], true where a key is hidden; queries without keys [B, S]."""
    batch, _, queries = q.absorbed.shape[:3]
    keys: Any = mask.shape[-1]
    hidden = mask.expand(batch, 1, queries, keys).reshape(batch * queries, keys)
    added = torch.zeros(hidden.shape, dtype=q.rope.dtype, device=q.rope.device).masked_fill(hidden, HIDDEN)
    rows = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch, mask_type="mask_type_spec", mask=added)
    return attended(q, pages, [keys] * batch, rows), hidden.all(-1).reshape(batch, queries)


def attended(q: Queries, pages: Pages, context: Any, rows: dict[str, Any]) -> Any:
    """Attention over pages, [B, S, N, C]; with `return_lse` also its log-sum-exp [B, S, N, 1]."""
    batch, heads, queries = q.absorbed.shape[:3]
    blocks = pages.table
    if blocks is None:
        blocks = torch.arange(pages.latents.shape[0], dtype=torch.int32, device=q.rope.device).reshape(batch, -1)
    operator = torch.ops.atb.npu_multi_head_latent_attention
    run = operator.lse if "return_lse" in rows else operator.default
    run = operator.tensor_lengths if isinstance(context, Tensor) else run
    query, rope = (each.transpose(1, 2).flatten(0, 1) for each in (q.absorbed, q.rope))
    y = run(
        query, rope, pages.latents, pages.ropes, blocks, context, heads, q.scale, 1, cache_mode=pages.mode, **rows,
        **q.scales,
    )  # fmt: skip
    rows_of = (batch, queries)
    return tuple(each.unflatten(0, rows_of) for each in y) if isinstance(y, tuple) else y.unflatten(0, rows_of)
