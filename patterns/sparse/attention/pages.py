"""Groups of the latent that sparse attention reads: in rows, or in pages of one head that a block table names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import attribute, require, tensor
from patterns.attention import calls
from patterns.attention.sources import Rows
from patterns.attention.varlen.pages import Pages
from patterns.cache.pages import page_operand

ROWS: dict[str, Any] = {"layout_kv": "BSND"}
"""Layout arguments of an operator that reads rows."""


def attended(queries: calls.Parts, kv: calls.Parts, listed: Tensor, scale: float, **where: Any) -> Tensor:
    """Emit npu_sparse_flash_attention of absorbed `queries` over the `listed` rows of the latent `kv`, [B, S, N, C].

    Args:
        queries: absorbed queries [B, S, N, C], and their rotated lanes [B, S, N, Dr].
        kv: the latent, and its rotated lanes, as rows [B, T, 1, C] or pages [Block, Size, 1, C].
        listed: lists of keys, int32 [B, S, 1, K], -1 after the last key.
        scale: factor of the scores.
        where: arguments of the layout of `kv`, `sparse_mode` and `actual_seq_lengths_kv`.
    """
    (query, query_rope), (rows, key_rope) = queries, kv
    return torch.ops.npu.npu_sparse_flash_attention(
        query, rows, rows, listed, scale, query_rope=query_rope, key_rope=key_rope, sparse_block_size=1,
        layout_query="BSND", attention_mode=2, **where,
    )[0]  # fmt: skip


@dataclass(frozen=True)
class LatentRows(Rows):
    """Rows of a latent and of its rotated lanes."""

    averaged = True

    def mean(self, batch: Any, keys: Any) -> Tensor:
        """Average the first `keys` rows of the latent of each sequence, [B, 1, 1, C]."""
        return self.read(batch)[0][:, :keys].mean(1, keepdim=True)

    def refuse_lists(self, distinct: bool) -> None:
        """Refuse no list: npu_sparse_flash_attention counts a key as often as it is listed."""

    def attended(self, queries: calls.Parts, listed: Tensor, scale: float, **seen: Any) -> Tensor:
        """Emit npu_sparse_flash_attention of `queries` over the `listed` rows, see `attended`: [B, S, N, C].

        `seen` are the arguments `sparse_mode` and `actual_seq_lengths_kv`.
        """
        rows, turned = self.read(queries[0].shape[0])
        return attended(queries, (rows, turned), listed, scale, **ROWS, **seen)

    def attended_in_segments(self, queries: calls.Parts, listed: Tensor, scale: float, ends: Tensor) -> Tensor:
        """Emit npu_sparse_flash_attention in TND for packed tokens, whose segments end at `ends`, int32 [segments].

        `queries` are [1, T, N, C] and [1, T, N, Dr]. An entry of `listed` [1, T, 1, K] is the number of a key, counted
        from the first key of the segment to which the query belongs. The result is [1, T, N, C].
        """
        (query, query_rope), (rows, key_rope) = queries, self.read(1)
        return torch.ops.npu.npu_sparse_flash_attention(
            query[0], rows[0], rows[0], listed[0], scale, query_rope=query_rope[0], key_rope=key_rope[0],
            sparse_block_size=1, layout_query="TND", layout_kv="TND", actual_seq_lengths_query=ends,
            actual_seq_lengths_kv=ends, sparse_mode=3, attention_mode=2,
        )[0].unsqueeze(0)  # fmt: skip


@dataclass(frozen=True)
class LatentPages(Pages):
    """Pages of a latent and pages of its rotated lanes, each with a block table."""

    averaged = False
    layout: Any = attribute()
    rope_table: Any = tensor("B Q")
    rope_size: Any = attribute()
    rope_layout: Any = attribute()

    def terms(self, p) -> tuple[Any, Any]:
        """Return the terms of the latent rows and of their rotated lanes, each gathered from its pages by its block
        table.
        """
        rope = dict(block_table=self.rope_table, size=self.rope_size, layout=self.rope_layout)
        return super().terms(p)[0], p.paged_rows(rows=self.second, pages=self.second_pages, **rope)

    def refuse_blocks(self, operator: str, *widths: int) -> None:
        """Refuse pages in FRACTAL_NZ, and a latent and rotated lanes with different block tables or sizes of pages."""
        refuse_nz("npu_sparse_flash_attention", self.layout, self.rope_layout)
        one = self.block_table is self.rope_table and self.size == self.rope_size
        require(
            one,
            "block tables: the latent and its rotated lanes have one each; npu_sparse_flash_attention "
            "requires one for both; index both caches by one table",
        )

    def refuse_lists(self, distinct: bool) -> None:
        """Refuse no list: npu_sparse_flash_attention counts a key as often as it is listed."""

    def attended(self, queries: calls.Parts, listed: Tensor, scale: float, **seen: Any) -> Tensor:
        """Emit npu_sparse_flash_attention of `queries` over the `listed` rows, see `attended`: [B, S, N, C].

        `seen` are the arguments `sparse_mode` and `actual_seq_lengths_kv`.
        """
        rows, turned = (
            read(each, self.size, "npu_sparse_flash_attention") for each in (self.first_pages, self.second_pages)
        )
        return attended(queries, (rows, turned), listed, scale, **paged(self.block_table), **seen)

    def attended_in_segments(self, queries: calls.Parts, listed: Tensor, scale: float, ends: Tensor) -> Tensor:
        """Refuse every call: segments of packed tokens are taken over rows alone."""
        return refuse_segments()


def refuse_segments() -> Tensor:
    """Refuse every call, with the reason that segments of packed tokens require a latent in rows.

    The return type is that of the calls it stands for.
    """
    why = "latent: it is in pages, or packed in int8; segments of packed tokens require rows in TND"
    require(False, why)
    return torch.empty(0)


def paged(block_table: Tensor) -> dict[str, Any]:
    """Return the layout arguments of an operator that reads pages by `block_table`."""
    return {"layout_kv": "PA_BSND", "block_table": block_table.int()}


def refuse_nz(operator: str, *layouts: str) -> None:
    """Refuse `layouts` of pages other than rows of tokens, such as FRACTAL_NZ, for `operator`."""
    require(
        set(layouts) == {"BSND"},
        "cache: its pages are lines of NZ; {operator} requires rows [Block, Size, 1, D]; allocate the cache so",
        operator=operator,
    )


def read(pages: Tensor, size: Any, operator: str) -> Tensor:
    """Reshape `pages` of one head to [Block, Size, 1, D] for `operator`."""
    return page_operand(pages, size, operator).unsqueeze(2)
