"""Attention over listed keys as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import linear, relu, scaled_dot_product_attention, softmax

from fusion import Example
from patterns.examples.inputs import Inputs, normal

B, N, S, T, D, DR, C, E = 2, 4, 6, 16, 16, 8, 32, 16
H, LISTED, FEW = 4, 4, 5
SCALE = (D + DR) ** -0.5


def latents(queries: int = S, keys: int = S) -> Inputs:
    """Queries [B, N, S, D + Dr], latents [B, T, C], keys that all heads share [B, T, Dr], the projection of latents."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shapes = (B, N, queries, D + DR), (B, keys, C), (B, keys, DR), (N * (D + E), C)
        q, latent, rope, up = (normal(seed, *shape) for seed, shape in enumerate(shapes))
        return tuple(each.to(dtype) for each in (q, latent, rope, up / 8))

    return make


def indexed(queries: int = S, keys: int = S, *more: Callable[[], Tensor]) -> Inputs:
    """The same, with queries [B, S, H, T], keys [B, T, T] and weights [B, S, H] of an indexer.

    Every sum is a whole number that each dtype holds, and no two keys of a query have the same: key j counts lane j, of
    which the first head tells all apart, and the other heads add multiples of T.
    """

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        shuffled = torch.Generator().manual_seed(7)
        first = torch.rand(B, queries, 1, keys, generator=shuffled).argsort(-1) + 1
        others = torch.randint(-3, 4, (B, queries, H - 1, keys), generator=shuffled)
        weights = torch.tensor([1, keys, -keys, 2 * keys]).expand(B, queries, H)
        query, key = torch.cat((first, others), dim=2), torch.eye(keys).expand(B, keys, keys)
        index = (each.clone().to(dtype) for each in (query, key, weights))
        return *latents(queries, keys)(dtype), *index, *(each() for each in more)

    return make


def listed(queries: int = S, keys: int = S) -> Inputs:
    """The same as `latents`, with a list of keys [B, S, K], no two of them the same."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        places = torch.rand(B, queries, keys, generator=torch.Generator().manual_seed(7)).argsort(-1)[..., :LISTED]
        return *latents(queries, keys)(dtype), places

    return make


def position() -> Tensor:
    """Where the next token goes."""
    return torch.tensor(9)


def keys_values(latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, N, T, D + Dr] and values [B, N, T, E] of every head."""
    both = linear(latent, up).unflatten(-1, (N, D + E)).transpose(1, 2)
    nope, values = both.split((D, E), dim=-1)
    return torch.cat((nope, rope.unsqueeze(1).expand(-1, N, -1, -1)), dim=-1), values


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Matmuls around a softmax in float32."""
    scores = q @ k.transpose(-2, -1) * SCALE + mask
    return (softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v).transpose(1, 2)


def causal(queries: int, keys: int, at: Tensor | int = 0) -> Tensor:
    """Which keys stand at or before each query."""
    return torch.arange(keys)[None, :] <= (torch.arange(queries) + at)[:, None]


def hidden(seen: Tensor, dtype: torch.dtype, fill: float = -torch.inf) -> Tensor:
    """0 where a key is seen."""
    return torch.zeros(seen.shape, dtype=dtype).masked_fill(~seen, fill)


def by_matmul(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores [B, S, T] in float32, as transformers computes them."""
    scores = relu(query.float() @ key.float().transpose(-1, -2).unsqueeze(1) * T**-0.5)
    return ((weights.float() * H**-0.5).unsqueeze(-2) @ scores).squeeze(-2)


def by_einsum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Two einsums."""
    return torch.einsum("bsht,bsh->bst", relu(torch.einsum("bshd,btd->bsht", query, key)), weights)


def by_sum(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """A product and a sum, heads first."""
    scores = relu(query.transpose(1, 2) @ key.unsqueeze(1).transpose(2, 3))
    return (scores * weights.transpose(1, 2).unsqueeze(-1)).sum(1)


def chosen(scores: Tensor, count: int = LISTED) -> Tensor:
    """Booleans [B, S, T], true at the largest scores."""
    places = scores.topk(count, dim=-1).indices
    return torch.zeros(scores.shape, dtype=torch.bool).scatter(-1, places, True)


def found(score: Callable[..., Tensor], seen: Tensor, index: Sequence[Tensor]) -> Tensor:
    """The same, of the keys that are seen."""
    return chosen(score(*index).masked_fill(~seen, -torch.inf)) & seen


def by_sdpa(q: Tensor, kv: tuple[Tensor, Tensor], listed: Tensor) -> Tensor:
    """Attention to the keys at which booleans [B, S, T] are true."""
    return scaled_dot_product_attention(q, *kv, attn_mask=listed.unsqueeze(1))


def by_eager(q: Tensor, kv: tuple[Tensor, Tensor], listed: Tensor) -> Tensor:
    """The same with a mask that is added."""
    return eager(q, *kv, hidden(listed, q.dtype).unsqueeze(1))


def transformers(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """A prompt: masks are added, and filled in where a key is not listed."""
    mask = hidden(causal(S, S), q.dtype)
    places = (by_matmul(*index) + mask).topk(LISTED, dim=-1).indices.to(torch.int32)
    left = torch.ones(B, S, S, dtype=torch.bool).scatter(-1, places.long(), False).unsqueeze(1)
    return eager(q, *keys_values(latent, rope, up), mask.masked_fill(left, -torch.inf))


def deepseek(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """A prompt: the mask of the list is one of -inf, to which the causal one is added."""
    mask = hidden(causal(S, S), q.dtype)
    places = (by_einsum(*index) + mask).topk(LISTED)[1]
    listed = torch.full((B, S, S), -torch.inf, dtype=q.dtype).scatter_(-1, places, 0)
    return eager(q, *keys_values(latent, rope, up), (listed + mask).unsqueeze(1))


def booleans(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """A prompt: masks are booleans."""
    return by_sdpa(q, keys_values(latent, rope, up), found(by_sum, causal(S, S), index))


def step(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """One token over a cache that is filled up to its position."""
    return by_sdpa(q, keys_values(latent, rope, up), found(by_einsum, causal(1, T, index[3]), index[:3]))


def chunk(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Several tokens that are written into a cache first, at a position that does not count from its end."""
    query, key, weights, at = index
    at = at.clamp(min=0)
    places = torch.arange(S) + at
    latent = latent.index_copy(1, places, q[:, 0, :, :1] * up[0])
    mask = hidden(causal(S, T, at), q.dtype)
    listed = chosen(by_matmul(query, key, weights) + mask)
    return eager(q, *keys_values(latent, rope, up), mask.masked_fill(~listed, -torch.inf).unsqueeze(1))


def encoder(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Queries may see every key."""
    return by_eager(q, keys_values(latent, rope, up), chosen(by_sum(*index)))


def absorbed(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, places: Tensor) -> Tensor:
    """A list that comes from elsewhere."""
    listed = torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, places, True)
    return by_sdpa(q, keys_values(latent, rope, up), listed)


EXAMPLES = (
    Example("a prompt, as transformers writes it", transformers, indexed()),
    Example("a prompt, as DeepSeek writes it", deepseek, indexed()),
    Example("a prompt, with booleans", booleans, indexed()),
    Example("a step over a cache", step, indexed(1, T, position)),
    Example("a chunk written into a cache", chunk, indexed(S, T, position)),
    Example("an encoder", encoder, indexed()),
    Example("a list from elsewhere", absorbed, listed()),
)


def nothing_left(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, places: Tensor) -> Tensor:
    """A list that may hold nothing but keys behind the query, which then gives the mean."""
    seen = causal(S, S)
    listed = torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, places, True) & seen
    k, v = keys_values(latent, rope, up)
    scores = (q @ k.transpose(-2, -1) * SCALE).masked_fill(~listed.unsqueeze(1), torch.finfo(q.dtype).min)
    return softmax(scores, dim=-1) @ v


def scored(score: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A prompt whose keys are chosen by other scores."""

    def forward(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
        return by_eager(q, keys_values(latent, rope, up), found(score, causal(S, S), index))

    return forward


def not_rectified(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores that may be negative."""
    return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", query, key), weights)


def worst_first(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """The keys with the least scores."""
    return -by_einsum(query, key, weights)


def worst_weights(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Weights with the other sign."""
    return by_einsum(query, key, weights * -0.5)


def any_mask(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Beside the list, a mask that may be anything."""
    return by_eager(q, keys_values(latent, rope, up), found(by_einsum, index[3], index[:3]))


def chosen_unmasked(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Keys are chosen among all, then those behind the query are hidden, so that none may be left."""
    return by_eager(q, keys_values(latent, rope, up), chosen(by_einsum(*index)) & causal(S, S))


def unproven(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Several tokens over a cache that nothing was written into, so that they may stand behind its end."""
    return by_eager(q, keys_values(latent, rope, up), found(by_einsum, causal(S, T, index[3]), index[:3]))


def short(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Fewer keys than queries, of which the last ones see all."""
    return by_eager(q, keys_values(latent, rope, up), found(by_einsum, causal(S, FEW), index))


def anything() -> Tensor:
    """Booleans, true for a query and itself at least."""
    some = torch.rand(B, S, S, generator=torch.Generator().manual_seed(3)) > 0.5
    return some | torch.eye(S, dtype=torch.bool)


NOT_A_SUM = "not the sum over heads"
NO_KEY = "no key is left"
REJECTS = (
    Example("nothing left", nothing_left, listed(), NO_KEY),
    Example("scores that are not rectified", scored(not_rectified), indexed(), NOT_A_SUM),
    Example("the worst keys", scored(worst_first), indexed(), "not positive"),
    Example("negative weights", scored(worst_weights), indexed(), "not positive"),
    Example("any mask", any_mask, indexed(S, S, anything), "the mask asks for more"),
    Example("chosen without the mask", chosen_unmasked, indexed(), NO_KEY),
    Example("fewer keys than queries", short, indexed(S, FEW), "fewer keys than queries"),
    Example("positions that may be outside", unproven, indexed(S, T, position), "is not proven to be a causal order"),
)

TRIED = {"sparse_attention": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
