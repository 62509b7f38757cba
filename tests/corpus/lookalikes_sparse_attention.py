"""What resembles sparse attention or its prolog: less of it may be fused, and whatever is must mean the same."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .attention_base import lowest
from .sparse_attention_base import (
    EPS,
    HEADS,
    SCALE,
    Block,
    D,
    E,
    K,
    N,
    R,
    X,
    choose,
    entry,
    expand,
    halves,
    hide,
    norm,
    pairs,
    score,
)

KEPT = ("chunk", "step")
SUM = "what is chosen from is not the sum over heads"
SIGN = "scores are multiplied by a number that is not positive"
ONE_LATENT = "different latents"


# scores of the indexer -----------------------------------------------------------------------------------------------


def turned_scores(q, k, w):
    return -score(q, k, w)


def turned_products(q, k, w):
    return (F.relu(q @ k.mT.unsqueeze(1) * -(X**-0.5)) * w.unsqueeze(-1)).sum(2)


def turned_weights(q, k, w):
    return score(q, k, w * -0.5)


def without_relu(q, k, w):
    return ((q @ k.mT.unsqueeze(1)) * w.unsqueeze(-1)).sum(2)


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


def chosen_queries(scores, seen):
    return scores.masked_fill(~seen, -math.inf).topk(min(K, scores.shape[1]), dim=1).indices.mT.contiguous()


def windowed_list(scores, seen):
    t = scores.shape[-1]
    near = seen & (torch.arange(t) > seen.sum(-1, keepdim=True) - 1 - K)
    return scores.masked_fill(~near, -math.inf).topk(min(K, t), dim=-1).indices


def all_but_the_last(scores, seen):
    return choose(scores, seen)[..., :-1]


def all_but_the_first(scores, seen):
    return choose(scores, seen)[..., 1:]


# masks ---------------------------------------------------------------------------------------------------------------


def only_listed(places, seen, x):
    return torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True).unsqueeze(1)


def all_but_listed(places, seen, x):
    hidden = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True)
    hidden = hidden & (torch.arange(seen.shape[-1]) > 0)  # so that every query sees a key
    return (~hidden & seen).unsqueeze(1)


def listed_or_near(places, seen, x):
    near = seen & (torch.arange(seen.shape[-1]) >= seen.sum(-1, keepdim=True) - 2)
    return (only_listed(places, seen, x) & seen) | near


def listed_and_near(places, seen, x):
    near = seen & (torch.arange(seen.shape[-1]) >= seen.sum(-1, keepdim=True) - 3)
    return hide(places, near, x)


def listed_or_first(places, seen, x):
    return hide(places, seen, x) | (torch.arange(seen.shape[-1]) == 0)


def padded(places, seen, x):
    real = torch.arange(seen.shape[-1]) >= (torch.arange(x.shape[0]) * 2)[:, None]
    return hide(places, seen, x) & real[:, None, None]


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


def lowered_twice(places, seen, x):
    causal = torch.zeros(seen.shape, dtype=x.dtype).masked_fill(~seen, lowest(x) / 2)
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=x.dtype)
    return (listed + lowest(x) / 4).scatter(-1, places, 0.0).unsqueeze(1) + causal


# keys, values and softmax --------------------------------------------------------------------------------------------


def with_bias(block, latent):
    heads = F.linear(latent, block.kv_b, block.kv_b[:, 0]).view(*latent.shape[:2], N, D + E).transpose(1, 2)
    return heads.split((D, E), -1)


def values_of_another(block, latent):
    return expand(block, latent)[0], expand(block, latent.flip(-1))[1]


def values_of_others(block, latent):
    k, v = expand(block, latent)
    return k, v.flip(2)


def values_of_other_heads(block, latent):
    k, v = expand(block, latent)
    return k, v.roll(1, 1)


def keys_of_other_heads(block, latent):
    k, v = expand(block, latent)
    return k.roll(1, 1), v


def activated(block, latent):
    k, v = expand(block, latent)
    return F.silu(k), v


def interleaved_heads(block, latent):
    heads = F.linear(latent, block.kv_b).view(*latent.shape[:2], D + E, N).permute(0, 3, 1, 2)
    return heads.split((D, E), -1)


def turned_rope(k, rope):
    return torch.cat((k, rope.flip(-1).unsqueeze(1).expand(-1, N, -1, -1)), -1)


def rope_of_heads(k, rope):
    gains = 1 + torch.arange(N).to(k.dtype)[:, None, None] / 8
    return torch.cat((k, rope.unsqueeze(1) * gains), -1)


def one_rope_for_two(k, rope):
    return torch.cat((k, rope.unsqueeze(1).expand(-1, N, -1, -1) * 2), -1)


def strange_softmax(q, k, v, mask):
    scores = (q @ k.mT * SCALE).masked_fill(~mask, -math.inf).float()
    powers = scores.exp()
    return (powers / (1 + powers.sum(-1, keepdim=True))).to(q.dtype) @ v


def capped(q, k, v, mask):
    scores = torch.tanh(q @ k.mT * SCALE / 8) * 8
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def renormalised(q, k, v, mask):
    weights = (q @ k.mT * SCALE).softmax(-1) * mask
    return weights @ v


def filled_with_lowest(q, k, v, mask):
    return (q @ k.mT * SCALE).masked_fill(~mask, lowest(q)).softmax(-1) @ v


# rotation and norms --------------------------------------------------------------------------------------------------


def pairs_stay_pairs(x, cos, sin):
    cos, sin = (each[..., : R // 2].unsqueeze(2) for each in (cos, sin))
    even, odd = x[..., 0::2], x[..., 1::2]
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)


def turned_back(x, cos, sin):
    return pairs(x, cos, -sin)


def centred_norm(x, gain):
    return norm(x - x.mean(-1, keepdim=True), gain)


def no_gain(x, gain):
    return F.rms_norm(x, x.shape[-1:], None, EPS)


def no_norm(x, gain):
    return x


def other_gain(x, gain):
    return norm(x, gain + 1)


class Changed(Block):
    """The block with something else around its parts."""


class ListReturned(Changed):
    """The list is a result as well."""

    def places(self, *args):
        self.listed = super().places(*args)
        return self.listed

    def forward(self, *args):
        out = super().forward(*args)
        return (*out, self.listed) if isinstance(out, tuple) else (out, self.listed)


class BestReturned(Changed):
    """The values of the best keys are used as well."""

    def places(self, x, c, key, cos, sin, seen):
        query = self.index_turned(F.linear(c, self.iq).view(*x.shape[:2], HEADS, X), cos, sin)
        scores = self.parts.score(query, key, F.linear(x, self.iw)).masked_fill(~seen, -math.inf)
        best = scores.topk(min(K, scores.shape[-1]), dim=-1)
        self.best = best.values.clamp(min=-8.0)
        return best.indices

    def forward(self, *args):
        out = super().forward(*args)
        return (*out, self.best) if isinstance(out, tuple) else (out, self.best)


class WeightsReturned(Changed):
    """The weights of the softmax are a result as well."""

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        scores = (q @ self.parts.join(k, rope).mT * SCALE).masked_fill(~mask, -math.inf)
        self.weights = scores.softmax(-1)
        return self.weights @ v

    def forward(self, *args):
        out = super().forward(*args)
        return (*out, self.weights) if isinstance(out, tuple) else (out, self.weights)


class LatentReturned(Changed):
    """The queries' latent is a result as well."""

    def query_latent(self, x):
        self.latent = super().query_latent(x)
        return self.latent

    def forward(self, *args):
        out = super().forward(*args)
        return (*out, self.latent) if isinstance(out, tuple) else (out, self.latent)


class KeysReturned(Changed):
    """The keys of all heads are a result as well."""

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        self.keys = self.parts.join(k, rope)
        return self.parts.attend(q, self.keys, v, mask)

    def forward(self, *args):
        out = super().forward(*args)
        return (*out, self.keys) if isinstance(out, tuple) else (out, self.keys)


class QueriesWithBias(Changed):
    """The first projection has a bias."""

    def query_latent(self, x):
        return self.parts.norm(F.linear(x, self.q_a, self.q_norm), self.q_norm)


class OneList(Changed):
    """All sequences use the list of the first one."""

    def places(self, *args):
        return super().places(*args)[:1].expand(args[0].shape[0], -1, -1)


class AnotherKey(Changed):
    """The indexer reads the keys of other positions."""

    def places(self, x, c, key, *more):
        return super().places(x, c, key.flip(1), *more)


class WrittenLater(Changed):
    """The attention reads the cache of the latent as it was before this step."""

    def kept(self, rows, state):
        old = state[0].clone()
        _, rope, key, start = super().kept(rows, state)
        return old, rope, key, start


LOOKALIKES = (
    entry("turned_scores", score=turned_scores, indexer=0, reason=SIGN),
    entry("turned_products", score=turned_products, indexer=0, reason=SUM),
    entry("turned_weights", score=turned_weights, indexer=0, reason=SIGN),
    entry("without_relu", score=without_relu, indexer=0, reason=SUM),
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
    entry("without_mask", choose=without_mask, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("masked_with_zero", choose=masked_with_zero, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("softly_masked", choose=softly_masked, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("moved", choose=moved, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("wrapped", choose=wrapped, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("chosen_queries", ("chunk",), choose=chosen_queries, hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("windowed_list", choose=windowed_list, indexer=0),
    entry("all_but_the_last", choose=all_but_the_last, indexer=0),
    entry("all_but_the_first", ("chunk", "step", "grow"), choose=all_but_the_first, indexer=0),
    entry("only_listed", hide=only_listed, indexer=0),
    entry("all_but_listed", hide=all_but_listed, indexer=0, sparse=0, prolog=0),
    entry("listed_or_near", hide=listed_or_near, indexer=0, sparse=0, prolog=0),
    entry("listed_and_near", hide=listed_and_near, indexer=0, sparse=0, prolog=0),
    entry("listed_or_first", hide=listed_or_first, indexer=0, sparse=0, prolog=0),
    entry("padded", ("chunk", "step", "grow"), hide=padded, indexer=0, sparse=0, prolog=0),
    entry("softly_hidden", hide=softly_hidden, indexer=0, sparse=0, prolog=0),
    entry("hidden_by_a_hundred", hide=hidden_by_a_hundred, indexer=0, sparse=0, prolog=0),
    entry("written_twice", hide=written_twice, indexer=0, sparse=0, prolog=0),
    entry("two_lists", hide=two_lists, indexer=0, sparse=0, prolog=0),
    entry("counted_from_the_end", hide=counted_from_the_end, indexer=0, sparse=0, prolog=0),
    entry("for_other_queries", hide=for_other_queries, indexer=0, sparse=0, prolog=0),
    entry("for_other_sequences", hide=for_other_sequences, indexer=0),
    entry("lowered_twice", hide=lowered_twice, indexer=0, sparse=0, prolog=0),
    entry("with_bias", expand=with_bias, indexer=0, sparse=0, prolog=0),
    entry("values_of_another", expand=values_of_another, indexer=0, sparse=0, prolog=0, reason=ONE_LATENT),
    entry("values_of_others", expand=values_of_others, indexer=0, sparse=0, prolog=0),
    entry("values_of_other_heads", expand=values_of_other_heads, indexer=0, sparse=0, prolog=0),
    entry("keys_of_other_heads", expand=keys_of_other_heads, indexer=0, sparse=0, prolog=0),
    entry("activated", expand=activated, indexer=0, sparse=0, prolog=0),
    entry("interleaved_heads", expand=interleaved_heads, indexer=0, sparse=0, prolog=0),
    entry("turned_rope", join=turned_rope),
    entry("rope_of_heads", join=rope_of_heads, indexer=0, sparse=0, prolog=0),
    entry("one_rope_for_two", join=one_rope_for_two),
    entry("strange_softmax", attend=strange_softmax, indexer=0, sparse=0, prolog=0),
    entry("capped", attend=capped, indexer=0, sparse=0, prolog=0, reason="capped softly"),
    entry("renormalised", attend=renormalised, indexer=0, sparse=0, prolog=0),
    entry("filled_with_lowest", attend=filled_with_lowest),
    entry("pairs_stay_pairs", rope=pairs_stay_pairs, prolog=0),
    entry("halves_stay_halves", rope=halves, prolog=0),
    entry("turned_back", rope=turned_back, prolog=0),
    entry("centred_norm", norm=centred_norm, prolog=0),
    entry("no_gain", norm=no_gain, prolog=0),
    entry("no_norm", norm=no_norm, prolog=0),
    entry("other_gain", norm=other_gain, prolog=0),
    entry("list_returned", block=ListReturned),
    entry("best_returned", block=BestReturned),
    entry("weights_returned", block=WeightsReturned, indexer=0, sparse=0, prolog=0),
    entry("latent_returned", block=LatentReturned),
    entry("keys_returned", block=KeysReturned),
    entry("queries_with_bias", block=QueriesWithBias, prolog=0),
    entry("one_list", block=OneList, indexer=0),
    entry("another_key", block=AnotherKey),
    entry("written_later", KEPT, block=WrittenLater),
)
