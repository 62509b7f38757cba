"""How attention over a latent in whole numbers of 8 bits is put to the operator: scales, pages, lines of NZ."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import require
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as paged


def attended(p, query, tokens, rope, rows, **how):
    """The term of attention over a latent and its rotated lanes; the queries are divided by their scales."""
    latent, k_rope = rows
    return p.whole_latent_attention(query=query, tokens=tokens, rope=rope, latent=latent, k_rope=k_rope, **how)


@dataclass(frozen=True)
class Scales:
    """Of every token and head, [B, N, S, 1], and of all keys and all values: a tensor [1] times a number."""

    tokens: Tensor
    keys: Tensor | None
    keys_by: float
    values: Tensor | None
    values_by: float

    def arguments(self) -> dict[str, Any]:
        """As the operator is told."""
        device = self.tokens.device
        of_keys = scale_of(self.keys, self.keys_by, device)
        alike = self.keys is self.values and self.keys_by == self.values_by
        return dict(
            query_quant_mode=3,
            dequant_scale_query=self.tokens.float().transpose(1, 2).squeeze(-1).contiguous(),
            dequant_scale_key=of_keys,
            dequant_scale_value=of_keys if alike else scale_of(self.values, self.values_by, device),
        )


def scale_of(scale: Tensor | None, by: float, device: torch.device) -> Tensor:
    """A scale [1], or one of each head or channel, times the number `by`, in float32; without a tensor the number."""
    if scale is None:
        return torch.full((1,), by, dtype=torch.float32, device=device)
    return scale.float() if by == 1 else scale.float() * by


def keys(latent: Tensor, query: Tensor) -> Any:
    """How many rows a sequence has."""
    return latent.numel() // latent.shape[-1] // query.shape[0]


def laid(table: Tensor | None, pages: tuple[Tensor, Tensor], size: int, lies: str) -> list[Tensor]:
    """Pages of latent and rotated lanes as the operator reads them: [Block, Size, D], or [Block, 1, D/L, Size, L]."""
    require(table is not None, "no block table names the pages")
    return [paged.laid(each, size, lies) for each in pages]


def by_table(
    query: Tensor, rope: Tensor, caches: Sequence[Tensor], table: paged.Table, scales: Scales, scale: float,
    seen: calls.Seen, count: Tensor | None, empty: str,
) -> Tensor:  # fmt: skip
    """Queries [B, N, S, C] and [B, N, S, Dr] over pages, as [B, N, S, C]."""
    known = seen.order != "mask" or count is not None
    require(known, "what the mask lets through is not proven to be causal, a window or a length")
    if count is not None:
        (query, length), (rope, _) = (paged.given_some(each, count, table.keys, empty) for each in (query, rope))
        seen = calls.Seen("full", length=length)
    seen, many = paged.lengths(seen, query, table)
    y = _fused(query, rope, caches, many, scales, scale, seen, **table.arguments())
    return y.masked_fill((count <= 0).reshape(-1, 1, 1, 1), torch.nan) if count is not None and empty == "nan" else y


def shown_by_table(
    query: Tensor, rope: Tensor, caches: Sequence[Tensor], table: paged.Table, scales: Scales, scale: float,
    mask: Tensor | None, empty: str,
) -> Tensor:  # fmt: skip
    """The same, shown by a mask [B | 1, 1, S, T], true where a key is hidden."""
    require(mask is not None, "there is no mask")
    assert mask is not None
    (query, hidden), (rope, _) = (paged.shown_some(each, mask, empty) for each in (query, rope))
    seen, many = paged.lengths(calls.Seen(), query, table)
    told = calls.shown(paged.wide(hidden, table, query.shape[0]), query.shape[2])
    y = _fused(query, rope, caches, many, scales, scale, seen, **told, **table.arguments())
    return y.masked_fill(mask.all(-1, keepdim=True), torch.nan) if empty == "nan" else y


def as_they_lie(
    query: Tensor, rope: Tensor, rows: Sequence[Tensor], scales: Scales, scale: float, seen: calls.Seen
) -> Tensor:
    """The same over rows [B, T, 1, C] and [B, T, 1, Dr]."""
    require(seen.order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
    queries, many = query.shape[2], seen.length if seen.known is None else [seen.known]
    if seen.order == "left":
        require(queries <= rows[0].shape[1], "there are fewer keys than queries")
        seen, many = calls.Seen("right", seen.window), [queries]
    return _fused(query, rope, rows, many, scales, scale, seen)


def _fused(
    query: Tensor, rope: Tensor, caches: Sequence[Tensor], many: Any, scales: Scales, scale: float, seen: calls.Seen,
    **pages: Any,
) -> Tensor:  # fmt: skip
    latent, k_rope = caches
    return calls.fused(
        query.transpose(1, 2), latent, latent, many, 2, query_rope=rope.transpose(1, 2), key_rope=k_rope,
        num_query_heads=query.shape[1], num_key_value_heads=1, softmax_scale=scale, input_layout="BSND",
        **seen.arguments(query.device, query.shape[2]), **scales.arguments(), **pages,
    )[0].transpose(1, 2)  # fmt: skip


def multipliers(scale: Tensor | None, by: float, width: Any, device: torch.device) -> Tensor:
    """What rows [.., width] are multiplied by to become whole numbers, [width], of a scale that gives them back.

    The scale is [1], [width], or missing, times the number `by`.
    """
    if scale is None:
        return torch.full((width,), 1 / by, dtype=torch.float32, device=device)
    return torch.reciprocal(scale_of(scale, by, device)).expand(width).contiguous()
