"""Indexers of int8 queries and keys as people write them, and what looks like them.

Every sum is a number that each dtype holds, and no two keys of a query have the same: the first head counts odd
numbers, the others multiples of 32, and scales are powers of 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import relu

S, T, H, K, D, SIZE = 3, 16, 3, 4, 24, 16
Inputs = tuple[Tensor, ...]
Form = Callable[..., Any]


def tokens(batch: int = 2, queries: int = S, keys: int = T, lanes: int = D) -> Inputs:
    """Queries [B, S, H, D] in floats, int8 keys [B, T, D] with scales [B, T] in float16, and weights [B, S, H]."""
    shuffled = torch.Generator().manual_seed(5)
    odd = torch.stack([torch.randperm(T, generator=shuffled) for _ in range(batch * queries)]) * 2 + 1
    others = torch.randint(-1, 2, (batch, queries, H - 1, T), generator=shuffled)
    numbers = torch.cat((odd.view(batch, queries, 1, T), others), dim=2).double()
    query = torch.zeros(batch, queries, H, lanes, dtype=torch.float64)
    query[..., :T], query[..., -1] = numbers, 127
    query = query * torch.tensor([1.0, 2.0, 1.0]).view(H, 1)
    key = torch.eye(T, lanes)[torch.arange(keys) % T].expand(batch, -1, -1).to(torch.int8).clone()
    of_keys = 2.0 ** torch.randint(-1, 2, (batch, keys), generator=shuffled)
    weights = torch.tensor([1.0, 32, -32], dtype=torch.float64).expand(batch, queries, H)
    return query, key, of_keys.to(torch.float16), weights.clone()


def step(batch: int = 2) -> Inputs:
    return tokens(batch, 1)


def paged(batch: int = 2) -> Inputs:
    """The keys in pages, of which a table names some, and how many each sequence has."""
    query, key, scale, weights = tokens(batch)
    table = torch.arange(1, batch + 1).flip(0).view(batch, 1)
    pages, scales = torch.zeros(batch + 2, SIZE, D, dtype=torch.int8), torch.ones(batch + 2, SIZE, dtype=torch.float16)
    pages[table[:, 0]], scales[table[:, 0]] = key, scale
    return query, pages, scales, weights, table, torch.tensor([T - 1, K - 1][:batch])


def quantised(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rows in int8, with scales [.., 1] in float32."""
    scale = x.float().abs().amax(-1, keepdim=True) / 127
    return (x.float() / scale).round().clamp(-128, 127).to(torch.int8), scale


def products(q8: Tensor, k8: Tensor) -> Tensor:
    """[B, S, H, T] in float32."""
    return torch.einsum("bshd,btd->bsht", q8.float(), k8.float())


def best(scores: Tensor, count: int = K) -> Tensor:
    return scores.topk(count, -1).indices


# spellings -----------------------------------------------------------------------------------------------------------


def folded(q, k8, s_k, w):
    """Scales of queries go into the weights, those of keys behind the sum."""
    q8, s_q = quantised(q)
    weights = w.float() * s_q.squeeze(-1)
    scores = torch.einsum("bsht,bsh->bst", relu(products(q8, k8)), weights)
    return best(scores * s_k.float().unsqueeze(1))


def by_products(q, k8, s_k, w):
    """Every factor behind the relu, then a sum."""
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8)) * s_k.float()[:, None, None] * s_q * w.float().unsqueeze(-1)
    return best(scores.sum(2))


def heads_first(q, k8, s_k, w):
    """Of heads [B, H, S, T], in the model's own dtype; scales of queries below the relu."""
    q8, s_q = quantised(q.transpose(1, 2))
    scores = q8.to(q.dtype) @ k8.to(q.dtype).unsqueeze(1).mT
    scores = relu(scores * s_q.to(q.dtype)) * w.transpose(1, 2).unsqueeze(-1)
    return best(scores.sum(1) * s_k.to(q.dtype).unsqueeze(1))


def in_int32(q, k8, s_k, w):
    """Sums in int32."""
    q8, s_q = quantised(q)
    scores = relu((q8.int().flatten(1, 2) @ k8.int().mT).float()).unflatten(1, q8.shape[1:3])
    scores = ((w.float() * s_q.squeeze(-1)).unsqueeze(-2) @ (scores * s_k.float()[:, None, None])).squeeze(-2)
    return best(scores)


def queries_first(q, k8, s_k, w):
    """Queries are dequantised, keys are not."""
    q8, s_q = quantised(q)
    scores = torch.einsum("bshd,btd->bsht", q8.float() * s_q, k8.float()).clamp(min=0)
    return best(torch.einsum("bsht,bsh->bst", scores * s_k.float()[:, None, None], w.float()))


def both_first(q, k8, s_k, w):
    """Both are dequantised, keys by scales that a bound keeps positive."""
    q8, s_q = quantised(q)
    keys = k8.to(q.dtype) * s_k.clamp(min=2.0**-14).to(q.dtype).unsqueeze(-1)
    scores = torch.einsum("bshd,btd->bsht", q8.to(q.dtype) * s_q.to(q.dtype), keys)
    return best(torch.einsum("bsht,bsh->bst", relu(scores), w))


def in_float16(q, k8, s_k, w):
    """Weights and scales as the operator takes them; positive numbers are left out."""
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * 0.125) * (w.half() * s_q.half().squeeze(-1)).float().unsqueeze(-1) * 0.25
    return best(scores.sum(-2) * s_k.float().unsqueeze(1))


def behind_one_another(q, k8, s_k, w):
    """A prompt whose last queries these are, and -1 for what they do not see."""
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * (w * s_q.squeeze(-1)).unsqueeze(-1)).sum(2) * s_k.unsqueeze(1)
    seen = torch.arange(T) <= torch.arange(S)[:, None] + 1
    values, places = scores.masked_fill(~seen, -math.inf).topk(K, -1)
    return places.masked_fill(values == -math.inf, -1).int()


def from_pages(q, pages, scales, w, table, lengths):
    """Keys and scales are gathered by one table."""
    q8, s_q = quantised(q)
    k8, s_k = pages[table].flatten(1, 2), scales[table].flatten(1, 2)
    scores = torch.einsum("bsht,bsh->bst", relu(products(q8, k8)), w.float() * s_q.squeeze(-1)) * s_k.float()[:, None]
    hidden = torch.arange(T) >= lengths[:, None, None]
    places = best(scores.masked_fill(hidden, -math.inf))
    return torch.where(places < lengths[:, None, None], places, -1)


def from_rows_of_pages(q, pages, scales, w, table, lengths):
    """The scales lie as [Block, Size, 1]; every row by its own number."""
    q8, s_q = quantised(q)
    slots = (table.unsqueeze(-1) * SIZE + torch.arange(SIZE)).flatten(1)
    k8, s_k = pages.flatten(0, 1)[slots], scales.unsqueeze(-1).flatten(0, 1)[slots]
    scores = relu(products(q8, k8)) * s_k.float().mT.unsqueeze(1) * s_q * w.float().unsqueeze(-1)
    hidden = torch.arange(T) >= lengths[:, None, None]
    places = best(scores.sum(2).masked_fill(hidden, -math.inf))
    return torch.where(places < lengths[:, None, None], places, -1)


def by_computed_scales(q, k8, s_k, w):
    """Scales of keys are functions of a product of matrices."""
    scale = (s_k @ torch.eye(T, dtype=s_k.dtype)).abs().float().unsqueeze(1)
    q8, s_q = quantised(q)
    scores = torch.einsum("bsht,bsh->bst", relu(products(q8, k8)), w.float() * s_q.squeeze(-1))
    return best(scale * scores)


ROWS: dict[Form, Callable[[int], Inputs]] = {
    folded: tokens, by_products: tokens, heads_first: tokens, in_int32: tokens, queries_first: step, both_first: tokens,
    in_float16: step, behind_one_another: tokens, by_computed_scales: tokens,
}  # fmt: skip
PAGES: dict[Form, Callable[[int], Inputs]] = {from_pages: paged, from_rows_of_pages: paged}


# look-alikes: what they are, where the operator of floats still takes them, and what is refused ----


def of_any_sign(q, k8, s_k, w):
    """Scales of keys below the relu, of which nothing is known."""
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8) * s_k.float()[:, None, None]) * s_q * w.float().unsqueeze(-1)
    return best(scores.sum(2))


def of_any_sign_first(q, k8, s_k, w):
    """Keys are dequantised by them."""
    q8, s_q = quantised(q)
    keys = k8.to(q.dtype) * s_k.to(q.dtype).unsqueeze(-1)
    scores = torch.einsum("bshd,btd->bsht", q8.to(q.dtype) * s_q.to(q.dtype), keys)
    return best(torch.einsum("bsht,bsh->bst", relu(scores), w))


def of_queries_with_any_sign(q, k8, s_k, w):
    """Queries in int8 by scales that are not the largest of a row."""
    scores = relu(products(q.to(torch.int8), k8) * w.float().unsqueeze(-1)) * s_k.float()[:, None, None]
    return best((scores * w.float().unsqueeze(-1)).sum(2))


def without_relu(q, k8, s_k, w):
    q8, s_q = quantised(q)
    return best((products(q8, k8) * s_k.float()[:, None, None] * s_q * w.float().unsqueeze(-1)).sum(2))


def of_floats(q, k8, s_k, w):
    """Queries that are no whole numbers."""
    scores = relu(products(q, k8)) * w.float().unsqueeze(-1)
    return best(scores.sum(2) * s_k.float().unsqueeze(1))


def with_zero_points(q, k8, s_k, w):
    """A key stands for k8 minus a number of its row."""
    q8, s_q = quantised(q)
    keys = k8.float() - k8.float().mean(-1, keepdim=True).round()
    scores = relu(torch.einsum("bshd,btd->bsht", q8.float(), keys)) * s_k.float()[:, None, None]
    return best((scores * s_q * w.float().unsqueeze(-1)).sum(2))


def with_weights_added(q, k8, s_k, w):
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * s_q + w.float().unsqueeze(-1)) * s_k.float()[:, None, None]
    return best(scores.sum(2))


def by_groups_of_lanes(q, k8, s_k, w):
    """A scale for every eight lanes of a key."""
    q8, s_q = quantised(q)
    groups = torch.stack((s_k, s_k * 2, s_k * 4), -1).to(q.dtype).unsqueeze(-1)
    keys = (k8.unflatten(-1, (3, -1)).to(q.dtype) * groups).flatten(-2)
    scores = torch.einsum("bshd,btd->bsht", q8.to(q.dtype) * s_q.to(q.dtype), keys)
    return best(torch.einsum("bsht,bsh->bst", relu(scores), w))


def by_scales_of_queries(q, k8, s_k, w):
    """As many queries as keys, each times the scale of the key at its own place: of this order is none."""
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8)) * s_k.float()[:, :, None, None] * s_q * w.float().unsqueeze(-1)
    return best(scores.sum(2))


def by_scales_of_heads(q, k8, s_k, w):
    """A scale of each key and head."""
    q8, s_q = quantised(q)
    scales = s_k.float()[:, None, None] * torch.tensor([1.0, 2.0, 4.0])[:, None]
    return best((relu(products(q8, k8)) * scales * s_q * w.float().unsqueeze(-1)).sum(2))


def by_scales_of_keys_and_heads(q, k8, s_k, w):
    """A scale of each key, and one of each key and head."""
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8)) * s_k.float()[:, None, None] * 2.0 ** (torch.arange(H)[:, None] * torch.arange(T))
    return best((scores * s_q * w.float().unsqueeze(-1)).sum(2))


def by_scales_of_pairs(q, k8, s_k, w):
    """A scale of each query and key, behind the sum."""
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * s_q * w.float().unsqueeze(-1)).sum(2)
    return best(scores * (s_k.float().unsqueeze(1) * torch.arange(1, S + 1)[:, None]).abs())


def by_scales_of_another(q, k8, s_k, w):
    """As many sequences as queries, each query by the scales of the sequence of its number."""
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * s_q * w.float().unsqueeze(-1)).sum(2)
    return best(scores * s_k.float().unsqueeze(0))


def in_bytes(q, k8, s_k, w):
    """Sums that wrap round."""
    q8, s_q = quantised(q)
    scores = relu((q8.flatten(1, 2) @ k8.mT).float()).unflatten(1, q8.shape[1:3]) * s_k.float()[:, None, None]
    return best((scores * s_q * w.float().unsqueeze(-1)).sum(2))


def in_float32(q, k8, s_k, w):
    """Scales of keys in float32, of which float16 does not hold all."""
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8)) * (s_k.float() * 3).unsqueeze(1).unsqueeze(1).exp()
    return best((scores * s_q * w.float().unsqueeze(-1)).sum(2))


def behind_the_mask(q, k8, s_k, w):
    """-inf times a scale."""
    q8, s_q = quantised(q)
    scores = (relu(products(q8, k8)) * s_q * w.float().unsqueeze(-1)).sum(2)
    seen = torch.arange(T) <= torch.arange(S)[:, None] + K
    return best(scores.masked_fill(~seen, -math.inf) * s_k.float().unsqueeze(1))


def times_a_negative_number(q, k8, s_k, w):
    q8, s_q = quantised(q)
    scores = relu(products(q8, k8)) * s_k.float()[:, None, None] * s_q * (w.float() * -0.5).unsqueeze(-1)
    return best(scores.sum(2))


def queries_by_a_negative_number(q, k8, s_k, w):
    """Queries are dequantised by it, below the relu."""
    q8, s_q = quantised(q)
    scores = torch.einsum("bshd,btd->bsht", q8.float() * -0.5 * s_q, k8.float()).relu()
    return best((scores * s_k.float()[:, None, None] * w.float().unsqueeze(-1)).sum(2))


def by_one_scale(q, k8, s_k, w):
    """One scale of all keys."""
    q8, s_q = quantised(q)
    return best((relu(products(q8, k8)) * s_k.float().amax() * s_q * w.float().unsqueeze(-1)).sum(2))


def by_two_tables(q, pages, scales, w, table, lengths):
    """Scales by a table of their own: that of the operator names both."""
    q8, s_q = quantised(q)
    k8, s_k = pages[table].flatten(1, 2), scales[(table + 1) % pages.shape[0]].flatten(1, 2)
    scores = (relu(products(q8, k8)) * s_q * w.float().unsqueeze(-1)).sum(2) * s_k.float().unsqueeze(1)
    hidden = torch.arange(T) >= lengths[:, None, None]
    places = best(scores.masked_fill(hidden, -math.inf))
    return torch.where(places < lengths[:, None, None], places, -1)


_ROW = "no scale of each row"
REFUSED: dict[Form, tuple[str, Callable[[], Inputs]]] = {
    of_any_sign: ("not proven to be positive", tokens),
    of_queries_with_any_sign: ("not proven to be positive", tokens),
    by_scales_of_queries: (_ROW, lambda: tokens(2, T)),
    by_scales_of_heads: (_ROW, tokens),
    by_scales_of_keys_and_heads: (_ROW, tokens),
    by_scales_of_pairs: (_ROW, tokens),
    by_scales_of_another: (_ROW, lambda: tokens(S)),
    by_one_scale: (_ROW, tokens),
    in_bytes: ("wrap round", tokens),
    in_float32: ("held in torch.float32", tokens),
    behind_the_mask: ("they are multiplied by scales of keys", tokens),
    times_a_negative_number: ("not positive", tokens),
    queries_by_a_negative_number: ("not positive", tokens),
}
UNLIKE = (without_relu, of_floats, with_zero_points, with_weights_added)
"""Nothing that an indexer sums."""
FLOATS = (of_any_sign_first, by_groups_of_lanes)
"""Rows that are dequantised first: the operator of floats takes them."""
