"""What resembles sparse attention by an indexer: less of it may be fused, and whatever is must mean the same."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .sparse_attention_base import HEADS, UNFUSED, B, K, X, choose, entry, hide, score
from .sparse_attention_blocks import PagedApart, in_pages
from .sparse_attention_lists import lowered_twice

SEVERAL = ("prefill", "chunk")
SUM = "they are not the sum over heads of weight *"
SIGN = "they are multiplied by a number that is not"


# scores of the indexer -----------------------------------------------------------------------------------------------


def turned_scores(q, k, w):
    return -score(q, k, w)


def turned_products(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1) * -(X**-0.5)) * w.unsqueeze(-1)).sum(2)


def turned_weights(q, k, w):
    return score(q, k, w * -0.5)


def without_relu(q, k, w):
    return ((q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).sum(2)


def head_by_head(q, k, w):
    """The same sum, of a product of each head."""
    return sum(w[:, :, n, None] * F.relu(q[:, :, n] @ k.mT) for n in range(HEADS))


def other_rectifier(q, k, w):
    return (F.gelu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).sum(2)


def leaky(q, k, w):
    return (F.leaky_relu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).sum(2)


def clamped_above_zero(q, k, w):
    return ((q @ k.mT.unsqueeze(1)).clamp(min=0.25) * w.unsqueeze(-1)).sum(2)


def clamped_on_both_sides(q, k, w):
    return ((q @ k.mT.unsqueeze(1)).clamp(0.0, 1.0) * w.unsqueeze(-1)).sum(2)


def shifted(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1) - 0.5) * w.unsqueeze(-1)).sum(2)


def rectified_sum(q, k, w):
    return F.relu(score(q, k, w))


def largest_head(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).amax(2)


def summed_queries(q, k, w):
    products = F.relu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)
    return products.sum(1, keepdim=True).expand_as(products).sum(2)


def weighted_by_key(q, k, w):
    products = (F.relu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).sum(2)
    return products * torch.arange(1, k.shape[1] + 1).to(k.dtype)


def weighted_by_query(q, k, w):
    return score(q, k, w) * w[..., :1].float()


def local_bias(q, k, w):
    return score(q, k, w) + torch.arange(k.shape[1]) * 0.125


def keys_of_queries(q, k, w):
    return (F.relu(q @ k.mT) * w.unsqueeze(-1)).sum(2)


def keys_of_queries_turned(q, k, w):
    products = F.relu(q.transpose(0, 1) @ k.mT.unsqueeze(1)).transpose(0, 1)
    return (products * w.unsqueeze(-1)).sum(2)


def one_weight(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1)) * w[:1, :1].unsqueeze(-1)).sum(2)


def one_weight_with_matmul(q, k, w):
    return (w[:1, :1].unsqueeze(-2) @ F.relu(q @ k.mT.unsqueeze(1))).squeeze(2)


def weights_of_keys(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1)) * k[..., :HEADS].mT.unsqueeze(1)).sum(2)


def of_the_first(q, k, w):
    return score(q[:1], k[:1], w[:1])


def whole_products(q, k, w):
    products = F.relu(q @ k.mT.unsqueeze(1)).to(torch.int32).to(q.dtype)
    return (products * w.unsqueeze(-1)).sum(2)


# lists ---------------------------------------------------------------------------------------------------------------


def smallest(scores, seen):
    return scores.masked_fill(~seen, math.inf).topk(min(K, scores.shape[-1]), dim=-1, largest=False).indices


def smallest_with_infinity(scores, seen):
    return (-scores.masked_fill(~seen, math.inf)).topk(min(K, scores.shape[-1]), dim=-1).indices


def without_mask(scores, seen):
    return scores.topk(min(K, scores.shape[-1]), dim=-1).indices


def masked_with_zero(scores, seen):
    return scores.masked_fill(~seen, 0.0).topk(min(K, scores.shape[-1]), dim=-1).indices


def softly_masked(scores, seen):
    return (scores - (~seen).to(scores.dtype)).topk(min(K, scores.shape[-1]), dim=-1).indices


def moved(scores, seen):
    return (choose(scores, seen) + 1).clamp(max=scores.shape[-1] - 1)


def wrapped(scores, seen):
    return choose(scores, seen) % 4


def windowed_list(scores, seen):
    t = scores.shape[-1]
    near = seen & (torch.arange(t) > seen.sum(-1, keepdim=True) - 1 - K)
    return scores.masked_fill(~near, -math.inf).topk(min(K, t), dim=-1).indices


def all_but_the_last(scores, seen):
    return choose(scores, seen)[..., :-1]


def all_but_the_first(scores, seen):
    return choose(scores, seen)[..., 1:]


def whole_scores(scores, seen):
    return (scores * 4).to(torch.int32).masked_fill(~seen, -100000).topk(min(K, scores.shape[-1]), -1).indices


def listed_twice(scores, seen):
    places = choose(scores, seen)
    return torch.cat((places, torch.zeros_like(places[..., :1])), -1)


def masked_in_two_shapes(scores, seen):
    t = scores.shape[-1]
    scores = scores.unsqueeze(1).masked_fill(~seen, -math.inf).squeeze(1)
    real = torch.arange(t) < (torch.arange(scores.shape[0]) * 2 + 3)[:, None, None]
    return scores.masked_fill(~real, -math.inf).topk(min(K, t), -1).indices


def masked_in_two_other_shapes(scores, seen):
    t = scores.shape[-1]
    real = torch.arange(t) < (torch.arange(scores.shape[0]) * 2 + 3)[:, None, None]
    scores = scores.masked_fill(~real, -math.inf).unsqueeze(1)
    return scores.masked_fill(~seen, -math.inf).topk(min(K, t), -1).indices.squeeze(1)


def masked_in_halves(scores, seen):
    b, s, t = scores.shape
    hidden = torch.ones(2 * s, t // 2, dtype=torch.bool).triu(1)
    halves = scores.reshape(b, 2 * s, t // 2).masked_fill(hidden, -math.inf)
    return halves.reshape(b, s, t).topk(min(K, t), -1).indices


def chosen_in_halves(scores, seen):
    b, s, t = scores.shape
    halves = scores.masked_fill(~seen, -math.inf).reshape(b, 2 * s, t // 2)
    return halves.topk(2, -1).indices.reshape(b, s, 4)


def masked_for_each(scores, seen):
    t = scores.shape[-1]
    real = torch.arange(t) < (torch.arange(B) * 2 + 3)[:, None, None]
    return scores.masked_fill(~(seen & real), -math.inf).topk(min(K, t), -1).indices


# masks ---------------------------------------------------------------------------------------------------------------


def only_listed(places, seen, x):
    return torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True).unsqueeze(1)


def all_but_listed(places, seen, x):
    hidden = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True)
    hidden = hidden & (torch.arange(seen.shape[-1]) > 0)  # so that every query sees a key
    return (~hidden & seen).unsqueeze(1)


def reaching_the_least(scores, seen):
    """Keys whose scores are as large as the least of the largest ones, of which there may be more."""
    scores = scores.masked_fill(~seen, -math.inf)
    return scores >= scores.topk(min(K, scores.shape[-1]), dim=-1).values[..., -1:]


def as_chosen(chosen, seen, x):
    return (chosen & seen).unsqueeze(1)


def listed_or_near(places, seen, x):
    near = seen & (torch.arange(seen.shape[-1]) >= seen.sum(-1, keepdim=True) - 2)
    return (only_listed(places, seen, x) & seen) | near


def listed_and_near(places, seen, x):
    near = seen & (torch.arange(seen.shape[-1]) >= seen.sum(-1, keepdim=True) - 3)
    return hide(places, near, x)


def listed_or_first(places, seen, x):
    return hide(places, seen, x) | (torch.arange(seen.shape[-1]) == 0)


def counted_once(places, seen, x):
    """Keys that a list names several times are left out."""
    few, ones = places % 4, torch.ones_like(places)
    counts = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.int64).scatter_add(-1, few, ones)
    return ((counts == 1) & seen).unsqueeze(1)


def counted_from_one(places, seen, x):
    """What is not listed is shown, too."""
    counts = torch.ones(*places.shape[:2], seen.shape[-1], dtype=torch.int64)
    return ((counts.scatter_add(-1, places, torch.ones_like(places)) > 0) & seen).unsqueeze(1)


def least(places, seen, x):
    listed = torch.ones(*places.shape[:2], seen.shape[-1])
    return ((listed.scatter_reduce(-1, places, torch.zeros(places.shape), "amin") > 0) & seen).unsqueeze(1)


def softly_hidden(places, seen, x):
    return torch.zeros(1, dtype=x.dtype) - (~hide(places, seen, x)).to(x.dtype)


def hidden_by_a_hundred(places, seen, x):
    return torch.where(hide(places, seen, x), 0.0, -100.0).to(x.dtype)


def written_twice(places, seen, x):
    listed = only_listed(places, seen, x).squeeze(1)
    return (listed.scatter(-1, places[..., :1], False) & seen | (torch.arange(seen.shape[-1]) == 0)).unsqueeze(1)


def two_lists(places, seen, x):
    second = places.flip(0)
    return hide(places, seen, x) | hide(second, seen, x)


def counted_from_the_end(places, seen, x):
    t = seen.shape[-1]
    return only_listed(t - 1 - places, seen, x) & seen | (torch.arange(t) == 0)


def for_other_queries(places, seen, x):
    return hide(places.flip(1), seen, x) | (torch.arange(seen.shape[-1]) == 0)


def for_other_sequences(places, seen, x):
    return hide(places.flip(0), seen, x)


def of_all(scores, seen):
    return scores.topk(min(K, scores.shape[-1]), -1).indices


def of_lowered(scores, seen):
    return (scores - 20000.0 * (~seen).to(scores.dtype)).topk(min(K, scores.shape[-1]), -1).indices


def of_others(scores, seen):
    return scores.masked_fill(seen, -math.inf).topk(min(K, scores.shape[-1]), -1).indices


def list_of_one_sequence(places, seen, x):
    listed = torch.zeros(places.shape[1], seen.shape[-1], dtype=torch.bool).scatter(-1, places[0], True)
    return (listed & seen)[None, None]


def list_of_the_first(places, seen, x):
    return (only_listed(places, seen, x)[:1] & seen).expand(x.shape[0], -1, -1, -1)


def lists_of_more(places, seen, x):
    more = torch.cat((places, places[:1]))
    return only_listed(more, seen, x)[: x.shape[0]] & seen


def list_of_the_last(places, seen, x):
    return only_listed(places, seen, x)[-1:] & seen


LOOKALIKES = (
    entry("turned_scores", score=turned_scores, indexer=0, reason=SIGN),
    entry("turned_products", score=turned_products, indexer=0, reason=SUM),
    entry("turned_weights", score=turned_weights, indexer=0, reason=SIGN),
    entry("without_relu", score=without_relu, indexer=0, reason=SUM),
    entry("head_by_head", ("chunk",), score=head_by_head, indexer=0, reason=SUM),
    entry("other_rectifier", score=other_rectifier, indexer=0, reason=SUM),
    entry("leaky", score=leaky, indexer=0, reason=SUM),
    entry("clamped_above_zero", score=clamped_above_zero, indexer=0, reason=SUM),
    entry("clamped_on_both_sides", score=clamped_on_both_sides, indexer=0, reason=SUM),
    entry("shifted", score=shifted, indexer=0, reason=SUM),
    entry("rectified_sum", score=rectified_sum, indexer=0, reason=SUM),
    entry("largest_head", score=largest_head, indexer=0, reason=SUM),
    entry("summed_queries", score=summed_queries, indexer=0, reason=SUM),
    entry("weighted_by_key", score=weighted_by_key, indexer=0, reason=SUM),
    entry("weighted_by_query", score=weighted_by_query, indexer=0, reason=SUM),
    entry("local_bias", score=local_bias, indexer=0),
    entry("smallest", choose=smallest, indexer=0),
    entry("smallest_with_infinity", choose=smallest_with_infinity, indexer=0),
    entry("without_mask", choose=without_mask, hide=listed_or_first, **UNFUSED | {"indexer": 1}),
    entry("masked_with_zero", choose=masked_with_zero, hide=listed_or_first, **UNFUSED),
    entry("softly_masked", choose=softly_masked, hide=listed_or_first, **UNFUSED),
    entry("moved", choose=moved, indexer=0),
    entry("wrapped", choose=wrapped, indexer=0),
    entry("windowed_list", choose=windowed_list, indexer=0),
    entry("all_but_the_last", choose=all_but_the_last),
    entry("all_but_the_first", ("chunk", "step", "grow"), choose=all_but_the_first, indexer=0),
    entry("only_listed", ("prefill", "chunk", "step"), hide=only_listed, indexer=0),
    entry("all_but_listed", hide=all_but_listed, **UNFUSED),
    entry("reaching_the_least", choose=reaching_the_least, hide=as_chosen, **UNFUSED),
    entry("listed_or_near", hide=listed_or_near, **UNFUSED),
    entry("listed_and_near", ("prefill", "chunk", "step"), hide=listed_and_near, indexer=0),
    entry("listed_or_first", hide=listed_or_first, **UNFUSED),
    entry("counted_once", ("chunk",), hide=counted_once, **UNFUSED),
    entry("counted_from_one", ("chunk",), hide=counted_from_one, indexer=0, sparse=0),
    entry("least", ("chunk",), hide=least, **UNFUSED),
    entry("softly_hidden", hide=softly_hidden, **UNFUSED),
    entry("hidden_by_a_hundred", hide=hidden_by_a_hundred, **UNFUSED),
    entry("written_twice", hide=written_twice, **UNFUSED),
    entry("two_lists", hide=two_lists, **UNFUSED),
    entry("counted_from_the_end", hide=counted_from_the_end, **UNFUSED),
    entry("for_other_queries", hide=for_other_queries, **UNFUSED),
    entry("for_other_sequences", hide=for_other_sequences, indexer=0),
    entry("chosen_of_all", ("chunk",), choose=of_all, hide=lowered_twice, sparse=0),
    entry("chosen_of_lowered", ("chunk",), choose=of_lowered, hide=lowered_twice, **UNFUSED, reason="see fewer keys"),
    entry("chosen_of_others", ("chunk",), choose=of_others, hide=lowered_twice, **UNFUSED, reason="topk of that sum"),
    entry("keys_of_queries", ("chunk",), score=keys_of_queries, tokens=2, indexer=0, reason=SUM),
    entry("keys_of_queries_turned", ("chunk",), score=keys_of_queries_turned, tokens=2, indexer=0, reason=SUM),
    entry("paged_apart", ("step",), block=PagedApart, cache=in_pages, reason="have one each"),
    entry("one_weight", score=one_weight),
    entry("one_weight_with_matmul", score=one_weight_with_matmul),
    entry("weights_of_keys", score=weights_of_keys, indexer=0, reason=SUM),
    entry("whole_products", score=whole_products, indexer=0, reason=SUM),
    entry("whole_scores", choose=whole_scores, indexer=0),
    entry("listed_twice", choose=listed_twice, indexer=0),
    entry("masked_in_two_shapes", choose=masked_in_two_shapes, indexer=0, reason="permuted or reshaped"),
    entry("masked_in_two_other_shapes", choose=masked_in_two_other_shapes, indexer=0, reason="permuted or reshaped"),
    entry("list_of_one_sequence", hide=list_of_one_sequence, indexer=0),
    entry("list_of_the_first", hide=list_of_the_first, **UNFUSED),
    entry("list_of_the_last", hide=list_of_the_last, **UNFUSED),
    entry("lists_of_more", hide=lists_of_more, **UNFUSED, reason="there is not one for each query"),
    entry("masked_in_halves", ("chunk",), choose=masked_in_halves, indexer=0, reason=SUM),
    entry("chosen_in_halves", ("chunk",), choose=chosen_in_halves, indexer=0, reason=SUM),
    entry("of_the_first", ("chunk",), score=of_the_first, choose=masked_for_each, indexer=0, reason=SUM),
)  # fmt: skip
