"""Blocks of sparse attention that differ in more than one part: how weights, lists, caches and tables are kept."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .sparse_attention import written_one_head
from .sparse_attention_base import HEADS, SCALE, B, Block, C, D, E, K, N, Q, R, T, X, entry, halves, rotate_half

SIZE = 8


class Absorbed(Block):
    """The projections of keys and values are absorbed by hand, and scores are a sum of two products."""

    def attended(self, q, latent, rope, mask):
        up = self.kv_b.view(N, D + E, C)
        q = q.transpose(1, 2)
        absorbed = torch.einsum("bshd,hdc->bshc", q[..., :D], up[:, :D])
        scores = torch.einsum("bshc,btc->bsht", absorbed, latent) + torch.einsum("bshr,btr->bsht", q[..., D:], rope)
        scores = scores * SCALE + torch.where(mask, 0.0, -math.inf).to(q.dtype).transpose(1, 2)
        weights = scores.softmax(-1, dtype=torch.float32).type_as(q)
        y = torch.einsum("bsht,btc->bshc", weights, latent)
        return torch.einsum("bshc,hdc->bshd", y, up[:, -E:]).transpose(1, 2)


class AbsorbedInFloat(Block):
    """The same with matmul, heads first, and scores in float32."""

    def attended(self, q, latent, rope, mask):
        absorbed = torch.matmul(q[..., :D], self.up_k)
        scores = torch.matmul(absorbed.float(), latent.float().mT.unsqueeze(1))
        scores = (scores + torch.matmul(q[..., D:].float(), rope.float().mT.unsqueeze(1))) * SCALE
        weights = scores.masked_fill(~mask, -math.inf).softmax(-1).to(q.dtype)
        return torch.matmul(torch.matmul(weights, latent.unsqueeze(1)), self.up_v)


class AbsorbedAndJoined(Block):
    """The same with queries and keys that are joined, over one head of keys."""

    def attended(self, q, latent, rope, mask):
        q = torch.cat((torch.einsum("bnsd,ndc->bnsc", q[..., :D], self.up_k), q[..., D:]), -1)
        keys = torch.cat((latent, rope), -1).unsqueeze(1)
        y = F.scaled_dot_product_attention(
            q, keys.expand(-1, N, -1, -1), latent.unsqueeze(1).expand(-1, N, -1, -1), attn_mask=mask, scale=SCALE
        )
        return y @ self.up_v


class TwoProducts(Block):
    """Scores are a sum of two products over keys that are expanded."""

    def attended(self, q, latent, rope, mask):
        k, v = self.parts.expand(self, latent)
        scores = q[..., :D] @ k.mT + q[..., D:] @ rope.unsqueeze(1).mT
        return (scores * SCALE).masked_fill(~mask, -math.inf).softmax(-1) @ v


class FirstProjectionsTogether(Block):
    """The projections of both latents are one."""

    def __init__(self, *args):
        super().__init__(*args)
        self.qkv_a = nn.Parameter(torch.cat((self.q_a, self.kv_a)), requires_grad=False)

    def query_latent(self, x):
        return self.parts.norm(F.linear(x, self.qkv_a)[..., :Q], self.q_norm)

    def key_latent(self, x):
        return F.linear(x, self.qkv_a)[..., Q:].split((C, R), -1)


class WithoutMask(Block):
    """One new token sees every key: no mask but the list."""

    def places(self, x, c, key, cos, sin, seen):
        query = self.index_turned(F.linear(c, self.iq).view(*x.shape[:2], HEADS, X), cos, sin)
        return self.parts.score(query, key, F.linear(x, self.iw)).topk(min(K, key.shape[1]), dim=-1).indices


class SlicedCaches(Block):
    """Caches for more sequences and tokens than there are, read up to the last one."""

    def kept(self, rows, state):
        *caches, start = state
        b, s, _ = rows[0].shape
        for cache, new in zip(caches, rows, strict=True):
            cache[:b, start : start + s] = new
        return *(cache[:b, : start + s] for cache in caches), start


class Paged(Block):
    """Caches are pages [Block, Size, W] that a table of each sequence names; the indexer has a table of its own."""

    tables = ("table", "table", "index_table")

    def __init__(self, *args):
        super().__init__(*args)
        for name in {"table", *self.tables}:
            self.register_buffer(name, torch.arange(B * T // SIZE).view(B, -1))

    def kept(self, rows, state):
        *caches, start = state
        at = torch.as_tensor(start) + torch.arange(rows[0].shape[1])
        found = []
        for cache, new, name in zip(caches, rows, self.tables, strict=True):
            table = getattr(self, name)
            cache.flatten(0, 1)[(table[:, at // SIZE] * SIZE + at % SIZE).flatten()] = new.flatten(0, 1)
            found.append(cache[table].flatten(1, 2))
        return *found, start


class PagedApart(Paged):
    """The same with a table for each cache."""

    tables = ("table", "rope_table", "index_table")


def in_pages(cache):
    """[B, T, W] as pages."""
    return cache.unflatten(1, (-1, SIZE)).flatten(0, 1)


def tables_of_tokens(x, cos, sin):
    """Tables [S, R] that all sequences share."""
    b, s, n, r = x.shape
    x = x.view(b, s, n, r // 2, 2).transpose(4, 3).reshape(b, s, n, r)
    cos, sin = cos[0][:, None], sin[0][:, None]
    return x * cos + rotate_half(x) * sin


def halves_of_tokens(x, cos, sin):
    return halves(x, cos[:1], sin[:1])


def hide_listed(places, seen, x):
    listed = torch.zeros(*places.shape[:2], seen.shape[-1], dtype=torch.bool).scatter(-1, places, True)
    return listed.unsqueeze(1)


def see_up_to(s, t, start, x):
    return torch.arange(t).unsqueeze(0) < torch.as_tensor(start) + torch.arange(1, s + 1).unsqueeze(1)


SPELLINGS = (
    entry("absorbed", block=Absorbed),
    entry("absorbed_in_float", block=AbsorbedInFloat),
    entry("absorbed_and_joined", block=AbsorbedAndJoined),
    entry("two_products", block=TwoProducts),
    entry("first_projections_together", block=FirstProjectionsTogether),
    entry("without_mask", ("grow",), block=WithoutMask, hide=hide_listed),
    entry("sliced_caches", ("chunk", "step"), block=SlicedCaches, start=int),
    entry("paged", ("step",), block=Paged, cache=in_pages),
    entry("tables_of_tokens", rope=tables_of_tokens, index_rope=halves_of_tokens),
    entry("see_up_to", see=see_up_to),
    entry("one_sequence", batch=1, write=written_one_head, cache=lambda cache: cache.unsqueeze(1)),
    entry("fewer_tokens_than_listed", ("chunk",), tokens=3),
    entry("as_many_tokens_as_listed", ("chunk",), tokens=K),
    entry("as_many_tokens_as_sequences", ("chunk",), tokens=2),
)

# Prompts of which every key is listed.
WHOLE = tuple(
    entry(name, ("prefill",), tokens=tokens, indexer=0, sparse=0)
    for name, tokens in (("fewer", K - 1), ("as_many", K), ("as_many_as_sequences", 2))
)
