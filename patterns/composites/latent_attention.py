"""out = softmax(scale · q kᵀ + mask) v, of keys and values that one latent gives, without computing either.

    q · k = (q_nope W_K) · c + q_rope · r        Σ p v = (Σ p c) W_V

*Matches* attention over keys and values that are projected from a latent (DeepSeek-V2, 2024, §2.1), or that absorbs the
projections itself. *Replaces with* `npu_fused_infer_attention_score_v2` on the latent, its rotated lanes apart, and
`npu_transpose_batchmatmul` for both projections. Keys and values stay expanded where that costs less: see `Attention`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fusion import Example, Rule, attribute, lowering, pattern, require, scalar, tensor, variants
from patterns.examples import latent_attention
from patterns.primitives import attention_calls as calls
from patterns.primitives import latent_calls

SEVERAL = dict(by=("words", "mask"), values=("transposed", "multiplied"), version=(2, 1))
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
        return p.softmax_attention(
            q=p.latent_queries(nope=nope, rope=q_rope, absorbed=absorbed),
            k=p.latent_keys(latent=latent, rope=k_rope, up=up_key, rows=rows),
            v=p.latent_values(latent=latent, up=up_value),
            mask=mask, length=length, scale=scale, order=order, window=window, known=known, empty=empty, finish=finish,
        )  # fmt: skip

    @lowering
    @variants(**SEVERAL)
    def apart(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
              finish, by, values, version):  # fmt: skip
        """Latent and rotated lanes apart."""
        seen = _Seen(by, order, window, known, length, rows, mask, empty)
        y = _apart((absorbed, q_rope), (latent, k_rope), seen, scale, version)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def apart_of_heads(self, nope, up_key, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window,
                       known, empty, finish, by, values, version):  # fmt: skip
        """The same for queries of heads that are projected first."""
        seen = _Seen(by, order, window, known, length, rows, mask, empty)
        y = _apart((latent_calls.absorbed(nope, up_key), q_rope), (latent, k_rope), seen, scale, version)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    @lowering
    @variants(**SEVERAL)
    def joined(self, absorbed, q_rope, latent, k_rope, up_value, rows, mask, length, scale, order, window, known, empty,
               finish, by, values, version):  # fmt: skip
        """Both side by side, as one key head, for widths that the operator does not take apart."""
        seen = _Seen(by, order, window, known, length, rows, mask, empty)
        y = _joined((absorbed, q_rope), (latent, k_rope), seen, scale, version)
        return calls.finished(latent_calls.expanded(y, up_value, values), finish)

    def examples(self) -> Iterator[Example]:
        """Functions that must be recognised."""
        return iter(latent_attention.EXAMPLES)

    def rejects(self) -> Iterator[Example]:
        """Functions that must be refused."""
        return iter(latent_attention.REJECTS)


@dataclass(frozen=True)
class _Seen:
    """What queries see of the first `rows` of a latent: told in words, or shown by a mask, as `by` wants it."""

    by: str
    order: str
    window: int | None
    known: Any
    length: Tensor | None
    rows: Any
    mask: Tensor | None
    empty: str

    def told(self, queries: Any) -> calls.Seen:
        """In words: the operator's causal order ends at the last key, never begins at the first."""
        require(self.order != "mask", "what the mask lets through is not proven to be causal, a window or a length")
        if self.order == "left":
            require(self.rows is None or queries <= self.rows, "there are fewer keys than queries")
            return calls.Seen("right", self.window, queries)
        every = self.known is None and self.length is None
        return calls.Seen(self.order, self.window, self.rows if every else self.known, self.length)

    def shown(self) -> Tensor:
        """The mask [B or 1, 1, S, T], true where a key is hidden."""
        require(self.mask is not None, "there is no mask")
        assert self.mask is not None
        return self.mask

    def cut(self, kv: Tensor) -> Tensor:
        """The rows of a latent [B, T, 1, D] that a mask speaks of."""
        return kv if self.rows is None else kv[:, : self.rows]


def _apart(q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: _Seen, scale: float, version: int) -> Tensor:
    """Queries [B, N, S, C] and [B, N, S, Dr] over a latent [.., C] and [.., Dr], as [B, S, N, C]."""
    queries = q[0].shape[2]
    latent, rope = _by_sequence(q[0], kv)
    if seen.by == "mask":
        latent, rope = seen.cut(latent), seen.cut(rope)
        precise = {} if queries == 1 else dict(inner_precise=2)  # queries that see nothing give 0
        y = _fused(q, latent, rope, None, scale, version, atten_mask=seen.shown(), **precise).transpose(1, 2)
        return calls.where_empty(y, latent.transpose(1, 2), seen.shown(), seen.empty).transpose(1, 2)
    told = seen.told(queries)
    require(not told.known or told.known <= latent.shape[1], "there are fewer keys than queries")
    lengths = told.length if told.known is None else [told.known]
    return _fused(q, latent, rope, lengths, scale, version, **told.arguments(latent.device, queries))


def _joined(q: tuple[Tensor, Tensor], kv: tuple[Tensor, Tensor], seen: _Seen, scale: float, version: int) -> Tensor:
    """The same with queries and keys [.., C + Dr], and values of which the first C lanes count."""
    query, key = torch.cat(q, dim=-1), seen.cut(torch.cat(_by_sequence(q[0], kv), dim=-1)).transpose(1, 2)
    if seen.by == "mask":
        y = calls.batched(query, key, key, scale, mask=seen.shown(), version=version)[0]
        y = calls.where_empty(y, key, seen.shown(), seen.empty)
    else:
        y = calls.batched(query, key, key, scale, seen.told(query.shape[2]), version=version)[0]
    return y[..., : q[0].shape[-1]].transpose(1, 2)


def _by_sequence(q: Tensor, kv: tuple[Tensor, Tensor]) -> list[Tensor]:
    """Latents as [B, T, 1, C] and [B, T, 1, Dr]."""
    return [each.reshape(q.shape[0], -1, 1, each.shape[-1]) for each in kv]


def _fused(
    q: tuple[Tensor, Tensor], latent: Tensor, rope: Tensor, lengths: Any, scale: float, version: int, **told: Any
) -> Tensor:
    query, query_rope = (each.transpose(1, 2) for each in q)
    return calls.fused(
        query, latent, latent, lengths, version, query_rope=query_rope, key_rope=rope, num_query_heads=query.shape[2],
        num_key_value_heads=1, softmax_scale=scale, input_layout="BSND", **told,
    )[0]  # fmt: skip
