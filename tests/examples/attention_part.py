"""Attention over a part of the keys, or of a latent, with its log-sum-exp, and what only looks like it."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from fusion import Example
from tests.examples import sparse_attention
from tests.examples.attention import SINKS, B, N, S, T, normalised, qkv, repeated, written
from tests.examples.latent_attention import absorbed, given, over_latent
from tests.examples.masks import below, causal, lowest
from tests.examples.sparse_attention import SCALE

Parts = tuple[Tensor, Tensor]
LATENT_S = sparse_attention.S


def by_name(scores: Tensor, empty: bool = False, keepdim: bool = False) -> Parts:
    """The functions that PyTorch has for both; a query that sees no key may give nothing."""
    weights = scores.softmax(-1)
    return weights.nan_to_num(0.0) if empty else weights, scores.logsumexp(-1, keepdim=keepdim)


def below_the_sum(scores: Tensor) -> Parts:
    """Weights that are computed from the log-sum-exp."""
    lse = scores.logsumexp(-1, keepdim=True)
    return (scores - lse).exp(), lse


def written_out(scores: Tensor) -> Parts:
    """Below a maximum, without the dim of keys."""
    top = scores.amax(-1)
    weights = (scores - top.unsqueeze(-1)).exp()
    total = weights.sum(-1)
    return weights / total.unsqueeze(-1), top + total.log()


part = partial(written, weigh=by_name, scale=SCALE, wide=True)
"""Attention with the log-sum-exps of its scores, in float32."""


def divided_late(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Weights whose sum divides what they give."""
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return ((weights.to(v.dtype) @ v).float() / total).to(v.dtype), (top + total.log()).squeeze(-1)


def with_sink(scores: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head behind those of the keys."""
    return torch.cat((scores, sink.float().view(1, N, 1, 1).expand(B, N, S, 1)), -1)


def last_tokens(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Parts:
    """The last tokens of a sequence over a latent, whose heads stand behind them."""
    last = part(weigh=below_the_sum, hidden=lambda: ~causal(LATENT_S, T, T - LATENT_S))
    out, lse = over_latent(last)(q, latent, rope, up)
    return out.transpose(1, 2), lse


def of_latent(scores: Tensor) -> Parts:
    """Weights of products that are to be scaled, in the dtype of the model, and their log-sum-exps."""
    weights, lse = normalised(scores.float() * SCALE)
    return weights.to(scores.dtype), lse.squeeze(-1)


def mask(queries: int) -> Tensor:
    """A mask [B, 1, S, T] of which one row shows nothing."""
    seen = torch.randn(B, 1, queries, T, generator=torch.Generator().manual_seed(7)) > 0
    seen[0, :, 2] = False
    return seen


PLAIN = qkv(S, T, N)
MASKED = qkv(S, T, N, mask(S))
LAST = part(hidden=lambda: ~causal(S, T, T - S))
MORE = part(weigh=partial(by_name, empty=True), hidden=lambda: ~causal(S, S - 2, -2))
BY_MASK = part(weigh=partial(by_name, empty=True, keepdim=True), hidden=lambda seen: ~seen)
LENGTHS = part(hidden=lambda lengths: ~below(lengths, T))
AT = part(hidden=lambda at: torch.arange(T) > at)
LOWERED = part(lambda scores, seen: scores + lowest(~seen, torch.float32))
"""Keys that are lowered by the least number, so that a query that sees none sees all."""
SINK = part(with_sink, weigh=lambda both: (both.softmax(-1)[..., :-1], both.logsumexp(-1)))
FINITE = "of a query without visible keys it is finite"
ATTENTION = (
    Example("named", lambda q, k, v: part()(q, repeated(k), repeated(v)), qkv(S, T)),
    Example("below the sum", part(weigh=below_the_sum), PLAIN),
    Example("written out", part(weigh=written_out), PLAIN),
    Example("divided late", divided_late, PLAIN),
    Example("the last tokens", LAST, PLAIN),
    Example("more queries than keys", MORE, qkv(S, S - 2, N)),
    Example("by a mask", BY_MASK, MASKED),
    Example("lengths", LENGTHS, qkv(S, T, N, torch.tensor([T - 3, 7]))),
    Example("at a position", AT, qkv(S, T, N, torch.tensor(4))),
    Example("a log-sum-exp of lowered keys", LOWERED, MASKED, FINITE),
    Example("a bias beside the log-sum-exp", part(torch.add), qkv(S, T, N, (S, T)), "it stands beside a bias"),
    Example("a sink beside the log-sum-exp", SINK, qkv(S, T, N, SINKS), "does not count the sink"),
)
LATENT = (
    Example("a step with its log-sum-exp", over_latent(part()), given(1, T)),
    Example("the last tokens", last_tokens, given(LATENT_S, T)),
    Example("absorbed with its log-sum-exp", absorbed(of_latent), given(1, T)),
    Example("lengths", over_latent(LENGTHS), given(1, T, torch.tensor([T - 3, 0]))),
    Example("lowered", over_latent(LOWERED), given(LATENT_S, T, mask(LATENT_S)), FINITE),
)

TRIED = {"attention": ATTENTION, "latent_attention": LATENT}
