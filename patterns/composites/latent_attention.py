"""out = softmax(scale · q kᵀ + mask) v, of keys and values that one latent gives, without computing either.

    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

*Matches* attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1), or that absorbs the
projections itself. *Replaces with* `npu_fused_infer_attention_score_v2` on the latent, its rotated lanes apart, and
`npu_transpose_batchmatmul` for both projections. Keys and values stay expanded where that costs less: see `Attention`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from fusion import Rule, Target, attribute, lowering, pattern, scalar, tensor, variants
from patterns.primitives import attention_calls as calls
from patterns.primitives import latent_attention_calls as forms
from patterns.primitives import latent_calls
from patterns.primitives.latent_phases import Sizes, break_even

SEVERAL = dict(by=("words", "mask"), values=("transposed", "heads first", "multiplied"), version=(2, 1))
"""How the operator learns what is seen, how the values are expanded, and which version of the operator runs."""


@dataclass(frozen=True)
class LatentAttention(Rule):
    """Softmax attention over a latent that all heads share."""

    def reference(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """The meaning without a mask: q [B, N, S, D], k [B, N, T, D], v [B, N, T, E] → [B, N, S, E]."""
        scores = (q @ k.transpose(-2, -1)).float() * scale
        return scores.softmax(-1).to(q.dtype) @ v

    @pattern
    def written(
        self, p, nope=tensor("B N S D", optional=True), q_rope=tensor("B N S Dr"), absorbed=tensor("B N S C"),
        latent=tensor("*L C"), k_rope=tensor("*R Dr"), up_key=tensor("N D C", optional=True),
        up_value=tensor("N C E", optional=True), mask=tensor("*M S T", optional=True),
        length=tensor("B", optional=True), scale=scalar(), order=attribute(), window=attribute(), known=attribute(),
        empty=attribute(), finish=attribute(), rows=attribute(),
    ):  # fmt: skip
        """What the canonicaliser has read; masks as in `Attention.written`."""
        return latent_calls.attended(
            p, (nope, q_rope, absorbed), (latent, k_rope), (up_key, up_value), rows=rows,
            mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    def remark(self, up_key: Any, up_value: Any, q_rope: Any, lowering: str, machine: Target) -> str:
        """Which form was chosen, and from how many queries on the other one costs less."""
        if up_key is None or up_value is None:
            return ""
        form = "expanded" if lowering.startswith("expanded") else "absorbed"
        heads, width, rank = up_key.shape
        even = break_even(machine, Sizes(heads, rank, width, q_rope.shape[3], up_value.shape[2]))
        until = f"expanding costs less from about {even} queries on" if even else "expanding never costs less"
        return f"{form}: behind a long context, on {machine.name}, {until}"

    @lowering
    @variants(**SEVERAL)
    def apart(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
              finish, by, values, version):  # fmt: skip
        """Latent and rotated lanes apart."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        y = forms.apart((absorbed, q_rope), (latent, k_rope), seen, scale, version, values)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def apart_of_heads(self, nope, up_key, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window,
                       known, empty, finish, by, values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        q = (latent_calls.absorbed(nope, up_key), q_rope)
        y = forms.apart(q, (latent, k_rope), seen, scale, version, values)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**{**SEVERAL, "values": ("transposed", "multiplied")})
    def joined(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
               finish, by, values, version):  # fmt: skip
        """Both side by side, as one key head, for widths that the operator does not take apart."""
        seen = forms.Seen(by, order, window, known, length, rows, mask, empty)
        y = forms.joined((absorbed, q_rope), (latent, k_rope), seen, scale, version)[0]
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(version=(2, 1))
    def expanded(self, nope, q_rope, latent, k_rope, up_key, up_value, rows, mask, length, scale, order, window, known,
                 empty, finish, version):  # fmt: skip
        """Keys and values of all heads, the rotated lanes apart: for so many queries that this costs less."""
        seen = forms.Seen("words", order, window, known, length, rows, mask, empty)
        y = forms.expanded((nope, q_rope), (latent, k_rope), (up_key, up_value), seen, scale, version)[0]
        return calls.finished(y.transpose(1, 2), finish)
