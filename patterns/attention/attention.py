"""out = softmax(scale · q kᵀ, masked) v  (Vaswani et al., Attention Is All You Need, 2017).

*Matches* attention in every layout and spelling that the canonicaliser reads: sdpa; matmuls around a softmax; grouped
heads; masks that are added, filled in or applied by where; sliding windows; sinks; keys and values in rows, or in cache
pages that a block table names; the output alone, or with the log-sum-exp of the scores, which merges the output with
attention over other keys.
*Replaces with* `npu_fused_infer_attention_score_v2`, with a sparse mode and lengths where the mask is proven to be
causal, a window or a length, else with the dense mask; with version 1 of the operator where version 2 is not available;
with `npu_incre_flash_attention` and `npu_prompt_flash_attention` where neither is; with atb's `_npu_paged_attention`;
or with `npu_fusion_attention` for encoders.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor

from fusion import Captures, lowering, pattern, require, scalar, tensor, variants
from patterns.attention import calls
from patterns.attention.calls import Call
from patterns.attention.encodings import Encoded, Floats
from patterns.attention.masks.biases import Bias
from patterns.attention.masks.visibility import Dense, Structured, Unmasked, Visibility
from patterns.attention.results import RESULTS, Output, SoftmaxAttention
from patterns.attention.sources import SOURCES, PagedSegments, Rows, Segments, SegmentsById
from patterns.attention.varlen.pages import Pages

_PACKED = (
    "bias: it is added to the scores; npu_fused_infer_attention_score requires layout BNSD or BSND beside one, "
    "not packed sequences"
)


@dataclass(frozen=True)
class AttentionMatch(Captures):
    """Captures of softmax attention: queries `q` [B, N, S, D], the facets, `sink` [N] or None, and `scale`."""

    q: Tensor
    encoding: Any
    source: Any
    result: Any
    seen: Any
    bias: Any
    sink: Any
    scale: float

    def call(self, version: int, *, lse: bool | None = None) -> Call:
        """Build the options of a call of operator `version`, with the scales of stored keys and values.

        `lse` says if the call returns the log-sum-exp; None for what the result needs.
        """
        call = Call(self.scale, version, self.result.lse if lse is None else lse)
        return self.encoding.with_scales(call, self.q, self.source)

    def sink_argument(self, version: int) -> dict[str, Any]:
        """Build the argument of the sink for operator `version`; refuse a sink for a version that takes none."""
        require(
            self.sink is None or version == 2,
            "sink: the softmax has one; npu_fused_infer_attention_score_v2 requires CANN with this version, as the "
            "first takes no sink",
        )
        return {} if self.sink is None else dict(learnable_sink=self.sink)

    def restored(self, y: Tensor, lse: Tensor) -> Any:
        """Return the output `y` [B, N, S, E], and `lse` if it is a result, in the views of the model."""
        return self.result.restored(y, lse, self.seen)


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
        """softmax(scale · q kᵀ + bias, masked) v over floats, with or without log Σ exp of the scores."""
        k, v = encoding.terms(p, *source.terms(p))
        captures = dict(q=q, k=k, sink=sink, scale=scale, **encoding.captures(), **seen.captures(), **bias.captures())
        return result.terms(partial(p.softmax_attention, v=v, **captures), partial(p.softmax_lse, **captures))

    @pattern
    @variants(source=SOURCES, result=(Output,))
    def over_encoded(
        self,
        p,
        source,
        result,
        q=tensor("B N S D"),
        encoding: Any = Encoded,
        seen: Any = Visibility,
        bias: Any = Bias,
        sink=tensor("N", optional=True),
        scale=scalar(),
    ):
        """softmax(scale · q kᵀ + bias, masked) v over stored keys and values, without the log-sum-exp."""
        return self.written(p, source, result, q, encoding, seen, bias, sink, scale)

    @pattern
    @variants(source=(PagedSegments, Segments, SegmentsById), result=(Output,))
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
        """softmax(scale · q kᵀ + bias, masked) v of packed segments, each over its own keys and values."""
        k, v = encoding.terms(p, *source.terms(p))
        captures = dict(q=q, k=k, v=v, sink=sink, scale=scale, output_view=result.view)
        return source.attended(p)(**captures, **seen.captures(), **bias.captures())

    def guard(self, match: AttentionMatch):
        """Refuse what each facet refuses of the others, and a bias beside a sink.

        The encoding refuses NZ blocks, int8 with a sink or log-sum-exp; the result a mask or sink for its log-sum-exp;
        the bias a mask under which queries without keys give a mean.
        """
        bias, sink = match.bias, match.sink
        match.encoding.refuse(match.source, match.result, sink)
        match.result.refuse(match.seen, sink, bias.values)
        require(
            sink is None or bias.values is None,
            "sink: a bias is added to its scores as well; npu_fused_infer_attention_score_v2 requires one of "
            "both; leave the bias out, or the sink",
        )
        bias.refuse_with_mask(match.seen, match.source.paged)

    @lowering
    @variants(seen=(Structured, Dense), version=(2, 1, 0))
    def batched(self, match: AttentionMatch, version: int):
        """Emit one call on q [B, N, S, D] in layout BNSD or BSND; the mask as a sparse mode and lengths, or dense."""
        require(
            match.sink is None,
            "sink: the call is of batches [B, N, S, D]; npu_fused_infer_attention_score_v2 requires packed "
            "sequences (TND) beside a sink",
        )
        y, lse = match.source.batched(match.q, match.seen, match.call(version), match.bias)
        return match.restored(match.bias.restored(y, match.seen), lse)

    @lowering
    @variants(source=(Rows,), seen=(Structured, Dense), version=(2, 1))
    def as_heads(self, match: AttentionMatch, version: int):
        """Emit one call with batch 1 and B · N heads, where q, k and v have the memory layout [S, B, N, D]."""
        require(
            match.sink is None,
            "sink: the call is of batches [B, N, S, D]; npu_fused_infer_attention_score_v2 requires packed "
            "sequences (TND) beside a sink",
        )
        match.bias.refuse(
            "bias: it is added to the scores; a call with batch 1 requires none, as a bias may differ from "
            "sequence to sequence"
        )
        y, lse = match.source.as_heads(match.q, match.seen, match.call(version))
        return match.restored(y, lse)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def packed(self, match: AttentionMatch, version: int):
        """Emit one call on packed rows [B · S, N, D] (layout TND) with the end of each sequence."""
        match.bias.refuse(_PACKED)
        y, lse = match.source.packed(match.q, match.seen, match.call(version), **match.sink_argument(version))
        return match.restored(y, lse)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def as_pages(self, match: AttentionMatch, version: int):
        """Emit one TND call that reads keys and values in place, as pages of T rows by an arange block table."""
        match.bias.refuse(_PACKED)
        y, lse = match.source.as_pages(match.q, match.seen, match.call(version), **match.sink_argument(version))
        return match.restored(y, lse)

    @lowering
    @variants(seen=(Structured, Dense), version=(2, 1))
    def sink_from_lse(self, match: AttentionMatch, version: int):
        """Emit attention without the sink, and multiply the output by exp(lse) / (exp(lse) + exp(sink))."""
        require(match.sink is not None, "sink: the softmax has none; a multiplication by its share requires one")
        y, lse = match.source.batched(match.q, match.seen, match.call(version, lse=True), match.bias)
        return calls.viewed(calls.with_sink(y, lse, match.sink), match.result.view)

    @lowering
    @variants(source=(Pages,), seen=(Structured,))
    def by_atb(self, match: AttentionMatch):
        """Emit atb's _npu_paged_attention for one query of each sequence over pages, with lengths read on the host."""
        match.encoding.refuse_stored("of the transformer library")
        match.bias.refuse("bias: it is added to the scores; _npu_paged_attention requires scores without one")
        require(
            match.sink is None and not match.result.lse,
            "result: a sink, or the log-sum-exp, is computed beside it; _npu_paged_attention requires attention alone",
        )
        return match.restored(match.source.by_atb(match.q, match.seen, match.scale), match.q)

    @lowering
    @variants(seen=(Unmasked,))
    def encoder(self, match: AttentionMatch):
        """Emit npu_fusion_attention on full sequences of which every query sees every key."""
        match.seen.refuse_others()
        match.encoding.refuse_stored("for encoders")
        match.bias.refuse(
            "bias: it is added to scores that are scaled already; npu_fusion_attention requires a bias of the "
            "unscaled scores; write (q @ k.mT + bias) * scale"
        )
        require(
            match.q.shape[2] != 1,
            "queries: there is one; npu_fusion_attention requires every token of a sequence as a query",
        )
        require(
            match.sink is None and not match.result.lse,
            "result: a sink, or the log-sum-exp, is computed beside it; npu_fusion_attention requires attention alone",
        )
        return calls.viewed(match.source.encoded(match.q, match.scale), match.result.view)
