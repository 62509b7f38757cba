"""Attention over some of the keys with its log-sum-exp, as models write it, and what only looks like it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.sparse_attention import SCALE, causal, hidden

B, N, S, T, D, DR, E = 2, 4, 6, 9, 16, 8, 16
LONG = 128  # from which on it costs less than to read a triangle of fixed size
Parts = tuple[Tensor, Tensor]


def parts(queries: int = S, keys: int = T, heads: int = N, lanes: int = D + DR) -> Inputs:
    """Queries [B, N, S, D + Dr], keys [B, M, T, D + Dr], values [B, M, T, E]."""
    shapes = (B, N, queries, lanes), (B, heads, keys, lanes), (B, heads, keys, E)
    return lambda dtype: tuple(normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Parts:
    """Weights and their sums in float32."""
    scores = (q @ k.transpose(-2, -1)).float() * SCALE
    return _summed(scores if mask is None else scores + mask, v)


def _summed(scores: Tensor, v: Tensor) -> Parts:
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return (weights / total).to(v.dtype) @ v, top + total.log()


def diagonal(q: Tensor, k: Tensor, v: Tensor, weight: Tensor) -> Parts:
    """The block on the diagonal, which is causal, of queries that are projected here."""
    q = linear(q, weight)
    return attended(q, k, v, hidden(causal(q.shape[2], q.shape[2]), torch.float32))


def without_last_dim(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Sums without the dim of keys, which other heads share."""
    out, lse = attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    return out, lse.squeeze(-1)


def chosen(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Parts:
    """Keys that are chosen by a mask which is passed in."""
    return _summed((q @ k.transpose(-2, -1)).float().mul(SCALE).masked_fill(~seen, -torch.inf), v)


def merged(q: Tensor, k: Tensor, v: Tensor, before: Tensor, sums: Tensor, mask: Tensor | None = None) -> Parts:
    """Over more keys than those that gave `before` [B, N, S, E], with log-sum-exps `sums` [B, N, S, 1]."""
    out, lse = attended(q, k, v, mask)
    top = torch.maximum(sums, lse)
    old, new = (sums - top).exp(), (lse - top).exp()
    total = old + new
    return ((before.float() * old + out.float() * new) / total).to(q.dtype), top + total.log()


def with_before(queries: int = S, keys: int = T) -> Inputs:
    """The inputs with the result of other keys."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        before, sums = normal(3, B, N, queries, E).to(dtype), normal(4, B, N, queries, 1).float()
        return *parts(queries, keys)(dtype), before, sums

    return make


def diagonal_merged(q: Tensor, k: Tensor, v: Tensor, before: Tensor, sums: Tensor, weight: Tensor) -> Parts:
    """The block on the diagonal after others."""
    mask = hidden(causal(q.shape[2], q.shape[2]), torch.float32)
    return merged(linear(q, weight), k, v, before, sums, mask)


def projected_with_before(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The inputs of a whole sequence, the result of other keys, and a projection, a Parameter."""
    return *with_before(LONG, LONG)(dtype), projected(dtype)[-1]


def offset(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """The last tokens of a sequence."""
    return attended(q, k, v, hidden(causal(S, T, T - S), torch.float32))


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """A causal block of which some keys are too far away."""
    seen = causal(S, S) & ~causal(S, S, -3)
    return attended(q, k, v, hidden(seen, torch.float32))


def projected(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The inputs of a whole sequence, and a projection, a Parameter."""
    weight = (normal(6, D + DR, D + DR) / 5).to(dtype)
    return *parts(LONG, LONG)(dtype), torch.nn.Parameter(weight, requires_grad=False)


def shown(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same with a mask that is passed in."""
    seen = torch.eye(S, dtype=torch.bool) | (normal(5, S, S) > 0)
    return *parts(S, S)(dtype), seen


EXAMPLES = (
    Example("merged with other keys", merged, with_before()),
    Example("the diagonal, merged with other keys", diagonal_merged, projected_with_before),
    Example("keys that came before", attended, parts()),
    Example("the diagonal", diagonal, projected),
    Example("shared keys", without_last_dim, parts(heads=2)),
)
REJECTS = (
    Example("any mask", chosen, shown, "not proven to be causal"),
    Example("the last tokens", offset, parts(), "not that of a square"),
    Example("a window", windowed, parts(S, S), "only a part of the keys"),
    Example("fewer keys", attended, parts(S, 4), "fewer keys than queries"),
    Example("no more lanes", attended, parts(lanes=E), "no lanes beside"),
)

TRIED = {"ring_mla": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
