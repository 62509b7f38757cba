"""out = softmax(scale · q kᵀ, masked) v, of keys and values k[b, p · Size + o] = pages[table[b, p], o].

*Matches* attention over keys and values that are gathered from the pages of a cache (PagedAttention, Kwon et al.,
2023). *Replaces with* `npu_fused_infer_attention_score_v2`, which reads the pages by the block table, up to the length
of each sequence: no copy of the cache is made. A mask that is not proven to be an order or a length is passed on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Example, Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.examples import attention_pages
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as paged


@dataclass(frozen=True)
class PagedAttention(Rule):
    """Softmax attention over pages."""

    def reference(self, q: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], pages [Block, Size, M, D | E], table [B, P] → [B, N, S, E]."""
        k, v = (each[table].flatten(1, 2).transpose(1, 2) for each in (key_pages, value_pages))
        k, v = (each.repeat_interleave(q.shape[1] // each.shape[1], 1) for each in (k, v))
        return ((q @ k.transpose(-2, -1)).float() * scale).softmax(-1).to(q.dtype) @ v

    @pattern
    def counted(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), key_pages=tensor("Block X Y D"),
        value_pages=tensor("Block X Y E"), table=tensor("B P"), mask=tensor("*L S T"), count=tensor("B"),
        sink=tensor("N", optional=True), heads_first=attribute(), scale=scalar(), order=attribute(), window=attribute(),
        known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """A mask up to a length that may be 0: `count` keys are seen."""
        return p.softmax_attention(
            q=q, k=p.paged_rows(rows=k, pages=key_pages, table=table, heads_first=heads_first),
            v=p.paged_rows(rows=v, pages=value_pages, table=table, heads_first=heads_first),
            mask=p.counted_keys(mask=mask, length=count), sink=sink, scale=scale, order=order, window=window,
            known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def written(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), key_pages=tensor("Block X Y D"),
        value_pages=tensor("Block X Y E"), table=tensor("B P"), mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True), sink=tensor("N", optional=True), heads_first=attribute(), scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Any other mask, as in `Attention.written`."""
        return p.softmax_attention(
            q=q, k=p.paged_rows(rows=k, pages=key_pages, table=table, heads_first=heads_first),
            v=p.paged_rows(rows=v, pages=value_pages, table=table, heads_first=heads_first),
            mask=mask, length=length, sink=sink, scale=scale, order=order, window=window, known=known, empty=empty,
            finish=finish,
        )  # fmt: skip

    @lowering
    def told(self, q, k, key_pages, value_pages, table, mask, count, length, sink, heads_first, scale, order, window,
             known, empty, finish):  # fmt: skip
        """What is seen in words, one sequence beside the other."""
        require(sink is None, "with a sink the operator reads packed sequences")
        return _told(paged.batched, q, k, key_pages, value_pages, table, heads_first, scale,
                     calls.Seen(order, window, known, length), count, empty, finish)  # fmt: skip

    @lowering
    def packed(self, q, k, key_pages, value_pages, table, mask, count, length, sink, heads_first, scale, order, window,
               known, empty, finish):  # fmt: skip
        """The same, one sequence after the other."""
        beside = {} if sink is None else dict(learnable_sink=sink)
        return _told(paged.packed, q, k, key_pages, value_pages, table, heads_first, scale,
                     calls.Seen(order, window, known, length), count, empty, finish, **beside)  # fmt: skip

    @lowering
    def shown(self, q, k, key_pages, value_pages, table, mask, sink, heads_first, scale, empty, finish):
        """What is seen, shown by the mask."""
        require(mask is not None, "there is no mask")
        require(sink is None, "with a sink the operator reads packed sequences")
        of = _table(k, key_pages, table, heads_first)
        queries, hidden = paged.shown_some(q, mask, empty)
        y = paged.batched(
            queries, paged.laid(key_pages, heads_first), paged.laid(value_pages, heads_first), calls.Seen(), of,
            mask=paged.wide(hidden, of, q.shape[0]), num_key_value_heads=k.shape[1], softmax_scale=scale,
        )  # fmt: skip
        nothing = mask.all(-1, keepdim=True) if empty == "nan" else None
        return calls.finished(y if nothing is None else y.masked_fill(nothing, torch.nan), finish)

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(attention_pages.EXAMPLES)

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused."""
        return iter(attention_pages.REJECTS)


def _table(k: Tensor, pages: Tensor, table: Tensor, heads_first: bool) -> paged.Table:
    return paged.Table(table, pages.shape[2 if heads_first else 1], k.shape[2])


def _told(
    run: Any, q: Tensor, k: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, heads_first: bool,
    scale: float, seen: calls.Seen, count: Tensor | None, empty: str, finish: Any, **arguments: Any,
) -> Tensor:  # fmt: skip
    known = seen.order != "mask" or count is not None
    require(known, "what the mask lets through is not proven to be causal, a window or a length")
    if count is not None:
        q, length = paged.given_some(q, count, k.shape[2], empty)
        seen = calls.Seen("full", length=length)
    y = run(
        q, paged.laid(key_pages, heads_first), paged.laid(value_pages, heads_first), seen,
        _table(k, key_pages, table, heads_first), num_key_value_heads=k.shape[1], softmax_scale=scale, **arguments,
    )  # fmt: skip
    if count is not None and empty == "nan":
        y = y.masked_fill((count <= 0).reshape(-1, 1, 1, 1), torch.nan)
    return calls.finished(y, finish)
