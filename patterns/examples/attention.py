"""Attention as models write it, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention, softmax

from fusion import Example

Inputs = Callable[[torch.dtype], tuple[Tensor, ...]]
B, N, M, S, T, D = 2, 4, 2, 5, 16, 16


def heads(number: int, size: int, dtype: torch.dtype, seed: int, width: int = D) -> Tensor:
    """A tensor [B, number, size, width]."""
    return torch.randn(B, number, size, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def qkv(queries: int = S, keys: int = S, shared: int = M, *more: Callable[[torch.dtype], Tensor]) -> Inputs:
    """Queries of N heads, keys and values of `shared` heads, and what else is asked for."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, k, v = heads(N, queries, dtype, 1), heads(shared, keys, dtype, 2), heads(shared, keys, dtype, 3)
        return (q, k, v, *(each(dtype) for each in more))

    return make


def padding(dtype: torch.dtype) -> Tensor:
    """Which of T keys are there: the first sequence is padded on the left, so that its first queries see nothing."""
    seen = torch.ones(B, S, dtype=torch.bool)
    seen[0, :2] = False
    return seen


def sinks(dtype: torch.dtype) -> Tensor:
    """One number for each head."""
    return torch.randn(N, generator=torch.Generator().manual_seed(4)).to(dtype)


def position(dtype: torch.dtype) -> Tensor:
    """Where the next token goes."""
    return torch.tensor(6)


def repeated(x: Tensor) -> Tensor:
    """Every key head for the query heads that share it."""
    return x[:, :, None].expand(-1, -1, N // M, -1, -1).reshape(B, N, *x.shape[2:])


def lowest(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is seen, the least number where it is hidden."""
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill(hidden, torch.finfo(dtype).min)


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Matmuls around a softmax in float32."""
    scores = q @ repeated(k).transpose(-2, -1) / math.sqrt(D)
    scores = scores if mask is None else scores + mask
    return softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeated(v)


def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """An encoder."""
    return scaled_dot_product_attention(q, k, v)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A decoder over its own prompt, with shared keys."""
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def causal_by_mask(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same by hand."""
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return eager(q, k, v, lowest(hidden, q.dtype))


def step(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """One token over a cache that is filled up to its position."""
    seen = torch.arange(T)[None, :] <= (torch.arange(1) + at)[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None], enable_gqa=True)


def chunk(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """Several tokens over a cache that is filled up to their positions."""
    hidden = torch.arange(T)[None, :] > (torch.arange(S) + at)[:, None]
    return eager(q, k, v, lowest(hidden, q.dtype)[None, None])


def written_chunk(q: Tensor, k: Tensor, v: Tensor, at: Tensor) -> Tensor:
    """The same, with keys and values of its own written there before: positions beyond the end are an error."""
    places = torch.arange(S) + at
    fresh = q[:, :M]
    return chunk(q, k.index_copy(2, places, fresh), v.index_copy(2, places, fresh), at)


def cached(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A prompt over a cache that is longer."""
    seen = torch.arange(T)[None, :] <= torch.arange(S)[:, None]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def padded(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """Causal, and without the padding."""
    both = torch.ones(S, S, dtype=torch.bool).tril() & seen[:, None, None, :]
    return scaled_dot_product_attention(q, repeated(k), repeated(v), attn_mask=both)


def padded_by_hand(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    """The same with the least number, so that a query that sees nothing gets the mean."""
    both = torch.ones(S, S, dtype=torch.bool).tril() & seen[:, None, None, :]
    scores = (q @ repeated(k).transpose(-2, -1) * D**-0.5).masked_fill(~both, torch.finfo(q.dtype).min)
    return softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ repeated(v)


def windowed(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A query sees itself and the two keys before."""
    near = torch.arange(S)[:, None] - torch.arange(S)[None, :]
    return eager(q, k, v, lowest((near < 0) | (near >= 3), q.dtype))


def grouped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Groups of heads by einsum, heads behind the positions."""
    q = q.transpose(1, 2).reshape(B, S, M, N // M, D)
    weights = torch.einsum("bsmgd,bmtd->bmgst", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bmgst,bmtd->bsmgd", weights, v).reshape(B, S, N * D)


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Tensors [B, S, N, D], as projections give them."""
    q, k, v = (each.reshape(B, S, -1, D).transpose(1, 2) for each in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """A logit of each head that no value belongs to."""
    scores = q @ repeated(k).transpose(-2, -1) * D**-0.5
    scores = scores + lowest(torch.ones(S, S, dtype=torch.bool).triu(1), q.dtype)
    return _sunk(scores, sink) @ repeated(v)


def all_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Every query sees every key, and the sink."""
    return _sunk(q @ repeated(k).transpose(-2, -1) * D**-0.5, sink) @ repeated(v)


def with_sink_padded(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, seen: Tensor) -> Tensor:
    """The same without the padding."""
    scores = q @ repeated(k).transpose(-2, -1) * D**-0.5
    both = torch.ones(S, S, dtype=torch.bool).tril() & seen[:, None, None, :]
    return _sunk(scores + lowest(~both, q.dtype), sink) @ repeated(v)


def step_with_sink(q: Tensor, k: Tensor, v: Tensor, sink: Tensor, at: Tensor) -> Tensor:
    """One token over a cache."""
    hidden = torch.arange(T) > at
    scores = q @ repeated(k).transpose(-2, -1) * D**-0.5 + lowest(hidden, q.dtype)
    return _sunk(scores, sink) @ repeated(v)


def _sunk(scores: Tensor, sink: Tensor) -> Tensor:
    joined = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], dim=-1)
    return softmax(joined - joined.max(dim=-1, keepdim=True).values, dim=-1)[..., :-1]


def narrow_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values of fewer lanes than keys."""
    return scaled_dot_product_attention(q, k, v[..., :8], is_causal=True, enable_gqa=True)


def wide_values(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Values of more lanes than keys."""
    return softmax(q[..., :8] @ repeated(k)[..., :8].transpose(-2, -1), dim=-1) @ repeated(v)


EXAMPLES = [
    Example("an encoder", whole, qkv(shared=N)),
    Example("causal", causal, qkv()),
    Example("causal by a mask", causal_by_mask, qkv()),
    Example("one step over a cache", step, qkv(1, T, M, position)),
    Example("a chunk over a cache", chunk, qkv(S, T, M, position)),
    Example("a chunk written into a cache", written_chunk, qkv(S, T, M, position)),
    Example("a prompt over a cache", cached, qkv(S, T)),
    Example("padded", padded, qkv(S, S, M, padding)),
    Example("padded with the least number", padded_by_hand, qkv(S, S, M, padding)),
    Example("a window", windowed, qkv()),
    Example("groups by einsum", grouped, qkv()),
    Example("positions before heads", positions_first, qkv()),
    Example("a sink", with_sink, qkv(S, S, M, sinks)),
    Example("a sink and every key", all_with_sink, qkv(S, S, M, sinks)),
    Example("a sink and padding", with_sink_padded, qkv(S, S, M, sinks, padding)),
    Example("a sink over a cache", step_with_sink, qkv(1, T, M, sinks, position)),
    Example("values narrower than keys", narrow_values, qkv()),
    Example("values wider than keys", wide_values, qkv()),
]


def over_queries(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The shares of the queries, not of the keys."""
    return softmax(q @ k.transpose(-2, -1), dim=-2) @ v


def capped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Scores that grow to 30 at most."""
    return softmax(torch.tanh(q @ k.transpose(-2, -1) / 30.0) * 30.0, dim=-1) @ v


def sloped(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """ALiBi."""
    near = (torch.arange(S)[None, :] - torch.arange(S)[:, None]).to(q.dtype)
    slopes = torch.tensor([0.5**n for n in range(1, N + 1)], dtype=q.dtype)
    return softmax(q @ k.transpose(-2, -1) + near * slopes[:, None, None], dim=-1) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias that was learned, or that may be anything."""
    return scaled_dot_product_attention(q, k, v, attn_mask=bias)


def tempered(q: Tensor, k: Tensor, v: Tensor, temperature: Tensor) -> Tensor:
    """Scores scaled by a tensor."""
    return softmax(q @ k.transpose(-2, -1) * temperature, dim=-1) @ v


def lowered(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Later keys count less, not nothing."""
    later = torch.ones(S, S, dtype=torch.bool).triu(1)
    return softmax((q @ k.transpose(-2, -1)).masked_fill(later, -1.0), dim=-1) @ v


REJECTS = [
    Example("softmax over queries", over_queries, qkv(shared=N), "taken over the queries"),
    Example("soft capping", capped, qkv(shared=N), "capped softly"),
    Example("ALiBi", sloped, qkv(shared=N), "not proven to be a mask"),
    Example("any bias", biased, qkv(S, S, N, lambda dtype: torch.randn(S, S).to(dtype)), "not proven to be a mask"),
    Example("a temperature", tempered, qkv(S, S, N, lambda dtype: torch.rand(1, 1, S, 1).to(dtype)), "by a tensor"),
    Example("lowered, not hidden", lowered, qkv(shared=N), "something else than a number"),
]

TRIED = {"attention": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
