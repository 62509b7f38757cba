"""out = softmax(scale · q kᵀ + mask) v, of keys and values that one latent gives, without computing either.

    q · k = (q_nope W_UK) · c + q_rope · r        Σ p v = (Σ p c) W_UV

*Matches* attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1), or that absorbs the
projections itself; over rows of the latent, or pages that a block table names; in floats, or in int8 with one scale and
queries quantised for each token and head; alone, or with the log-sum-exp of its scores. *Replaces with*
`npu_fused_infer_attention_score_v2` on the latent, its rotated lanes apart, and `npu_transpose_batchmatmul` for both
projections; of few queries where it is left out, or in int8 by steps of 1 / 127, with atb's older operator. Keys and
values stay expanded where that costs less: see `Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fusion import Target, lowering, pattern, require, scalar, variants
from patterns.attention.calls import Call
from patterns.attention.masks.visibility import Dense, Structured, Visibility
from patterns.attention.results import RESULTS, Output, SoftmaxAttention
from patterns.attention.sources import SOURCES, Rows
from patterns.latent.attention import attention_call as calls
from patterns.latent.attention.attention_atb import ATB, FewQueries
from patterns.latent.attention.attention_call import Keys
from patterns.latent.attention.encodings import Int8, Plain, Unrotated

SEVERAL = dict(seen=(Structured, Dense), values=("transposed", "heads first", "multiplied"), version=(2, 1))
"""How the operator learns what is seen, how the values are expanded, and which version of the operator runs."""
JOINED = {**SEVERAL, "values": ("transposed", "multiplied")}


@dataclass(frozen=True)
class AnyQueries(SoftmaxAttention):
    """Softmax attention of any number of queries over a latent that all heads share."""

    @pattern
    @variants(source=SOURCES, result=RESULTS)
    def written(self, p, source, result, encoding: Any = Plain, seen: Any = Visibility, scale=scalar()):
        """Behind any mask, or none."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.said()))

    @pattern
    @variants(source=SOURCES, result=(Output,))
    def written_int8(self, p, source, result, encoding: Any = Int8, seen: Any = Visibility, scale=scalar()):
        """An int8 latent behind any mask, or none; of its scores the operator gives no log-sum-exp."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.said()))

    @pattern
    @variants(result=RESULTS)
    def written_unrotated(
        self, p, result, encoding: Any = Unrotated, source: Any = Rows, seen: Any = Visibility, scale=scalar()
    ):
        """A latent without rotated lanes, in rows, behind any mask, or none."""
        return encoding.terms(p, source, result, dict(scale=scale, **seen.said()))

    @lowering
    @variants(**SEVERAL)
    def apart(self, encoding, source, result, seen, scale, values, version):
        """Latent and rotated lanes apart."""
        keys, scales = Keys(source, seen, encoding.first_rows), encoding.scales(version)
        shown = isinstance(seen, Dense) and not source.paged
        require(not (scales and shown), "a mask is shown of int8 keys in pages alone")
        call, heads_first = Call(scale, version, result.lse), values == "heads first"
        y, lse = calls.apart(encoding.queries(), keys, call, heads_first=heads_first, **scales)
        return result.restored(encoding.expanded(y.transpose(1, 2), values), lse, seen)

    @lowering
    @variants(**JOINED)
    def joined(self, encoding, source, result, seen, scale, values, version):
        """Both side by side, as one key head, for widths that the operator does not take apart."""
        keys, q = Keys(source, seen, encoding.first_rows), encoding.queries()
        require(not encoding.scales(version), "int8 queries and rotated lanes are not joined")
        y, lse = calls.joined(q, keys, Call(scale, version, result.lse))
        return result.restored(encoding.expanded(y.transpose(1, 2), values), lse, seen)

    @lowering
    @variants(**JOINED)
    def unrotated(self, encoding, source, result, seen, scale, values, version):
        """The latent as the one head of keys and values, where no lanes are rotated."""
        keys = Keys(source, seen, encoding.first_rows)
        y, lse = calls.unrotated(encoding.unrotated(values), keys, Call(scale, version, result.lse))
        return result.restored(encoding.expanded(y.transpose(1, 2), values), lse, seen)

    @lowering
    @variants(seen=(Structured,), version=(2, 1))
    def expanded(self, encoding, source, result, seen, scale, version):
        """Keys and values of all heads, the rotated lanes apart: for so many queries that this costs less."""
        keys, (q, up) = Keys(source, seen, encoding.first_rows), encoding.parts_of_heads()
        y, lse = calls.expanded(q, keys, up, Call(scale, version, result.lse))
        return result.restored(y, lse, seen)


@dataclass(frozen=True)
class LatentAttention(FewQueries, AnyQueries):
    """Softmax attention over a latent that all heads share, of few queries by an older operator too."""

    aliases = (
        "mla",
        "latent_attention_atb",
        "latent_attention_part",
        "latent_attention_whole",
        "paged_latent_attention",
    )

    def guard(self, encoding: Any, source: Any, result: Any, seen: Any, version: Any):
        """How pages hold their rows, what the log-sum-exp of the operator is of, and how many queries atb takes."""
        if version in ATB:
            FewQueries.guard(self, encoding, source)
        else:
            encoding.refuse_blocks(source)
            result.refuse(seen)

    def remark(self, encoding: Any, source: Any, version: Any, lowering: str, machine: Target) -> str:
        """Which form was chosen, and from how many queries on the other one costs less; pages are never expanded."""
        return "" if version in ATB or source.paged else encoding.remark(lowering, machine)
