"""out = softmax(scale · q kᵀ over the keys that an indexer lists) v, of keys and values that one latent gives.

*Matches* dense attention behind a mask of listed keys, with keys and values expanded from a latent (DeepSeek-V3.2,
2025), over rows, or over pages that block tables name; or attention over rows of a latent that the model gathers by a
list itself (FlashMLA, 2025). *Replaces with* `npu_lightning_indexer` and
`npu_sparse_flash_attention` on the latent itself, in place, or on packed rows with
`npu_kv_quant_sparse_flash_attention`: queries and results take the expansion over (`q · (W c) =
(q W) · c`), which is exact for every list of keys.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Captures, Rule, lowering, pattern, require, scalar, variants
from patterns.attention.calls import viewed
from patterns.attention.masks.visibility import Visibility
from patterns.attention.results import Output
from patterns.latent.attention.encodings import Plain
from patterns.latent.head_projection import expanded
from patterns.sparse.attention.list_sources import GatheredRows, IndexedRows, Listing
from patterns.sparse.attention.packed import PackedPages, PackedRows
from patterns.sparse.attention.pages import LatentPages, LatentRows
from patterns.sparse.indexer.indexer import INDEXERS

SOURCES = (LatentRows, LatentPages, PackedRows, PackedPages)
VALUES = ("transposed", "multiplied")
"""Products of a result with W_UV, see `expanded`."""


@dataclass(frozen=True)
class SparseMatch(Captures):
    """Captures of attention over listed keys: its facets, and the factor `scale` of the scores.

    Attributes:
        indexer: the indexer that gives the list; None for a list that the model computes in another way.
        listing: the facet of the list, which gives the lengths of keys and restores the results of empty lists.
        encoding: the encoding of the latent, which gives the absorbed queries.
        source: rows or pages of the latent.
        result: the facet of the output.
        seen: captures of the mask; None where the rows are gathered.
    """

    indexer: Any
    listing: Any
    encoding: Any
    source: Any
    result: Any
    seen: Any
    scale: float

    def attended(self, listed: Tensor) -> Tensor:
        """Emit attention of absorbed queries over the rows of the latent that `listed` names: [B, S, N, C].

        `listed` is int32 [B, S, 1, K], -1 after the last key.
        """
        listing, source = self.listing, self.source
        query, rope = listing.posed(*(each.transpose(1, 2) for each in self.encoding.queries()))
        room = source.keys(query.shape[0])
        keys = room if self.encoding.first_rows is None else self.encoding.first_rows
        ends = listing.segment_ends()
        if ends is not None:
            y = source.attended_in_segments((query, rope), listed, self.scale, ends)
        else:
            mode, lengths = listing.lengths(query, keys, None if source.paged else room)
            how = dict(sparse_mode=mode, actual_seq_lengths_kv=lengths)
            y = source.attended((query, rope), listed, self.scale, **how)
        return listing.restored(y, listed, self.seen, lambda: source.mean(query.shape[0], keys))

    def projected(self, y: Tensor, values: str) -> Tensor:
        """Return `y` [B, S, N, C] times W_UV, by the product `values` (see `expanded`), in the view of the model."""
        return viewed(expanded(y, self.encoding.up_value, values), self.result.view)


@dataclass(frozen=True)
class SparseAttention(Rule):
    """Attention over the keys that are listed for each query."""

    aliases = ("dsa", "sparse_flash_attention", "top_k_attention")

    def reference(self, q: Tensor, k: Tensor, v: Tensor, places: Tensor, scale: float) -> Tensor:
        """Compute [B, N, S, E] of q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] over the keys `places` [B, S, K]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        listed = torch.zeros_like(scores[:, 0], dtype=torch.bool).scatter(-1, places, True)
        return scores.masked_fill(~listed.unsqueeze(1), -torch.inf).softmax(-1).to(q.dtype) @ v

    def within(self) -> frozenset[str]:
        """Name the fusion of the full layer, and that of a buffer of the listed rows."""
        return frozenset({"sparse_attention_pto", "gather_selection_kv_cache"})

    @pattern
    @variants(indexer=INDEXERS, source=SOURCES)
    def by_indexer(
        self,
        p,
        indexer,
        source,
        listing: Any = Listing,
        encoding: Any = Plain,
        result: Any = Output,
        seen: Any = Visibility,
        scale=scalar(),
    ):
        """softmax(scale · q kᵀ, masked to the top-K keys of an indexer) v"""
        attended = dict(seen.captures(), scale=scale, mask=listing.indexed(p, indexer))
        return encoding.terms(p, source, result, attended)

    @pattern
    @variants(source=SOURCES)
    def by_places(
        self,
        p,
        source,
        listing: Any = Listing,
        encoding: Any = Plain,
        result: Any = Output,
        seen: Any = Visibility,
        scale=scalar(),
    ):
        """softmax(scale · q kᵀ, masked to the keys in a list that the model computes in any way) v"""
        return encoding.terms(p, source, result, dict(seen.captures(), scale=scale, mask=listing.listed(p)))

    @pattern
    @variants(source=SOURCES)
    def by_gathered_rows(
        self, p, source, listing: Any = GatheredRows, encoding: Any = Plain, result: Any = Output, scale=scalar()
    ):
        """softmax(scale · q k[places]ᵀ) v[places], over the rows k[places] and v[places] that the model gathers"""
        return encoding.terms(p, source, result, dict(listing.gathered(p), scale=scale), "listed_attention")

    @pattern
    @variants(indexer=INDEXERS, source=SOURCES)
    def by_indexed_rows(
        self,
        p,
        indexer,
        source,
        listing: Any = IndexedRows,
        encoding: Any = Plain,
        result: Any = Output,
        scale=scalar(),
    ):
        """softmax(scale · q k[places]ᵀ) v[places], with places the top-K keys of an indexer"""
        attended = dict(listing.gathered(p, indexer), scale=scale)
        return encoding.terms(p, source, result, attended, "listed_attention")

    def guard(self, match: SparseMatch):
        """Refuse NZ pages of the latent or of the indexer's keys, and lists that name a key twice if the operator
        miscounts them.

        Masks under which a query has no key are refused if its result cannot be restored, see `Listing.refuse`.
        """
        if match.indexer is not None:
            match.indexer.refuse_blocks()
        match.listing.refuse(match.seen, match.indexer, match.source.averaged)
        match.source.refuse_blocks("npu_sparse_flash_attention")
        match.source.refuse_lists(match.listing.is_distinct())

    @lowering
    @variants(values=VALUES)
    def indexed(self, match: SparseMatch, values: str):
        """Emit the operator of the indexer, sparse attention over its list, and a product with W_UV of each head."""
        require(match.indexer is not None, "list of keys: no indexer gives it; this call requires one")
        return match.projected(match.attended(match.indexer.select(match.listing)), values)

    @lowering
    @variants(values=VALUES)
    def listed(self, match: SparseMatch, values: str):
        """Emit sparse attention over the list that the model computes itself, and a product with W_UV of each head."""
        return match.projected(match.attended(match.listing.own(match.seen)), values)
