"""What resembles attention over a latent or its prolog: less of it may be fused, and whatever is must mean the same."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.attention.attention_base import lowest
from tests.sparse.sparse_attention_base import (
    EPS,
    HEADS,
    SCALE,
    UNFUSED,
    Block,
    C,
    D,
    E,
    K,
    N,
    R,
    X,
    entry,
    expand,
    halves,
    norm,
    pairs,
)

KEPT = ("chunk", "step")
ONE_LATENT = "different latents"

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


def projected_together(block, latent):
    b, t, _ = latent.shape  # a sum over other rows for each head, whose elements are then read in another order
    heads = (latent.reshape(b * t, C) @ block.kv_b.view(N, D + E, C).mT).reshape(b, N, t, D + E)
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


class ListReturned(Block):
    """The list is a result as well."""

    def places(self, *args):
        self.listed = super().places(*args)
        return self.listed

    def readers_of_results(self):
        return (self.listed,)


class BestReturned(Block):
    """The values of the best keys are used as well."""

    def places(self, x, c, key, cos, sin, seen):
        query = self.index_turned(F.linear(c, self.iq).view(*x.shape[:2], HEADS, X), cos, sin)
        scores = self.parts.score(query, key, F.linear(x, self.iw)).masked_fill(~seen, -math.inf)
        best = scores.topk(min(K, scores.shape[-1]), dim=-1)
        self.best = best.values.clamp(min=-8.0)
        return best.indices

    def readers_of_results(self):
        return (self.best,)


class WeightsReturned(Block):
    """The weights of the softmax are a result as well."""

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        scores = (q @ self.parts.join(k, rope).mT * SCALE).masked_fill(~mask, -math.inf)
        self.weights = scores.softmax(-1)
        return self.weights @ v

    def readers_of_results(self):
        return (self.weights,)


class LatentReturned(Block):
    """The queries' latent is a result as well."""

    def query_latent(self, x):
        self.latent = super().query_latent(x)
        return self.latent

    def readers_of_results(self):
        return (self.latent,)


class KeysReturned(Block):
    """The keys of all heads are a result as well."""

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        self.keys = self.parts.join(k, rope)
        return self.parts.attend(q, self.keys, v, mask)

    def readers_of_results(self):
        return (self.keys,)


class QueriesWithBias(Block):
    """The first projection has a bias."""

    def query_latent(self, x):
        return self.parts.norm(F.linear(x, self.q_a, self.q_norm), self.q_norm)


class OneList(Block):
    """All sequences use the list of the first one."""

    def places(self, *args):
        return super().places(*args)[:1].expand(args[0].shape[0], -1, -1)


class AnotherKey(Block):
    """The indexer reads the keys of other positions."""

    def places(self, x, c, key, *more):
        return super().places(x, c, key.flip(1), *more)


class WrittenLater(Block):
    """The attention reads the cache of the latent as it was before this step."""

    def kept(self, rows, state):
        old = state[0].clone()
        _, rope, key, start = super().kept(rows, state)
        return old, rope, key, start


LOOKALIKES = (
    entry("with_bias", expand=with_bias, **UNFUSED),
    entry("values_of_another", expand=values_of_another, **UNFUSED, reason=ONE_LATENT),
    entry("values_of_others", expand=values_of_others, **UNFUSED),
    entry("values_of_other_heads", expand=values_of_other_heads, **UNFUSED),
    entry("keys_of_other_heads", expand=keys_of_other_heads, **UNFUSED),
    entry("activated", expand=activated, **UNFUSED),
    entry("interleaved_heads", expand=interleaved_heads, **UNFUSED),
    entry("turned_rope", join=turned_rope),
    entry("rope_of_heads", join=rope_of_heads, **UNFUSED),
    entry("one_rope_for_two", join=one_rope_for_two),
    entry("strange_softmax", attend=strange_softmax, **UNFUSED),
    entry("capped", attend=capped, **UNFUSED, reason="soft capping"),
    entry("renormalised", attend=renormalised, **UNFUSED),
    entry("filled_with_lowest", attend=filled_with_lowest),
    entry("pairs_stay_pairs", rope=pairs_stay_pairs, prolog=0),
    entry("halves_stay_halves", rope=halves, prolog=0),
    entry("turned_back", rope=turned_back, prolog=0),
    entry("centred_norm", norm=centred_norm, prolog=0),
    entry("no_gain", norm=no_gain, prolog=0),
    entry("no_norm", norm=no_norm, prolog=0),
    entry("other_gain", norm=other_gain, prolog=0),
    entry("list_returned", block=ListReturned, indexer=0),
    entry("best_returned", block=BestReturned, indexer=0),
    entry("weights_returned", block=WeightsReturned, **UNFUSED),
    entry("latent_returned", block=LatentReturned),
    entry("keys_returned", block=KeysReturned),
    entry("queries_with_bias", block=QueriesWithBias, prolog=0),
    entry("one_list", block=OneList, indexer=0),
    entry("another_key", block=AnotherKey),
    entry("written_later", KEPT, block=WrittenLater),
    entry("projected_together", expand=projected_together, **UNFUSED),
)  # fmt: skip
