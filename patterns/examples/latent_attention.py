"""Attention over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, softmax

from fusion import Example
from patterns.examples import sparse_attention as sparse
from patterns.examples.inputs import Inputs, normal
from patterns.examples.sparse_attention import SCALE, B, D, N, S, T, causal, keys_values


def over_latent(attend: Callable[..., Any]) -> Callable[..., Any]:
    """Over keys and values that are expanded from a latent."""
    return lambda q, latent, rope, up, *more: attend(q, *keys_values(latent, rope, up), *more)


def by_sdpa(seen: Callable[..., Tensor] | None = None) -> Callable[..., Tensor]:
    """By sdpa, the mask as booleans."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        return scaled_dot_product_attention(q, k, v, None if seen is None else seen(*more), scale=SCALE)

    return over_latent(attend)


step = by_sdpa()
chunk = by_sdpa(lambda: causal(S, T, T - S))
at_position = by_sdpa(lambda at: (torch.arange(T) <= at)[None, None, None])
prompt = over_latent(lambda q, k, v: sparse.eager(q, k, v, sparse.hidden(causal(S, S), q.dtype)))


@over_latent
def few_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first queries of a sequence see its first keys, the others all that there are."""
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~causal(S, sparse.FEW), -torch.inf)
    return (softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def absorbed(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """The model absorbs both projections itself, and adds two products."""
    heads = q.shape[1]
    up_key, up_value = up.unflatten(0, (heads, -1)).split((D, up.shape[0] // heads - D), dim=1)
    nope, rotated = q.split((D, q.shape[-1] - D), dim=-1)
    query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
    scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
    weights = softmax(scores * SCALE, dim=-1, dtype=torch.float32).to(q.dtype)
    return torch.einsum("bnsc,nec->bsne", torch.einsum("bnst,btc->bnsc", weights, latent), up_value)


def of_one_cache(q: Tensor, rows: Tensor, up: Tensor) -> Tensor:
    """The same over rows that hold latent and rotated lanes, with one product for the scores."""
    up_key, up_value = up.unflatten(0, (N, -1)).split((D, up.shape[0] // N - D), dim=1)
    nope, rotated = q.split((D, q.shape[-1] - D), dim=-1)
    query = torch.cat((torch.einsum("bnsd,ndc->bnsc", nope, up_key), rotated), dim=-1)
    weights = softmax(torch.einsum("bnsc,btc->bnst", query, rows) * SCALE, dim=-1, dtype=torch.float32).to(q.dtype)
    read = torch.einsum("bnst,btc->bnsc", weights, rows[..., : up.shape[1]])
    return torch.einsum("bnsc,nec->bsne", read, up_value)


def there() -> Tensor:
    """Which tokens are there: the last sequence is padded on the right."""
    seen = torch.ones(B, S, dtype=torch.bool)
    seen[-1, -2:] = False
    return seen


def given(queries: int = S, keys: int = S, *more: Callable[[], Tensor]) -> Inputs:
    """The inputs of attention over listed keys without lists; the projection is a Parameter."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        *tensors, up = sparse.latents(queries, keys)(dtype)
        return *tensors, torch.nn.Parameter(up, requires_grad=False), *(each() for each in more)

    return make


def given_heads(heads: int) -> Inputs:
    """The same for one query of so many heads."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        q, latent, rope, up = given(1, T)(dtype)
        return q[:, :heads], latent, rope, torch.nn.Parameter(up[: up.shape[0] // N * heads], requires_grad=False)

    return make


def given_together(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same with both in one cache."""
    q, latent, rope, up = given(1, T)(dtype)
    return q, torch.cat((latent, rope), dim=-1), up


EXAMPLES = (
    Example("step", step, given(1, T)),
    Example("prompt", prompt, given()),
    Example("chunk", chunk, given(S, T)),
    Example("more queries than keys", few_keys, given(S, sparse.FEW)),
    Example("absorbed", absorbed, given(1, T)),
    Example("absorbed, three heads", absorbed, given_heads(3)),
    Example("of one cache", of_one_cache, given_together),
    Example("at a position", at_position, given(1, T, sparse.position)),
    Example("padded", by_sdpa(lambda there: causal(S, S) & there[:, None, None]), given(S, S, there)),
)


def other_latent(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, other: Tensor) -> Tensor:
    """Values that are projected from another latent than the keys."""
    (k, _), (_, v) = keys_values(latent, rope, up), keys_values(other.to(q.dtype), rope, up)
    return scaled_dot_product_attention(q, k, v, scale=SCALE)


def rotated_twice(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Every head has rotated lanes of its own."""
    heads = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2)
    k = torch.cat((heads[..., :D], rope.unsqueeze(1) * torch.arange(1, N + 1, dtype=q.dtype).view(1, N, 1, 1)), dim=-1)
    return scaled_dot_product_attention(q, k, heads[..., D:], scale=SCALE)


REJECTS = (
    Example("another latent", other_latent, given(1, T, lambda: normal(9, B, T, 32)), "different latents"),
    Example("rotated lanes of each head", rotated_twice, given(1, T), "one that all heads share"),
)

TRIED = {"latent_attention": (*EXAMPLES, *REJECTS)}
