"""The facet of sparse attention that says which keys are listed: those that an indexer finds, or those of the model.

Listing         a list of keys, and where an indexer makes it, its keys as rows
PagedListing    the same of an indexer whose keys lie in pages, by a block table of its own
GatheredRows    a list by which the model gathers the rows that it attends to
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec
from patterns.sparse.pages import of_rows, read


@dataclass(frozen=True)
class Listing(Group):
    """A list of keys.

    Attributes:
        places: numbers of keys, for each query.
        distinct: whether no row of them names a key twice.
        mask_kind, kv_len, kv_lens: which keys can be seen at all, as of `Visibility`.
        every_row_nonempty: whether each query sees a key.
        query, key, weights, count: those of the indexer, and how many keys it lists; None where the model lists them.
    """

    places: Any = tensor("B S K")
    distinct: Any = attribute()
    mask_kind: Any = attribute()
    kv_len: Any = attribute()
    kv_lens: Any = tensor("B", optional=True)
    every_row_nonempty: Any = attribute()
    query: Any = tensor("B S H Di")
    key: Any = tensor("B T Di")
    weights: Any = tensor("B S H")
    count: Any = attribute()

    def listed(self, p) -> Any:
        """The mask of keys that are listed in whatever way."""
        return p.topk_mask(places=self.places, distinct=self.distinct, **self._seen())

    def indexed(self, p) -> Any:
        """The same of what an indexer finds behind the same mask."""
        parts = dict(query=self.query, key=self.rows(p), weights=self.weights, places=self.places, count=self.count)
        places = p.lightning_indexer(**parts, **self._seen())
        return p.topk_mask(places=places, distinct=self.distinct, **self._seen())

    def _seen(self) -> dict[str, Any]:
        seen = dict(mask_kind=self.mask_kind, window=None, kv_len=self.kv_len, kv_lens=self.kv_lens)
        return seen | dict(every_row_nonempty=self.every_row_nonempty)

    def rows(self, p) -> Any:
        """The keys of the indexer."""
        return self.key

    def refuse(self, seen: Any) -> None:
        """Refuse a query that no key is left for, of which the operator gives 0."""
        left = seen.fully_masked_row == "zero" or (self.every_row_nonempty and self.query is not None)
        require(left, "a query for which no key is left gives the mean of all values, the operator gives 0")

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

    def found(self) -> Tensor:
        """What the indexer lists [B, S, 1, count], -1 where there are not so many."""
        require(self.query is not None, "the keys are not listed by an indexer")
        keys, room, how = self.read()
        mode, lengths = self.lengths(self.query, self.key.shape[1], room)
        return torch.ops.npu.npu_lightning_indexer(
            self.query, keys, self.weights, actual_seq_lengths_key=lengths, layout_query="BSND",
            sparse_count=self.count, sparse_mode=mode, **how,
        )[0]  # fmt: skip

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """The keys of the indexer, how many it reads untold, and what it is told of where they lie."""
        return self.key.unsqueeze(2), self.key.shape[1], dict(layout_key="BSND")

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Queries [B, S, N, C] and [B, S, N, Dr] for which the operator gives what the model does."""
        return queries

    def restored(self, y: Tensor) -> Tensor:
        """The result [B, S, N, C] with what plain attention gives without a key."""
        return y

    def own(self) -> Tensor:
        """The list of the model as the operator takes it, [B, S, 1, K]: each key once, then -1.

        It leaves out what lies behind the mask itself.
        """
        places = self.places.to(torch.int32)
        if not self.distinct:
            ordered = places.sort(dim=-1).values
            again = ordered.diff(dim=-1, prepend=ordered[..., :1] - 1) == 0
            places = ordered.masked_fill(again, -1).sort(dim=-1, descending=True).values
        return places.unsqueeze(2)


@dataclass(frozen=True)
class PagedListing(Listing):
    """A list that an indexer makes of keys in pages."""

    pages: Any = tensor("*I Y")
    block_table: Any = tensor("B O")
    size: Any = attribute()
    layout: Any = attribute()

    def rows(self, p) -> Any:
        """The keys as they are gathered."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return p.paged_rows(rows=self.key, pages=self.pages, **how)

    def refuse(self, seen: Any) -> None:
        """Refuse blocks of NZ too."""
        of_rows(self.layout)
        super().refuse(seen)

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """The same of pages, of which it reads none untold."""
        return read(self.pages, self.size), None, dict(layout_key="PA_BSND", block_table=self.block_table.int())


@dataclass(frozen=True)
class GatheredRows(Group):
    """A list of rows that the model gathers, each of which counts as often as it is listed.

    Attributes:
        places: numbers of rows, negative ones of entries that are hidden.
        hidden: which entries are hidden besides.
        ends: whether behind a hidden entry there are hidden ones alone.
        fully_masked_row: what a query without keys gives.
    """

    places: Any = tensor("B S K")
    hidden: Any = tensor("B S K", optional=True)
    ends: Any = attribute()
    fully_masked_row: Any = attribute()

    def said(self) -> dict[str, Any]:
        """As the reader says it."""
        return {name: getattr(self, name) for name in self.declared()}

    def refuse(self, seen: Any) -> None:
        """What a query without keys gives is restored."""

    def lengths(self, queries: Tensor, keys: Any, room: Any) -> tuple[int, Tensor | None]:
        """As of `Listing`: every query may see all of the keys."""
        return Listing(mask_kind="none", kv_len=None, kv_lens=None).lengths(queries, keys, room)

    def found(self) -> Tensor:
        """No indexer lists the rows."""
        require(False, "the keys are not listed by an indexer")
        return self.places

    def own(self) -> Tensor:
        """The list as the operator takes it, [B, S, 1, K]: it ends at the first negative entry."""
        places = self.places.to(torch.int32)
        if self.hidden is not None:
            hidden = self.hidden & ~self._blind() if self.fully_masked_row == "mean" else self.hidden
            places = places.masked_fill(hidden, -1)
        return (places if self.ends else places.sort(dim=-1, descending=True).values).unsqueeze(2)

    def posed(self, *queries: Tensor) -> Sequence[Tensor]:
        """Queries that are 0 where all of their list is hidden, and seen so: they give the mean of what it names."""
        if self.fully_masked_row != "mean":
            return queries
        return [each.masked_fill(self._blind().unsqueeze(-1), 0) for each in queries]

    def restored(self, y: Tensor) -> Tensor:
        """The result [B, S, N, C] with NaN where all of a list is hidden, if that is what the model gives."""
        return y.masked_fill(self._blind().unsqueeze(-1), torch.nan) if self.fully_masked_row == "nan" else y

    def _blind(self) -> Tensor:
        """Which queries see nothing, [B, S, 1]."""
        hidden = self.places < 0 if self.hidden is None else self.hidden
        return hidden.all(-1, keepdim=True)
