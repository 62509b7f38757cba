"""Attention over a latent that lies in a cache in whole numbers of 8 bits, with one scale for all of it.

    out = softmax(scale · (s[token, head] · c · q8 · k8 + q_rope · r)) k8 · c

*Matches* queries quantised for each token and head, over rows of a cache, pages, or pages in lines of NZ, wherever the
model multiplies by the scales. *Replaces with* `npu_fused_infer_attention_score_v2`, which is given rotated queries
divided by s · c. A chip reads lines of NZ alone.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, scalar, tensor
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as paged
from patterns.primitives import latent_calls
from patterns.primitives import whole_latent_calls as whole


@dataclass(frozen=True)
class LatentAttentionWhole(Rule):
    """Softmax attention over a latent in whole numbers."""

    def reference(self, q: Tensor, tokens: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        """The meaning: q8 [B, N, S, C], tokens [B, N, S, 1], rope [B, N, S, Dr], latent [B, 1, T, C] → [B, N, S, C]."""
        scores = (q.float() @ latent.float().mT) * tokens + rope.float() @ k_rope.float().mT
        return scores.softmax(-1) @ latent.float()

    @pattern
    def counted(
        self, p, query=tensor("B N S C"), tokens=tensor("B N S 1"), rope=tensor("B N S Dr"), latent=tensor("*L C"),
        k_rope=tensor("*R Dr"), of_keys=tensor("1", optional=True), of_values=tensor("1", optional=True),
        pages=tensor("*P"), rope_pages=tensor("*Q"), table=tensor("B P"), mask=tensor("*M S T"),
        count=tensor("B"), size=attribute(), lies=attribute(), scale=scalar(), order=attribute(), window=attribute(),
        known=attribute(), empty=attribute(), finish=attribute(), keys_by=scalar(), values_by=scalar(),
    ):  # fmt: skip
        """Pages, and a mask up to a length that may be 0: `count` keys are seen."""
        how = dict(order=order, window=window, known=known, empty=empty, finish=finish, scale=scale)
        scales = dict(of_keys=of_keys, of_values=of_values, keys_by=keys_by, values_by=values_by)
        rows = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        mask = p.counted_keys(mask=mask, length=count)
        return whole.attended(p, query, tokens, rope, rows, mask=mask, **scales, **how)

    @pattern
    def told_of_pages(
        self, p, query=tensor("B N S C"), tokens=tensor("B N S 1"), rope=tensor("B N S Dr"), latent=tensor("*L C"),
        k_rope=tensor("*R Dr"), of_keys=tensor("1", optional=True), of_values=tensor("1", optional=True),
        pages=tensor("*P"), rope_pages=tensor("*Q"), table=tensor("B P"), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), size=attribute(), lies=attribute(), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), finish=attribute(), keys_by=scalar(),
        values_by=scalar(),
    ):  # fmt: skip
        """Pages, and any other mask."""
        how = dict(order=order, window=window, known=known, empty=empty, finish=finish, scale=scale)
        scales = dict(of_keys=of_keys, of_values=of_values, keys_by=keys_by, values_by=values_by)
        rows = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        return whole.attended(p, query, tokens, rope, rows, mask=mask, length=length, **scales, **how)

    @pattern
    def told_of_rows(
        self, p, query=tensor("B N S C"), tokens=tensor("B N S 1"), rope=tensor("B N S Dr"), latent=tensor("*L C"),
        k_rope=tensor("*R Dr"), of_keys=tensor("1", optional=True), of_values=tensor("1", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), scale=scalar(), order=attribute(),
        window=attribute(), known=attribute(), empty=attribute(), finish=attribute(), keys_by=scalar(),
        values_by=scalar(),
    ):  # fmt: skip
        """Rows of a cache."""
        how = dict(order=order, window=window, known=known, empty=empty, finish=finish, scale=scale)
        scales = dict(of_keys=of_keys, of_values=of_values, keys_by=keys_by, values_by=values_by)
        return whole.attended(p, query, tokens, rope, (latent, k_rope), mask=mask, length=length, **scales, **how)

    @lowering
    def told(self, query, tokens, rope, latent, k_rope, pages, rope_pages, table, size, lies, of_keys,
             of_values, keys_by, values_by, count, length, scale, order, window, known, empty, finish):  # fmt: skip
        """What is seen in words, by the block table or as the rows lie."""
        seen = calls.Seen(order, window, known, length)
        scales = whole.Scales(tokens, of_keys, keys_by, of_values, values_by)
        if table is None:
            rows = [each.reshape(query.shape[0], -1, 1, each.shape[-1]) for each in (latent, k_rope)]
            return calls.finished(whole.as_they_lie(query, rope, rows, scales, scale, seen), finish)
        caches = whole.laid(table, (pages, rope_pages), size, lies)
        table = paged.Table(table, size, whole.keys(latent, query))
        return calls.finished(whole.by_table(query, rope, caches, table, scales, scale, seen, count, empty), finish)

    @lowering
    def shown(self, query, tokens, rope, latent, pages, rope_pages, table, size, lies, of_keys, of_values,
              keys_by, values_by, mask, scale, empty, finish):  # fmt: skip
        """By the block table, what is seen shown by the mask."""
        caches = whole.laid(table, (pages, rope_pages), size, lies)
        scales = whole.Scales(tokens, of_keys, keys_by, of_values, values_by)
        table = paged.Table(table, size, whole.keys(latent, query))
        return calls.finished(whole.shown_by_table(query, rope, caches, table, scales, scale, mask, empty), finish)
