"""Attention over a latent as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import linear, scaled_dot_product_attention, softmax

from fusion import Example
from tests.examples import sparse_attention as sparse
from tests.examples.attention import in_float, written
from tests.examples.caches import Read, of_pages
from tests.examples.inputs import fixed, normal, tensors, weight
from tests.examples.masks import added, causal
from tests.examples.sparse_attention import SCALE, B, D, E, Form, N, S, T, keys_values, over_latent

C, DR, UP = sparse.C, sparse.DR, fixed(sparse.UP)
given = partial(sparse.latents, up=UP)
"""The inputs of attention over listed keys without lists; the projection is a Parameter."""


def by_sdpa(seen: Callable[..., Tensor | None] = lambda: None) -> Form:
    """By sdpa, the mask as booleans."""
    return over_latent(lambda q, k, v, *more: scaled_dot_product_attention(q, k, v, attn_mask=seen(*more), scale=SCALE))


def by_hand(hidden: Callable[..., Tensor] | None = None) -> Form:
    """By matmuls around a softmax in float32."""
    return over_latent(written(weigh=in_float, hidden=hidden, scale=SCALE))


def by_table(form: Form, read: Read = of_pages, keys: int | None = None) -> Form:
    """The same over the first keys in pages that a block table names."""

    def forward(q: Tensor, latents: Tensor, ropes: Tensor, up: Tensor, table: Tensor, *more: Tensor) -> Any:
        latent, rope = (read(pages, table)[:, :keys] for pages in (latents, ropes))
        return form(q, latent, rope, up, *more)

    return forward


step = by_sdpa()
chunk = by_hand(lambda: ~causal(S, T, T - S))
at_position = by_sdpa(lambda at: (torch.arange(T) <= at)[None, None, None])
prompt = over_latent(lambda q, k, v: sparse.eager(q, k, v, added(~causal(S, S), q.dtype)))


@over_latent
def few_keys(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The first queries of a sequence see its first keys, the others all that there are."""
    return written(weigh=in_float, hidden=lambda: ~causal(S, sparse.FEW), scale=SCALE)(q, k, v).transpose(1, 2)


def shares(scores: Tensor) -> tuple[Tensor]:
    """A softmax in float32."""
    return (softmax(scores * SCALE, dim=-1, dtype=torch.float32).to(scores.dtype),)


def shares_and_sums(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The same, with log Σ exp of the scores."""
    return *shares(scores), torch.logsumexp(scores.float() * SCALE, dim=-1)


def absorbed(weigh: Callable[..., tuple[Tensor, ...]] = shares, out: str = "bsne") -> Form:
    """The model absorbs both projections itself, and adds two products; scores give weights, perhaps with sums."""

    def form(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *more: Tensor) -> Any:
        up_key, up_value = up.unflatten(0, (q.shape[1], -1)).split((D, E), dim=1)
        nope, rotated = q.split((D, q.shape[-1] - D), dim=-1)
        query = torch.einsum("bnsd,ndc->bnsc", nope, up_key)
        scores = torch.einsum("bnsc,btc->bnst", query, latent) + torch.einsum("bnsr,btr->bnst", rotated, rope)
        weights, *sums = weigh(scores, *more)
        y = torch.einsum(f"bnsc,nec->{out}", torch.einsum("bnst,btc->bnsc", weights, latent), up_value)
        return (y, *sums) if sums else y

    return form


def unrotated(weigh: Callable[..., tuple[Tensor, ...]] = shares) -> Form:
    """Over keys and values of every head that are expanded from a latent alone."""

    def form(q: Tensor, latent: Tensor, up: Tensor) -> Any:
        k, v = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2).split((D, E), dim=-1)
        weights, *sums = weigh(q @ k.mT)
        return (weights @ v, *sums) if sums else weights @ v

    return form


def of_one_cache(q: Tensor, rows: Tensor, up: Tensor) -> Tensor:
    """The same over rows that hold latent and rotated lanes, with one product for the scores."""
    up_key, up_value = up.unflatten(0, (N, -1)).split((D, up.shape[0] // N - D), dim=1)
    nope, rotated = q.split((D, q.shape[-1] - D), dim=-1)
    query = torch.cat((torch.einsum("bnsd,ndc->bnsc", nope, up_key), rotated), dim=-1)
    weights = softmax(torch.einsum("bnsc,btc->bnst", query, rows) * SCALE, dim=-1, dtype=torch.float32).to(q.dtype)
    read = torch.einsum("bnst,btc->bnsc", weights, rows[..., : up.shape[1]])
    return torch.einsum("bnsc,nec->bsne", read, up_value)


PADDING = torch.arange(S) < torch.tensor([S, S - 2])[:, None]
"""Which tokens are there: the last sequence is padded on the right."""
HEADS = tensors((B, 3, 1, D + DR), (B, T, C), (B, T, DR), fixed(sparse.UP[: 3 * (D + E)]))
LONG = tensors((B, N, 1, D), (B, 4096, C), UP)
DEEP = tensors((B, N, 1, D + 64), F.pad(normal(1, B, T, C), (0, 512 - C)), (B, T, 64), weight(3, N * (D + E), 512))
"""The widths of DeepSeek's latent and of its rotated lanes; most lanes are 0, so that sums are of few numbers."""
TOGETHER = tensors((B, N, 1, D + DR), (B, T, C + DR), UP)


def other_latent(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, other: Tensor) -> Tensor:
    """Values that are projected from another latent than the keys."""
    (k, _), (_, v) = keys_values(latent, rope, up), keys_values(other.to(q.dtype), rope, up)
    return scaled_dot_product_attention(q, k, v, scale=SCALE)


def rotated_twice(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor) -> Tensor:
    """Every head has rotated lanes of its own."""
    heads = linear(latent, up).unflatten(-1, (N, -1)).transpose(1, 2)
    k = torch.cat((heads[..., :D], rope.unsqueeze(1) * torch.arange(1, N + 1, dtype=q.dtype).view(1, N, 1, 1)), dim=-1)
    return scaled_dot_product_attention(q, k, heads[..., D:], scale=SCALE)


EXAMPLES = (
    Example("step", step, given(1, T)),
    Example("prompt", prompt, given()),
    Example("chunk", chunk, given(S, T)),
    Example("more queries than keys", few_keys, given(S, sparse.FEW)),
    Example("absorbed", absorbed(), given(1, T)),
    Example("absorbed, three heads", absorbed(), HEADS),
    Example("step, wide", step, DEEP),
    Example("without rotated lanes", unrotated(), LONG),
    Example("without rotated lanes, with its sums", unrotated(shares_and_sums), LONG),
    Example("of one cache", of_one_cache, TOGETHER),
    Example("at a position", at_position, given(1, T, sparse.POSITION)),
    Example("padded", by_hand(lambda there: ~(causal(S, S) & there[:, None, None])), given(S, S, PADDING)),
    Example("another latent", other_latent, given(1, T, normal(9, B, T, C).float()), "different latents"),
    Example("rotated lanes of each head", rotated_twice, given(1, T), "one that all heads share"),
)

TRIED = {"latent_attention": EXAMPLES}
