"""Attention over some of the keys with its log-sum-exp, as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusion import Example
from tests.examples.attention import normalised, written
from tests.examples.inputs import Inputs, Part, fixed, normal, tensors
from tests.examples.masks import added, causal
from tests.examples.sparse_attention import SCALE

B, N, S, T, D, DR, E = 2, 4, 6, 9, 16, 8, 16
LONG = 128  # from which on it costs less than to read a triangle of fixed size
PROJECTION = fixed(normal(6, D + DR, D + DR) / 5)
Parts = tuple[Tensor, Tensor]
summed = partial(written, weigh=normalised, scale=SCALE, wide=True)
"""Attention with its log-sum-exps."""


def parts(queries: int = S, keys: int = T, *more: Part, heads: int = N, lanes: int = D + DR) -> Inputs:
    """Queries [B, N, S, D + Dr], keys [B, M, T, D + Dr], values [B, M, T, E], and more."""
    return tensors((B, N, queries, lanes), (B, heads, keys, lanes), (B, heads, keys, E), *more)


def before(queries: int) -> tuple[Part, Part]:
    """The result of other keys [B, N, S, E] and their log-sum-exps [B, N, S, 1]."""
    return (B, N, queries, E), normal(4, B, N, queries, 1).float()


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Parts:
    """Weights and their sums in float32."""
    return summed()(q, k, v) if mask is None else summed(torch.add)(q, k, v, mask)


def without_last_dim(q: Tensor, k: Tensor, v: Tensor) -> Parts:
    """Sums without the dim of keys, which other heads share."""
    out, lse = attended(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1))
    return out, lse.squeeze(-1)


def merged(q: Tensor, k: Tensor, v: Tensor, before: Tensor, sums: Tensor, mask: Tensor | None = None) -> Parts:
    """Over more keys than those that gave `before` [B, N, S, E], with log-sum-exps `sums` [B, N, S, 1]."""
    out, lse = attended(q, k, v, mask)
    top = torch.maximum(sums, lse)
    old, new = (sums - top).exp(), (lse - top).exp()
    total = old + new
    return ((before.float() * old + out.float() * new) / total).to(q.dtype), top + total.log()


def diagonal(q: Tensor, *rest: Tensor) -> Parts:
    """The block on the diagonal, which is causal, of queries that are projected here; perhaps after others."""
    *keys, weight = rest
    attend: Callable[..., Parts] = merged if len(keys) == 4 else attended
    return attend(linear(q, weight), *keys, added(~causal(q.shape[2], q.shape[2]), torch.float32))


def seeing(seen: Callable[[], Tensor]) -> Callable[..., Parts]:
    """Queries that see these keys."""
    return lambda q, k, v: attended(q, k, v, added(~seen(), torch.float32))


LAST = seeing(lambda: causal(S, T, T - S))
WINDOW = seeing(lambda: causal(S, S) & ~causal(S, S, -3))
SEEN = torch.eye(S, dtype=torch.bool) | (normal(5, S, S) > 0)
EXAMPLES = (
    Example("merged with other keys", merged, parts(S, T, *before(S))),
    Example("the diagonal, merged with other keys", diagonal, parts(LONG, LONG, *before(LONG), PROJECTION)),
    Example("keys that came before", attended, parts()),
    Example("the diagonal", diagonal, parts(LONG, LONG, PROJECTION)),
    Example("shared keys", without_last_dim, parts(heads=2)),
    Example("any mask", summed(hidden=lambda seen: ~seen), parts(S, S, SEEN), "not proven to be causal"),
    Example("the last tokens", LAST, parts(), "it is causal with other numbers of queries"),
    Example("a window", WINDOW, parts(S, S), "a window or a length leaves some out"),
    Example("fewer keys", attended, parts(S, 4), "fewer than queries"),
    Example("no more lanes", attended, parts(lanes=E), "they have no more lanes than values"),
)

TRIED = {"ring_mla": EXAMPLES}
