"""Groups of a lightning indexer: visible keys, and an indexer over keys in rows, or in pages of a block table."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Group, attribute, bounded, require, tensor
from patterns.attention.calls import MaskSpec
from patterns.cache.pages import SIZES, cut, page_operand
from patterns.kit.segments import segment_ends
from patterns.sparse.attention.pages import read, refuse_nz


@dataclass(frozen=True)
class Seen(Group):
    """Keys that an indexer may list for a query, or that a query may see of its list.

    Attributes:
        mask_kind: "none", "causal_upper_left" or "causal_lower_right", as in `Visibility`.
        kv_len: number of keys of every sequence, None for all keys.
        kv_lens: number of keys of each sequence.
        row_lens: number of keys that each query sees; with R = 1 that of the first one, and one more for each later
            one.
        segment: non-decreasing segment id of each packed token, which sees its own segment up to itself.
        segments: exclusive upper bound of the segment ids.
        every_row_nonempty: True if every query is proven to see a key.
    """

    mask_kind: Any = attribute()
    kv_len: Any = attribute()
    kv_lens: Any = tensor("B", optional=True)
    row_lens: Any = tensor("B R", optional=True)
    segment: Any = tensor("*T", optional=True)
    segments: Any = attribute()
    every_row_nonempty: Any = attribute()

    def captures(self) -> dict[str, Any]:
        """Return the attributes, and `window` None, by the names that words of sparse attention give them."""
        seen = dict(mask_kind=self.mask_kind, window=None, kv_len=self.kv_len, kv_lens=self.kv_lens)
        own = dict(row_lens=self.row_lens, segment=self.segment, segments=self.segments)
        return seen | own | dict(every_row_nonempty=self.every_row_nonempty)

    def hides_nothing(self) -> bool:
        """Return True if every query may see all of the keys."""
        limits = (self.kv_len, self.kv_lens, self.row_lens, self.segment)
        return self.mask_kind == "none" and all(each is None for each in limits)

    def segment_ends(self) -> Tensor | None:
        """Return the end of each segment among the packed tokens, int32 [segments]; None without `self.segment`."""
        return None if self.segment is None else segment_ends(self.segment, self.segments).to(torch.int32)

    def segment_starts(self) -> Tensor:
        """Return, for each packed token, where its segment starts, int32 [T]: the number of tokens with a smaller
        id.
        """
        line = self.segment.reshape(-1)
        return torch.searchsorted(line, line, out_int32=True)

    def own_lengths(self, queries: Any, keys: Any) -> Tensor:
        """Return how many of `keys` keys each of S = `queries` queries sees, int32 [B, S], in 0 .. `keys`.

        It is `row_lens` [B, S]; or [B, 1] for the first query, with one key more for each later query.
        """
        lengths = self.row_lens
        if lengths.shape[1] != queries:
            lengths = lengths + torch.arange(queries, device=lengths.device)
        return lengths.clamp(0, keys).to(torch.int32)

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Return the sparse mode, and the number of keys of each sequence, int32 [B], or None for all `room` keys.

        In mode 3 the last of the queries [B, S, ..] sees up to the last of these keys; in mode 0 every query sees all
        of them. `keys` is the number of keys that the model has, `room` the number that the operator reads without
        lengths.
        """
        mode = 0 if self.mask_kind == "none" else 3
        spec = MaskSpec(self.mask_kind, None, self.kv_len, self.kv_lens).from_last(queries.shape[1], keys)
        if spec.kv_lens is not None:
            return mode, spec.kv_lens.to(torch.int32)
        if isinstance(spec.kv_len, int) and spec.kv_len == room:
            return mode, None
        return mode, torch.full(queries.shape[:1], spec.kv_len, dtype=torch.int32, device=queries.device)


@dataclass(frozen=True)
class Indexer(Group):
    """Operands of an indexer over keys in rows: queries, keys, weights of heads, scales of int8 rows, and number of
    listed keys.
    """

    query: Any = tensor("B S H Di")
    key: Any = tensor("B T Di")
    weights: Any = tensor("B S H", optional=True)
    count: Any = attribute()
    query_scale: Any = tensor("B S H", optional=True)
    key_scale: Any = tensor("B T", optional=True)

    def captures(self, p) -> dict[str, Any]:
        """Return the attributes by the names that the words `lightning_indexer` and `indexer_list` give them."""
        captures = dict(query=self.query, weights=self.weights, count=self.count, query_scale=self.query_scale)
        return captures | self.rows(p)

    def rows(self, p) -> dict[str, Any]:
        """Return the captures `key` and `key_scale`; a subclass with pages gives the terms of rows gathered from
        them.
        """
        return dict(key=self.key, key_scale=self.key_scale)

    @property
    def operator(self) -> str:
        """The name of the operator that lists keys of the dtype of these."""
        return "npu_lightning_indexer" if self.key_scale is None else "npu_quant_lightning_indexer"

    def refuse_blocks(self) -> None:
        """Refuse no layout: keys in rows have none that the operator could not read."""

    def select(self, seen: Seen) -> Tensor:
        """Emit the operator of the indexer over the keys that `seen` shows: lists [B, S, 1, count], with -1 after the
        last key.

        With `seen.segment`, an entry counts keys from the first one of the segment of its query.
        """
        if seen.row_lens is not None:
            batch, queries = self.query.shape[:2]
            lengths = seen.own_lengths(queries, self.key.shape[1]).flatten()
            every = Seen(mask_kind="none", kv_len=None, kv_lens=lengths, row_lens=None, segment=None, segments=None)
            return self.by_query(queries).select(every).unflatten(0, (batch, queries)).squeeze(2)
        ends = seen.segment_ends()
        if ends is not None:
            return self.in_segments(ends)
        keys, room, how = self.read()
        mode, lengths = Seen.lengths(seen, self.query, self.key.shape[1], room)
        how |= dict(actual_seq_lengths_key=lengths, layout_query="BSND", sparse_count=self.count, sparse_mode=mode)
        if self.key_scale is None:
            weights = self.query.new_ones(self.query.shape[:3]) if self.weights is None else self.weights
            return torch.ops.npu.npu_lightning_indexer(self.query, keys, weights, **how)[0]
        weights, query_scale = self.weighted()
        return torch.ops.npu.npu_quant_lightning_indexer(
            self.query, keys, weights, query_scale, self.scales(), 0, 0, **how
        )

    def in_segments(self, ends: Tensor) -> Tensor:
        """Emit npu_lightning_indexer in TND for segments of packed tokens that end at `ends`, int32 [segments].

        An entry of the result [1, T, 1, K] is the number of a key, counted from the first key of the segment of its
        query.
        """
        require(
            self.key_scale is None,
            "keys of the indexer: they are int8 of packed tokens; npu_quant_lightning_indexer is called on "
            "batches [B, S, ..] and requires these",
        )
        query, key = self.query[0], self.key[0].unsqueeze(1)
        weights = query.new_ones(query.shape[:2]) if self.weights is None else self.weights[0]
        lengths = dict(actual_seq_lengths_query=ends, actual_seq_lengths_key=ends)
        how = dict(layout_query="TND", layout_key="TND", sparse_count=self.count, sparse_mode=3)
        return torch.ops.npu.npu_lightning_indexer(query, key, weights, **lengths, **how)[0].unsqueeze(0)

    def weighted(self) -> tuple[Tensor, Tensor]:
        """Return weights and query scales [B, S, N] in float16; the operator multiplies both and rounds the product to
        float16.

        If the model has either in another dtype, their product is computed here: divided by the greatest magnitude
        among the heads of a query, which leaves the order of its keys as it is, it is returned as the weights, and the
        scales are 1.
        """
        weights, scale = self.weights, self.query_scale
        if weights.dtype == torch.float16 and (scale is None or scale.dtype == torch.float16):
            return weights, torch.ones_like(weights) if scale is None else scale
        weights = weights.float() if scale is None else weights.float() * scale.float()
        largest = weights.abs().amax(-1, keepdim=True)
        with bounded():  # at most 1; what is less than 3e-8 of the largest counts as 0
            weights = (weights / largest.masked_fill(largest == 0, 1)).to(torch.float16)
        return weights, torch.ones_like(weights)

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the keys as the operator reads them, the number of keys in them, and the arguments of their layout.

        Rows are [B, T, 1, Di], of which there are T. Pages are [Block, Size, 1, Di], and need lengths: their number is
        None.
        """
        return self.key.unsqueeze(2), self.key.shape[1], dict(layout_key="BSND")

    def by_query(self, queries: Any) -> Indexer:
        """Return an indexer for which each of `queries` queries is a sequence of its own, all over the keys of their
        sequence.

        Keys [B, T, Di] are read as pages by an arange block table, which has the same row for all queries of a
        sequence. If no size of a page divides T, rows are appended that no query sees.
        """
        padded = self.with_room()
        pages = cut(padded.key.unsqueeze(2), 1, padded.operator).squeeze(2)
        size = pages.shape[1]
        table = torch.arange(pages.shape[0], device=pages.device).reshape(padded.key.shape[0], -1)
        rows = dict(vars(padded), pages=pages, block_table=table, size=size, layout="BSND")
        if padded.key_scale is None:
            return PagedIndexer(**rows).by_query(queries)
        return PagedInt8Indexer(**rows, scale_pages=padded.key_scale.reshape(-1, size)).by_query(queries)

    def with_room(self) -> Indexer:
        """Return the indexer with keys [B, T, Di] and scales [B, T] padded by zeros until the smallest size of a page
        divides T.
        """
        keys = self.key.shape[1]
        room = -keys % SIZES[-1] if isinstance(keys, int) else 0
        if not room:
            return self
        scale = None if self.key_scale is None else pad(self.key_scale, (0, room))
        return replace(self, key=pad(self.key, (0, 0, 0, room)), key_scale=scale)

    def scales(self) -> Tensor:
        """Return the scales of int8 keys for the operator, float16 [B, T, 1]."""
        return float16_scale(self.key_scale).unsqueeze(2)


def float16_scale(scale: Tensor) -> Tensor:
    """Return `scale` of int8 keys if it is in float16; refuse other dtypes, which have numbers that float16 cannot
    represent.
    """
    why = (
        "scales of int8 keys: they are {dtype}; npu_quant_lightning_indexer requires float16, which may round "
        "them; store them in float16"
    )
    require(scale.dtype == torch.float16, why, dtype=scale.dtype)
    return scale


@dataclass(frozen=True)
class PagedIndexer(Indexer):
    """An indexer over keys in pages that a block table names."""

    pages: Any = tensor("*I Y")
    block_table: Any = tensor("B O")
    size: Any = attribute()
    layout: Any = attribute()

    def rows(self, p) -> dict[str, Any]:
        """Return the capture `key` as the term of rows that the block table gathers from the pages."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return dict(key=p.paged_rows(rows=self.key, pages=self.pages, **how))

    def refuse_blocks(self) -> None:
        """Refuse pages in FRACTAL_NZ."""
        refuse_nz(self.operator, self.layout)

    def in_segments(self, ends: Tensor) -> Tensor:
        """Refuse segments of packed tokens: TND requires a row of the block table for each, and `self.block_table` has
        one.
        """
        require(False, "block_table: it names the pages of all packed tokens; TND requires a row for each segment")
        return ends

    def by_query(self, queries: Any) -> Indexer:
        """Return an indexer for which each of `queries` queries is a sequence of its own, with the row of its sequence
        in `self.block_table`.
        """
        operands = (self.query, self.weights, self.query_scale)
        query, weights, scale = (None if x is None else x.flatten(0, 1).unsqueeze(1) for x in operands)
        table = self.block_table.unsqueeze(1).expand(-1, queries, -1).flatten(0, 1)
        return replace(self, query=query, weights=weights, query_scale=scale, block_table=table)

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the pages [Block, Size, 1, Di], None since pages need lengths, and the arguments of their layout."""
        return (
            read(self.pages, self.size, self.operator),
            None,
            dict(layout_key="PA_BSND", block_table=self.block_table.int()),
        )


@dataclass(frozen=True)
class PagedInt8Indexer(PagedIndexer):
    """An indexer over int8 keys in pages, and their scales in pages."""

    scale_pages: Any = tensor("*J")
    scale_table: Any = tensor("B M")
    scale_size: Any = attribute()
    scale_layout: Any = attribute()

    def rows(self, p) -> dict[str, Any]:
        """Return the captures `key` and `key_scale` as terms of rows that block tables gather from the pages."""
        how = dict(block_table=self.scale_table, size=self.scale_size, layout=self.scale_layout)
        return super().rows(p) | dict(key_scale=p.paged_rows(rows=self.key_scale, pages=self.scale_pages, **how))

    def refuse_blocks(self) -> None:
        """Refuse pages in FRACTAL_NZ, and scales whose block table is not that of the keys."""
        refuse_nz(self.operator, self.layout)
        one = self.block_table is self.scale_table and self.size == self.scale_size
        require(
            one,
            "block tables: int8 keys and their scales have one each; npu_quant_lightning_indexer requires one "
            "for both; index both caches by one table",
        )

    def scales(self) -> Tensor:
        """Return the pages of scales for the operator, float16 [Block, Size, 1]."""
        return page_operand(float16_scale(self.scale_pages), self.size, self.operator)


INDEXERS = (Indexer, PagedIndexer, PagedInt8Indexer)
