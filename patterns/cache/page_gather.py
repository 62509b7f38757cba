"""rows[b, p · Size + o] = pages[table[b, p], o], of two caches, the sequences concatenated.

*Matches* the pages of keys and of values, or of a latent and its rotated lanes, that one block table gathers: all rows
of the pages, the first rows of every sequence, or sequences of different lengths, concatenated. *Replaces with*
`npu_gather_pa_kv_cache`, one call for both caches. Where attention can read the pages in place, that rewrite is chosen
instead: it gathers nothing and costs less.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
from torch import Tensor

from fusion import Group, Rule, attribute, lowering, pattern, tensor
from patterns.cache.pages import page_operand


@dataclass(frozen=True)
class Pages(Group):
    """The pages of two caches that one block table gathers.

    Attributes:
        size: rows of a page.
        lengths: rows of every sequence, one number or one for each.
        layout: "BSND" or "NZ", the layout of a page.
        key_shape: the shape of the gathered keys in the model, with one symbolic size at most.
        value_shape: that of the gathered values.
    """

    keys: Any = tensor("*K")
    values: Any = tensor("*V")
    table: Any = tensor("B M")
    size: Any = attribute()
    lengths: Any = attribute()
    layout: Any = attribute()
    key_shape: Any = attribute()
    value_shape: Any = attribute()

    def terms(self, p):
        """Build the terms of the rows that are gathered from both caches."""
        caches = ((self.keys, self.key_shape), (self.values, self.value_shape))
        how = dict(table=self.table, size=self.size, lengths=self.lengths, layout=self.layout)
        return tuple(p.gathered_pages(pages=pages, shape=shape, **how) for pages, shape in caches)


@dataclass(frozen=True)
class PageGather(Rule):
    """A gather of rows of two caches from their pages."""

    aliases = ("gather_pa_kv_cache",)

    def reference(self, key_pages: Tensor, value_pages: Tensor, table: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        """Gather the rows [T, W], T = sum(lengths), of two caches [Block, Size, W] by `table` [B, M], `lengths` [B]."""
        tokens = [(row, int(length)) for row, length in zip(table, lengths, strict=True)]
        caches = (key_pages, value_pages)
        return tuple(torch.cat([pages[row].flatten(0, 1)[:length] for row, length in tokens]) for pages in caches)

    @pattern
    def gathered(self, p, pages: Any = Pages):
        """key_pages[table] and value_pages[table], the first `lengths` rows of every sequence"""
        return pages.terms(p)

    @lowering
    def run(self, pages: Pages):
        """Emit npu_gather_pa_kv_cache for both caches in one call, into fresh memory."""
        in_lines = pages.layout == "NZ"
        caches = [
            page_operand(each, pages.size, "npu_gather_pa_kv_cache", pages.layout)
            for each in (pages.keys, pages.values)
        ]
        caches = [each.squeeze(1) if in_lines else each.unsqueeze(2) for each in caches]
        table, lengths = pages.table, pages.lengths
        count = lengths * table.shape[0] if isinstance(lengths, int) else sum(lengths)
        shapes = [(count, 1, x.shape[1] * x.shape[3] if in_lines else x.shape[3]) for x in caches]
        rows = [torch.empty(shape, dtype=x.dtype, device=x.device) for shape, x in zip(shapes, caches, strict=True)]
        results = torch.ops.npu.npu_gather_pa_kv_cache_functional(
            *caches, table.int(), _lengths_tensor(lengths, table), *rows
        )
        restored = _split_heads if in_lines else _reshaped
        return tuple(restored(*each) for each in zip(results, (pages.key_shape, pages.value_shape), strict=True))


def _lengths_tensor(lengths: Any, table: Tensor) -> Tensor:
    """Return `lengths`, one number or one of each sequence of `table` [B, M], as int32 [B]."""
    runs = [(lengths, table.shape[0])]
    if not isinstance(lengths, int):
        runs = [(length, len(list(run))) for length, run in groupby(lengths)]
    parts = [torch.full((many,), length, dtype=torch.int32, device=table.device) for length, many in runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _reshaped(rows: Tensor, shape: Any) -> Tensor:
    """Reshape `rows` to `shape`, in which at most one size is symbolic."""
    return rows.reshape([each if isinstance(each, int) else -1 for each in shape])


def _split_heads(rows: Tensor, shape: Any) -> Tensor:
    """Split the heads of `rows` [T, 1, N · D], and transpose to `shape` [B, N, T / B, D]."""
    batch, heads, keys, width = shape
    return _reshaped(rows, (batch, keys, heads, width)).transpose(1, 2)
