"""Packed rows of a latent (656 bytes for DeepSeek-V3.2) that sparse attention unpacks itself: as rows, or in pages."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import Parts
from patterns.sparse.attention.pages import ROWS, of_rows, paged, read, refuse_segments


@dataclass(frozen=True)
class PackedRows(Group):
    """Rows [*B, T, Row] that the model unpacks, see `unpacked_latent`."""

    rows: Any = tensor("*F Row")
    tile: Any = attribute()
    paged = averaged = False

    def term(self, p) -> Any:
        """The rows as the model unpacks them."""
        return self.rows

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Of a latent and its rotated lanes."""
        rows = self.term(p)
        return p.unpacked_latent(rows=rows, tile=self.tile), p.unpacked_rope(rows=rows)

    def keys(self, batch: Any) -> Any:
        """How many keys each sequence has."""
        return prod(self.rows.shape[:-1]) // batch

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ; rows have none."""

    def refuse_lists(self, distinct: bool) -> None:
        """Refuse lists that may name a key twice."""
        require(distinct, "a list may name a key twice, of which the operator over packed rows reads too little")

    def where(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """The rows as the operator reads them, and what it is told of where they lie."""
        return self.rows.reshape(batch, -1, 1, self.rows.shape[-1]), ROWS

    def attended(self, queries: Parts, listed: Tensor, scale: float, **seen: Any) -> Tensor:
        """Absorbed queries [B, S, N, C] and rotated lanes over the listed rows, as [B, S, N, C]."""
        rows, where = self.where(queries[0].shape[0])
        return torch.ops.npu.npu_kv_quant_sparse_flash_attention(
            torch.cat(queries, dim=-1), rows, rows, listed, scale, 2, 2, sparse_block_size=1, layout_query="BSND",
            attention_mode=2, quant_scale_repo_mode=1, tile_size=self.tile, rope_head_dim=queries[1].shape[-1],
            **where, **seen,
        )  # fmt: skip

    def attended_in_segments(self, queries: Parts, listed: Tensor, scale: float, ends: Tensor) -> Tensor:
        """See `refuse_segments`."""
        return refuse_segments()


@dataclass(frozen=True)
class PackedPages(PackedRows):
    """The same in pages that a block table [B, P] names."""

    pages: Any = tensor("*K W")
    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute()
    paged = True

    def term(self, p) -> Any:
        """As they are gathered."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return p.paged_rows(rows=self.rows, pages=self.pages, **how)

    def refuse_blocks(self, *widths: int) -> None:
        """Refuse blocks of NZ."""
        of_rows(self.layout)

    def where(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """The pages, and the table."""
        return read(self.pages, self.size), paged(self.block_table)
