"""Attention over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, softmax

from fusion import Example
from patterns.examples.inputs import Inputs, normal
from patterns.examples.sparse_attention import (
    FEW,
    SCALE,
    B,
    D,
    N,
    S,
    T,
    causal,
    eager,
    hidden,
    keys_values,
    latents,
    position,
)


def step(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """One query of each sequence that sees all keys."""
    k, v = keys_values(latent, rope, up)
    return scaled_dot_product_attention(q, k, v, scale=SCALE)


def prompt(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """A whole sequence, by a mask that is added."""
    return eager(q, *keys_values(latent, rope, up), hidden(causal(S, S), q.dtype))


def few_keys(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """The first queries of a sequence see its first keys, the others all that there are."""
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~causal(S, FEW), -torch.inf)
    return (softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def chunk(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """The last tokens of a sequence, the mask as booleans."""
    k, v = keys_values(latent, rope, up)
    return scaled_dot_product_attention(q, k, v, causal(S, T, T - S), scale=SCALE)


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


def at_position(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, at: Tensor) -> Tensor:
    """One query over a cache that is filled up to its own position."""
    seen = torch.arange(T) <= at
    k, v = keys_values(latent, rope, up)
    return scaled_dot_product_attention(q, k, v, seen[None, None, None], scale=SCALE)


def padded(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, there: Tensor) -> Tensor:
    """A prompt whose first sequence is padded."""
    k, v = keys_values(latent, rope, up)
    return scaled_dot_product_attention(q, k, v, causal(S, S) & there[:, None, None], scale=SCALE)


def there() -> Tensor:
    """Which tokens are there: the last sequence is padded on the right."""
    seen = torch.ones(B, S, dtype=torch.bool)
    seen[-1, -2:] = False
    return seen


def given(queries: int = S, keys: int = S, *more: Callable[[], Tensor]) -> Inputs:
    """The inputs of attention over listed keys without lists; the projection is a Parameter."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        *tensors, up = latents(queries, keys)(dtype)
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
    Example("more queries than keys", few_keys, given(S, FEW)),
    Example("absorbed", absorbed, given(1, T)),
    Example("absorbed, three heads", absorbed, given_heads(3)),
    Example("of one cache", of_one_cache, given_together),
    Example("at a position", at_position, given(1, T, position)),
    Example("padded", padded, given(S, S, there)),
)


def other_latent(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, other: Tensor) -> Tensor:
    """Values that are projected from another latent than the keys."""
    k, _ = keys_values(latent, rope, up)
    _, v = keys_values(other.to(q.dtype), rope, up)
    return scaled_dot_product_attention(q, k, v, scale=SCALE)


def rotated_twice(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Every head has rotated lanes of its own."""
    heads = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2)
    k = torch.cat((heads[..., :D], rope.unsqueeze(1) * torch.arange(1, N + 1, dtype=q.dtype).view(1, N, 1, 1)), dim=-1)
    return scaled_dot_product_attention(q, k, heads[..., D:], scale=SCALE)


def other() -> Tensor:
    """Another latent."""
    return normal(9, B, T, 32)


REJECTS = (
    Example("another latent", other_latent, given(1, T, other), "different latents"),
    Example("rotated lanes of each head", rotated_twice, given(1, T), "one that all heads share"),
)

TRIED = {"latent_attention": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
