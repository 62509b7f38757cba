"""The row of a token in multi-head latent attention, from its projection to both caches, in one operator.

    [.., c, r] = kv      ckv_cache[position] = s norm(c)              k_cache[position] = rope(r)
    int8 (C8):           ckv_cache[slot] = int8(s norm(c) / a)        k_cache[slot] = int8(rope(r) / b), or rope(r)

*Matches* the norm of the latent lanes, the rotation of the lanes behind them from pairs to halves, and the writes of
both, to consecutive positions of contiguous caches or by slot to pages, BSND or NZ, in int8 by static scales of each
channel or of all; and the rows themselves beside them, which a prompt attends to (DeepSeek-V2, 2024). *Replaces with*
`npu_kv_rmsnorm_rope_cache_v2`, which quantises rows before they would be rounded; the caches keep their layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, tensor, variants
from patterns.cache.pages import of_one_head
from patterns.cache.stores import PAGES, Int8LatentPages, Pages, Rows
from patterns.kit.orders import HALF, INTERLEAVED
from patterns.latent.prolog.terms import LatentRow, Tables

CACHES, WITH_ROWS = "caches", "rows and caches"
Storage = Rows | Pages
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class KvRmsnormRopeCache(Rule):
    """Both writes, and perhaps the rows themselves."""

    aliases = ("kv_write",)

    def reference(self, kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The rows: latents [*B, C] and, behind the lanes of kv [*B, C + Dr] that they are, rotated keys [*B, Dr]."""
        latent, rope = kv.split((gamma.shape[0], cos.shape[-1]), dim=-1)
        low, high = rope[..., ::2], rope[..., 1::2]
        turned = torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.nn.functional.rms_norm(latent, gamma.shape, gamma, eps), turned

    @pattern
    @variants(storage=(Rows, *PAGES, Int8LatentPages), results=(CACHES, WITH_ROWS))
    def written(self, p, storage, results, kv=tensor("*B W"), row: Any = LatentRow, tables: Any = Tables):
        """Of one projection, whose lanes before and behind may be something else."""
        rows = row.terms(p, kv, tables, kv)
        caches = storage.written(p, *rows)
        return (*rows, *caches) if results == WITH_ROWS else tuple(caches)

    def guard(self, kv: Any, row: LatentRow, storage: Storage):
        """How the tokens, their lanes and the caches are laid out."""
        orders = dict(source=row.source, result=row.result)
        turned = (row.source, row.result) == (INTERLEAVED, HALF)
        said = "keys are rotated from {source} to {result} order, by the operator from interleaved to half order"
        require(turned, said, **orders)
        storage.guard(kv)

    @lowering
    @variants(storage=(Rows,), results=(CACHES,))
    def by_position(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Rows) -> tuple[Tensor, ...]:
        """One call, into sequences that lie one behind the other."""
        lines, size = kv[..., row.begin : row.end], storage.kv_cache.shape[storage.axis]
        first = storage.start.reshape(-1, 1).long().expand(lines.shape[0], 1)
        index = first + torch.arange(lines.shape[1], device=lines.device)
        index = torch.where(index < size, index, -1)
        caches = (_sequences(storage.kv_cache, storage.axis), _sequences(storage.kr_cache, storage.axis))
        *_, kr, latents = _called(lines, row, tables.of_tokens(lines, row, kv.dtype), index, caches, cache_mode="Norm")
        return storage.restored(latents, kr)

    @lowering
    @variants(results=(CACHES,))
    def by_page(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Storage) -> tuple[Tensor, ...]:
        """One call, into pages, which may be those of a contiguous cache of more sequences than there are tokens of."""
        *_, kr, latents = _paged(kv, row, tables, storage)
        return storage.restored(latents, kr)

    @lowering
    @variants(results=(WITH_ROWS,))
    def with_rows(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Storage) -> tuple[Tensor, ...]:
        """The same, and the rows."""
        rope, latent, kr, latents = _paged(kv, row, tables, storage, is_output_kv=True)
        both = zip((latent, rope), row.widths, strict=True)
        return *(each.reshape(*kv.shape[:-1], width) for each, width in both), *storage.restored(latents, kr)


def _called(
    kv: Tensor, row: LatentRow, tables: list[Tensor], index: Tensor, caches: tuple[Tensor, Tensor], **how: Any
) -> Four:
    """Rotated keys and latents [B, 1, S, ..] of lines [B, S, W], and their caches, with tables [B, S, Dr]."""
    cos, sin = (each.unsqueeze(1).contiguous() for each in tables)
    latents, ropes = caches
    gamma = row.scaled_gamma(kv.dtype)
    return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv.unsqueeze(1).contiguous(), gamma, cos, sin, index, ropes, latents, epsilon=row.eps, **how
    )


def _paged(kv: Tensor, row: LatentRow, tables: Tables, storage: Storage, **how: Any) -> Four:
    """Rotated keys and latents [T, 1, 1, ..], and both caches, rows going to slots of all pages."""
    slots: Any = storage.index(kv)
    slots = slots.flatten()
    tokens, lines = slots.shape[0], kv[..., row.begin : row.end]
    of_tokens = [each.reshape(tokens, 1, -1) for each in tables.of_tokens(kv, row, kv.dtype)]
    widths = row.widths
    mode = "PA_NZ" if storage.layout(kv) == "PA_NZ" else "PA_BNSD"
    return _called(
        lines.reshape(tokens, 1, -1), row, of_tokens, slots, storage.caches(kv, widths, kv), cache_mode=mode,
        **storage.row_arguments(widths, kv.device), **how,
    )  # fmt: skip


def _sequences(cache: Tensor, axis: int) -> Tensor:
    """A contiguous cache of one head as [B, 1, T, D]."""
    batch = cache.shape[0] if axis else 1
    return of_one_head(cache, axis).reshape(batch, 1, cache.shape[axis], cache.shape[-1])
