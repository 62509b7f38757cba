"""out = softmax(scale · q kᵀ, masked) v  (Vaswani et al., Attention Is All You Need, 2017).

*Matches* attention in every layout and spelling that the canonicaliser reads: sdpa, matmuls around a softmax, grouped
heads, masks that are added, chosen or filled in, windows, sinks; over rows, or over the pages of a cache that a block
table names; alone, or with the log-sum-exp of its scores, by which it is merged with attention over other keys.
*Replaces with* `npu_fused_infer_attention_score_v2`, told in words what the mask lets through where that is proven,
else shown the mask; with its first version where the second is left out, with `npu_incre_flash_attention` and
`npu_prompt_flash_attention` where both are, or `_npu_paged_attention` of atb; or with `npu_fusion_attention` for
encoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fusion import lowering, pattern, require, scalar, tensor, variants
from patterns.attention import calls
from patterns.attention.calls import Call
from patterns.attention.encodings import Floats, Int8
from patterns.attention.masks.biases import Bias
from patterns.attention.masks.visibility import Dense, Structured, Unmasked, Visibility
from patterns.attention.results import RESULTS, Output, SoftmaxAttention
from patterns.attention.sources import SOURCES, NumberedSegments, PagedSegments, Rows, Segments
from patterns.attention.varlen.pages import Pages

_PACKED = "packed sequences take no bias"


@dataclass(frozen=True)
class Attention(SoftmaxAttention):
    """Softmax attention of queries over keys and values, which several query heads may share."""

    aliases = (
        "sdpa",
        "scaled_dot_product_attention",
        "softmax_attention",
        "flash_attention",
        "paged_attention",
        "fusion_attention",
    )

    @pattern
    @variants(source=SOURCES, result=RESULTS)
    def written(
        self,
        p,
        source,
        result,
        q=tensor("B N S D"),
        encoding: Any = Floats,
        seen: Any = Visibility,
        bias: Any = Bias,
        sink=tensor("N", optional=True),
        scale=scalar(),
    ):
        """Behind any mask, or none, with or without a bias."""
        k, v = encoding.terms(p, *source.terms(p))
        said = dict(q=q, k=k, sink=sink, scale=scale, **encoding.said(), **seen.said(), **bias.said())
        return result.terms(partial(p.softmax_attention, v=v, **said), partial(p.softmax_lse, **said))

    @pattern
    @variants(source=SOURCES, result=(Output,))
    def over_int8(
        self,
        p,
        source,
        result,
        q=tensor("B N S D"),
        encoding: Any = Int8,
        seen: Any = Visibility,
        bias: Any = Bias,
        sink=tensor("N", optional=True),
        scale=scalar(),
    ):
        """The same over int8, of whose scores the operator gives no log-sum-exp."""
        return self.written(p, source, result, q, encoding, seen, bias, sink, scale)

    @pattern
    @variants(source=(PagedSegments, Segments, NumberedSegments), result=(Output,))
    def segmented(
        self,
        p,
        source,
        result,
        q=tensor("1 N S D"),
        encoding: Any = Floats,
        seen: Any = Visibility,
        bias: Any = Bias,
        sink=tensor("N", optional=True),
        scale=scalar(),
    ):
        """Of segments of packed tokens, each to itself."""
        k, v = encoding.terms(p, *source.terms(p))
        said = dict(q=q, k=k, v=v, sink=sink, scale=scale, output_view=result.view)
        return source.attended(p)(**said, **seen.said(), **bias.said())

    def guard(self, encoding: Any, source: Any, result: Any, seen: Any, bias: Any, sink: Any):
        """How pages hold their rows, what the log-sum-exp of the operator is of, and what a bias stands beside."""
        encoding.refuse(source, result, sink)
        result.refuse(seen, sink, bias.values)
        require(sink is None or bias.values is None, "with a sink the operator reads packed sequences, without a bias")
        bias.refuse_beside(seen, source.paged)

    @lowering
    @variants(seen=(Structured, Dense), version=(2, 1, 0))
    def batched(self, q, encoding, source, result, seen, bias, sink, scale, version):
        """One sequence beside the other, what is seen told in words or shown by the mask."""
        require(sink is None, "with a sink the operator reads packed sequences")
        y, lse = source.batched(q, seen, encoding.told(Call(scale, version, result.lse), q, source), bias)
        return result.restored(bias.restored(y, seen), lse, seen)

    @lowering
    @variants(source=(Rows,), seen=(Structured, Dense), version=(2, 1))
    def as_heads(self, q, encoding, source, result, seen, bias, sink, scale, version):
        """The heads of all sequences as those of one, where positions stand before sequences in memory."""
        require(sink is None, "with a sink the operator reads packed sequences")
        bias.refuse("a bias may differ from sequence to sequence")
        y, lse = source.as_heads(q, seen, encoding.told(Call(scale, version, result.lse), q, source))
        return result.restored(y, lse, seen)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def packed(self, q, encoding, source, result, seen, bias, sink, scale, version):
        """One sequence after the other."""
        bias.refuse(_PACKED)
        y, lse = source.packed(
            q, seen, encoding.told(Call(scale, version, result.lse), q, source), **_beside(sink, version)
        )
        return result.restored(y, lse, seen)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def as_pages(self, q, encoding, source, result, seen, bias, sink, scale, version):
        """The same with the keys of a sequence as one page of a paged cache, as they lie."""
        bias.refuse(_PACKED)
        y, lse = source.as_pages(
            q, seen, encoding.told(Call(scale, version, result.lse), q, source), **_beside(sink, version)
        )
        return result.restored(y, lse, seen)

    @lowering
    @variants(seen=(Structured, Dense), version=(2, 1))
    def beside_sink(self, q, encoding, source, result, seen, bias, sink, scale, version):
        """Attention without the sink, and the share that the sink takes, from the log-sum-exp of the scores."""
        require(sink is not None, "there is no sink")
        y, lse = source.batched(q, seen, encoding.told(Call(scale, version, lse=True), q, source), bias)
        return calls.viewed(calls.beside_sink(y, lse, sink), result.view)

    @lowering
    @variants(source=(Pages,), seen=(Structured,))
    def by_atb(self, q, encoding, source, result, seen, bias, sink, scale):
        """One query of each sequence over pages, of the transformer library, which reads the lengths on the host."""
        encoding.refuse_int8("of the transformer library")
        bias.refuse("the operator of the transformer library takes no bias")
        require(sink is None and not result.lse, "the operator of the transformer library gives attention alone")
        return result.restored(source.by_atb(q, seen, scale), q, seen)

    @lowering
    @variants(seen=(Unmasked,))
    def encoder(self, q, encoding, source, result, seen, bias, sink, scale):
        """Every query sees every key."""
        seen.refuse_others()
        encoding.refuse_int8("for encoders")
        bias.refuse("the operator for encoders adds a bias before it multiplies by the scale")
        require(q.shape[2] != 1, "not a whole sequence attends to itself")
        require(sink is None and not result.lse, "the operator for encoders takes no sink and gives no log-sum-exp")
        return calls.viewed(source.encoded(q, scale), result.view)


def _beside(sink: Tensor | None, version: int) -> dict[str, Any]:
    """What the operator is told of a sink."""
    require(sink is None or version == 2, "the first version of the operator takes no sink")
    return {} if sink is None else dict(learnable_sink=sink)
