"""Lists of keys that a model uses itself: as DeepSeek-V3.2, vLLM and SGLang write them, and what looks like them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from tests.corpus.base import activations
from tests.examples.sparse_attention import by_einsum, by_matmul, by_sum, index

B, S, T, K, LARGE = 2, 6, 16, 4, 128
Inputs = tuple[Tensor, ...]


def indexed(queries: int, keys: int) -> Inputs:
    """Queries [B, S, H, T], keys [B, T, T] and weights [B, S, H] whose sums differ and are rounded by no dtype."""
    query, key, weights = index(queries, keys)
    return query, key.expand(B, -1, -1).clone(), weights


def prompt(keys: int = T) -> Inputs:
    """As many queries as keys."""
    return indexed(keys if keys == LARGE else T, keys)


def step(keys: int = T) -> Inputs:
    return indexed(1, keys)


def with_lengths(keys: int = T) -> Inputs:
    """One query, and how many keys each sequence has, fewer than are listed of one."""
    return *indexed(1, keys), torch.tensor([K - 1, keys - 2])


def packed(keys: int = T) -> Inputs:
    """The last tokens of one sequence, [S, H, T], keys [T, T] and weights [S, H]."""
    query, key, weights = indexed(S, keys)
    return query[0], key[0], weights[0]


def attended(keys: int = T) -> Inputs:
    """`with_lengths`, and a query [B, S, N, D] and the rows [B, T, D] that it attends to."""
    lanes, heads = (576, 16) if keys == LARGE else (24, 4)
    return *with_lengths(keys), activations(3, B, 1, heads, lanes), activations(4, B, keys, lanes)


def attended_with_none(keys: int = T) -> Inputs:
    """The same, and one sequence has no keys."""
    query, key, weights, _, *rows = attended(keys)
    return query, key, weights, torch.tensor([0, keys - 2]), *rows


def attended_in_line(keys: int = T) -> Inputs:
    """The same of a prompt."""
    lanes, heads = (576, 16) if keys == LARGE else (24, 4)
    given = prompt(keys)
    return *given, activations(3, B, given[0].shape[1], heads, lanes), activations(4, B, keys, lanes)


def later(scores: Tensor) -> Tensor:
    """Where a key stands behind the query [S, T]."""
    return torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)


def hidden(scores: Tensor) -> Tensor:
    return scores.masked_fill(later(scores), -math.inf)


def attend(q: Tensor, kv: Tensor, places: Tensor, seen: Tensor | None) -> Tensor:
    return weighted(q, kv[torch.arange(B)[:, None, None], places.clamp(min=0)], seen)


def weighted(q: Tensor, rows: Tensor, seen: Tensor | None) -> Tensor:
    scores = q @ rows.mT * 0.3
    scores = scores if seen is None else torch.where(seen.unsqueeze(2), scores, -math.inf)
    weights = scores.softmax(-1, dtype=torch.float32).to(q.dtype)
    return weights @ rows[..., : 16 if q.shape[-1] == 24 else 512]


# spellings -----------------------------------------------------------------------------------------------------------


def returned(q, k, w):
    return by_einsum(q, k, w).topk(K, -1)[1]


def narrow(q, k, w):
    return by_matmul(q, k, w).topk(K, dim=-1).indices.to(torch.int32)


def of_tokens(q, k, w):
    """Heads first, as the reference functions of kernels have it."""
    scores = torch.einsum("mhd,nd->hmn", q.float(), k.float())
    return of_last((scores.relu() * w.unsqueeze(-1).transpose(0, 1)).sum(dim=0))


def of_tokens_by_a_product(q, k, w):
    """Tokens first, by one matrix."""
    return of_last((torch.matmul(q, k.T).relu() * w.unsqueeze(-1)).sum(1))


def of_last(scores: Tensor) -> Tensor:
    """The largest of the keys that the last queries see."""
    (queries, keys), places = scores.shape, torch.arange(scores.shape[1])
    unseen = places > torch.arange(keys - queries, keys)[:, None]
    return scores.masked_fill(unseen, -math.inf).topk(K, dim=-1)[1]


def as_many_as_there_are(q, k, w):
    scores = by_sum(q, k, w)
    return scores.topk(min(K, scores.shape[-1]), dim=-1).indices


def sorted_first(q, k, w):
    return by_einsum(q, k, w).sort(dim=-1, descending=True).indices[..., :K]


def marked_by_scores(q, k, w):
    best, places = hidden(by_einsum(q, k, w)).topk(K, -1)
    return places.masked_fill(best == -math.inf, -1)


def kept_by_scores(q, k, w):
    best, places = (
        by_matmul(q, k, w) + torch.zeros(q.shape[1], k.shape[1]).masked_fill(later(by_matmul(q, k, w)), -math.inf)
    ).topk(K)
    return torch.where(best > -math.inf, places, -1).to(torch.int32)


def marked_by_places(q, k, w):
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places <= torch.arange(q.shape[1])[:, None], places, -1)


def marked_by_the_mask(q, k, w):
    """The mask at the places that were found."""
    scores = by_einsum(q, k, w)
    places = hidden(scores).topk(K, -1).indices
    return places.masked_fill(later(scores).expand(scores.shape).gather(-1, places), -1)


def marked_by_length(q, k, w, lengths):
    scores = by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= lengths[:, None, None], -math.inf)
    places = scores.topk(K, -1).indices
    return places.masked_fill(places >= lengths[:, None, None], -1)


def with_weights_of_all(q, k, w):
    """One weight of each head, for all queries."""
    products = torch.einsum("bshd,btd->bhst", q, k).relu()
    return torch.einsum("bhst,h->bst", products, w[0, 0]).topk(K, -1).indices


def with_heads_last(q, k, w):
    """The products of a key stand together, and one matrix sums them."""
    products = torch.einsum("bshd,btd->bsth", q, k).relu()
    return (products * 0.5 @ w[0, 0]).topk(K, -1).indices


def with_heads_last_of_each(q, k, w):
    products = (k.unsqueeze(1) @ q.mT).relu().float()
    return (products @ w.float().unsqueeze(-1)).squeeze(-1).topk(K, -1).indices


def of_one_token(q, k, w):
    """The heads of one sequence's only token stand where others have positions."""
    products = (q[:1, 0] @ k[:1].mT).relu().float()
    return (w[:1, :1].float() @ products)[:, 0].topk(K, -1).indices


def of_one_head(q, k, w):
    return (q[:, :, 0] @ k.mT).relu().float().topk(K, -1).indices


def marked_where_not_finite(q, k, w):
    best, places = hidden(by_einsum(q, k, w)).topk(K, -1)
    return places.where(best.isfinite(), -1)


def marked_at_the_least(q, k, w):
    """What hides a key is a number of the dtype."""
    scores = by_matmul(q, k, w)
    least = torch.finfo(scores.dtype).min
    best, places = scores.masked_fill(later(scores), least).topk(K, -1)
    return torch.where(best > least / 2, places, -1)


def marked_by_rank(q, k, w):
    """Hidden keys are the last ones of a list."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return places.masked_fill(torch.arange(K) > torch.arange(q.shape[1])[:, None], -1)


def behind_a_window(q, k, w):
    """DeepSeek-V4: such keys stand behind others, and hidden ones are -1 all the same."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places > torch.arange(q.shape[1])[:, None], -1, places + 8).int()


def last_of_several(q, k, w):
    """Queries that stand behind so many keys that each sees enough."""
    scores = by_einsum(q[:, : K + 1], k, w[:, : K + 1])
    seen = torch.arange(k.shape[1]) <= torch.arange(K + 1)[:, None] + K - 1
    return scores.masked_fill(~seen, -math.inf).topk(K, -1).indices


def gathered(q, k, w, lengths, query, kv):
    places = marked_by_length(q, k, w, lengths)
    return attend(query, kv, places, places >= 0)


def gathered_behind_a_window(q, k, w, query, kv):
    """The rows of a list that is moved are gathered by it."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    moved = torch.where(places > torch.arange(q.shape[1])[:, None], -1, places + 8)
    return attend(query, torch.cat((kv[:, -8:], kv), 1), moved, moved >= 0)


def gathered_by_rank(q, k, w, lengths, query, kv):
    """As many of the best as there are keys."""
    scores = by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= lengths[:, None, None], -math.inf)
    return attend(query, kv, scores.topk(K, -1).indices, torch.arange(K) < lengths[:, None, None])


def gathered_and_returned(q, k, w, lengths, query, kv):
    places = returned(q, k, w)
    return attend(query, kv, places, None), places


def gathered_in_line(q, k, w, query, kv):
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return attend(query, kv, places, places <= torch.arange(q.shape[1])[:, None])


def gathered_by_flat_numbers(q, k, w, lengths, query, kv):
    """Rows of all sequences behind each other; the scores that are found say which entries count."""
    scores = by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= lengths[:, None, None], -math.inf)
    best, places = scores.topk(K, -1)
    rows = kv.reshape(-1, kv.shape[-1])[places + torch.arange(B)[:, None, None] * kv.shape[1]]
    return weighted(query, rows, best != -math.inf)


def gathered_by_flat_numbers_of_rows(q, k, w, lengths, query, kv):
    """The same of lists [B, K], flat themselves."""
    scores = by_einsum(q, k, w)[:, 0].masked_fill(torch.arange(k.shape[1]) >= lengths[:, None], -math.inf)
    places = scores.topk(K, -1).indices
    flat = (torch.arange(B).unsqueeze(1) * kv.shape[1] + places).flatten()
    rows = kv.flatten(0, 1).index_select(0, flat).view(B, 1, K, -1)
    return weighted(query, rows, (places < lengths[:, None])[:, None])


def gathered_from_other_sequences(q, k, w, lengths, query, kv):
    """The rows of a sequence begin before its own: the list of the first one is no list of the second."""
    scores = by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= lengths[:, None, None], -math.inf)
    best, places = scores.topk(K, -1)
    rows = kv.reshape(-1, kv.shape[-1])[places + torch.arange(B)[:, None, None] * (kv.shape[1] - 1)]
    return weighted(query, rows, best != -math.inf)


def gathered_of_one_query_each(q, k, w, lengths, query, kv):
    """-1 is written into lists [B, K], and taken out again to gather by."""
    scores = by_einsum(q, k, w)[:, 0].masked_fill(torch.arange(k.shape[1]) >= lengths[:, None], -math.inf)
    places = scores.topk(K, -1).indices
    places = places.masked_fill(places >= lengths[:, None], -1)
    rows = kv[torch.arange(B)[:, None], places.clamp(min=0)].unsqueeze(1)
    return weighted(query, rows, (places >= 0)[:, None])


def gathered_and_lowered(q, k, w, lengths, query, kv):
    """A query without keys gives the mean of what is listed, hidden or not."""
    hidden = torch.arange(k.shape[1]) >= lengths[:, None, None]
    places = by_einsum(q, k, w).masked_fill(hidden, -math.inf).topk(K, -1).indices
    rows = kv[torch.arange(B)[:, None, None], places]
    scores = query @ rows.mT * 0.3
    scores = scores.masked_fill((places >= lengths[:, None, None])[:, :, None], torch.finfo(scores.dtype).min)
    return scores.softmax(-1) @ rows[..., : 16 if query.shape[-1] == 24 else 512]


Form = Callable[..., Any]
RETURNED: dict[Form, Callable[[int], Inputs]] = {
    returned: step, narrow: prompt, as_many_as_there_are: step, sorted_first: step, marked_by_scores: prompt,
    kept_by_scores: prompt, marked_by_places: prompt, marked_by_the_mask: prompt, marked_by_length: with_lengths,
    last_of_several: prompt, of_tokens: packed, of_tokens_by_a_product: packed, marked_where_not_finite: prompt,
    marked_at_the_least: prompt, marked_by_rank: prompt, with_weights_of_all: step, of_one_head: prompt,
    with_heads_last: prompt, with_heads_last_of_each: prompt, of_one_token: step, behind_a_window: prompt,
}  # fmt: skip
GATHERED: dict[Form, Callable[[int], Inputs]] = {
    gathered: attended, gathered_and_returned: attended, gathered_in_line: attended_in_line,
    gathered_and_lowered: attended_with_none, gathered_by_rank: attended,
    gathered_behind_a_window: attended_in_line, gathered_by_flat_numbers: attended,
    gathered_by_flat_numbers_of_rows: attended, gathered_of_one_query_each: attended,
    gathered_from_other_sequences: attended,
}  # fmt: skip


# look-alikes ---------------------------------------------------------------------------------------------------------


def raw(q, k, w):
    """Places of hidden keys stay what they are."""
    return hidden(by_einsum(q, k, w)).topk(K, -1).indices


def of_a_length(q, k, w):
    """Only the first keys are seen, fewer than are listed."""
    scores = by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= K - 1, -math.inf)
    return scores.topk(K, -1).indices


def last_of_too_few(q, k, w):
    """The first query sees a key less than are listed."""
    scores = by_einsum(q[:, : K + 1], k, w[:, : K + 1])
    seen = torch.arange(k.shape[1]) <= torch.arange(K + 1)[:, None] + K - 2
    return scores.masked_fill(~seen, -math.inf).topk(K, -1).indices


def itself_too(q, k, w):
    """-1 for the query's own place as well."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places < torch.arange(q.shape[1])[:, None], places, -1)


def some_of_them(q, k, w):
    """The key right behind the query stays."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places <= torch.arange(q.shape[1])[:, None] + 1, places, -1)


def zeros(q, k, w):
    """Other numbers than -1."""
    best, places = hidden(by_einsum(q, k, w)).topk(K, -1)
    return places.masked_fill(best == -math.inf, 0)


def the_others(q, k, w):
    """-1 for those that are seen."""
    best, places = hidden(by_einsum(q, k, w)).topk(K, -1)
    return places.masked_fill(best != -math.inf, -1)


def never(q, k, w):
    """Scores that are lowered, but not to -inf."""
    scores = by_einsum(q, k, w)
    best, places = scores.masked_fill(later(scores), -30000.0).topk(K, -1)
    return places.masked_fill(best == -math.inf, -1)


def moved_to_none(q, k, w):
    """A number is taken away, by which a key may be -1."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places > torch.arange(q.shape[1])[:, None], -1, places - 1)


def moved_after_it_was_asked(q, k, w):
    """Which keys are seen is asked of places of other keys."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places + 8 > torch.arange(q.shape[1])[:, None], -1, places + 8)


def by_places(q, k, w):
    """-1 where a place is infinite, which none is."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return places.masked_fill(places.to(w.dtype) == -math.inf, -1)


def of_a_length_and_more(q, k, w):
    """A length that may be negative, and as many keys as are listed behind it."""
    lengths = k[:, 0, 0].to(torch.int64)[:, None, None]
    return by_einsum(q, k, w).masked_fill(torch.arange(k.shape[1]) >= lengths + K, -math.inf).topk(K, -1).indices


def by_other_scores(q, k, w):
    """The scores of another list."""
    places, best = hidden(by_einsum(q, k, w)).topk(K, -1).indices, hidden(by_einsum(q, k, w * 2)).topk(K + 1, -1).values
    return places.masked_fill(best[..., 1:] == -math.inf, -1)


def of_the_next(q, k, w):
    """-1 where the list of the next query has it."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return places.masked_fill(places.roll(1, 1) > torch.arange(q.shape[1])[:, None], -1)


def of_two_lengths(q, k, w):
    """The list of every query twice, each cut off at a place of its own."""
    places = hidden(by_einsum(q, k, w)).topk(K, -1).indices
    return torch.where(places <= torch.tensor([3, 9])[:, None, None, None], places, -1)


_FEW, _OTHERS = "a query may see fewer keys than topk lists", "-1 is written over other entries than those"
LOOKALIKES: dict[Form, str] = {
    raw: _FEW, of_a_length: _FEW, last_of_too_few: _FEW, itself_too: _OTHERS, some_of_them: _OTHERS, zeros: _OTHERS,
    the_others: _OTHERS, never: _OTHERS, by_places: _OTHERS, of_a_length_and_more: _FEW, by_other_scores: _OTHERS,
    of_the_next: _OTHERS, of_two_lengths: _FEW, moved_to_none: _FEW, moved_after_it_was_asked: _OTHERS,
}  # fmt: skip
