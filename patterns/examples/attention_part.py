"""Attention over a part of the keys with its log-sum-exp, as models write it, and what only looks like it."""

from __future__ import annotations

import torch
from torch import Tensor

from fusion import Example
from patterns.examples.attention import B, N, S, T, lowest, qkv, repeated, sinks
from patterns.examples.inputs import Inputs
from patterns.examples.sparse_attention import SCALE, causal

Parts = tuple[Tensor, Tensor]


def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """In float32."""
    return (q @ k.transpose(-2, -1)).float() * SCALE


def named(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The functions that PyTorch has for both."""
    scores = scores_of(q, repeated(k))
    return scores.softmax(-1).to(v.dtype) @ repeated(v), scores.logsumexp(-1)


def below_the_sum(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Weights that are computed from the log-sum-exp."""
    scores = scores_of(q, k)
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


def last_tokens(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The last tokens of a sequence, which see what is before them."""
    scores = scores_of(q, k).masked_fill(~causal(S, T, T - S), -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def more_queries(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The last query sees the last key, so that the first ones see none."""
    scores = scores_of(q, k).masked_fill(~causal(S, S - 2, -2), -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0).to(v.dtype) @ v, scores.logsumexp(-1)


def chosen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Parts:
    """Keys that a mask shows; a query that sees none gives nothing."""
    scores = scores_of(q, k).masked_fill(~seen, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return scores.softmax(-1).nan_to_num(0.0).to(v.dtype) @ v, lse


def chosen_by_least(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Parts:
    """Keys that are lowered by the least number, so that a query that sees none sees all."""
    scores = scores_of(q, k) + lowest(~seen, torch.float32)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def up_to(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Parts:
    """As many keys as there are of each sequence."""
    there = torch.arange(T) < lengths[:, None]
    scores = scores_of(q, k).masked_fill(~there[:, None, None], -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def at_a_position(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Parts:
    """Keys up to a position, which may stand before the first."""
    scores = scores_of(q, k).masked_fill(torch.arange(T) > at, -torch.inf)
    return scores.softmax(-1).to(v.dtype) @ v, scores.logsumexp(-1)


def beside_a_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Parts:
    """A sink, which counts."""
    scores = scores_of(q, k)
    both = torch.cat((scores, sink.float().view(1, N, 1, 1).expand(B, N, S, 1)), -1)
    return both.softmax(-1)[..., :-1].to(v.dtype) @ v, both.logsumexp(-1)


def mask(dtype: torch.dtype) -> Tensor:
    """A mask [B, 1, S, T] of which one row shows nothing."""
    seen = torch.randn(B, 1, S, T, generator=torch.Generator().manual_seed(7)) > 0
    seen[0, :, 2] = False
    return seen


def lengths(dtype: torch.dtype) -> Tensor:
    """Of each sequence."""
    return torch.tensor([T - 3, 7])


def position(dtype: torch.dtype) -> Tensor:
    """Of the last key that is seen."""
    return torch.tensor(4)


def plain(keys: int = T) -> Inputs:
    """Queries, and keys of as many heads."""
    return qkv(S, keys, N)


EXAMPLES = (
    Example("named", named, qkv(S, T)),
    Example("below the sum", below_the_sum, plain()),
    Example("written out", written_out, plain()),
    Example("divided late", divided_late, plain()),
    Example("the last tokens", last_tokens, plain()),
    Example("more queries than keys", more_queries, plain(S - 2)),
    Example("by a mask", chosen, qkv(S, T, N, mask)),
    Example("lengths", up_to, qkv(S, T, N, lengths)),
    Example("at a position", at_a_position, qkv(S, T, N, position)),
)
REJECTS = (
    Example("a log-sum-exp of lowered keys", chosen_by_least, qkv(S, T, N, mask), "has a finite log-sum-exp"),
    Example("a sink beside the log-sum-exp", beside_a_sink, qkv(S, T, N, sinks), "does not count the sink"),
)

TRIED = {"attention": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
