"""out = softmax(scale · q kᵀ + mask) v over a latent, for one to four queries of each sequence, by atb.

*Matches* what `LatentAttention` does where each sequence has at most four queries. *Replaces with*
`npu_multi_head_latent_attention` on a contiguous latent, read as pages in their own order, on pages that the model
keeps in lines of NZ, or on those that a block table names: without a mask, where every query sees all keys; with its
mask of fixed shape, where queries are the last tokens of their sequences; or with a mask of every row. A hidden key
weighs exp(-10000), which is 0.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Example, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.examples import latent_attention_atb
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as page_calls
from patterns.primitives import latent_calls

HIDDEN = -10000.0
ROWS = 4
"""The most queries of a sequence."""
BLIND = {"zero": 0.0, "nan": torch.nan}
"""What a query gives that sees no key."""
LINES = (0, 2, 1, 3)
"""How pages in lines of NZ [Blocks, D/L, Size, L] are turned to be read, one row after the other."""


@dataclass(frozen=True)
class LatentAttentionAtb(Rule):
    """Softmax attention of few queries over a latent that all heads share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E], S ≤ 4."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    def with_sums(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), length=tensor("B", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), summed=attribute(),
    ):  # fmt: skip
        """With the log-sum-exp of the scores, in the dtype of the queries."""
        seen = dict(length=length, scale=scale, order=order, window=window, known=known, empty=empty)
        q = p.latent_queries(nope=nope, rope=q_rope, absorbed=absorbed)
        k = p.latent_keys(latent=latent, rope=k_rope, up=up_key, rows=None)
        v = p.latent_values(latent=latent, up=up_value)
        sums = p.as_dtype(p.attention_log_sum(q=q, k=k, **seen), q_rope)
        return p.softmax_attention(q=q, k=k, v=v, finish=summed, **seen), sums

    @pattern
    def in_lines(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent_lines=tensor("Blocks A Size L"), rope_lines=tensor("Blocks R Size M"),
        up_key=tensor("N D C", optional=True), up_value=tensor("N C E", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages in lines of NZ, in their own order."""
        latent, k_rope = (p.reshaped(p.permuted(x, LINES)) for x in (latent_lines, rope_lines))
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value),
            mask=mask, length=length, scale=scale, order=order,
            window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def gathered(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        whole=tensor("*L C"), whole_rope=tensor("*R Dr"), cache=tensor("*P C"), rope_cache=tensor("*P Dr"),
        table=tensor("B P"), up_key=tensor("N D C", optional=True), up_value=tensor("N C E", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), size=attribute(), scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages of a cache that a block table names."""
        both = ((whole, cache), (whole_rope, rope_cache))
        how = dict(table=table, size=size, lies="rows")
        latent, k_rope = (p.reshaped(p.paged_rows(rows=rows, pages=of, **how)) for rows, of in both)
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
        require(isinstance(queries, int) and queries <= ROWS, "a sequence has more than four queries")

    @lowering
    @variants(values=("transposed", "multiplied"))
    def told(self, absorbed, q_rope, latent, k_rope, latent_lines, rope_lines, table, up_value, length, scale, order,
             window, known, finish, values):  # fmt: skip
        """What is seen, told in words."""
        require(finish is not None, "the log-sum-exp of the scores is used")
        require(table is None, "a block table names the pages")
        pages = _pages(absorbed.shape[0], latent, k_rope, latent_lines, rope_lines)
        y = _told(absorbed, q_rope, pages, length, scale, order, window, known)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def listed(self, absorbed, q_rope, cache, rope_cache, table, size, up_value, length, scale, order, window, known,
               finish, values):  # fmt: skip
        """The same over pages that a block table names."""
        require(table is not None, "no block table names the pages")
        latents, ropes = (page_calls.laid(each, size).unsqueeze(2) for each in (cache, rope_cache))
        pages = _Pages(latents, ropes, "krope_ctkv", size, table.shape[1] * size, table.int())
        y = _told(absorbed, q_rope, pages, length, scale, order, window, known)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def ring(self, absorbed, q_rope, latent, k_rope, up_value, length, scale, window, known, summed, values):
        """One query of each sequence, with the log-sum-exp of its scores."""
        require(summed is not None, "nothing uses the log-sum-exp of the scores")
        one = absorbed.shape[2] == 1 and window is None and length is None
        require(one, "with the log-sum-exp, each sequence has one query, and keys whose number is known before")
        pages = _pages(absorbed.shape[0], latent, k_rope, None, None)
        context = [pages.room if known is None else known] * absorbed.shape[0]
        y, sums = _attended(absorbed, q_rope, pages, context, scale, dict(calc_type="calc_type_ring", return_lse=True))
        return calls.finished(latent_calls.expanded(y, up_value, values), summed), sums.transpose(1, 2)

    @lowering
    @variants(values=("transposed", "multiplied"))
    def shown(self, absorbed, q_rope, latent, k_rope, latent_lines, rope_lines, table, up_value, mask, scale, empty,
              finish, values):  # fmt: skip
        """What is seen, shown by a mask."""
        require(table is None, "a block table names the pages")
        require(mask is not None, "there is no mask")
        require(empty in BLIND, "a query without keys gives the mean of all, the operator gives another one")
        batch, _, queries = absorbed.shape[:3]
        size: Any = mask.shape[-1]
        hidden = mask.expand(batch, 1, queries, size).reshape(batch * queries, size)
        added = torch.zeros(hidden.shape, dtype=absorbed.dtype, device=absorbed.device).masked_fill(hidden, HIDDEN)
        rows = dict(calc_type="calc_type_spec", qseqlen=[queries] * batch, mask_type="mask_type_spec", mask=added)
        pages = _pages(batch, latent, k_rope, latent_lines, rope_lines)
        y = _attended(absorbed, q_rope, pages, [size] * batch, scale, rows)
        y = y.masked_fill(hidden.all(-1).reshape(batch, queries, 1, 1), BLIND[empty])
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(latent_attention_atb.EXAMPLES)

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused."""
        return iter(latent_attention_atb.REJECTS)


@dataclass(frozen=True)
class _Pages:
    """Pages of the latent and its rotated lanes, how they lie, how many rows one has, and how many a sequence has."""

    latents: Tensor
    ropes: Tensor
    mode: str
    size: Any
    room: Any
    table: Tensor | None = None


def _pages(
    batch: Any, latent: Tensor | None, k_rope: Tensor | None, latent_lines: Tensor | None, rope_lines: Tensor | None
) -> _Pages:
    """The latent [.., C] with its rotated lanes [.., Dr] as pages [Blocks, Size, 1, ..], or pages in lines."""
    if latent_lines is not None and rope_lines is not None:
        blocks, size = latent_lines.shape[0], latent_lines.shape[2]
        return _Pages(latent_lines, rope_lines, "nzcache", size, blocks * size // batch)
    assert latent is not None
    assert k_rope is not None
    rows = (each.reshape(batch, -1, each.shape[-1]) for each in (latent, k_rope))
    latents, ropes = (latent_calls.pages(each, 1) for each in rows)
    size = latents.shape[1]
    return _Pages(latents, ropes, "krope_ctkv", size, latents.shape[0] * size // batch)


def _told(
    absorbed: Tensor, q_rope: Tensor, pages: _Pages, length: Tensor | None, scale: float, order: str, window: Any,
    known: Any,
) -> Tensor:  # fmt: skip
    """Attention [B, S, N, C] over what is told in words."""
    require(order != "mask" and window is None, "what the mask lets through is not proven to be causal or a length")
    batch, _, queries = absorbed.shape[:3]
    rows: dict[str, Any] = {} if queries == 1 else dict(calc_type="calc_type_spec", qseqlen=[queries] * batch)
    if queries > 1 and order != "full":
        rows |= dict(mask_type="mask_type_free", mask=_free(queries, pages.size, absorbed))
    count = queries if order == "left" else pages.room if known is None else known
    require(length is not None or count <= pages.room, "there are fewer keys than queries")
    return _attended(absorbed, q_rope, pages, [count] * batch if length is None else length, scale, rows)


def _free(queries: int, size: int, like: Tensor) -> Tensor:
    """The mask of fixed shape for so many queries, [Size - 3 + 2 · queries, Size]."""
    shape = (size - 3 + 2 * queries, size)
    return torch.full(shape, HIDDEN, dtype=like.dtype, device=like.device).triu(2 - queries)


def _attended(absorbed: Tensor, q_rope: Tensor, pages: _Pages, context: Any, scale: float, rows: dict[str, Any]) -> Any:
    """Queries [B, N, S, C + Dr] over pages, as [B, S, N, C]; with `return_lse` also its log-sum-exp [B, S, N, 1]."""
    batch, heads, queries = absorbed.shape[:3]
    blocks = pages.table
    if blocks is None:
        blocks = torch.arange(pages.latents.shape[0], dtype=torch.int32, device=absorbed.device).reshape(batch, -1)
    operator = torch.ops.atb.npu_multi_head_latent_attention
    run = operator.lse if "return_lse" in rows else operator.default
    run = operator.tensor_lengths if isinstance(context, Tensor) else run
    query, rope = (each.transpose(1, 2).flatten(0, 1) for each in (absorbed, q_rope))
    caches = pages.latents, pages.ropes
    y = run(query, rope, *caches, blocks, context, heads, scale, 1, cache_mode=pages.mode, **rows)
    rows_of = (batch, queries)
    return tuple(each.unflatten(0, rows_of) for each in y) if isinstance(y, tuple) else y.unflatten(0, rows_of)
