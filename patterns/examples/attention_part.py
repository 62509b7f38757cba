"""Attention over a part of the keys, or of a latent, with its log-sum-exp, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fusion import Example
from patterns.examples import sparse_attention
from patterns.examples.attention import B, N, S, T, lowest, qkv, repeated, sinks
from patterns.examples.latent_attention import given, over_latent
from patterns.examples.sparse_attention import SCALE, D, causal

Parts = tuple[Tensor, Tensor]
Attend = Callable[..., Parts]
LATENT_S = sparse_attention.S


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """In float32."""
    return (q @ k.transpose(-2, -1)).float() * SCALE


def named(hidden: Callable[..., Tensor] | None = None, empty: bool = False, keepdim: bool = False) -> Attend:
    """The functions that PyTorch has for both; a query that sees no key may give nothing."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Parts:
        scores = scores_of(q, k)
        scores = scores if hidden is None else scores.masked_fill(hidden(*more), -torch.inf)
        weights = scores.softmax(-1)
        weights = weights.nan_to_num(0.0) if empty else weights
        return weights.to(v.dtype) @ v, scores.logsumexp(-1, keepdim=keepdim)

    return forward


def shared(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Heads that share keys."""
    return named()(q, repeated(k), repeated(v))


def below_the_sum(q: Tensor, k: Tensor, v: Tensor, *hidden: Tensor) -> Parts:
    """Weights that are computed from the log-sum-exp."""
    scores = scores_of(q, k)
    for each in hidden:
        scores = scores.masked_fill(each, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp().to(v.dtype) @ v, lse


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Below a maximum, without the dim of keys."""
    scores = scores_of(q, k)
    top = scores.amax(-1)
    weights = (scores - top.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    return (weights / total.unsqueeze(-1)).to(v.dtype) @ v, top + total.log()


def divided_late(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Weights whose sum divides what they give."""
    scores = scores_of(q, k)
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return ((weights.to(v.dtype) @ v).float() / total).to(v.dtype), (top + total.log()).squeeze(-1)


def lowered(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Parts:
    """Keys that are lowered by the least number, so that a query that sees none sees all."""
    scores = scores_of(q, k) + lowest(~seen, torch.float32)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def beside_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Parts:
    """A sink, which counts."""
    scores = scores_of(q, k)
    both = torch.cat((scores, sink.float().view(1, N, 1, 1).expand(B, N, S, 1)), -1)
    return both.softmax(-1)[..., :-1].to(v.dtype) @ v, both.logsumexp(-1)


def behind(lengths: Tensor) -> Tensor:
    """Keys that there are not, of each sequence."""
    return ~(torch.arange(T) < lengths[:, None])[:, None, None]


def last_tokens(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Parts:
    """The last tokens of a sequence over a latent, whose heads stand behind them."""
    out, lse = over_latent(below_the_sum)(q, latent, rope, up, ~causal(LATENT_S, T, T - LATENT_S))
    return out.transpose(1, 2), lse


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


def mask(queries: int) -> Tensor:
    """A mask [B, 1, S, T] of which one row shows nothing."""
    seen = torch.randn(B, 1, queries, T, generator=torch.Generator().manual_seed(7)) > 0
    seen[0, :, 2] = False
    return seen


PLAIN = qkv(S, T, N)
MASKED = qkv(S, T, N, lambda dtype: mask(S))
LAST = named(lambda: ~causal(S, T, T - S))
MORE = named(lambda: ~causal(S, S - 2, -2), empty=True)
LENGTHS = qkv(S, T, N, lambda dtype: torch.tensor([T - 3, 7]))
POSITION = qkv(S, T, N, lambda dtype: torch.tensor(4))
FINITE = "has a finite log-sum-exp"
ATTENTION = (
    Example("named", shared, qkv(S, T)),
    Example("below the sum", below_the_sum, PLAIN),
    Example("written out", written_out, PLAIN),
    Example("divided late", divided_late, PLAIN),
    Example("the last tokens", LAST, PLAIN),
    Example("more queries than keys", MORE, qkv(S, S - 2, N)),
    Example("by a mask", named(lambda seen: ~seen, empty=True, keepdim=True), MASKED),
    Example("lengths", named(behind), LENGTHS),
    Example("at a position", named(lambda at: torch.arange(T) > at), POSITION),
    Example("a log-sum-exp of lowered keys", lowered, MASKED, FINITE),
    Example("a sink beside the log-sum-exp", beside_a_sink, qkv(S, T, N, sinks), "does not count the sink"),
)
LATENT = (
    Example("a step with its log-sum-exp", over_latent(named()), given(1, T)),
    Example("the last tokens", last_tokens, given(LATENT_S, T)),
    Example("absorbed with its log-sum-exp", absorbed, given(1, T)),
    Example("lengths", over_latent(named(behind)), given(1, T, lambda: torch.tensor([T - 3, 0]))),
    Example("lowered", over_latent(lowered), given(LATENT_S, T, lambda: mask(LATENT_S)), FINITE),
)

TRIED = {"attention": ATTENTION, "latent_attention": LATENT}
