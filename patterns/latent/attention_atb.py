"""out = softmax(scale · q kᵀ + mask) v over a latent, for one to four queries of each sequence, by atb.

    int8:  p = exp(s - max s),  s = scale · (c[head] · (q8 k8ᵀ) + q_rope k_ropeᵀ),  out = (round(127 p) k8) · v / Σ p

*Matches* what `LatentAttention` does where each sequence has at most four queries; and the same over an int8 latent
with int8 queries of one scale for each head, where the model itself rounds its probabilities to steps of 1 / 127.
*Replaces with* `npu_multi_head_latent_attention` on a contiguous latent, read as pages in their own order, on pages
that the model keeps in NZ, or on those that a block table names: without a mask, where every query sees all keys; with
its mask of fixed shape, where queries are the last tokens of their sequences; or with a mask of every row. A hidden key
weighs exp(-10000), which is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, variants
from patterns.attention import calls
from patterns.latent import attention_atb_call as atb
from patterns.latent import latent_calls
from patterns.latent.attention_atb_groups import BLIND, Int8Queries, PlainQueries, Queries, Visibility
from patterns.latent.attention_atb_sources import Pages, PagesInOrder, Rows, Source

VALUES = ("transposed", "multiplied")


@dataclass(frozen=True)
class LatentAttentionAtb(Rule):
    """Softmax attention of few queries over a latent that all heads share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E], S ≤ 4."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    @variants(source=(Pages, Rows))
    def with_lse(
        self, p, source, query: Any = PlainQueries, seen: Any = Visibility, scale=scalar(), lse_output_view=attribute()
    ):
        """With the log-sum-exp of the scores, in the dtype of the queries."""
        (queries, up), said = query.operands(), dict(scale=scale, **seen.structured())
        q, k, v = latent_calls.operands(p, queries, source.latent_terms(p), up, None)
        y = p.softmax_attention(q=q, k=k, v=v, finish=lse_output_view, **said)
        return y, p.as_dtype(p.attention_log_sum(q=q, k=k, **said), query.rope)

    @pattern
    @variants(source=(Pages, PagesInOrder, Rows))
    def written(
        self, p, source, query: Any = PlainQueries, seen: Any = Visibility, scale=scalar(), output_view=attribute()
    ):
        """What the canonicaliser has read; masks as in `Attention.written`."""
        q, up = query.operands()
        return latent_calls.attended(p, q, source.latent_terms(p), up, scale=scale, finish=output_view, **seen.said())

    @pattern
    @variants(source=(Pages, PagesInOrder))
    def int8_counted(
        self, p, source, query: Any = Int8Queries, seen: Any = Visibility, scale=scalar(), output_view=attribute()
    ):
        """An int8 latent up to a length that may be 0."""
        return query.attended(p, source.latent_terms(p), scale=scale, finish=output_view, **seen.counted(p))

    @pattern
    @variants(source=(Pages, PagesInOrder))
    def int8(
        self, p, source, query: Any = Int8Queries, seen: Any = Visibility, scale=scalar(), output_view=attribute()
    ):
        """An int8 latent."""
        return query.attended(p, source.latent_terms(p), scale=scale, finish=output_view, **seen.said())

    def guard(self, query: Queries, source: Source):
        """How many queries there are, and how pages lie."""
        queries = query.absorbed.shape[2]
        require(isinstance(queries, int) and queries <= atb.ROWS, "a sequence has more than four queries")
        query.guard(source)

    @lowering
    @variants(values=VALUES)
    def structured(self, query: Queries, source: Source, seen: Visibility, scale: float, output_view: Any, values: str):
        """What is seen, told by lengths and an order of keys."""
        require(output_view is not None, "the log-sum-exp of the scores is used")
        pages = source.pages(query.absorbed.shape[0], query.int8)
        q, asked = seen.posed(query.read(scale), pages.room)
        y = seen.restored(atb.structured(q, pages, asked.spec()))
        return calls.viewed(query.expanded(y, values), output_view)

    @lowering
    @variants(values=VALUES)
    def ring(self, query: Queries, source: Source, seen: Visibility, scale: float, lse_output_view: Any, values: str):
        """One query of each sequence, with the log-sum-exp of its scores."""
        require(lse_output_view is not None, "nothing uses the log-sum-exp of the scores")
        batch, _, queries = query.absorbed.shape[:3]
        one = queries == 1 and seen.window is None and seen.kv_lens is None
        require(one, "with the log-sum-exp, each sequence has one query, and keys whose number is known before")
        pages = source.pages(batch, query.int8)
        context = [pages.room if seen.kv_len is None else seen.kv_len] * batch
        y, lse = atb.attended(query.read(scale), pages, context, dict(calc_type="calc_type_ring", return_lse=True))
        y = calls.viewed(query.expanded(y, values), lse_output_view)
        return y, lse.transpose(1, 2)

    @lowering
    @variants(values=VALUES)
    def dense(self, query: Queries, source: Source, seen: Visibility, scale: float, output_view: Any, values: str):
        """What is seen, shown by a mask."""
        mask = seen.shown()
        require(not query.int8, "the kernel reads no mask of int8 queries")
        y, blind = atb.dense(query.read(scale), source.pages(query.absorbed.shape[0], query.int8), mask)
        y = y.masked_fill(blind[..., None, None], BLIND[seen.fully_masked_row])
        return calls.viewed(query.expanded(y, values), output_view)
