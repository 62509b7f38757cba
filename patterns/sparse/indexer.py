"""A lightning indexer, as forms and lowerings speak of it: keys as rows, or in pages by a block table of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Group, attribute, require, tensor
from patterns.attention.calls import MaskSpec
from patterns.sparse.pages import of_rows, read


@dataclass(frozen=True)
class Seen(Group):
    """Which keys can be seen at all, as of `Visibility`."""

    mask_kind: Any = attribute()
    kv_len: Any = attribute()
    kv_lens: Any = tensor("B", optional=True)
    every_row_nonempty: Any = attribute()

    def seen(self) -> dict[str, Any]:
        """As the readers say it."""
        seen = dict(mask_kind=self.mask_kind, window=None, kv_len=self.kv_len, kv_lens=self.kv_lens)
        return seen | dict(every_row_nonempty=self.every_row_nonempty)

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
class Indexer(Seen):
    """An indexer of keys that lie as rows, and how many of them it lists."""

    query: Any = tensor("B S H Di")
    key: Any = tensor("B T Di")
    weights: Any = tensor("B S H")
    count: Any = attribute()

    def said(self, p) -> dict[str, Any]:
        """As the readers say it."""
        return dict(query=self.query, key=self.rows(p), weights=self.weights, count=self.count, **self.seen())

    def rows(self, p) -> Any:
        """The keys of the indexer."""
        return self.key

    def refuse_blocks(self) -> None:
        """Refuse blocks of NZ; rows have none."""

    def found(self) -> Tensor:
        """What the indexer lists [B, S, 1, count], -1 where there are not so many."""
        require(self.query is not None, "the keys are not listed by an indexer")
        keys, room, how = self.read()
        mode, lengths = Seen.lengths(self, self.query, self.key.shape[1], room)
        return torch.ops.npu.npu_lightning_indexer(
            self.query, keys, self.weights, actual_seq_lengths_key=lengths, layout_query="BSND",
            sparse_count=self.count, sparse_mode=mode, **how,
        )[0]  # fmt: skip

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """The keys of the indexer, how many it reads untold, and what it is told of where they lie."""
        return self.key.unsqueeze(2), self.key.shape[1], dict(layout_key="BSND")


@dataclass(frozen=True)
class PagedIndexer(Indexer):
    """The same of keys in pages."""

    pages: Any = tensor("*I Y")
    block_table: Any = tensor("B O")
    size: Any = attribute()
    layout: Any = attribute()

    def rows(self, p) -> Any:
        """The keys as they are gathered."""
        how = dict(block_table=self.block_table, size=self.size, layout=self.layout)
        return p.paged_rows(rows=self.key, pages=self.pages, **how)

    def refuse_blocks(self) -> None:
        """Refuse blocks of NZ."""
        of_rows(self.layout)

    def read(self) -> tuple[Tensor, Any, dict[str, Any]]:
        """The same of pages, of which it reads none untold."""
        return read(self.pages, self.size), None, dict(layout_key="PA_BSND", block_table=self.block_table.int())
