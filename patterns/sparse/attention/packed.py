"""Groups of packed rows of a latent (656 bytes in DeepSeek-V3.2), which sparse attention unpacks: rows, or pages."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import Parts
from patterns.sparse.attention.pages import ROWS, paged, read, refuse_nz, refuse_segments


@dataclass(frozen=True)
class PackedRows(Group):
    """Packed rows [*B, T, Row], which the model unpacks, see `unpacked_latent`."""

    rows: Any = tensor("*F Row")
    tile: Any = attribute()
    paged = averaged = False

    def term(self, p) -> Any:
        """Return `self.rows`: the packed rows are in no pages."""
        return self.rows

    def latent_terms(self, p) -> tuple[Any, Any]:
        """Return the terms of the latent and of its rotated lanes, both unpacked from the packed rows."""
        rows = self.term(p)
        return p.unpacked_latent(rows=rows, tile=self.tile), p.unpacked_rope(rows=rows)

    def keys(self, batch: Any) -> Any:
        """Return the number of keys of one sequence: all rows divided by `batch`, as all sequences are equally long."""
        return prod(self.rows.shape[:-1]) // batch

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse nothing: only pages can be in FRACTAL_NZ."""

    def refuse_lists(self, distinct: bool) -> None:
        """Refuse a list that may name a key twice, which is so unless `distinct`."""
        require(
            distinct,
            "list of keys: it may name a key twice; npu_kv_quant_sparse_flash_attention requires distinct "
            "keys; make the list of topk, or remove repetitions",
        )

    def where(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the packed rows [B, T, 1, Row] for the operator, and the arguments of their layout."""
        return self.rows.reshape(batch, -1, 1, self.rows.shape[-1]), ROWS

    def attended(self, queries: Parts, listed: Tensor, scale: float, **seen: Any) -> Tensor:
        """Emit npu_kv_quant_sparse_flash_attention of absorbed `queries` over the `listed` rows, [B, S, N, C].

        Args:
            queries: absorbed queries [B, S, N, C], and their rotated lanes [B, S, N, Dr].
            listed: lists of keys, int32 [B, S, 1, K], -1 after the last key.
            scale: factor of the scores.
            seen: arguments `sparse_mode` and `actual_seq_lengths_kv`, by which the operator hides keys.
        """
        rows, where = self.where(queries[0].shape[0])
        return torch.ops.npu.npu_kv_quant_sparse_flash_attention(
            torch.cat(queries, dim=-1), rows, rows, listed, scale, 2, 2, sparse_block_size=1, layout_query="BSND",
            attention_mode=2, quant_scale_repo_mode=1, tile_size=self.tile, rope_head_dim=queries[1].shape[-1],
            **where, **seen,
        )  # fmt: skip

    def attended_in_segments(self, queries: Parts, listed: Tensor, scale: float, ends: Tensor) -> Tensor:
        """Refuse every call: the operator takes segments of packed tokens only over rows of a latent in floats."""
        return refuse_segments()


@dataclass(frozen=True)
class PackedPages(PackedRows):
    """Packed rows in pages that a block table [B, P] names."""

    pages: Any = tensor("*K W")
    block_table: Any = tensor("B P")
    size: Any = attribute()
    layout: Any = attribute()
    paged = True

    def term(self, p) -> Any:
        """Return the term of the rows that the block table gathers from the pages."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return p.paged_rows(rows=self.rows, pages=self.pages, **how)

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse pages in FRACTAL_NZ."""
        refuse_nz("npu_kv_quant_sparse_flash_attention", self.layout)

    def where(self, batch: Any) -> tuple[Tensor, dict[str, Any]]:
        """Return the pages [Block, Size, 1, Row] for the operator, and the arguments of their layout with the block
        table.
        """
        return read(self.pages, self.size, "npu_kv_quant_sparse_flash_attention"), paged(self.block_table)
