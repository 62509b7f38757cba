"""Attention over a part of a latent with its log-sum-exp, as models write it, and what only looks like it."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.attention import lowest
from patterns.examples.attention_part import scores_of
from patterns.examples.latent_attention import given
from patterns.examples.sparse_attention import SCALE, B, D, N, S, T, causal, keys_values

Parts = tuple[Tensor, Tensor]


def step(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Parts:
    """One query of each sequence that sees all keys."""
    k, v = keys_values(latent, rope, up)
    scores = scores_of(q, k)
    return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1)


def last_tokens(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Parts:
    """The last tokens of a sequence, with weights that are computed from the log-sum-exp."""
    k, v = keys_values(latent, rope, up)
    scores = scores_of(q, k).masked_fill(~causal(S, T, T - S), -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return ((scores - lse).exp().to(q.dtype) @ v).transpose(1, 2), lse


def absorbed(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Parts:
    """The model absorbs both projections itself, and adds two products."""
    up_key, up_value = up.unflatten(0, (N, -1)).split((D, up.shape[0] // N - D), dim=1)
    nope, rotated = q.split((D, q.shape[-1] - D), dim=-1)
    query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
    scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
    scores = scores.float() * SCALE
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    read = torch.einsum("bnst,btc->bnsc", (weights / total).to(q.dtype), latent)
    return torch.einsum("bnsc,nec->bsne", read, up_value), (top + total.log()).squeeze(-1)


def up_to(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, lengths: Tensor) -> Parts:
    """As many keys as there are of each sequence, which may be none."""
    k, v = keys_values(latent, rope, up)
    there = torch.arange(T) < lengths[:, None]
    scores = scores_of(q, k).masked_fill(~there[:, None, None], -torch.inf)
    return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1)


def lowered(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, seen: Tensor) -> Parts:
    """Keys that are lowered by the least number, so that a query that sees none sees all."""
    k, v = keys_values(latent, rope, up)
    scores = scores_of(q, k) + lowest(~seen, torch.float32)
    return scores.softmax(-1).to(q.dtype) @ v, scores.logsumexp(-1)


def lengths() -> Tensor:
    """Of each sequence."""
    return torch.tensor([T - 3, 0])


def mask() -> Tensor:
    """A mask [B, 1, S, T] of which one row shows nothing."""
    seen = torch.randn(B, 1, S, T, generator=torch.Generator().manual_seed(7)) > 0
    seen[0, :, 2] = False
    return seen


EXAMPLES = (
    Example("a step with its log-sum-exp", step, given(1, T)),
    Example("the last tokens", last_tokens, given(S, T)),
    Example("absorbed with its log-sum-exp", absorbed, given(1, T)),
    Example("lengths", up_to, given(1, T, lengths)),
)
REJECTS = (Example("lowered", lowered, given(S, T, mask), "has a finite log-sum-exp"),)

TRIED = {"latent_attention": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
