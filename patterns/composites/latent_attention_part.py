"""out, lse of attention over a part of the keys that one latent gives, without computing keys or values.

*Matches* `LatentAttention` whose log-sum-exp is used beside it: a latent that is split over steps or devices, or read
chunk by chunk. *Replaces with* `npu_fused_infer_attention_score_v2` on the latent, which gives both, and
`npu_transpose_batchmatmul` for both projections; keys and values are expanded where that costs less.
"""

from __future__ import annotations

from dataclasses import dataclass

from fusion import attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.primitives import attention_calls as calls
from patterns.primitives import latent_attention_calls as forms
from patterns.primitives import latent_calls
from patterns.primitives.attention_part import Part

SEVERAL = dict(by=("words", "mask"), values=("transposed", "multiplied"), version=(2, 1))
"""How the operator learns what is seen, how the values are expanded, and which version of the operator runs."""


@dataclass(frozen=True)
class LatentAttentionPart(Part):
    """Attention over a part of a latent that all heads share, and the log-sum-exp of its scores."""

    @pattern
    def written(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(), rows=attribute(),
    ):  # fmt: skip
        """What the canonicaliser has read; masks as in `Attention.written`."""
        return latent_calls.attended_part(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), rows, finish,
            mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty,
        )  # fmt: skip

    def guard(self, empty: str):
        """What the log-sum-exp of the operator is of."""
        require(empty != "mean", "a query without keys has a finite log-sum-exp, of which the operator says +inf")

    @lowering
    @variants(**SEVERAL)
    def apart(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
              finish, by, values, version):  # fmt: skip
        """Latent and rotated lanes apart."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        y, lse = forms.apart_with_sum((absorbed, q_rope), (latent, k_rope), seen, scale, version)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish), lse

    @lowering
    @variants(**SEVERAL)
    def apart_of_heads(self, nope, up_key, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window,
                       known, empty, finish, by, values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        q = (latent_calls.absorbed(nope, up_key), q_rope)
        y, lse = forms.apart_with_sum(q, (latent, k_rope), seen, scale, version)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish), lse

    @lowering
    @variants(**SEVERAL)
    def joined(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
               finish, by, values, version):  # fmt: skip
        """Both side by side, as one key head, for widths that the operator does not take apart."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        y, lse = forms.joined((absorbed, q_rope), (latent, k_rope), seen, scale, version, lse=True)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish), lse

    @lowering
    @variants(version=(2, 1))
    def expanded(self, nope, q_rope, latent, k_rope, up_key, up_value, rows, mask, length, scale, order, window, known,
                 empty, finish, version):  # fmt: skip
        """Keys and values of all heads, the rotated lanes apart: for so many queries that this costs less."""
        seen = forms.Seen("words", order, window, known, length, rows, mask, empty)
        y, lse = forms.expanded((nope, q_rope), (latent, k_rope), (up_key, up_value), seen, scale, version, lse=True)
        return calls.finished(y.transpose(1, 2), finish), lse
