"""out = softmax(scale · q kᵀ + mask) v over a latent, for one to four queries of each sequence, by atb.

*Matches* what `LatentAttention` does where each sequence has at most four queries. *Replaces with*
`npu_multi_head_latent_attention` on a contiguous latent, read as pages in their own order, on pages that the model
keeps in lines of NZ, or on those that a block table names: without a mask, where every query sees all keys; with its
mask of fixed shape, where queries are the last tokens of their sequences; or with a mask of every row. A hidden key
weighs exp(-10000), which is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.attention import calls
from patterns.primitives import atb_latent_calls as atb
from patterns.primitives import latent_calls

MODES = {"rows": "krope_ctkv", "heads": "krope_ctkv", "lines": "nzcache"}
"""How the operator is told in what way pages lie."""
BLIND = {"zero": 0.0, "nan": torch.nan}
"""What a query gives that sees no key."""


@dataclass(frozen=True)
class LatentAttentionAtb(Rule):
    """Softmax attention of few queries over a latent that all heads share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E], S ≤ 4."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    def gathered_with_sums(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        whole=tensor("*L"), whole_rope=tensor("*R"), cache=tensor("*P"), rope_cache=tensor("*Q"),
        table=tensor("B P"), up_key=tensor("N D C", optional=True), up_value=tensor("N C E", optional=True),
        length=tensor("B", optional=True), size=attribute(), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), summed=attribute(),
    ):  # fmt: skip
        """With the log-sum-exp of the scores, over pages of a cache that a block table names."""
        seen = dict(length=length, scale=scale, order=order, window=window, known=known, empty=empty)
        latent, k_rope = latent_calls.gathered(p, whole, whole_rope, cache, rope_cache, table, size, "rows")
        return _summed(p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), summed, seen)

    @pattern
    def with_sums(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), length=tensor("B", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), summed=attribute(),
    ):  # fmt: skip
        """With the log-sum-exp of the scores, in the dtype of the queries."""
        seen = dict(length=length, scale=scale, order=order, window=window, known=known, empty=empty)
        return _summed(p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), summed, seen)

    @pattern
    def in_lines(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent_lines=tensor("Blocks A Size L"), rope_lines=tensor("Blocks R Size M"),
        up_key=tensor("N D C", optional=True), up_value=tensor("N C E", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages in lines of NZ, in their own order."""
        latent, k_rope = (p.reshaped(p.permuted(x, atb.LINES)) for x in (latent_lines, rope_lines))
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value),
            mask=mask, length=length, scale=scale, order=order,
            window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def gathered(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        whole=tensor("*L"), whole_rope=tensor("*R"), cache=tensor("*P"), rope_cache=tensor("*Q"),
        table=tensor("B P"), up_key=tensor("N D C", optional=True), up_value=tensor("N C E", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), size=attribute(), lies=attribute(),
        scale=scalar(), order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages of a cache that a block table names."""
        latent, k_rope = latent_calls.gathered(p, whole, whole_rope, cache, rope_cache, table, size, lies)
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value),
            mask=mask, length=length, scale=scale, order=order,
            window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def written(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """What the canonicaliser has read; masks as in `Attention.written`."""
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value),
            mask=mask, length=length, scale=scale, order=order,
            window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    def guard(self, absorbed: Any):
        """How many queries there are."""
        queries = absorbed.shape[2]
        require(isinstance(queries, int) and queries <= atb.ROWS, "a sequence has more than four queries")

    @lowering
    @variants(values=("transposed", "multiplied"))
    def told(self, absorbed, q_rope, latent, k_rope, latent_lines, rope_lines, table, up_value, length, scale, order,
             window, known, finish, values):  # fmt: skip
        """What is seen, told in words."""
        require(finish is not None, "the log-sum-exp of the scores is used")
        require(table is None, "a block table names the pages")
        pages = _pages(absorbed.shape[0], latent, k_rope, latent_lines, rope_lines)
        y = atb.told(absorbed, q_rope, pages, length, scale, order, window, known)
        return calls.viewed(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def listed(self, absorbed, q_rope, cache, rope_cache, table, size, lies, up_value, length, scale, order, window,
               known, finish, values):  # fmt: skip
        """The same over pages that a block table names."""
        require(finish is not None, "the log-sum-exp of the scores is used")
        require(table is not None, "no block table names the pages")
        pages = atb.listed(cache, rope_cache, table, size, MODES[lies])
        y = atb.told(absorbed, q_rope, pages, length, scale, order, window, known)
        return calls.viewed(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def ring(self, absorbed, q_rope, latent, k_rope, cache, rope_cache, table, size, up_value, length, scale, window,
             known, summed, values):  # fmt: skip
        """One query of each sequence, with the log-sum-exp of its scores."""
        require(summed is not None, "nothing uses the log-sum-exp of the scores")
        one = absorbed.shape[2] == 1 and window is None and length is None
        require(one, "with the log-sum-exp, each sequence has one query, and keys whose number is known before")
        if table is None:
            pages = _pages(absorbed.shape[0], latent, k_rope, None, None)
        else:
            pages = atb.listed(cache, rope_cache, table, size, "krope_ctkv")
        context = [pages.room if known is None else known] * absorbed.shape[0]
        y, sums = atb.attended(
            absorbed, q_rope, pages, context, scale, dict(calc_type="calc_type_ring", return_lse=True)
        )
        return calls.viewed(latent_calls.expanded(y, up_value, values), summed), sums.transpose(1, 2)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def shown(self, absorbed, q_rope, latent, k_rope, latent_lines, rope_lines, cache, rope_cache, table, size, lies,
              up_value, mask, scale, empty, finish, values):  # fmt: skip
        """What is seen, shown by a mask."""
        require(mask is not None, "there is no mask")
        require(empty in BLIND, "a query without keys gives the mean of all, the operator gives another one")
        batch, _, queries = absorbed.shape[:3]
        keys: Any = mask.shape[-1]
        hidden = mask.expand(batch, 1, queries, keys).reshape(batch * queries, keys)
        added = torch.zeros(hidden.shape, dtype=absorbed.dtype, device=absorbed.device).masked_fill(hidden, atb.HIDDEN)
        rows = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch, mask_type="mask_type_spec", mask=added)
        if table is None:
            pages = _pages(batch, latent, k_rope, latent_lines, rope_lines)
        else:
            pages = atb.listed(cache, rope_cache, table, size, MODES[lies])
        y = atb.attended(absorbed, q_rope, pages, [keys] * batch, scale, rows)
        y = y.masked_fill(hidden.all(-1).reshape(batch, queries, 1, 1), BLIND[empty])
        return calls.viewed(latent_calls.expanded(y, up_value, values), finish)


def _summed(p, q, kv, up, finish, seen):
    """The terms of attention and of its log-sum-exp."""
    (nope, rope, absorbed), (latent, k_rope), (up_key, up_value) = q, kv, up
    query = p.latent_queries(nope=nope, rope=rope, absorbed=absorbed)
    k = p.latent_keys(latent=latent, rope=k_rope, up=up_key, rows=None)
    v = p.latent_values(latent=latent, up=up_value)
    sums = p.as_dtype(p.attention_log_sum(q=query, k=k, **seen), rope)
    return p.softmax_attention(q=query, k=k, v=v, finish=finish, **seen), sums


def _pages(
    batch: Any, latent: Tensor | None, k_rope: Tensor | None, latent_lines: Tensor | None, rope_lines: Tensor | None
) -> atb.Pages:
    """The latent [.., C] with its rotated lanes [.., Dr], or pages in lines of NZ, in their own order."""
    if latent_lines is not None and rope_lines is not None:
        return atb.in_lines(batch, latent_lines, rope_lines, "nzcache")
    assert latent is not None
    assert k_rope is not None
    return atb.in_rows(batch, latent, k_rope)
