"""Attention over a latent for one to four queries of each sequence, by atb's older `npu_multi_head_latent_attention`.

    int8:  p = exp(s - max s),  s = scale · (c[head] · (q8 k8ᵀ) + q_rope k_ropeᵀ),  out = (round(127 p) k8) v / 127 Σ p

A floating-point latent has the forms of every attention over a latent. An int8 latent has int8 queries with a scale of
each head, in a model that itself rounds its probabilities to steps of 1 / 127. The latent is in rows, which are cut
into pages, in NZ pages in order, or in pages of a block table. Without a mask every query sees all keys; with the mask
of fixed shape the queries are the last tokens of their sequences; else each query has a row of an additive mask, in
which a hidden key weighs exp(-10000), which is 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from fusion import lowering, pattern, require, scalar, variants
from patterns.attention.calls import MaskSpec, each_length, viewed
from patterns.attention.masks.visibility import Structured
from patterns.attention.results import Output, OutputAndLse, SoftmaxAttention
from patterns.attention.sources import Rows
from patterns.extras import latent_attention_atb_call as atb
from patterns.extras.latent_attention_atb_call import AnyPages, PagesInOrder
from patterns.latent.attention.encodings import Floats, Int8ByHead

VALUES = ("transposed", "multiplied")
"""Operators for the product with W_UV, see `head_projection.expanded`."""
BLIND = {"zero": 0.0, "nan": torch.nan}
"""`fully_masked_row` -> result of a query that sees no key."""


@dataclass(frozen=True)
class LatentAttentionAtb(SoftmaxAttention):
    """Softmax attention of at most four queries of each sequence over a latent that all heads share."""

    @pattern
    @variants(source=(AnyPages, Rows), result=(OutputAndLse,))
    def with_lse(self, p, source, result, encoding: Any = Floats, seen: Any = Structured, scale=scalar()):
        """softmax(scale · q kᵀ) v and log Σ exp(scale · q kᵀ) over a floating-point latent, up to a length."""
        y, lse = encoding.terms(p, source, result, dict(scale=scale, **seen.captures("mask", "count")))
        return y, p.as_dtype(lse, encoding.q_rope)

    @pattern
    @variants(source=(AnyPages, PagesInOrder, Rows), result=(Output,))
    def written(self, p, source, result, encoding: Any = Floats, seen: Any = Structured, scale=scalar()):
        """softmax(scale · q kᵀ + mask) v over a floating-point latent; the mask may be absent."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.captures()))

    @pattern
    @variants(source=(AnyPages, PagesInOrder), result=(Output,))
    def written_int8(self, p, source, result, encoding: Any = Int8ByHead, seen: Any = Structured, scale=scalar()):
        """softmax(scale · q kᵀ + mask) v over an int8 latent, with probabilities rounded to steps of 1 / 127."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.captures()))

    def guard(self, encoding: Any, source: Any):
        """Refuse more than four queries of a sequence, and pages of an int8 latent in another layout than NZ."""
        queries: Any = encoding.queries()[0].shape[2]
        require(
            isinstance(queries, int) and queries <= atb.ROWS,
            "queries: a sequence has more than four; npu_multi_head_latent_attention requires four at most, as "
            "decoding and speculation have",
        )
        if isinstance(encoding, Int8ByHead):
            encoding.refuse_blocks(source, "npu_multi_head_latent_attention")

    @lowering
    @variants(values=VALUES)
    def structured(self, encoding, source, result, seen, scale, values):
        """Emit npu_multi_head_latent_attention with the mask as lengths of the keys and a causal order."""
        require(
            not result.lse, "log-sum-exp: something reads it; this call of npu_multi_head_latent_attention returns none"
        )
        call, keys = _call(encoding, source, scale)
        counted = seen.count is not None and isinstance(encoding, Int8ByHead)  # `dense` takes floats
        proven = seen.window is None and (seen.mask_kind != "dense" or counted)
        require(
            proven,
            "mask: it is not proven to be causal or a length of each sequence; npu_multi_head_latent_attention "
            "requires one of both; write such a mask",
        )
        q, seen = seen.posed(encoding.queries(), keys)
        y = atb.structured(q, call, keys, seen.spec())
        return viewed(encoding.expanded(seen.restored(y), values), result.view)

    @lowering
    @variants(values=VALUES)
    def ring(self, encoding, source, result, seen, scale, values):
        """Emit npu_multi_head_latent_attention with calc_type_ring, for one query per sequence and the log-sum-exp."""
        require(
            result.lse,
            "log-sum-exp: nothing reads it; the ring call of npu_multi_head_latent_attention requires a reader",
        )
        queries = encoding.absorbed.shape[2]
        one = queries == 1 and seen.window is None and seen.kv_lens is None
        require(
            one,
            "log-sum-exp: a sequence has several queries, or keys whose number data decides; "
            "npu_multi_head_latent_attention requires one query and a static number of keys beside it",
        )
        call, keys = _call(encoding, source, scale)
        context = each_length(MaskSpec(kv_len=keys if seen.kv_len is None else seen.kv_len), encoding.absorbed)
        options = dict(calc_type="calc_type_ring", return_lse=True)
        y, lse = atb.attended(encoding.queries(), call, context, options)
        return viewed(encoding.expanded(y, values), result.view), lse.transpose(1, 2)

    @lowering
    @variants(values=VALUES)
    def dense(self, encoding, source, result, seen, scale, values):
        """Emit npu_multi_head_latent_attention with the mask of the model as an additive tensor."""
        require(seen.mask is not None, "mask: there is none; this call of npu_multi_head_latent_attention requires one")
        representable = seen.fully_masked_row in BLIND
        require(
            representable,
            "mask: a query without visible keys gives the mean of all values; npu_multi_head_latent_attention "
            "gives another result and requires 0 or NaN; hide keys by -inf, or show each query a key",
        )
        require(
            isinstance(encoding, Floats),
            "mask: it is a tensor beside int8 queries; npu_multi_head_latent_attention requires floats beside one",
        )
        y, blind = atb.dense(encoding.queries(), _call(encoding, source, scale)[0], seen.mask)
        y = y.masked_fill(blind[..., None, None], BLIND[seen.fully_masked_row])
        return viewed(encoding.expanded(y, values), result.view)


def _call(encoding: Any, source: Any, scale: float) -> tuple[atb.Call, Any]:
    """Return the operands of npu_multi_head_latent_attention for `encoding` and `source`, and the number of keys of
    each sequence.

    `scale` is the factor of the scores.
    """
    batch = encoding.queries()[0].shape[0]
    return atb.call_of(source, batch, scale, encoding.scales_of_heads()), source.keys(batch)
