"""What attention of few queries over a latent takes: its queries, where the latent lies, and which keys are seen.

queries      plain: [q W_UK, q_r]; or int8: [q8, q_r] with a scale of the scores of each head, and of the values
source       rows | pages that a block table names, as BSND or in NZ | pages in NZ, in their own order
visibility   lengths and an order of keys, or a dense mask
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fusion import Group, attribute, require, scalar, tensor
from patterns.attention.calls import MaskSpec
from patterns.attention.visibility import opened
from patterns.latent import attention_atb_call as atb
from patterns.latent import latent_calls
from patterns.latent.attention_atb_sources import Rows, Source
from patterns.quant.scales import scale_of

BLIND = {"zero": 0.0, "nan": torch.nan}
"""What a query gives that sees no key."""


@dataclass(frozen=True)
class Visibility(Group):
    """What was read of a mask.

    Attributes:
        mask: true where a key is hidden.
        count: how many keys every query of a sequence sees, which may be none.
        kv_lens, kv_len: how many keys are seen, of each sequence or of all.
        mask_kind: "full", "left", "right", or "mask" (dense).
        window: how many keys before its own a query sees.
        fully_masked_row: what a query without keys gives: "zero", "mean" (of all values) or "nan".
    """

    mask: Any = tensor("*M S T", optional=True)
    count: Any = tensor("B", optional=True)
    kv_lens: Any = tensor("B", optional=True)
    mask_kind: Any = attribute()
    window: Any = attribute()
    kv_len: Any = attribute()
    fully_masked_row: Any = attribute()

    def structured(self) -> dict[str, Any]:
        """As the canonicaliser says it where there is no mask."""
        order = dict(order=self.mask_kind, window=self.window, known=self.kv_len, empty=self.fully_masked_row)
        return dict(length=self.kv_lens) | order

    def said(self) -> dict[str, Any]:
        """As the canonicaliser says it."""
        return dict(mask=self.mask) | self.structured()

    def counted(self, p) -> dict[str, Any]:
        """The same of a mask up to a length that may be 0: `count` keys are seen."""
        return self.said() | dict(mask=p.counted_keys(mask=self.mask, length=self.count))

    def spec(self) -> MaskSpec:
        """What is seen, in words."""
        if self.count is not None:
            return MaskSpec(kv_lens=self.count)
        return MaskSpec(self.mask_kind, self.window, self.kv_len, self.kv_lens)

    def posed(self, q: atb.Queries, keys: Any) -> tuple[atb.Queries, Visibility]:
        """Queries that are 0 and see all keys where, without one, they give the mean of all values."""
        if self.count is None or self.fully_masked_row != "mean":
            return q, self
        (absorbed, rope), count = opened((q.absorbed, q.rope), self.count, keys)
        return replace(q, absorbed=absorbed, rope=rope), replace(self, count=count)

    def restored(self, y: Tensor) -> Tensor:
        """The result [B, S, N, C] with what plain attention gives for a query without keys."""
        if self.count is None or self.fully_masked_row != "nan":
            return y
        return y.masked_fill((self.count <= 0).reshape(-1, 1, 1, 1), torch.nan)

    def shown(self) -> Tensor:
        """The mask, of which the operator says what a query without keys gives."""
        require(self.mask is not None, "there is no mask")
        known = self.fully_masked_row in BLIND
        require(known, "a query without keys gives the mean of all, the operator gives another one")
        return self.mask


@dataclass(frozen=True)
class PlainQueries(Group):
    """Absorbed queries and their rotated lanes; `nope` where the model expands keys by `up_key` instead."""

    absorbed: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr")
    nope: Any = tensor("B N S D", optional=True)
    up_key: Any = tensor("N D C", optional=True)
    up_value: Any = tensor("N C E", optional=True)

    int8: ClassVar[bool] = False

    def operands(self) -> tuple[Any, Any]:
        """The queries, and what projects keys and values, as the terms of attention over a latent take them."""
        return (self.nope, self.rope, self.absorbed), (self.up_key, self.up_value)

    def guard(self, source: Source) -> None:
        """Every source is read."""

    def read(self, scale: float) -> atb.Queries:
        """As the operator reads them."""
        return atb.Queries(self.absorbed, self.rope, scale)

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """A result [B, S, N, C] times W_UV, [B, N, S, E]."""
        return latent_calls.expanded(y, self.up_value, values)


@dataclass(frozen=True)
class Int8Queries(Group):
    """int8 queries with a scale of the scores of each head, their rotated lanes, and the scale of an int8 latent."""

    absorbed: Any = tensor("B N S C")
    rope: Any = tensor("B N S Dr")
    score_scale: Any = tensor("N")
    value_scale: Any = tensor("V", optional=True)
    value_factor: Any = scalar()

    int8: ClassVar[bool] = True

    def attended(self, p, rows, **said):
        """The term of attention."""
        scales = dict(of_scores=self.score_scale, of_values=self.value_scale, values_by=self.value_factor)
        return p.rounded_latent_attention(
            query=self.absorbed, rope=self.rope, latent=rows[0], k_rope=rows[1], **scales, **said
        )

    def guard(self, source: Source) -> None:
        """Refuse sources that hold no int8 latent as the operator reads it."""
        if not isinstance(source, Rows):
            source.refuse_others()

    def read(self, scale: float) -> atb.Queries:
        """As the operator reads them."""
        heads = self.absorbed.shape[1]
        values = scale_of(self.value_scale, self.value_factor, self.rope.device).expand(heads).contiguous()
        return atb.Queries(
            self.absorbed, self.rope, scale, dict(qk_descale=self.score_scale.float(), pv_descale=values)
        )

    def expanded(self, y: Tensor, values: str) -> Tensor:
        """A result [B, S, N, C] as [B, N, S, C]: the model itself expands it."""
        return y.transpose(1, 2)


Queries = PlainQueries | Int8Queries
