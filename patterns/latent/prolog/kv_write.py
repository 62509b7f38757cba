"""The row of a token in multi-head latent attention, from its projection to both caches, in one operator.

    [.., c, r] = kv      ckv_cache[position] = s norm(c)              k_cache[position] = rope(r)
    int8 (C8):           ckv_cache[slot] = int8(s norm(c) / a)        k_cache[slot] = int8(rope(r) / b), or rope(r)

*Matches* the norm of the latent lanes, the rotation of the next lanes from interleaved to half order, and the writes of
both, to consecutive positions of contiguous caches or by slot to pages, in BSND or NZ, in int8 with static scales per
channel or per tensor; and optionally the rows as results, to which a prompt attends (DeepSeek-V2, 2024). *Replaces
with* `npu_kv_rmsnorm_rope_cache_v2`, which quantises rows before they would be rounded; the caches keep their layout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, lowering, pattern, require, tensor, variants
from patterns.cache.pages import single_head
from patterns.cache.stores import PAGES, Int8LatentPages, Pages, Rows
from patterns.latent.prolog.terms import LatentRow, Tables
from patterns.rotary.orders import HALF, INTERLEAVED

CACHES, WITH_ROWS = "caches", "rows and caches"
_OPERATOR = "npu_kv_rmsnorm_rope_cache_v2"
Storage = Rows | Pages
Four = tuple[Tensor, Tensor, Tensor, Tensor]


@dataclass(frozen=True)
class KvRmsnormRopeCache(Rule):
    """Norm, rotation and cache writes of the row of a token in latent attention."""

    aliases = ("kv_write",)

    def reference(self, kv: Tensor, gamma: Tensor, cos: Tensor, sin: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Compute the rows, latents [*B, C] and rotated keys [*B, Dr], from kv [*B, C + Dr]; cos and sin [*B, Dr]."""
        latent, rope = kv.split((gamma.shape[0], cos.shape[-1]), dim=-1)
        low, high = rope[..., ::2], rope[..., 1::2]
        turned = torch.cat((low, high), dim=-1) * cos + torch.cat((-high, low), dim=-1) * sin
        return torch.nn.functional.rms_norm(latent, gamma.shape, gamma, eps), turned

    @pattern
    @variants(storage=(Rows, *PAGES, Int8LatentPages), results=(CACHES, WITH_ROWS))
    def written(self, p, storage, results, kv=tensor("*B W"), row: Any = LatentRow, tables: Any = Tables):
        """cache[slot] = norm(c), rope(r) for lanes [.., c, r, ..] of a projection; the rows may be results as well."""
        rows = row.terms(p, kv, tables, kv)
        caches = storage.written(p, *rows)
        return (*rows, *caches) if results == WITH_ROWS else tuple(caches)

    def guard(self, kv: Any, row: LatentRow, storage: Storage):
        """Refuse rotations other than from interleaved to half order, and what `storage` refuses for the tokens of
        `kv`.
        """
        orders = dict(source=row.source, result=row.result)
        supported = (row.source, row.result) == (INTERLEAVED, HALF)
        reason = (
            "keys: they are rotated from {source} to {result} order; npu_kv_rmsnorm_rope_cache_v2 requires "
            "interleaved pairs (2j, 2j + 1) before and halves (j, j + D/2) behind; permute the rows of the "
            "projection, and store halves"
        )
        require(supported, reason, **orders)
        storage.guard(kv, _OPERATOR)

    @lowering
    @variants(storage=(Rows,), results=(CACHES,))
    def by_position(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Rows) -> tuple[Tensor, ...]:
        """Emit npu_kv_rmsnorm_rope_cache_v2 with cache_mode Norm, which writes to positions of contiguous sequences."""
        rows, size = kv[..., row.begin : row.end], storage.kv_cache.shape[storage.axis]
        first = storage.start.reshape(-1, 1).long().expand(rows.shape[0], 1)
        index = first + torch.arange(rows.shape[1], device=rows.device)
        index = torch.where(index < size, index, -1)
        caches = (_sequences(storage.kv_cache, storage.axis), _sequences(storage.kr_cache, storage.axis))
        *_, kr, latents = _called(rows, row, tables.for_tokens(rows, row, kv.dtype), index, caches, cache_mode="Norm")
        return storage.restored(latents, kr)

    @lowering
    @variants(results=(CACHES,))
    def by_page(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Storage) -> tuple[Tensor, ...]:
        """Emit npu_kv_rmsnorm_rope_cache_v2 on pages; a contiguous cache is cut into pages."""
        *_, kr, latents = _paged(kv, row, tables, storage)
        return storage.restored(latents, kr)

    @lowering
    @variants(results=(WITH_ROWS,))
    def with_rows(self, kv: Tensor, row: LatentRow, tables: Tables, storage: Storage) -> tuple[Tensor, ...]:
        """Emit npu_kv_rmsnorm_rope_cache_v2 on pages with is_output_kv, which returns the rows as well."""
        rope, latent, kr, latents = _paged(kv, row, tables, storage, is_output_kv=True)
        both = zip((latent, rope), row.widths, strict=True)
        return *(each.reshape(*kv.shape[:-1], width) for each, width in both), *storage.restored(latents, kr)


def _called(
    kv: Tensor, row: LatentRow, tables: list[Tensor], index: Tensor, caches: tuple[Tensor, Tensor], **options: Any
) -> Four:
    """Call npu_kv_rmsnorm_rope_cache_v2 on rows `kv` [B, S, C + Dr] with tables [B, S, Dr].

    Args:
        kv: latent and key to rotate of each token.
        row: norm of the latent.
        tables: cos and sin, in half order.
        index: position or slot of each token.
        caches: those of the latents and of the rotated keys.
        options: further arguments of the operator.

    Returns:
        Rotated keys and latents [B, 1, S, ..], zeros without is_output_kv, and the caches of rotated keys and of
        latents.
    """
    cos, sin = (each.unsqueeze(1).contiguous() for each in tables)
    latents, ropes = caches
    gamma = row.scaled_gamma(kv.dtype)
    return torch.ops.npu.npu_kv_rmsnorm_rope_cache_v2_functional(
        kv.unsqueeze(1).contiguous(), gamma, cos, sin, index, ropes, latents, epsilon=row.eps, **options
    )


def _paged(kv: Tensor, row: LatentRow, tables: Tables, storage: Storage, **options: Any) -> Four:
    """Call npu_kv_rmsnorm_rope_cache_v2 on T sequences of one token, whose rows go to the slots of `storage`.

    `kv`, `row`, `tables` and `options`, and the results, are those of `_called`.
    """
    slots: Any = storage.index(kv)
    slots = slots.flatten()
    tokens, rows = slots.shape[0], kv[..., row.begin : row.end]
    cos_sin = [each.reshape(tokens, 1, -1) for each in tables.for_tokens(kv, row, kv.dtype)]
    widths = row.widths
    mode = "PA_NZ" if storage.layout(kv) == "PA_NZ" else "PA_BNSD"
    return _called(
        rows.reshape(tokens, 1, -1), row, cos_sin, slots, storage.caches(kv, widths, kv, _OPERATOR),
        cache_mode=mode, **storage.row_arguments(widths, kv.device), **options,
    )  # fmt: skip


def _sequences(cache: Tensor, axis: int) -> Tensor:
    """Reshape a contiguous cache of one head, with positions at dim `axis`, to [B, 1, T, D]."""
    batch = cache.shape[0] if axis else 1
    return single_head(cache, axis, _OPERATOR).reshape(batch, 1, cache.shape[axis], cache.shape[-1])
