"""out = softmax(scale · q kᵀ + mask) v, for keys and values that are projected from one latent and not computed.

    q · k = (q_nope W_UK) · c + q_rope · r        Σ p v = (Σ p c) W_UV

*Matches* attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1), also where the
model absorbs W_UK and W_UV itself; over rows of the latent, or pages of a block table; in floating point, or in int8
with one scale of the latent and queries quantised for each token and head; with or without the log-sum-exp of scores.
*Replaces with* `npu_fused_infer_attention_score_v2` on the latent, the rotated lanes as arguments of their own, and
`npu_transpose_batchmatmul` for W_UK and W_UV. Keys and values stay expanded where that costs less: see `Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Captures, Target, lowering, pattern, require, scalar, variants
from patterns.attention.calls import Call
from patterns.attention.masks.visibility import Dense, Structured, Visibility
from patterns.attention.results import RESULTS, Output, SoftmaxAttention
from patterns.attention.sources import SOURCES, Rows
from patterns.latent.attention import attention_call as calls
from patterns.latent.attention.attention_call import Keys
from patterns.latent.attention.encodings import Int8, Plain, Unrotated

VARIANTS = dict(seen=(Structured, Dense), values=("transposed", "heads first", "multiplied"), version=(2, 1))
"""Variants of the lowerings: the mask as parameters or as a tensor, the product with W_UV, the operator's version."""
JOINED_VARIANTS = {**VARIANTS, "values": ("transposed", "multiplied")}
"""Variants of lowerings whose result never has heads first in memory."""


@dataclass(frozen=True)
class LatentMatch(Captures):
    """Captures of attention over a latent: its facets, and the factor `scale` of the scores."""

    encoding: Any
    source: Any
    result: Any
    seen: Any
    scale: float

    @property
    def keys(self) -> Keys:
        """The rows or pages of the latent that queries attend to, and the mask."""
        return Keys(self.source, self.seen, self.encoding.first_rows)

    def call(self, version: int) -> Call:
        """Build the options of a call of operator `version`."""
        return Call(self.scale, version, self.result.lse)

    def projected(self, y: Tensor, lse: Tensor, values: str) -> Any:
        """Return `y` [B, N, S, C] times W_UV, by the product `values` (see `expanded`), and `lse` if it is a result."""
        return self.result.restored(self.encoding.expanded(y.transpose(1, 2), values), lse, self.seen)


@dataclass(frozen=True)
class LatentAttention(SoftmaxAttention):
    """Softmax attention over a latent that all heads share."""

    aliases = ("mla", "latent_attention_part", "latent_attention_whole", "paged_latent_attention")

    @pattern
    @variants(source=SOURCES, result=RESULTS)
    def written(self, p, source, result, encoding: Any = Plain, seen: Any = Visibility, scale=scalar()):
        """softmax(scale · q kᵀ + mask) v over a floating-point latent with rotated lanes; the mask may be absent."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.captures()))

    @pattern
    @variants(source=SOURCES, result=(Output,))
    def written_int8(self, p, source, result, encoding: Any = Int8, seen: Any = Visibility, scale=scalar()):
        """softmax(scale · q kᵀ + mask) v over an int8 latent, for which the operator gives no log-sum-exp."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.captures()))

    @pattern
    @variants(result=RESULTS)
    def written_unrotated(
        self, p, result, encoding: Any = Unrotated, source: Any = Rows, seen: Any = Visibility, scale=scalar()
    ):
        """softmax(scale · q kᵀ + mask) v over a latent in rows, without rotated lanes; the mask may be absent."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.captures()))

    def guard(self, encoding: Any, source: Any, result: Any, seen: Any):
        """Refuse pages in NZ blocks that `encoding` does not read, and masks `seen` whose log-sum-exp `result` cannot
        restore.
        """
        encoding.refuse_blocks(source, "npu_fused_infer_attention_score")
        result.refuse(seen)

    def remark(self, encoding: Any, source: Any, lowering: str, machine: Target) -> str:
        """Return a note on the `lowering` that was chosen, absorption or expansion, and when the other one costs less.

        That is from a number of queries on, which `encoding` gives for `machine`. "" where `source` has pages, which
        are never expanded.
        """
        return "" if source.paged else encoding.remark(lowering, machine)

    @lowering
    @variants(**VARIANTS)
    def apart(self, match: LatentMatch, values: str, version: int):
        """Emit npu_fused_infer_attention_score with the latent and its rotated lanes as separate arguments."""
        scales = match.encoding.scales(version)
        dense_rows = isinstance(match.seen, Dense) and not match.source.paged
        require(
            not (scales and dense_rows),
            "mask: it is a tensor, and int8 keys are rows; npu_fused_infer_attention_score_v2 requires pages "
            "beside such a mask; write the mask as a causal order or lengths",
        )
        queries, heads_first = match.encoding.queries(), values == "heads first"
        y, lse = calls.apart(queries, match.keys, match.call(version), heads_first=heads_first, **scales)
        return match.projected(y, lse, values)

    @lowering
    @variants(**JOINED_VARIANTS)
    def joined(self, match: LatentMatch, values: str, version: int):
        """Emit npu_fused_infer_attention_score on latent and rotated lanes joined to one key head [.., C + Dr].

        It applies to widths that the operator does not take as separate arguments.
        """
        require(
            not match.encoding.scales(version),
            "int8 queries: their rotated lanes are apart; a call on joined lanes requires floats",
        )
        y, lse = calls.joined(match.encoding.queries(), match.keys, match.call(version))
        return match.projected(y, lse, values)

    @lowering
    @variants(**JOINED_VARIANTS)
    def unrotated(self, match: LatentMatch, values: str, version: int):
        """Emit npu_fused_infer_attention_score with the latent as keys and values of one head, no rotated lanes."""
        y, lse = calls.unrotated(match.encoding.unrotated(values), match.keys, match.call(version))
        return match.projected(y, lse, values)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def expanded(self, match: LatentMatch, version: int):
        """Emit npu_fused_infer_attention_score on keys and values of all heads, expanded from the latent.

        With many queries this costs less than absorption.
        """
        q, up = match.encoding.parts_of_heads()
        y, lse = calls.expanded(q, match.keys, up, match.call(version))
        return match.result.restored(y, lse, match.seen)
