"""Attention over listed keys as models write it, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, relu, scaled_dot_product_attention

from fusion import Example
from tests.examples.attention import in_float, written
from tests.examples.inputs import Inputs, Part, normal, tensors
from tests.examples.masks import added, causal

B, N, S, T, D, DR, C, E = 2, 4, 6, 16, 16, 8, 32, 16
H, LISTED, FEW = 4, 4, 5
SCALE = (D + DR) ** -0.5
UP, POSITION = normal(3, N * (D + E), C) / 8, torch.tensor(9)
Form = Callable[..., Any]
Listed = Callable[..., Tensor]


def latents(queries: int = S, keys: int = S, *more: Part, up: Tensor = UP) -> Inputs:
    """Queries [B, N, S, D + Dr], latents [B, T, C], keys that all heads share [B, T, Dr], the projection of latents."""
    return tensors((B, N, queries, D + DR), (B, keys, C), (B, keys, DR), up, *more)


def index(queries: int, keys: int) -> tuple[Tensor, Tensor, Tensor]:
    """Queries [B, S, H, T], keys [T, T] and weights [B, S, H] of an indexer.

    Every sum is a whole number that each dtype holds, and no two keys of a query have the same: key j counts lane j, of
    which the first head tells all apart, and the other heads add multiples of T.
    """
    shuffled = torch.Generator().manual_seed(7)
    first = torch.rand(B, queries, 1, keys, generator=shuffled).argsort(-1) + 1
    others = torch.randint(-3, 4, (B, queries, H - 1, keys), generator=shuffled)
    weights = torch.tensor([1, keys, -keys, 2 * keys]).expand(B, queries, H)
    return torch.cat((first, others), dim=2).double(), torch.eye(keys).double(), weights.double()


def indexed(queries: int = S, keys: int = S, *more: Part) -> Inputs:
    """The same as `latents`, with queries, keys [B, T, T] and weights of an indexer."""
    query, key, weights = index(queries, keys)
    return latents(queries, keys, query, key.expand(B, -1, -1), weights, *more)


def listed(queries: int = S, keys: int = S) -> Inputs:
    """The same as `latents`, with a list of keys [B, S, K], no two of them the same."""
    order = torch.rand(B, queries, keys, generator=torch.Generator().manual_seed(7)).argsort(-1)
    return latents(queries, keys, order[..., :LISTED])


def keys_values(latent: Tensor, rope: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Keys [B, N, T, D + Dr] and values [B, N, T, E] of every head."""
    both = linear(latent, up).unflatten(-1, (N, D + E)).transpose(1, 2)
    nope, values = both.split((D, E), dim=-1)
    return torch.cat((nope, rope.unsqueeze(1).expand(-1, N, -1, -1)), dim=-1), values


def eager(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Matmuls around a softmax in float32."""
    return written(torch.add, in_float, scale=SCALE)(q, k, v, mask).transpose(1, 2)


def over_latent(attend: Form) -> Form:
    """Over keys and values that are expanded from a latent."""
    return lambda q, latent, rope, up, *more: attend(q, *keys_values(latent, rope, up), *more)


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


def found(score: Listed, seen: Listed = lambda: causal(S, S)) -> Listed:
    """The same, of the keys that are seen."""

    def find(query: Tensor, key: Tensor, weights: Tensor, *more: Tensor) -> Tensor:
        there = seen(*more)
        return chosen(score(query, key, weights).masked_fill(~there, -torch.inf)) & there

    return find


def at(places: Tensor) -> Tensor:
    """Booleans [B, S, S], true at places that are listed."""
    return torch.zeros(B, S, S, dtype=torch.bool).scatter(-1, places, True)


def by_sdpa(q: Tensor, k: Tensor, v: Tensor, listed: Tensor) -> Tensor:
    """Attention to the keys at which booleans [B, S, T] are true."""
    return scaled_dot_product_attention(q, k, v, attn_mask=listed.unsqueeze(1))


def by_eager(q: Tensor, k: Tensor, v: Tensor, listed: Tensor) -> Tensor:
    """The same with a mask that is added."""
    return eager(q, k, v, added(~listed, q.dtype).unsqueeze(1))


def hidden(q: Tensor, k: Tensor, v: Tensor, listed: Tensor) -> Tensor:
    """Other keys than those at which booleans [B, S, T] are true are filled with -inf: NaN without any."""
    return written(hidden=lambda: ~listed.unsqueeze(1), scale=SCALE)(q, k, v)


def over(find: Listed, attend: Form = by_eager) -> Form:
    """Over the keys that are found by further inputs."""
    return over_latent(lambda q, k, v, *more: attend(q, k, v, find(*more)))


@over_latent
def transformers(q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> Tensor:
    """A prompt: masks are added, and filled in where a key is not listed."""
    mask = added(~causal(S, S), q.dtype)
    places = (by_matmul(*index) + mask).topk(LISTED, dim=-1).indices.to(torch.int32)
    left = torch.ones(B, S, S, dtype=torch.bool).scatter(-1, places.long(), False).unsqueeze(1)
    return eager(q, k, v, mask.masked_fill(left, -torch.inf))


@over_latent
def deepseek(q: Tensor, k: Tensor, v: Tensor, *index: Tensor) -> Tensor:
    """A prompt: the mask of the list is one of -inf, to which the causal one is added."""
    mask = added(~causal(S, S), q.dtype)
    places = (by_einsum(*index) + mask).topk(LISTED)[1]
    listed = torch.full((B, S, S), -torch.inf, dtype=q.dtype).scatter_(-1, places, 0)
    return eager(q, k, v, (listed + mask).unsqueeze(1))


def chunk(q: Tensor, latent: Tensor, rope: Tensor, up: Tensor, *index: Tensor) -> Tensor:
    """Several tokens that are written into a cache first, at a position that does not count from its end."""
    query, key, weights, at = index
    at = at.clamp(min=0)
    places = torch.arange(S) + at
    latent = latent.index_copy(1, places, q[:, 0, :, :1] * up[0])
    mask = added(~causal(S, T, at), q.dtype)
    listed = chosen(by_matmul(query, key, weights) + mask)
    return eager(q, *keys_values(latent, rope, up), mask.masked_fill(~listed, -torch.inf).unsqueeze(1))


def lowered(seen: Listed) -> Form:
    """Other keys than those that are seen have the least number, by which a query without keys gives the mean."""
    return over_latent(written(hidden=lambda *more: ~seen(*more), least=True, scale=SCALE))


def not_rectified(query: Tensor, key: Tensor, weights: Tensor) -> Tensor:
    """Scores that may be negative."""
    return torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", query, key), weights)


@over_latent
def lowered_twice(q: Tensor, k: Tensor, v: Tensor, places: Tensor) -> Tensor:
    """Keys that are behind the query and not listed are lowered most: without any other, it sees the rest."""
    low = torch.finfo(torch.float32).min / 2
    listed = torch.full((B, S, S), low, dtype=torch.float32).scatter(-1, places, 0)
    return eager(q, k, v, (listed + added(~causal(S, S), torch.float32, low)).unsqueeze(1))


BEHIND = lowered(lambda places: (at(places) & causal(S, S)).unsqueeze(1))
"""A list that may hold nothing but keys behind the query."""
ANY = torch.rand(B, S, S, generator=torch.Generator().manual_seed(3)) > 0.5
ITSELF = ANY | torch.eye(S, dtype=torch.bool)
"""Any mask that shows a query at least itself."""
NOT_A_SUM = "not the sum over heads"
NO_KEY = "list has no visible key"
EXAMPLES = (
    Example("a prompt, as transformers writes it", transformers, indexed()),
    Example("a prompt, as DeepSeek writes it", deepseek, indexed()),
    Example("a prompt, with booleans", over(found(by_sum), by_sdpa), indexed()),
    Example(
        "a step over a cache", over(found(by_einsum, lambda at: causal(1, T, at)), by_sdpa), indexed(1, T, POSITION)
    ),
    Example("a chunk written into a cache", chunk, indexed(S, T, POSITION)),
    Example(
        "positions that may be outside", over(found(by_einsum, lambda at: causal(S, T, at))), indexed(S, T, POSITION)
    ),
    Example(
        "keys before each query, of which the first has none",
        over_latent(lambda q, k, v, *of: hidden(q, k, v, found(by_einsum, lambda: causal(S, S, -1))(*of))), indexed(),
    ),
    Example("an encoder", over(lambda *index: chosen(by_sum(*index))), indexed()),
    Example("a list from elsewhere", over(at), listed()),
    Example("nothing left", BEHIND, listed(), NO_KEY),
    Example("nothing left but keys that are lowered once", lowered_twice, listed(), "that are lowered least"),
    Example("scores that are not rectified", over(found(not_rectified)), indexed(), NOT_A_SUM, "by_places"),
    Example("the worst keys", over(found(lambda *index: -by_einsum(*index))), indexed(), "not positive", "by_places"),
    Example(
        "negative weights", over(found(lambda q, k, w: by_einsum(q, k, w * -0.5))), indexed(), "not positive",
        "by_places",
    ),
    Example(
        "any mask", over(found(by_einsum, lambda seen: seen)), indexed(S, S, ITSELF), "not proven to be a causal order",
        "by_places",
    ),
    Example("chosen without the mask", over(lambda *of: chosen(by_einsum(*of)) & causal(S, S)), indexed(), NO_KEY),
    Example(
        "fewer keys than queries", over(found(by_einsum, lambda: causal(S, FEW))), indexed(S, FEW),
        "fewer of them than queries",
    ),
)  # fmt: skip

TRIED = {"sparse_attention": EXAMPLES}
