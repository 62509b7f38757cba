"""Attention over a latent that lies in the pages of a cache: c[b, p · Size + o] = pages[table[b, p], o].

*Matches* `LatentAttention` over a latent and rotated lanes that are gathered from pages, which hold rows whole or in
lines of NZ, [Block, C / 16, Size, 16]. *Replaces with* `npu_fused_infer_attention_score_v2`, which reads both by the
block table, up to the length of each sequence, and `npu_transpose_batchmatmul` for both projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from fusion import Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.primitives import attention_calls as calls
from patterns.primitives import attention_page_calls as paged
from patterns.primitives import latent_calls

SEVERAL = dict(values=("transposed", "heads first", "multiplied"), version=(2, 1))
"""How the values are expanded, and which version of the operator runs."""


@dataclass(frozen=True)
class PagedLatentAttention(Rule):
    """Softmax attention over the pages of a latent that all heads share."""

    def reference(self, q: Tensor, q_rope: Tensor, pages: Tensor, rope_pages: Tensor, table: Tensor) -> Tensor:
        """The meaning without scale or mask: absorbed q [B, N, S, C], q_rope [B, N, S, Dr], pages [Block, Size, C]."""
        latent, rope = (each[table].flatten(1, 2).unsqueeze(1) for each in (pages, rope_pages))
        scores = q @ latent.transpose(-2, -1) + q_rope @ rope.transpose(-2, -1)
        return scores.float().softmax(-1).to(q.dtype) @ latent

    @pattern
    def counted(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L"), k_rope=tensor("*R"), pages=tensor("*P"),
        rope_pages=tensor("*Q"), table=tensor("B P"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T"), count=tensor("B"), size=attribute(),
        lies=attribute(), rows=attribute(), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """A mask up to a length that may be 0: `count` keys are seen."""
        of = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), of, (up_key, up_value), rows=rows,
            mask=p.counted_keys(mask=mask, length=count), scale=scale, order=order, window=window, known=known,
            empty=empty, finish=finish,
        )  # fmt: skip

    @pattern
    def written(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L"), k_rope=tensor("*R"), pages=tensor("*P"),
        rope_pages=tensor("*Q"), table=tensor("B P"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), size=attribute(), lies=attribute(), rows=attribute(), scale=scalar(),
        order=attribute(), window=attribute(), known=attribute(), empty=attribute(), finish=attribute(),
    ):  # fmt: skip
        """Any other mask, as in `Attention.written`."""
        of = latent_calls.gathered(p, latent, k_rope, pages, rope_pages, table, size, lies)
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), of, (up_key, up_value), rows=rows,
            mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    def guard(self, pages: Any, rope_pages: Any, lies: str):
        """How the pages hold their rows."""
        for each in (pages, rope_pages):
            latent_calls.of_line(each.shape[-1] if lies == "lines" else None)

    @lowering
    @variants(**SEVERAL)
    def told(self, absorbed, q_rope, latent, pages, rope_pages, table, size, lies, rows, up_value, count, length, scale,
             order, window, known, empty, finish, values, version):  # fmt: skip
        """What is seen, told in words."""
        of = _Pages(pages, rope_pages, table, size, lies, rows, latent, scale, version)
        return _told(of, absorbed, q_rope, count, calls.Seen(order, window, known, length), empty, up_value, values,
                     finish)  # fmt: skip

    @lowering
    @variants(**SEVERAL)
    def told_of_heads(self, nope, up_key, q_rope, latent, pages, rope_pages, table, size, lies, rows, up_value, count,
                      length, scale, order, window, known, empty, finish, values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        of = _Pages(pages, rope_pages, table, size, lies, rows, latent, scale, version)
        return _told(of, latent_calls.absorbed(nope, up_key), q_rope, count, calls.Seen(order, window, known, length),
                     empty, up_value, values, finish)  # fmt: skip

    @lowering
    @variants(**SEVERAL)
    def shown(self, absorbed, q_rope, latent, pages, rope_pages, table, size, lies, rows, up_value, mask, scale, empty,
              finish, values, version):  # fmt: skip
        """What is seen, shown by the mask."""
        of = _Pages(pages, rope_pages, table, size, lies, rows, latent, scale, version)
        return _shown(of, absorbed, q_rope, mask, empty, up_value, values, finish)

    @lowering
    @variants(**SEVERAL)
    def shown_of_heads(self, nope, up_key, q_rope, latent, pages, rope_pages, table, size, lies, rows, up_value, mask,
                       scale, empty, finish, values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        of = _Pages(pages, rope_pages, table, size, lies, rows, latent, scale, version)
        return _shown(of, latent_calls.absorbed(nope, up_key), q_rope, mask, empty, up_value, values, finish)


@dataclass(frozen=True)
class _Pages:
    """Pages of `size` rows [.., C] and [.., Dr], whole or in lines, and how the operator is called on them."""

    latent: Tensor
    rope: Tensor
    blocks: Tensor
    size: int
    lies: str
    first: int | None
    gathered: Tensor
    scale: float
    version: int

    def table(self) -> paged.Table:
        """The block table."""
        of_lines = self.lies == "lines"  # [Block, .., A, Size, L], where a row is A lines
        width = prod((*self.latent.shape[1:-2], self.latent.shape[-1])) if of_lines else self.latent.shape[-1]
        keys = self.gathered.numel() // width // self.blocks.shape[0]
        return paged.Table(self.blocks, self.size, keys if self.first is None else self.first)

    def attended(
        self, absorbed: Tensor, q_rope: Tensor, heads_first: bool, seen: calls.Seen = calls.Seen(),
        mask: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """Queries [B, N, S, C + Dr] over all pages, as [B, S, N, C], in memory with `heads_first` as [N, B, S, C]."""
        latent, rope = (paged.laid(each, self.size, self.lies) for each in (self.latent, self.rope))
        seen, many = paged.lengths(seen, absorbed, self.table())
        queries = absorbed.shape[2]
        of: dict[str, Any] = dict(softmax_scale=self.scale, **self.table().arguments())
        if heads_first and mask is None and not calls.few(queries):
            return calls.heads_before((absorbed, q_rope), latent, rope, many, seen, self.version, **of)
        told = seen.arguments(absorbed.device, queries) if mask is None else calls.shown(mask, queries)
        query, turned = (calls.with_heads(each.transpose(1, 2)) for each in (absorbed, q_rope))
        y, _ = calls.fused(
            query, latent, latent, many, self.version, query_rope=turned, key_rope=rope,
            num_query_heads=query.shape[2], num_key_value_heads=1,
            input_layout="BSND_NBSD" if heads_first else "BSND", **told, **of,
        )  # fmt: skip
        return (y.permute(1, 2, 0, 3) if heads_first else y)[:, :, : absorbed.shape[1]]


def _told(
    of: _Pages, absorbed: Tensor, q_rope: Tensor, count: Tensor | None, seen: calls.Seen, empty: str,
    up_value: Tensor | None, values: str, finish: Any,
) -> Tensor:  # fmt: skip
    known = seen.order != "mask" or count is not None
    require(known, "what the mask lets through is not proven to be causal, a window or a length")
    first = values == "heads first"
    if count is None:
        return calls.finished(
            latent_calls.expanded(of.attended(absorbed, q_rope, first, seen), up_value, values), finish
        )
    keys = of.table().keys
    (absorbed, length), (q_rope, _) = (paged.given_some(each, count, keys, empty) for each in (absorbed, q_rope))
    y = of.attended(absorbed, q_rope, first, calls.Seen("full", length=length))
    if empty == "nan":
        y = y.masked_fill((count <= 0).reshape(-1, 1, 1, 1), torch.nan)
    return calls.finished(latent_calls.expanded(y, up_value, values), finish)


def _shown(
    of: _Pages, absorbed: Tensor, q_rope: Tensor, mask: Tensor | None, empty: str, up_value: Tensor | None, values: str,
    finish: Any,
) -> Tensor:  # fmt: skip
    require(mask is not None, "there is no mask")
    assert mask is not None
    (absorbed, hidden), (q_rope, _) = (paged.shown_some(each, mask, empty) for each in (absorbed, q_rope))
    wide = paged.wide(hidden, of.table(), absorbed.shape[0])
    y = of.attended(absorbed, q_rope, values == "heads first", mask=wide)
    if empty == "nan":
        y = y.masked_fill(mask.all(-1, keepdim=True).transpose(1, 2), torch.nan)
    return calls.finished(latent_calls.expanded(y, up_value, values), finish)
