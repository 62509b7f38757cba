"""Sparse attention, as people write the scores of its indexer, the lists, the masks made of them, and the softmax."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.attention.attention_base import lowest

from .sparse_attention_base import HEADS, SCALE, E, K, N, X, entry, hide, score

# scores of the indexer -----------------------------------------------------------------------------------------------


def weighted(products, w):
    return (products * w.unsqueeze(-1)).sum(2)


def summed_heads(q, k, w):
    products = F.relu(q.float() @ k.float().transpose(1, 2)[:, None]) * X**-0.5
    return weighted(products, w.float() * HEADS**-0.5)


def einsum_heads_last(q, k, w):
    products = torch.einsum("bshd,btd->bsht", q, k).relu()
    return torch.einsum("bsht,bsh->bst", products, w * HEADS**-0.5)


def einsum_and_sum(q, k, w):
    products = torch.einsum("bshd,btd->bsht", q.float(), k.float()) * X**-0.5
    return weighted(torch.relu(products), w.float())


def einsum_heads_first(q, k, w):
    products = F.relu(torch.einsum("bshd,btd->bhst", q, k))
    return torch.einsum("bhst,bsh->bst", products, w)


def heads_first(q, k, w):
    products = torch.relu(q.transpose(1, 2) @ k.unsqueeze(1).transpose(-1, -2) * X**-0.5)
    return (products * w.transpose(1, 2).unsqueeze(-1)).sum(dim=1)


def heads_first_with_matmul(q, k, w):
    products = F.relu(torch.matmul(q.transpose(1, 2), k.unsqueeze(1).mT)).permute(0, 2, 1, 3)
    return (w.unsqueeze(2) @ products).squeeze(2)


def flattened_heads(q, k, w):
    b, s, n, x = q.shape
    products = torch.bmm(q.reshape(b, s * n, x), k.mT).view(b, s, n, -1).relu()
    return weighted(products, w)


def clamped(q, k, w):
    products = torch.matmul(q, k.mT.unsqueeze(1)).clamp(min=0)
    return weighted(products, w)


def clamped_from_below(q, k, w):
    return weighted((q @ k.mT.unsqueeze(1)).clamp_min(0.0), w)


def maximum(q, k, w):
    products = q @ k.mT.unsqueeze(1)
    return weighted(torch.maximum(products, torch.zeros_like(products)), w)


def where_positive(q, k, w):
    products = q @ k.mT.unsqueeze(1)
    return weighted(torch.where(products > 0, products, 0.0), w)


def times_positive(q, k, w):
    products = q @ k.mT.unsqueeze(1)
    return weighted(products * (products > 0), w)


def scaled_query(q, k, w):
    return weighted(F.relu((q * X**-0.5) @ k.mT.unsqueeze(1)), w)


def scaled_behind(q, k, w):
    return weighted(F.relu(q @ k.mT.unsqueeze(1)), w) * (X**-0.5 * HEADS**-0.5)


def divided(q, k, w):
    products = F.relu(torch.matmul(q.float(), k.float().mT.unsqueeze(1))) / math.sqrt(X)
    return weighted(products, w.float() / math.sqrt(HEADS))


def mean_of_heads(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).mean(2)


def no_weights(q, k, w):
    return F.relu(q @ k.mT.unsqueeze(1)).sum(2)


def scores_in_dtype(q, k, w):
    return score(q, k, w).to(q.dtype)


# lists ---------------------------------------------------------------------------------------------------------------


def count(scores):
    return min(K, scores.shape[-1])


def added_infinity(scores, seen):
    hidden = torch.zeros(seen.shape, dtype=scores.dtype).masked_fill(~seen, -math.inf)
    return torch.topk(scores + hidden, count(scores), dim=-1)[1]


def where_lowest(scores, seen):
    return torch.where(seen, scores, lowest(scores)).topk(count(scores), -1)[1]


def added_lowest(scores, seen):
    return (scores + (~seen).to(scores.dtype) * lowest(scores)).topk(count(scores), -1).indices


def unsorted(scores, seen):
    return scores.masked_fill(~seen, -math.inf).topk(count(scores), dim=-1, sorted=False).indices


def narrow_places(scores, seen):
    return scores.masked_fill(~seen, -math.inf).topk(count(scores), dim=-1).indices.to(torch.int32)


def sorted_places(scores, seen):
    return scores.masked_fill(~seen, -math.inf).argsort(-1, descending=True)[..., : count(scores)]


def sorted_pairs(scores, seen):
    return torch.sort(scores.masked_fill(~seen, -math.inf), dim=-1, descending=True)[1][..., : count(scores)]


def in_the_order_of_keys(scores, seen):
    return scores.masked_fill(~seen, -math.inf).topk(count(scores), dim=-1, sorted=False).indices.sort(-1).values


# masks ---------------------------------------------------------------------------------------------------------------


def filled(places, seen, x):
    listed = hide(places, seen, x)
    return torch.zeros(listed.shape, dtype=x.dtype).masked_fill(~listed, -math.inf)


def hidden_then_lowest(places, seen, x):
    hidden = torch.ones(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places.long(), False)
    causal = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, lowest(x))
    return causal.masked_fill(hidden, lowest(x)).unsqueeze(1)


def infinity_scattered(places, seen, x):
    index = torch.full((*places.shape[:2], seen.shape[-1]), -math.inf, dtype=x.dtype).scatter(-1, places, 0.0)
    return (index + torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, -math.inf)).unsqueeze(1)


def infinity_scattered_in_place(places, seen, x):
    index = x.new_full((*places.shape[:2], seen.shape[-1]), float("-inf")).scatter_(-1, places.to(torch.int64), 0)
    index += torch.where(seen, 0.0, -math.inf)
    return index[:, None]


def scattered_in_place(places, seen, x):
    listed = torch.zeros((*places.shape[:2], seen.shape[-1]), dtype=torch.bool)
    listed.scatter_(2, places.long(), True)
    return (listed & seen)[:, None]


def scattered_ones(places, seen, x):
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=x.dtype).scatter(-1, places, 1.0)
    return ((listed > 0) & seen).unsqueeze(1)


def scattered_tensor(places, seen, x):
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool)
    return (listed.scatter(-1, places, torch.ones_like(places, dtype=torch.bool)) & seen).unsqueeze(1)


def lowered_twice(places, seen, x):
    causal = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, lowest(x) / 2)
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=x.dtype)
    return (listed + lowest(x) / 4).scatter(-1, places, 0.0).unsqueeze(1) + causal


def turned_to_lowest(places, seen, x):
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=x.dtype).scatter(-1, places, 1.0)
    return ((1.0 - listed * seen.to(x.dtype)) * lowest(x)).unsqueeze(1)


def compared(places, seen, x):
    listed = (places.unsqueeze(-1) == torch.arange(seen.shape[-1])).any(-2)
    return (listed & seen).unsqueeze(1)


def one_hot(places, seen, x):
    return ((F.one_hot(places, seen.shape[-1]).sum(-2) > 0) & seen).unsqueeze(1)


def counted(places, seen, x):
    counts = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.int32)
    counts.scatter_add_(-1, places, torch.ones_like(places, dtype=torch.int32))
    return (counts.ne(0) & seen).unsqueeze(1)


def counted_as_floats(places, seen, x):
    counts = torch.zeros(*places.shape[:2], seen.shape[-1]).scatter_add(-1, places, torch.ones(places.shape))
    return ((counts > 0) & seen).unsqueeze(1)


def greatest(places, seen, x):
    zeros = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=x.dtype)
    listed = zeros.scatter_reduce(-1, places, torch.ones(places.shape, dtype=x.dtype), "amax")
    return ((listed == 1) & seen).unsqueeze(1)


def for_every_head(places, seen, x):
    return hide(places, seen, x).expand(-1, N, -1, -1)


# softmax -------------------------------------------------------------------------------------------------------------


def eager(q, k, v, mask):
    scores = torch.matmul(q, k.transpose(2, 3)) * SCALE
    scores = scores + torch.zeros(mask.shape, dtype=q.dtype).masked_fill(~mask, -math.inf)
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def eager_in_dtype(q, k, v, mask):
    return ((q @ k.mT) * SCALE).masked_fill(~mask, -math.inf).softmax(-1) @ v


def eager_lowest(q, k, v, mask):
    scores = torch.matmul(q * SCALE, k.mT).masked_fill(mask.logical_not(), lowest(q))
    return torch.matmul(scores.float().softmax(-1).type_as(q), v)


def einsum_heads(q, k, v, mask):
    scores = torch.einsum("bhsd,bhtd->bhst", q, k).float() * SCALE
    return torch.einsum("bhst,bhtd->bhsd", torch.where(mask, scores, -math.inf).softmax(-1).to(q.dtype), v)


def positions_first(q, k, v, mask):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = torch.einsum("bshd,bthd->bsht", q, k) * SCALE
    scores = scores + torch.where(mask, 0.0, -math.inf).to(q.dtype).transpose(1, 2)
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,bthd->bshd", weights, v).transpose(1, 2)


def flattened(q, k, v, mask):
    b = q.shape[0]
    flat = (each.flatten(0, 1) for each in (q, k, v))
    q, k, v = flat
    scores = torch.bmm(q, k.mT).view(b, N, q.shape[1], -1) * SCALE
    weights = scores.masked_fill(~mask, -math.inf).softmax(-1)
    return torch.bmm(weights.flatten(0, 1), v).view(b, N, -1, E)


SPELLINGS = (
    entry("summed_heads", score=summed_heads),
    entry("einsum_heads_last", score=einsum_heads_last),
    entry("einsum_and_sum", score=einsum_and_sum),
    entry("einsum_heads_first", score=einsum_heads_first),
    entry("heads_first", score=heads_first),
    entry("heads_first_with_matmul", score=heads_first_with_matmul),
    entry("flattened_heads", score=flattened_heads),
    entry("clamped", score=clamped),
    entry("clamped_from_below", score=clamped_from_below),
    entry("maximum", score=maximum),
    entry("where_positive", score=where_positive),
    entry("times_positive", score=times_positive),
    entry("scaled_query", score=scaled_query),
    entry("scaled_behind", score=scaled_behind),
    entry("divided", score=divided),
    entry("mean_of_heads", score=mean_of_heads),
    entry("no_weights", score=no_weights),
    entry("scores_in_dtype", score=scores_in_dtype),
    entry("added_infinity", choose=added_infinity),
    entry("where_lowest", choose=where_lowest),
    entry("added_lowest", choose=added_lowest),
    entry("unsorted", choose=unsorted),
    entry("narrow_places", choose=narrow_places, hide=hidden_then_lowest),
    entry("sorted_places", choose=sorted_places),
    entry("sorted_pairs", choose=sorted_pairs),
    entry("in_the_order_of_keys", choose=in_the_order_of_keys),
    entry("filled", hide=filled),
    entry("hidden_then_lowest", hide=hidden_then_lowest),
    entry("infinity_scattered", hide=infinity_scattered),
    entry("infinity_scattered_in_place", hide=infinity_scattered_in_place),
    entry("scattered_in_place", hide=scattered_in_place),
    entry("scattered_ones", hide=scattered_ones),
    entry("scattered_tensor", hide=scattered_tensor),
    entry("lowered_twice", hide=lowered_twice),
    entry("turned_to_lowest", hide=turned_to_lowest),
    entry("compared", hide=compared),
    entry("one_hot", hide=one_hot),
    entry("counted", hide=counted),
    entry("counted_as_floats", hide=counted_as_floats),
    entry("greatest", hide=greatest),
    entry("for_every_head", hide=for_every_head),
    entry("eager", attend=eager),
    entry("eager_in_dtype", attend=eager_in_dtype),
    entry("eager_lowest", attend=eager_lowest),
    entry("einsum_heads", attend=einsum_heads),
    entry("positions_first", attend=positions_first),
    entry("flattened", attend=flattened),
)
