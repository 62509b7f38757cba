"""Attention as models write it, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from fusion import Example
from tests.examples.inputs import Inputs, Part, normal, tensors
from tests.examples.masks import causal, lowest

Attend = Callable[..., Any]
Mask = Callable[..., Tensor]
B, N, M, S, T, D = 2, 4, 2, 5, 16, 16
SINKS, POSITION = normal(4, N), torch.tensor(6)
PADDING = torch.arange(S) >= torch.tensor([2, 0])[:, None]
"""Which keys are there: the first sequence is padded on the left, so that its first queries see nothing."""


def qkv(queries: int = S, keys: int = S, shared: int = M, *more: Part) -> Inputs:
    """Queries of N heads, keys and values of `shared` heads, and what else is asked for."""
    return tensors((B, N, queries, D), (B, shared, keys, D), (B, shared, keys, D), *more)


def repeated(x: Tensor) -> Tensor:
    """Each of M key heads for the query heads that share it; others as they are."""
    return x if x.shape[1] != M else x[:, :, None].expand(-1, -1, N // M, -1, -1).reshape(B, N, *x.shape[2:])


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Matmuls around a softmax in float32."""
    scores = q @ repeated(k).transpose(-2, -1) / math.sqrt(D)
    scores = scores if mask is None else scores + mask
    return softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeated(v)


def normalised(scores: Tensor) -> tuple[Tensor, Tensor]:
    """Weights below a maximum, and their log-sum-exps [.., 1]."""
    top = scores.amax(-1, keepdim=True)
    weights = (scores - top).exp()
    total = weights.sum(-1, keepdim=True)
    return weights / total, top + total.log()


def shares(scores: Tensor, dim: int = -1, dtype: torch.dtype | None = None) -> tuple[Tensor]:
    """A softmax alone."""
    return (softmax(scores, dim=dim, dtype=dtype),)


def written(
    change: Callable[..., Tensor] = lambda scores, *more: scores,
    weigh: Callable[[Tensor], tuple[Tensor, ...]] = shares,
    hidden: Mask | None = None,
    least: bool = False,
    scale: float = D**-0.5,
    wide: bool = False,
) -> Attend:
    """By matmuls, over scores that further inputs change, and of which `weigh` makes weights, perhaps with their sums.

    They are filled in where a key is hidden; a query that sees nothing gives NaN, or by the least number the mean.
    """

    def forward(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
        scores = q @ repeated(k).transpose(-2, -1)
        scores = scores.float() if wide else scores
        scores = change(scores if scale == 1 else scores * scale, *more)
        if hidden is not None:
            scores = scores.masked_fill(hidden(*more), torch.finfo(q.dtype).min if least else -math.inf)
        weights, *sums = weigh(scores)
        y = weights.to(v.dtype) @ repeated(v)
        return (y, *sums) if sums else y

    return forward


def by_sdpa(seen: Mask | None = None, repeat: bool = False, **flags: bool) -> Attend:
    """By sdpa, over the keys that are seen."""

    def forward(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        k, v = (repeated(each) if repeat else each for each in (k, v))
        return scaled_dot_product_attention(q, k, v, attn_mask=None if seen is None else seen(*more), **flags)

    return forward


def by_hand(hidden: Mask) -> Attend:
    """By matmuls; the least number is added where a key is hidden."""
    return lambda q, k, v, *more: eager(q, k, v, lowest(hidden(*more), q.dtype))


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, *more: Tensor, hidden: Mask | None = None) -> Tensor:
    """A logit of each head that no value belongs to."""
    scores = q @ repeated(k).transpose(-2, -1) * D**-0.5
    scores = scores if hidden is None else scores + lowest(hidden(*more), q.dtype)
    joined = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return softmax(joined - joined.max(dim=-1, keepdim=True).values, dim=-1)[..., :-1] @ repeated(v)


def sunk(scores: Tensor, sink: Tensor, bias: Tensor) -> Tensor:
    """Scores that something is added to, beside a logit of each head."""
    return torch.cat((scores + bias, sink.view(1, -1, 1, 1).expand(B, -1, S, -1)), dim=-1)


def but_last(scores: Tensor) -> tuple[Tensor]:
    """A softmax, without the weight of what is no key."""
    return (softmax(scores, dim=-1)[..., :-1],)


def later() -> Tensor:
    """Keys behind each query."""
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def there(seen: Tensor) -> Tensor:
    """Causal, and without the padding."""
    return torch.ones(S, S, dtype=torch.bool).tril() & seen[:, None, None, :]


def far() -> Tensor:
    """All but each query itself and the two keys before."""
    near = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    return (near < 0) | (near >= 3)


def behind(at: Tensor) -> Tensor:
    """Keys of a cache that is filled up to the positions of several tokens."""
    return (torch.arange(T)[None, :] > (torch.arange(S) + at)[:, None])[None, None]


def written_chunk(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The same, with keys and values of its own written there before: positions beyond the end are an error."""
    places = torch.arange(S) + at
    fresh = q[:, :M]
    return by_hand(behind)(q, k.index_copy(2, places, fresh), v.index_copy(2, places, fresh), at)


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Groups of heads by einsum, heads behind the positions."""
    q = q.transpose(1, 2).reshape(B, S, M, N // M, D)
    weights = torch.einsum("bsmgd,bmtd->bmgst", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bmgst,bmtd->bsmgd", weights, v).reshape(B, S, N * D)


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tensors [B, S, N, D], as projections give them."""
    q, k, v = (each.reshape(B, S, -1, D).transpose(1, 2) for each in (q, k, v))
    return CAUSAL(q, k, v).transpose(1, 2)


def wide_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values of more lanes than keys."""
    return softmax(q[..., :8] @ repeated(k)[..., :8].transpose(-2, -1), dim=-1) @ repeated(v)


in_float = partial(shares, dtype=torch.float32)
CAUSAL = by_sdpa(is_causal=True, enable_gqa=True)
STEP = by_sdpa(lambda at: causal(1, T, at)[None, None], enable_gqa=True)
CACHED = by_sdpa(lambda: torch.arange(T)[None] <= torch.arange(S)[:, None], enable_gqa=True)
LEAST = written(weigh=in_float, hidden=lambda seen: ~there(seen), least=True)
SINK_PADDED = partial(with_sink, hidden=lambda seen: ~there(seen))
SINK_PROMPT = partial(with_sink, hidden=lambda: torch.arange(T)[None] > torch.arange(S)[:, None])
SINK_STEP = partial(with_sink, hidden=lambda at: torch.arange(T) > at)
SUNK, PADDED = qkv(S, S, M, SINKS), qkv(S, S, M, PADDING)


def segments(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...] = (2, 3)) -> Tensor:
    """A loop over packed sequences, [T, N, D], each of which attends to itself."""
    packed = (each.transpose(0, 1)[None].split(lengths, dim=2) for each in (q, k, v))
    return torch.cat([by_sdpa(enable_gqa=True)(*each) for each in zip(*packed, strict=True)], dim=2)[0].transpose(0, 1)


def sloped(scores: Tensor) -> Tensor:
    """ALiBi."""
    near = (torch.arange(S)[None, :] - torch.arange(S)[:, None]).to(scores.dtype)
    slopes = torch.tensor([0.5**n for n in range(1, N + 1)], dtype=scores.dtype)
    return scores + near * slopes[:, None, None]


def counted(scores: Tensor) -> Tensor:
    """By how far keys are away, which is a whole number."""
    return scores + (torch.arange(S)[None, :] - torch.arange(S)[:, None])


def later_of_heads(scores: Tensor, bias: Tensor) -> Tensor:
    """A bias, and a mask that is made for every head."""
    queries = torch.arange(S)[:, None].expand(B, N, S, 1)
    return (scores + bias).masked_fill(torch.arange(S) > queries, -math.inf)


EQUAL = qkv(shared=N)
BARE = partial(written, scale=1)
OF_QUERIES = BARE(weigh=partial(shares, dim=-2))
LOWERED = BARE(lambda scores: scores.masked_fill(later(), -1.0))


def segments_by_id(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor) -> Tensor:
    """Packed sequences [T, N, D] of which `bounds` says where each ends; every token sees those of its own."""
    segment = torch.searchsorted(bounds, torch.arange(q.shape[0]), right=True)
    q, k, v = (each.transpose(0, 1)[None] for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, attn_mask=segment[:, None] == segment)[0].transpose(0, 1)


EXAMPLES = (
    Example("an encoder", by_sdpa(), qkv(shared=N)),
    Example("causal", CAUSAL, qkv()),
    Example("a bias, a mask of every head", written(later_of_heads), qkv(S, S, N, (S, S))),
    Example("causal by a mask", by_hand(later), qkv()),
    Example("one step over a cache", STEP, qkv(1, T, M, POSITION)),
    Example("a chunk over a cache", by_hand(behind), qkv(S, T, M, POSITION)),
    Example("a chunk written into a cache", written_chunk, qkv(S, T, M, POSITION)),
    Example("a prompt over a cache", CACHED, qkv(S, T)),
    Example("padded", by_sdpa(there, repeat=True), PADDED),
    Example("padded with the least number", LEAST, PADDED),
    Example("a window", by_hand(far), qkv()),
    Example("groups by einsum", grouped, qkv()),
    Example("positions before heads", positions_first, qkv()),
    Example("segments by the bounds of packed tokens", segments_by_id, tensors(*[(S, N, D)] * 3, torch.tensor([2, S]))),
    Example("segments of packed tokens", segments, tensors((S, N, D), (S, M, D), (S, M, D))),
    Example("a sink", partial(with_sink, hidden=later), SUNK),
    Example("a sink, a prompt over a cache", SINK_PROMPT, qkv(S, T, M, SINKS)),
    Example("a sink and every key", with_sink, SUNK),
    Example("a sink and padding", SINK_PADDED, qkv(S, S, M, SINKS, PADDING)),
    Example("a sink over a cache", SINK_STEP, qkv(1, T, M, SINKS, POSITION)),
    Example("values narrower than keys", lambda q, k, v: written(hidden=later)(q, k, v[..., :8]), qkv()),
    Example("values wider than keys", wide_values, qkv()),
    Example("ALiBi", BARE(sloped, in_float), EQUAL),
    Example("ALiBi, causal", BARE(sloped, hidden=later), EQUAL),
    Example("a temperature of each query", BARE(torch.mul), qkv(S, S, N, (1, 1, S, 1))),
    Example("any bias", written(torch.add, in_float), qkv(S, S, N, (S, S))),
    Example("a bias of each head", written(torch.add, in_float), qkv(S, T, M, (1, N, S, T))),
    Example("a bias of whole numbers", BARE(counted), qkv(S, S, N), "as a bias it is in integers"),
    Example("a sink and a bias", written(sunk, but_last), qkv(S, S, N, SINKS, (S, S)), "a bias is added to its scores"),
    Example("softmax over queries", OF_QUERIES, EQUAL, "taken over the queries"),
    Example("soft capping", BARE(lambda s: torch.tanh(s / 30.0) * 30.0), EQUAL, "soft capping"),
    Example("a temperature of each pair", BARE(torch.mul), qkv(S, S, N, (1, 1, S, S)), "by a tensor"),
    Example("lowered, not hidden", LOWERED, EQUAL, "hidden scores are replaced by a number"),
)

TRIED = {"attention": EXAMPLES}
