"""Which lists are those of an indexer: -1 stands where a query does not see a key, of this query, and nowhere else."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import relu

from fusion.graph import Reading
from fusion.stages.canonicalise import canonicalise
from patterns.attention.masks.assumed import Assumed
from patterns.sparse.lists.read_lists import listed
from tests.engine.graphs import numbers, traced
from tests.examples.sparse_attention import by_einsum

S, T, H, D, K = 4, 8, 2, 4, 2
FEW, OTHERS = "a query may see fewer keys than topk lists", "-1 is written over other entries than those"
Scores = tuple[Tensor, Tensor, Tensor]


def said(form: Callable[..., Tensor], sequences: int, *more: Tensor) -> Any:
    """What is said of the list that a function returns, of an indexer's queries, keys and weights."""
    shapes = (sequences, S, H, D), (sequences, T, D), (sequences, S, H)
    given = [numbers(*shape, seed=seed) for seed, shape in enumerate(shapes)]
    graph = canonicalise(traced(form, *given, *more).graph)
    return listed(Assumed.of(graph), graph.value_of[graph.source.output_node().args[0][-1]])


def later(by: int = 1) -> Tensor:
    return torch.ones(S, T, dtype=torch.bool).triu(by)


def best(q: Tensor, k: Tensor, w: Tensor, by: int = 1) -> Any:
    """The best scores, and their places, of keys that do not stand behind the query."""
    return by_einsum(q, k, w).masked_fill(later(by), -math.inf).topk(K, -1)


def marked(places: Tensor, queries: int = S) -> Tensor:
    """-1 over what stands behind the row."""
    return torch.where(places <= torch.arange(queries)[:, None], places, -1)


# spellings -----------------------------------------------------------------------------------------------------------


def each_sequence(q, k, w):
    return marked(best(q, k, w).indices)


def one_without_its_dim(q, k, w):
    return marked(best(q, k, w).indices[0])


def scores_without_it(q, k, w):
    return marked(by_einsum(q, k, w)[0].masked_fill(later(), -math.inf).topk(K, -1).indices)


def weights_that_are_rectified(q, k, w):
    """They are products of queries as well, with one key."""
    scores = (relu(q @ k.mT.unsqueeze(1)).mT @ relu(q @ k[:, None, :1].mT)).squeeze(-1)
    return marked(scores.masked_fill(later(), -math.inf).topk(K, -1).indices)


def hidden_by(number: float) -> Callable[[Tensor, Tensor, Tensor], Any]:
    """The best scores, and their places, where those of keys behind the query are another number."""
    return lambda q, k, w: by_einsum(q, k, w).masked_fill(later(), number).topk(K, -1)


lowest, low = hidden_by(torch.finfo(torch.float32).min), hidden_by(-1e9)


def finite(q, k, w):
    scores, places = best(q, k, w)
    return places.where(scores.isfinite(), -1)


def infinite_and_negative(q, k, w):
    scores, places = best(q, k, w)
    return places.masked_fill(scores.isinf() & (scores < 0), -1)


def negative_infinite(q, k, w):
    scores, places = best(q, k, w)
    return torch.where(torch.isneginf(scores), torch.full_like(places, -1), places)


def finite_or_not(q, k, w):
    scores, places = best(q, k, w)
    return places.masked_fill((~scores.isfinite()) | scores.isnan(), -1)


def above_the_least(q, k, w):
    scores, places = lowest(q, k, w)
    return torch.where(scores > torch.finfo(scores.dtype).min, places, -1)


def below_half_of_the_least(q, k, w):
    scores, places = lowest(q, k, w)
    return places.masked_fill(scores <= torch.finfo(scores.dtype).min / 2, -1)


def not_far_below(q, k, w):
    scores, places = low(q, k, w)
    return torch.where(scores > -1e8, places, -1)


def lowered_and_far_below(q, k, w):
    scores, places = (by_einsum(q, k, w) + later() * -1e9).topk(K, -1)
    return torch.where(scores > -1e8, places, -1)


def by_rank(q, k, w):
    """The query sees so many keys, which are the first ones of its list."""
    counted = torch.arange(K) <= torch.arange(S)[:, None]
    return torch.where(counted, best(q, k, w).indices, -1)


def by_shares(q, k, w):
    """A softmax keeps the order, rounded or not, and so does a number that is added."""
    return marked((best_shares(q, k, w) + 1.0).topk(K, -1).indices)


def best_shares(q: Tensor, k: Tensor, w: Tensor) -> Tensor:
    """In bfloat16."""
    return by_einsum(q, k, w).masked_fill(later(), -math.inf).softmax(-1).bfloat16()


ASKED = (
    finite, infinite_and_negative, negative_infinite, finite_or_not, above_the_least, below_half_of_the_least,
    not_far_below, lowered_and_far_below, by_rank,
)  # fmt: skip
SPELLINGS = [
    (each_sequence, 2), (one_without_its_dim, 1), (scores_without_it, 1), (weights_that_are_rectified, 1),
    (by_shares, 2),
    *((form, 2) for form in ASKED),
]  # fmt: skip


@pytest.mark.rotates(6)
@pytest.mark.parametrize(("form", "sequences"), SPELLINGS)
def test_a_list_of_an_indexer(form: Callable[..., Tensor], sequences: int):
    found = said(form, sequences)
    assert isinstance(found, Reading)
    assert (found.captures["mask_kind"], found.captures["entries"]) == ("causal_upper_left", K)


# look-alikes ---------------------------------------------------------------------------------------------------------


def by_halves(q, k, w):
    """Queries of the second half as if they were those of the first."""
    return marked(best(q, k, w).indices.view(2, S // 2, K), S // 2).view(1, S, K)


def by_sequences(q, k, w):
    """As many sequences as queries: each by its own number in the place of the query's."""
    return marked(best(q, k, w).indices.flatten(1)).view(S, S, K)


def by_lengths_of_others(q, k, w, lengths):
    """Two pairs of sequences, the second by the lengths of the first."""
    hidden = torch.arange(T) >= lengths[:, None, None]
    places = by_einsum(q, k, w).masked_fill(hidden, -math.inf).topk(K, -1).indices.view(2, 2, S, K)
    return places.masked_fill(places >= lengths[:2].view(2, 1, 1, 1), -1).view(4, S, K)


def shares_that_are_finite(q, k, w):
    """As that of a hidden key is, which is 0."""
    shares, places = best_shares(q, k, w).topk(K, -1)
    return places.where(shares.isfinite(), -1)


def shares_above_zero(q, k, w):
    """The share of a key that is seen may be 0 as well."""
    shares, places = best_shares(q, k, w).topk(K, -1)
    return torch.where(shares > 0, places, -1)


def shares_of_halves(q, k, w):
    """Among the keys of each half."""
    return marked(by_einsum(q, k, w).unflatten(-1, (2, -1)).softmax(-1).flatten(-2).topk(K, -1).indices)


def scaled_above_a_number(q, k, w):
    """Scales of keys, of which the number that is added first is a part."""
    return ((by_einsum(q, k, w) + 1.0) * k[:, None, :, 0].square()).topk(K, -1).indices


def saturated(q, k, w):
    return by_einsum(q, k, w).sigmoid().topk(K, -1).indices


def above_zero(q, k, w):
    scores, places = best(q, k, w)
    return torch.where(scores > 0, places, -1)


def not_above_zero(q, k, w):
    scores, places = best(q, k, w)
    return places.masked_fill(scores <= 0, -1)


def above_the_lowest_of_others(q, k, w):
    return torch.where(best(q, k, w, 2).values > -math.inf, best(q, k, w).indices, -1)


def not_above_the_lowest_of_others(q, k, w):
    return best(q, k, w).indices.masked_fill(best(q, k, w, 2).values <= -math.inf, -1)


def below_the_least(q, k, w):
    """Of which there is none, though keys are hidden."""
    scores, places = lowest(q, k, w)
    return places.masked_fill(scores < torch.finfo(scores.dtype).min, -1)


def below_what_is_added(q, k, w):
    """A score that is lowered may be above."""
    scores, places = (by_einsum(q, k, w) + later() * -1e9).topk(K, -1)
    return places.masked_fill(scores <= -1e9, -1)


def below_what_is_scaled(q, k, w):
    """What is filled in is not what the scores are then."""
    scores, places = (by_einsum(q, k, w).masked_fill(later(), -1e9) * 1e-3).topk(K, -1)
    return places.masked_fill(scores <= -1e9, -1)


def positive_infinite(q, k, w):
    scores, places = best(q, k, w)
    return places.masked_fill(scores.isinf() & (scores > 0), -1)


def neither_far_above(q, k, w):
    """Some score may be so high."""
    scores, places = best(q, k, w)
    return torch.where((scores > -math.inf) & (scores < 1e6), places, -1)


def in_whole_numbers(q, k, w):
    """Where a score rounds to 0."""
    scores, places = lowest(q, k, w)
    return places.masked_fill(scores.to(torch.int32) == 0, -1)


def by_other_rank(q, k, w):
    return torch.where(torch.arange(K) < torch.arange(S)[:, None], best(q, k, w).indices, -1)


def by_rank_in_no_order(q, k, w):
    scores = by_einsum(q, k, w).masked_fill(later(), -math.inf)
    counted = torch.arange(K) <= torch.arange(S)[:, None]
    return torch.where(counted, scores.topk(K, -1, sorted=False).indices, -1)


def by_rank_from_a_key_on(q, k, w):
    """A query sees the keys behind it: these are no first ones."""
    scores = by_einsum(q, k, w).masked_fill(torch.ones(S, T, dtype=torch.bool).tril(-1), -math.inf)
    counted = torch.arange(K) >= torch.arange(S)[:, None]
    return torch.where(counted, scores.topk(K, -1).indices, -1)


def by_rank_of_all(q, k, w):
    """Of scores that nothing hides."""
    counted = torch.arange(K) <= torch.arange(S)[:, None]
    return torch.where(counted, by_einsum(q, k, w).topk(K, -1).indices, -1)


def where_nothing_is_seen(q, k, w):
    """By the first score of each list."""
    scores, places = best(q, k, w)
    return places.masked_fill(scores[..., :1] == -math.inf, -1)


def within_a_window(q, k, w):
    """As many keys before the last one as are listed, but for one."""
    key, query = torch.arange(T), torch.arange(S)[:, None]
    seen = (key < query + K) & (key > query)
    return by_einsum(q, k, w).masked_fill(~seen, -math.inf).topk(K, -1).indices


def in_bytes(q, k, w):
    return by_einsum(q, k, w).topk(K, -1).indices.to(torch.int8).long()


def best_of_each(q, k, w):
    return by_einsum(q, k, w).topk(1, -1).indices.squeeze(-1)


def one_behind_the_other(q, k, w):
    return by_einsum(q, k, w).topk(K, -1).indices.flatten(0, 1)


def one_query_by_weights_of_many(q, k, w):
    """As many queries as heads and lanes, but the products have no dim for them."""
    return (relu(q[:, 0, :, :H] @ k[..., :H].mT) * w[:, :H, :, None]).sum(2).topk(K, -1).indices


def weights_without_a_dim(q, k, w):
    """As many queries as heads, all by the same weights."""
    return (w[:, :1] @ relu(q[:, :H] @ k.mT.unsqueeze(1))).squeeze(2).topk(K, -1).indices


def keys_of_no_sequence(q, k, w):
    """As many sequences as lanes, of one query and one head each, and the same keys for all."""
    products = relu(q[:, 0, 0].sin() @ k[0].mT)[:, None, None]
    return (w[:, :1, None, :1] @ products).squeeze(2).topk(K, -1).indices


def worst_of_a_router(q, k, w):
    """Products are rectified far below."""
    return (-relu(q @ k.mT.unsqueeze(1))[:, :, 0].softmax(-1)).topk(K, -1).indices


LOOKALIKES: dict[Callable[..., Tensor], tuple[int, str | None]] = {
    by_halves: (1, OTHERS), by_sequences: (S, OTHERS), by_lengths_of_others: (4, OTHERS), above_zero: (1, OTHERS),
    not_above_zero: (1, OTHERS), above_the_lowest_of_others: (1, OTHERS), not_above_the_lowest_of_others: (1, OTHERS),
    below_the_least: (1, OTHERS), below_what_is_added: (1, OTHERS), below_what_is_scaled: (1, OTHERS),
    positive_infinite: (1, OTHERS), neither_far_above: (1, OTHERS), in_whole_numbers: (1, OTHERS),
    by_other_rank: (1, OTHERS), by_rank_in_no_order: (1, OTHERS), by_rank_of_all: (1, OTHERS),
    by_rank_from_a_key_on: (1, "not proven to be a causal order"), where_nothing_is_seen: (1, OTHERS),
    within_a_window: (1, FEW), in_bytes: (1, None), best_of_each: (2, None),
    one_behind_the_other: (2, None), one_query_by_weights_of_many: (1, None), weights_without_a_dim: (1, None),
    shares_that_are_finite: (1, OTHERS), shares_above_zero: (1, OTHERS), shares_of_halves: (1, None),
    scaled_above_a_number: (1, None), saturated: (1, "before topk"), keys_of_no_sequence: (D, None),
    worst_of_a_router: (1, None),
}  # fmt: skip


@pytest.mark.rotates(8)
@pytest.mark.parametrize("form", LOOKALIKES, ids=lambda each: each.__name__)
def test_no_list_of_an_indexer(form: Callable[..., Tensor]):
    sequences, why = LOOKALIKES[form]
    found = said(form, sequences, *([torch.tensor([2, 3, 1, 5])] if form is by_lengths_of_others else []))
    assert found == why if why is None else why in found
