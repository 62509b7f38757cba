"""rows[b, p · Size + o] = pages[table[b, p], o], of two caches, the sequences one behind the other.

*Matches* the pages of keys and of values, or of a latent and its rotated lanes, that one block table gathers: whole
pages, the first rows of every sequence, or sequences of lengths of their own that are joined. *Replaces with*
`npu_gather_pa_kv_cache`, one call for both. Where attention reads the pages in place nothing is gathered, and that
costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, tensor
from patterns.attention.calls import laid


@dataclass(frozen=True)
class Pages(Group):
    """The pages of two caches that a table names: which rows of them are kept, and the dims that these have."""

    keys: Any = tensor("*K")
    values: Any = tensor("*V")
    table: Any = tensor("B M")
    size: Any = attribute()
    lengths: Any = attribute()
    layout: Any = attribute()
    key_shape: Any = attribute()
    value_shape: Any = attribute()

    def terms(self, p):
        """The rows of both."""
        both = ((self.keys, self.key_shape), (self.values, self.value_shape))
        how = dict(table=self.table, size=self.size, lengths=self.lengths, layout=self.layout)
        return tuple(p.gathered_pages(pages=pages, shape=shape, **how) for pages, shape in both)


@dataclass(frozen=True)
class PageGather(Rule):
    """Rows of two caches, out of their pages."""

    aliases = ("gather_pa_kv_cache",)

    def reference(self, key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """The meaning: pages [Block, Size, W], table [B, M], lengths [B] → two times [T, W], T the sum of lengths."""
        tokens = [(row, int(length)) for row, length in zip(table, lengths, strict=True)]
        caches = (key_pages, value_pages)
        return tuple(torch.cat([pages[row].flatten(0, 1)[:length] for row, length in tokens]) for pages in caches)

    @pattern
    def gathered(self, p, pages: Any = Pages):
        """What the canonicaliser has read."""
        return pages.terms(p)

    @lowering
    def run(self, pages: Pages):
        """One call for both, into memory of its own."""
        lines = pages.layout == "NZ"
        caches = [laid(each, pages.size, pages.layout) for each in (pages.keys, pages.values)]
        caches = [each.squeeze(1) if lines else each.unsqueeze(2) for each in caches]
        table, lengths = pages.table, pages.lengths
        count = lengths * table.shape[0] if isinstance(lengths, int) else sum(lengths)
        shapes = [(count, 1, x.shape[1] * x.shape[3] if lines else x.shape[3]) for x in caches]
        rows = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, caches, strict=True)]
        found = torch.ops.npu.npu_gather_pa_kv_cache_functional(*caches, table.int(), _told(lengths, table), *rows)
        restored = _as_heads if lines else _as
        return tuple(restored(*each) for each in zip(found, (pages.key_shape, pages.value_shape), strict=True))


def _told(lengths: Any, table: Tensor) -> Tensor:
    """How many rows each sequence of the table [B, M] has, [B]."""
    runs = [(lengths, table.shape[0])]
    if not isinstance(lengths, int):
        runs = [(length, len(list(alike))) for length, alike in groupby(lengths)]
    made = [torch.full((many,), length, dtype=torch.int32, device=table.device) for length, many in runs]
    return made[0] if len(made) == 1 else torch.cat(made)


def _as(rows: Tensor, shape: Any) -> Tensor:
    """Rows in the dims of the model, of which one may be symbolic."""
    return rows.reshape([each if isinstance(each, int) else -1 for each in shape])


def _as_heads(rows: Tensor, shape: Any) -> Tensor:
    """Rows [T, 1, M · D] of all heads as [B, M, T / B, D]."""
    batch, heads, keys, width = shape
    return _as(rows, (batch, keys, heads, width)).transpose(1, 2)
