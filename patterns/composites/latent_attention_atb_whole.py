"""out = (round(127 p) k8) · v / Σ p, p = exp(s - max s), for one to four queries of each sequence, by atb.

    s = scale · (c[head] · (q8 k8ᵀ) + q_rope k_ropeᵀ)

*Matches* attention over a latent in whole numbers of 8 bits whose queries have one scale for each head, and whose
weights the model itself rounds to steps of 1 / 127 before it multiplies them: rows of pages in lines of NZ, in their
own order or in that of a block table. *Replaces with* `npu_multi_head_latent_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor
from patterns.attention import calls
from patterns.attention.visibility import opened
from patterns.primitives import atb_latent_calls as atb
from patterns.primitives import latent_calls
from patterns.primitives.whole_latent_calls import scale_of

STEPS = 127


@dataclass(frozen=True)
class LatentAttentionAtbWhole(Rule):
    """Softmax attention of few queries over a latent in whole numbers, with weights in whole numbers."""

    def reference(self, q: Tensor, heads: Tensor, rope: Tensor, latent: Tensor, k_rope: Tensor) -> Tensor:
        """The meaning: q8 [B, N, S, C], heads [N, 1, 1], rope [B, N, S, Dr], latent [B, 1, T, C] → [B, N, S, C]."""
        scores = (q.float() @ latent.float().mT) * heads + rope.float() @ k_rope.float().mT
        weights = (scores - scores.amax(-1, keepdim=True)).exp()
        return (weights * STEPS).round() @ latent.float() / STEPS / weights.sum(-1, keepdim=True)

    @pattern
    def counted(
        self, p, query=tensor("B N S C"), rope=tensor("B N S Dr"), latent=tensor("*L"), k_rope=tensor("*R"),
        pages=tensor("*P"), rope_pages=tensor("*Q"), table=tensor("B P"), of_scores=tensor("N"),
        of_values=tensor("V", optional=True), mask=tensor("*M S T"), count=tensor("B"), values_by=scalar(),
        scale=scalar(), size=attribute(), lies=attribute(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """The same up to a length that may be 0: `count` keys are seen."""
        rows = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        return p.rounded_latent_attention(
            query=query, rope=rope, latent=rows[0], k_rope=rows[1], of_scores=of_scores, of_values=of_values,
            values_by=values_by, mask=p.counted_keys(mask=mask, length=count), scale=scale, order=order, window=window,
            known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def gathered(
        self, p, query=tensor("B N S C"), rope=tensor("B N S Dr"), latent=tensor("*L"), k_rope=tensor("*R"),
        pages=tensor("*P"), rope_pages=tensor("*Q"), table=tensor("B P"), of_scores=tensor("N"),
        of_values=tensor("V", optional=True), mask=tensor("*M S T", optional=True), length=tensor("B", optional=True),
        values_by=scalar(), scale=scalar(), size=attribute(), lies=attribute(), order=attribute(), window=attribute(),
        known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages that a block table names."""
        rows = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        return p.rounded_latent_attention(
            query=query, rope=rope, latent=rows[0], k_rope=rows[1], of_scores=of_scores, of_values=of_values,
            values_by=values_by, mask=mask, length=length, scale=scale, order=order, window=window, known=known,
            empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def in_lines(
        self, p, query=tensor("B N S C"), rope=tensor("B N S Dr"), latent_lines=tensor("Blocks A Size L"),
        rope_lines=tensor("Blocks R Size M"), of_scores=tensor("N"), of_values=tensor("V", optional=True),
        mask=tensor("*M S T", optional=True), length=tensor("B", optional=True), values_by=scalar(), scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Over pages in lines of NZ, in their own order."""
        latent, k_rope = (p.reshaped(p.permuted(x, atb.LINES)) for x in (latent_lines, rope_lines))
        return p.rounded_latent_attention(
            query=query, rope=rope, latent=latent, k_rope=k_rope, of_scores=of_scores, of_values=of_values,
            values_by=values_by, mask=mask, length=length, scale=scale, order=order, window=window, known=known,
            empty=empty, finish=finish,
        )  # fmt: skip

    def guard(self, query: Any, lies: Any, latent_lines: Any, rope_lines: Any, pages: Any, rope_pages: Any):
        """How many queries there are, and how pages lie."""
        queries = query.shape[2]
        require(isinstance(queries, int) and queries <= atb.ROWS, "a sequence has more than four queries")
        require(pages is None or lies == "lines", "the pages do not hold rows in lines of NZ")
        both = (latent_lines, rope_lines) if pages is None else (pages, rope_pages)
        latent_calls.of_line(both[0].shape[-1], latent_calls.WHOLE_LINE)
        latent_calls.of_line(both[1].shape[-1])

    @lowering
    def told(self, query, rope, latent_lines, rope_lines, pages, rope_pages, table, size, of_scores, of_values,
             values_by, count, length, scale, order, window, known, empty, finish):  # fmt: skip
        """What is seen, told in words."""
        batch, heads = query.shape[:2]
        if table is None:
            paged = atb.in_lines(batch, latent_lines, rope_lines, "int8_nzcache")
        else:
            paged = atb.listed(pages, rope_pages, table, size, "int8_nzcache")
        values = scale_of(of_values, values_by, query.device).expand(heads).contiguous()
        scales = dict(qk_descale=of_scores.float(), pv_descale=values)
        if count is not None:
            length, order = count, "full"
        if count is not None and empty == "mean":
            (query, rope), length = opened((query, rope), count, paged.room)
        y = atb.told(query, rope, paged, length, scale, order, window, known, **scales)
        if count is not None and empty == "nan":
            y = y.masked_fill((count <= 0).reshape(-1, 1, 1, 1), torch.nan)
        return calls.viewed(y.transpose(1, 2), finish)
