"""out = softmax(scale · q kᵀ, masked) v, of keys and values k[b, p · Size + o] = pages[table[b, p], o].

*Matches* attention over keys and values that are gathered from the pages of a cache (PagedAttention, Kwon et al.,
2023). *Replaces with* `npu_fused_infer_attention_score_v2`, which reads the pages by the block table, up to the length
of each sequence: no copy of the cache is made. A mask that is not proven to be an order or a length is passed on.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as paged
from patterns.primitives import latent_calls


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
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), key_pages=tensor("*K W"),
        value_pages=tensor("*V X"), table=tensor("B P"), mask=tensor("*L S T"), count=tensor("B"),
        sink=tensor("N", optional=True), size=attribute(), lies=attribute(), scale=scalar(), order=attribute(),
        window=attribute(),
        known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """A mask up to a length that may be 0: `count` keys are seen."""
        return p.softmax_attention(
            q=q, k=p.paged_rows(rows=k, pages=key_pages, table=table, size=size, lies=lies),
            v=p.paged_rows(rows=v, pages=value_pages, table=table, size=size, lies=lies),
            mask=p.counted_keys(mask=mask, length=count), sink=sink, scale=scale, order=order, window=window,
            known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def written(
        self, p, q=tensor("B N S D"), k=tensor("B M T D"), v=tensor("B M T E"), key_pages=tensor("*K W"),
        value_pages=tensor("*V X"), table=tensor("B P"), mask=tensor("*L S T", optional=True),
        length=tensor("B", optional=True), sink=tensor("N", optional=True), size=attribute(), lies=attribute(),
        scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Any other mask, as in `Attention.written`."""
        return p.softmax_attention(
            q=q, k=p.paged_rows(rows=k, pages=key_pages, table=table, size=size, lies=lies),
            v=p.paged_rows(rows=v, pages=value_pages, table=table, size=size, lies=lies),
            mask=mask, length=length, sink=sink, scale=scale, order=order, window=window, known=known, empty=empty,
            finish=finish,
        )  # fmt: skip

    def guard(self, key_pages: Any, value_pages: Any, lies: str):
        """How the pages hold their rows."""
        for each in (key_pages, value_pages):
            latent_calls.of_line(each.shape[-1] if lies == "lines" else None)

    @lowering
    def told(self, q, k, key_pages, value_pages, table, count, length, sink, size, lies, scale, order, window,
             known, empty, finish):  # fmt: skip
        """What is seen in words, one sequence beside the other."""
        require(sink is None, "with a sink the operator reads packed sequences")
        of = _of(k, key_pages, value_pages, table, size, lies, scale)
        return calls.finished(
            _told(paged.batched, q, of, calls.Seen(order, window, known, length), count, empty), finish
        )

    @lowering
    def packed(self, q, k, key_pages, value_pages, table, count, length, sink, size, lies, scale, order, window,
               known, empty, finish):  # fmt: skip
        """The same, one sequence after the other."""
        of = _of(k, key_pages, value_pages, table, size, lies, scale)
        of |= {} if sink is None else dict(learnable_sink=sink)
        return calls.finished(
            _told(paged.packed, q, of, calls.Seen(order, window, known, length), count, empty), finish
        )

    @lowering
    def shown(self, q, k, key_pages, value_pages, table, mask, sink, size, lies, scale, empty, finish):
        """What is seen, shown by the mask."""
        require(mask is not None, "there is no mask")
        require(sink is None, "with a sink the operator reads packed sequences")
        of = _of(k, key_pages, value_pages, table, size, lies, scale)
        queries, hidden = paged.shown_some(q, mask, empty)
        y = paged.batched(queries, seen=calls.Seen(), mask=paged.wide(hidden, of["table"], q.shape[0]), **of)
        return calls.finished(y.masked_fill(mask.all(-1, keepdim=True), torch.nan) if empty == "nan" else y, finish)


def _of(
    k: Tensor, key_pages: Tensor, value_pages: Tensor, table: Tensor, size: int, lies: str, scale: float
) -> dict[str, Any]:
    """What the operator reads, and how."""
    heads = k.shape[1]
    keys, values = (paged.laid(each, size, lies, heads) for each in (key_pages, value_pages))
    of = paged.Table(table, size, k.shape[2])
    return dict(k=keys, v=values, table=of, num_key_value_heads=heads, softmax_scale=scale)


def _told(
    run: Callable[..., Tensor], q: Tensor, of: dict[str, Any], seen: calls.Seen, count: Tensor | None, empty: str
) -> Tensor:
    known = seen.order != "mask" or count is not None
    require(known, "what the mask lets through is not proven to be causal, a window or a length")
    if count is None:
        return run(q, seen=seen, **of)
    q, length = paged.given_some(q, count, of["table"].keys, empty)
    y = run(q, seen=calls.Seen("full", length=length), **of)
    return y.masked_fill((count <= 0).reshape(-1, 1, 1, 1), torch.nan) if empty == "nan" else y
