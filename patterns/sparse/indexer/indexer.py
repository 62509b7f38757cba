"""A lightning indexer, as forms and lowerings speak of it: keys as rows, or in pages by a block table of its own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from fusion import Group, attribute, bounded, require, tensor
from patterns.attention.calls import MaskSpec, laid
from patterns.cache.pages import SIZES, cut
from patterns.sparse.attention.pages import of_rows, read


@dataclass(frozen=True)
class Seen(Group):
    """Which keys can be seen at all, as of `Visibility`."""

    mask_kind: Any = attribute()
    kv_len: Any = attribute()
    kv_lens: Any = tensor("B", optional=True)
    row_lens: Any = tensor("B R", optional=True)
    segment: Any = tensor("*T", optional=True)
    segments: Any = attribute()
    every_row_nonempty: Any = attribute()

    def seen(self) -> dict[str, Any]:
        """As the readers say it."""
        seen = dict(mask_kind=self.mask_kind, window=None, kv_len=self.kv_len, kv_lens=self.kv_lens)
        own = dict(row_lens=self.row_lens, segment=self.segment, segments=self.segments)
        return seen | own | dict(every_row_nonempty=self.every_row_nonempty)

    def hides_nothing(self) -> bool:
        """Whether every query may see all of the keys."""
        told = (self.kv_len, self.kv_lens, self.row_lens, self.segment)
        return self.mask_kind == "none" and all(each is None for each in told)

    def segment_ends(self) -> Tensor | None:
        """Return where each segment ends, int32 [segments]: behind as many tokens as have no larger number."""
        if self.segment is None:
            return None
        line = self.segment.reshape(-1, 1)
        return (line <= torch.arange(self.segments, device=line.device)).sum(0).to(torch.int32)

    def segment_starts(self) -> Tensor:
        """Return where the segment of each token starts, int32 [T]: behind as many tokens as have a smaller number."""
        line = self.segment.reshape(-1)
        return torch.searchsorted(line, line, out_int32=True)

    def own_lengths(self, queries: Any, keys: Any) -> Tensor:
        """How many of the keys each query sees, [B, S] in int32."""
        lengths = self.row_lens
        if lengths.shape[1] != queries:
            lengths = lengths + torch.arange(queries, device=lengths.device)
        return lengths.clamp(0, keys).to(torch.int32)

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """Sparse mode, and how many of the keys of queries [B, S, ..] there are, [B] in int32, None for the whole room.

        In mode 3 the last query sees the last of these keys; in mode 0 every query sees all of them.
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
    """An indexer of keys that lie as rows, and how many of them it lists."""

    query: Any = tensor("B S H Di")
    key: Any = tensor("B T Di")
    weights: Any = tensor("B S H", optional=True)
    count: Any = attribute()
    query_scale: Any = tensor("B S H", optional=True)
    key_scale: Any = tensor("B T", optional=True)

    def said(self, p) -> dict[str, Any]:
        """As the readers say it."""
        found = dict(query=self.query, weights=self.weights, count=self.count, query_scale=self.query_scale)
        return found | self.rows(p)

    def rows(self, p) -> dict[str, Any]:
        """The keys of the indexer, and the scales of those in int8."""
        return dict(key=self.key, key_scale=self.key_scale)

    def refuse_blocks(self) -> None:
        """Refuse blocks of NZ; rows have none."""

    def found(self, seen: Seen) -> Tensor:
        """What it lists of the keys that can be seen [B, S, 1, count], -1 where there are not so many."""
        if seen.row_lens is not None:
            batch, queries = self.query.shape[:2]
            lengths = seen.own_lengths(queries, self.key.shape[1]).flatten()
            alone = Seen(mask_kind="none", kv_len=None, kv_lens=lengths, row_lens=None, segment=None, segments=None)
            return self.apart(queries).found(alone).unflatten(0, (batch, queries)).squeeze(2)
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
        """List keys of each query's own segment, counted from the first of these [1, T, 1, K]."""
        require(self.key_scale is None, "int8 keys of packed tokens are not put to npu_quant_lightning_indexer in TND")
        query, key = self.query[0], self.key[0].unsqueeze(1)
        weights = query.new_ones(query.shape[:2]) if self.weights is None else self.weights[0]
        lengths = dict(actual_seq_lengths_query=ends, actual_seq_lengths_key=ends)
        how = dict(layout_query="TND", layout_key="TND", sparse_count=self.count, sparse_mode=3)
        return torch.ops.npu.npu_lightning_indexer(query, key, weights, **lengths, **how)[0].unsqueeze(0)

    def weighted(self) -> tuple[Tensor, Tensor]:
        """Weights and scales of int8 queries, [B, S, N] in float16, whose product the operator rounds to float16 again.

        What float16 may not hold is divided by the largest product of its query, which changes no order.
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
        """The keys of the indexer, how many it reads untold, and what it is told of where they lie."""
        return self.key.unsqueeze(2), self.key.shape[1], dict(layout_key="BSND")

    def apart(self, queries: Any) -> Indexer:
        """Take every query for a sequence of its own, whose keys are read as pages in their own order.

        Keys that no page divides are copied, with room behind them that no query sees.
        """
        whole = self.with_room()
        pages = cut(whole.key.unsqueeze(2), 1).squeeze(2)
        size = pages.shape[1]
        table = torch.arange(pages.shape[0], device=pages.device).reshape(whole.key.shape[0], -1)
        rows = dict(vars(whole), pages=pages, block_table=table, size=size, layout="BSND")
        if whole.key_scale is None:
            return PagedIndexer(**rows).apart(queries)
        return PagedInt8Indexer(**rows, scale_pages=whole.key_scale.reshape(-1, size)).apart(queries)

    def with_room(self) -> Indexer:
        """Pad keys [B, T, Di] and their scales [B, T] so that the smallest page divides T."""
        keys = self.key.shape[1]
        room = -keys % SIZES[-1] if isinstance(keys, int) else 0
        if not room:
            return self
        scale = None if self.key_scale is None else pad(self.key_scale, (0, room))
        return replace(self, key=pad(self.key, (0, 0, 0, room)), key_scale=scale)

    def scales(self) -> Tensor:
        """The scales of int8 keys as they lie."""
        return held(self.key_scale).unsqueeze(2)


def held(scale: Tensor) -> Tensor:
    """Scales of int8 keys in float16, which would not hold those of another dtype."""
    why = "scales of int8 keys are held in {dtype}, the operator takes float16, which does not hold all of them"
    require(scale.dtype == torch.float16, why, dtype=scale.dtype)
    return scale


@dataclass(frozen=True)
class PagedIndexer(Indexer):
    """The same of keys in pages."""

    pages: Any = tensor("*I Y")
    block_table: Any = tensor("B O")
    size: Any = attribute()
    layout: Any = attribute()

    def rows(self, p) -> dict[str, Any]:
        """The keys as they are gathered."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return dict(key=p.paged_rows(rows=self.key, pages=self.pages, **how))

    def refuse_blocks(self) -> None:
        """Refuse blocks of NZ."""
        of_rows(self.layout)

    def in_segments(self, ends: Tensor) -> Tensor:
        """Refuse segments: one block table names the pages of all."""
        require(False, "block_table: it names the pages of all packed tokens; TND requires a row for each segment")
        return ends

    def apart(self, queries: Any) -> Indexer:
        """Each with the pages of its sequence."""
        of_queries = (self.query, self.weights, self.query_scale)
        query, weights, scale = (None if x is None else x.flatten(0, 1).unsqueeze(1) for x in of_queries)
        table = self.block_table.unsqueeze(1).expand(-1, queries, -1).flatten(0, 1)
        return replace(self, query=query, weights=weights, query_scale=scale, block_table=table)

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """The same of pages, of which it reads none untold."""
        return read(self.pages, self.size), None, dict(layout_key="PA_BSND", block_table=self.block_table.int())


@dataclass(frozen=True)
class PagedInt8Indexer(PagedIndexer):
    """The same of int8 keys, of which the scales lie in pages by the same block table."""

    scale_pages: Any = tensor("*J")
    scale_table: Any = tensor("B M")
    scale_size: Any = attribute()
    scale_layout: Any = attribute()

    def rows(self, p) -> dict[str, Any]:
        """Keys and scales as they are gathered."""
        how = dict(block_table=self.scale_table, size=self.scale_size, layout=self.scale_layout)
        return super().rows(p) | dict(key_scale=p.paged_rows(rows=self.key_scale, pages=self.scale_pages, **how))

    def refuse_blocks(self) -> None:
        """Refuse blocks of NZ, and scales that lie elsewhere."""
        of_rows(self.layout)
        one = self.block_table is self.scale_table and self.size == self.scale_size
        require(one, "int8 keys and their scales have block tables of their own: the operator has one")

    def scales(self) -> Tensor:
        """The pages of scales, [Block, Size, 1]."""
        return laid(held(self.scale_pages), self.size)


INDEXERS = (Indexer, PagedIndexer, PagedInt8Indexer)
