"""Attention whose heads, scales and sinks are written as published code writes them, and what only resembles that.

Heads repeated before positions and heads change places (Llama, Gemma, minimind, torchtune), tokens without a batch
(reference functions of serving stacks), keys widened once and cut for the values (reference functions of kernels for
latents), scales that are tensors (x-transformers), sinks beside grouped heads (gpt-oss).
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.corpus.base import activations

from .attention_base import B, D, E, Entry, G, M, N, S, T, attend, tensors

# heads that are repeated ---------------------------------------------------------------------------------------------


def shares(q, k, dtype):
    return (q @ k.transpose(-2, -1) / math.sqrt(D)).softmax(-1, dtype=torch.float32).to(dtype)


def interleaved_before_they_change_places(q, k, v):
    k, v = (each.repeat_interleave(G, 2).transpose(1, 2) for each in (k, v))
    return (shares(q.transpose(1, 2), k, q.dtype) @ v).transpose(1, 2)


def spread(x, count):
    batch, rows, heads, width = x.shape
    return x[:, :, :, None].expand(batch, rows, heads, count, width).reshape(batch, rows, heads * count, width)


def spread_before_they_change_places(q, k, v):
    q, k, v = q.transpose(1, 2), spread(k, G).transpose(1, 2), spread(v, G).transpose(1, 2)
    return (shares(q, k, q.dtype) @ v).transpose(1, 2)


def repeated_by_einsum(q, k, v):
    k, v = torch.repeat_interleave(k, G, dim=2), torch.repeat_interleave(v, G, dim=2)
    weights = torch.einsum("bihd,bjhd->bhij", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhij,bjhd->bihd", weights, v)


def repeated_and_transposed(q, k, v):
    k = k.repeat_interleave(G, dim=1).transpose(2, 3)
    return F.softmax(q @ k / math.sqrt(D), dim=3) @ v.repeat_interleave(G, dim=1)


def widened_before_they_are_repeated(q, k, v):
    k, v = (each.float().repeat_interleave(G, 1) for each in (k, v))
    return ((q.float() @ k.mT) / math.sqrt(D)).softmax(-1).matmul(v).type_as(q)


def repeated_in_one_dim(q, k, v):
    k, v = (each.repeat_interleave(G, 1).reshape(B * N, -1, D) for each in (k, v))
    weights = torch.bmm(q.reshape(B * N, S, D) * D**-0.5, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, v).view(B, N, S, D)


def padded_in_one_dim(q, k, v, there):
    k, v = (each.repeat_interleave(G, 1).reshape(B * N, -1, D) for each in (k, v))
    scores = torch.bmm(q.reshape(B * N, S, D) * D**-0.5, k.transpose(1, 2))
    hidden = ~there[:, None, None].expand(B, N, S, S).reshape(B * N, S, S)
    return torch.bmm(scores.masked_fill(hidden, -math.inf).softmax(-1), v).view(B, N, S, D)


def tokens(q, k, v):
    k, v = k.repeat_interleave(G, dim=1), v.repeat_interleave(G, dim=1)
    scores = torch.einsum("ihd,jhd->hij", q, k).float() * D**-0.5
    hidden = torch.triu(torch.ones(S, S), diagonal=1).bool()
    return torch.einsum("hij,jhd->ihd", scores.masked_fill(hidden, -math.inf).softmax(-1).to(v.dtype), v)


def groups_of_tokens(q, k, v):
    q = q.view(S, M, G, D)
    k, v = (each[:, :, None].expand(-1, -1, G, -1) for each in (k, v))
    scores = torch.einsum("imgd,jmgd->mgij", q, k) * D**-0.5
    scores = scores + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    return torch.einsum("mgij,jmgd->imgd", scores.softmax(-1), v).reshape(S, N, D)


def one_head(q, k, v):
    q, k, v = (each[0, 0] for each in (q, k, v))
    return (q @ k.T / math.sqrt(D)).softmax(-1) @ v


def tiled_before_they_change_places(q, k, v):
    k, v = (each.repeat(1, 1, G, 1).transpose(1, 2) for each in (k, v))
    return (shares(q.transpose(1, 2), k, q.dtype) @ v).transpose(1, 2)


def tiled_in_one_dim(q, k, v):
    k, v = (each.repeat(1, G, 1, 1).reshape(B * N, -1, D) for each in (k, v))
    weights = torch.bmm(q.reshape(B * N, S, D) * D**-0.5, k.transpose(1, 2)).softmax(-1)
    return torch.bmm(weights, v).view(B, N, S, D)


def repeated_sequences(q, k, v):
    k, v = (each[:1].repeat_interleave(B, 0) for each in (k, v))
    return shares(q, k, q.dtype) @ v


# products the other way round ----------------------------------------------------------------------------------------


def keys_first(q, k, v):
    return (k @ q.mT * D**-0.5).softmax(-2).mT @ v


def keys_first_and_masked(q, k, v):
    hidden = torch.ones(S, S, dtype=torch.bool).tril(-1)
    return (k @ q.mT * D**-0.5).masked_fill(hidden, -math.inf).softmax(2).transpose(2, 3) @ v


def values_behind(q, k, v):
    return (v.mT @ (k @ q.mT * D**-0.5).softmax(-2)).mT


def keys_first_over_queries(q, k, v):
    return (k @ q.mT * D**-0.5).softmax(-1).mT @ v


# keys that are widened once ------------------------------------------------------------------------------------------


def widened_once(q, k, v):
    wide = k.float()
    return ((q.float() @ wide.mT) * D**-0.5).softmax(-1).matmul(wide[..., :E]).to(q.dtype)


def joined_after_they_are_spread(q, k, v):
    first, last = (each.expand(-1, N, -1, -1) for each in k.split((E, D - E), -1))
    keys = torch.cat((first, last), -1)
    return (q @ keys.mT * D**-0.5).softmax(-1) @ keys[..., :E]


def widened_cut_and_joined(q, k, v):
    first, last = (each.float() for each in k.split((E, D - E), -1))
    keys = torch.cat((first, last), -1).repeat_interleave(N, 1)
    return ((q.float() @ keys.mT) * D**-0.5).softmax(-1).matmul(keys[..., :E]).to(q.dtype)


def gathered_lanes(q, k, v, table):
    keys, values = k[:, 0].flatten(0, 1)[table], k[:, 0, :, :E].flatten(0, 1)[table]
    weights = torch.einsum("bhid,bjd->bhij", q, keys).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhij,bje->bhie", weights, values)


def of_gathered_lanes(q, k, v, table):
    """The meaning, for rows of all sequences."""
    keys = k[:, 0].flatten(0, 1)[table][:, None]
    return of_lanes(q, keys, v)


def gathered_by_other_places(q, k, v, table, other):
    keys, values = k[:, 0].flatten(0, 1)[table], k[:, 0, :, :E].flatten(0, 1)[other]
    weights = torch.einsum("bhid,bjd->bhij", q, keys).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhij,bje->bhie", weights, values)


def of_lanes(q, k, v):
    """The meaning of the three: values are the first lanes of keys."""
    return attend(q, k, k[..., :E], torch.ones(B, 1, S, S, dtype=torch.bool), D**-0.5)


# scales that are tensors ---------------------------------------------------------------------------------------------


def scaled_by_a_tensor(q, k, v, by):
    return (q @ k.mT * by).softmax(-1) @ v


def divided_by_its_root(q, k, v, by):
    return (q @ k.mT / by.sqrt()).softmax(-1) @ v


def masked_behind_the_scale(q, k, v, by):
    scores = q @ k.mT * by + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    return scores.softmax(-1) @ v


def groups_scaled(q, k, v, by):
    scores = torch.einsum("bmgid,bmjd->bmgij", q.view(B, M, G, S, D), k) * by.view(M, G, 1, 1)
    return torch.einsum("bmgij,bmjd->bmgid", scores.softmax(-1), v).reshape(B, N, S, D)


def scaled_twice(q, k, v, by):
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).view(B, N, S, S) * by.exp()
    weights = (scores * by.view(1, N, 1, 1)).view(B * N, S, S).softmax(-1)
    return torch.bmm(weights, v.flatten(0, 1)).view(B, N, S, D)


def decoded_and_scaled(q, k, v, by):
    scores = torch.einsum("bhd,bhjd->bhj", q[:, :, 0], k) * by.view(N, 1)
    return torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), v).unsqueeze(2)


def times(by):
    """The meaning: scores are multiplied by what `by` gives of the last argument."""

    def scaled(q, k, v, x):
        return attend(q * by(x), k, v, torch.ones(B, 1, q.shape[2], k.shape[2], dtype=torch.bool), 1.0)

    return scaled


def times_causal(q, k, v, x):
    return attend(q * x, k, v, torch.ones(S, S, dtype=torch.bool).tril().expand(B, 1, S, S), 1.0)


def scaled_by_key(q, k, v, by):
    return (q @ k.mT * by).softmax(-1) @ v


def scaled_by_a_column(q, k, v, by):
    return (q @ k[:, :, :1].mT * by).softmax(-1) @ v[:, :, :1].expand(-1, -1, S, -1)


def scaled_behind_the_mask(q, k, v, by):
    scores = (q @ k.mT).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    return (scores * by).softmax(-1) @ v


def scaled_by_themselves(q, k, v):
    scores = q @ k.mT
    return (scores * scores.abs().amax(-1, keepdim=True).reciprocal()).softmax(-1) @ v


def sink_that_a_tensor_scales(q, k, v, by, sink):
    joined = torch.cat([q @ k.mT, sink.view(1, N, 1, 1).expand(B, -1, S, -1)], -1) * by
    return joined.softmax(-1)[..., :-1] @ v


# sinks ---------------------------------------------------------------------------------------------------------------


def sinks_of_groups(q, k, v, sinks):
    q = q.view(S, M, G, D)
    k, v = (each[:, :, None].expand(-1, -1, G, -1) for each in (k, v))
    scores = torch.einsum("imgd,jmgd->mgij", q, k)
    scores *= 1 / math.sqrt(D)
    scores += torch.triu(q.new_full((S, S), -math.inf), diagonal=1)[None, None]
    joined = torch.cat([scores, sinks.reshape(M, G, 1, 1).expand(-1, -1, S, -1)], dim=-1)
    return torch.einsum("mgij,jmgd->imgd", torch.softmax(joined, dim=-1)[..., :-1], v).reshape(S, N, D)


def sinks_of_tokens(q, k, v, sinks):
    scores = torch.einsum("ihd,jhd->hij", q, k) * D**-0.5 + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    joined = torch.cat([scores, sinks.view(-1, 1, 1).expand(-1, S, 1)], -1)
    return torch.einsum("hij,jhd->ihd", joined.softmax(-1)[..., :-1].to(v.dtype), v)


def sinks_by_hand(q, k, v, sinks):
    sinks = sinks.view(1, M, G, 1, 1).float()
    scores = torch.einsum("bimgd,bjmgd->bmgij", q.view(B, S, M, G, D).float(), k.unsqueeze(3).float()) * D**-0.5
    hidden = torch.arange(S)[None] > torch.arange(S)[:, None]
    scores = scores + hidden.float().masked_fill(hidden, -math.inf)
    top = torch.maximum(scores.max(-1, keepdim=True).values, sinks)
    shares, rest = torch.exp(scores - top), torch.exp(sinks - top)
    weights = shares / (shares.sum(-1, keepdim=True) + rest)
    return torch.einsum("bmgij,bjmgd->bimgd", weights, v.unsqueeze(3).float()).reshape(B, S, N, D).to(q.dtype)


def sinks_by_hand_without_the_largest(q, k, v, sinks):
    shares = (q @ k.mT * D**-0.5 + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)).exp()
    return shares / (shares.sum(-1, keepdim=True) + sinks.view(N, 1, 1).exp()) @ v


def causal_and_sunk(q, k, v, sinks):
    """The meaning of all four."""
    k, v = (each.repeat_interleave(N // each.shape[1], 1) for each in (k, v))
    shares = (q @ k.mT * D**-0.5 + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)).exp()
    return shares / (shares.sum(-1, keepdim=True) + sinks.exp().view(1, N, 1, 1)) @ v


def sinks_in_another_order(q, k, v, sinks):
    scores = torch.einsum("imgd,jmd->mgij", q.view(S, M, G, D), k) * D**-0.5
    joined = torch.cat([scores, sinks.reshape(G, M).t()[..., None, None].expand(-1, -1, S, -1)], -1)
    return torch.einsum("mgij,jmd->imgd", joined.softmax(-1)[..., :-1], v).reshape(S, N, D)


def sinks_of_places(q, k, v, sinks):
    scores = torch.einsum("imgd,jmd->mgij", q.view(S, M, G, D), k) * D**-0.5
    joined = torch.cat([scores, sinks.reshape(1, 1, S, 1).expand(M, G, -1, -1)], -1)
    return torch.einsum("mgij,jmd->imgd", joined.softmax(-1)[..., :-1], v).reshape(S, N, D)


def sink_less_another_number(q, k, v, sinks):
    scores = q @ k.mT * D**-0.5
    shares = (scores - scores.amax(-1, keepdim=True)).exp()
    rest = (sinks.view(N, 1, 1) - scores.mean(-1, keepdim=True)).exp()
    return shares / (shares.sum(-1, keepdim=True) + rest) @ v


# one query of each head, without a dim for it ------------------------------------------------------------------------


def decoded(q, k, v, there):
    scores = torch.einsum("bhd,bhjd->bhj", q[:, :, 0], k) * D**-0.5
    weights = scores.masked_fill(~there[:, None], -math.inf).softmax(-1)
    return torch.einsum("bhj,bhjd->bhd", weights, v).unsqueeze(2)


def decoded_and_masked_by_head(q, k, v):
    scores = torch.einsum("bhd,bhjd->bhj", q[:, :, 0], k) * D**-0.5
    scores = scores + torch.full((N, S), -math.inf, dtype=q.dtype).triu(1)
    return torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), v).unsqueeze(2)


# a softmax between two products that is no attention -----------------------------------------------------------------


def gated_weights(q, k, v, gates):
    return (shares(q, k, q.dtype) * gates) @ v


def shifted_weights(q, k, v, gates):
    return (shares(q, k, q.dtype) + gates) @ v


def chosen_weights(q, k, v, gates):
    return torch.where(gates > 0, shares(q, k, q.dtype), 0.0) @ v


def mixed_heads(q, k, v, mix):
    return torch.einsum("bhij,hg->bgij", shares(q, k, q.dtype), mix) @ v


def cubed(q, k, v):
    return (q @ k.mT).pow(3).softmax(-1) @ v


def clipped(q, k, v):
    return (q @ k.mT).clamp(-5.0, 5.0).softmax(-1) @ v


def causal_seen(b, i, j):
    return j <= i


ragged = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])
PLACES = torch.tensor([[3, 0, 7, 7, 11, 2], [9, 5, 4, 1, 0, 10]])
PADDED = dict(seen=lambda b, i, j: bool(ragged[b, j]), more=tensors(ragged))
CAUSAL = ("causal_upper_left",)
SUNK = dict(seen=causal_seen, more=tensors(activations(4, N)), meaning=causal_and_sunk)
EACH = tensors(activations(7, N).abs() / 4)

SPELLINGS = (
    Entry(interleaved_before_they_change_places, heads=M, layout="BSND"),
    Entry(spread_before_they_change_places, heads=M, layout="BSND"),
    Entry(repeated_by_einsum, heads=M, keys=T, layout="BSND"),
    Entry(repeated_and_transposed, heads=M),
    Entry(widened_before_they_are_repeated, heads=M),
    Entry(repeated_in_one_dim, heads=M),
    Entry(padded_in_one_dim, "dense", heads=M, **PADDED),
    Entry(tokens, *CAUSAL, seen=causal_seen, heads=M, layout="SND"),
    Entry(groups_of_tokens, *CAUSAL, seen=causal_seen, heads=M, layout="SND"),
    Entry(one_head, meaning=lambda q, k, v: attend(q, k, v, torch.ones(B, 1, S, S, dtype=torch.bool), D**-0.5)[0, 0]),
    Entry(keys_first),
    Entry(keys_first_and_masked, *CAUSAL, seen=causal_seen),
    Entry(values_behind),
    Entry(widened_once, heads=1, meaning=of_lanes),
    Entry(joined_after_they_are_spread, heads=1, meaning=of_lanes),
    Entry(widened_cut_and_joined, heads=1, meaning=of_lanes),
    Entry(gathered_lanes, "", heads=1, more=tensors(PLACES), meaning=of_gathered_lanes),
    Entry(scaled_by_a_tensor, more=tensors(torch.tensor(0.25)), meaning=times(lambda x: x)),
    Entry(divided_by_its_root, more=tensors(torch.tensor(16.0)), meaning=times(lambda x: x**-0.5)),
    Entry(masked_behind_the_scale, *CAUSAL, more=tensors(torch.tensor([0.25])), meaning=times_causal),
    Entry(groups_scaled, heads=M, more=EACH, meaning=times(lambda x: x.view(N, 1, 1))),
    Entry(scaled_twice, more=tensors(torch.full((1, N, 1, 1), 0.25)), meaning=times(lambda x: x * x.exp())),
    Entry(decoded_and_scaled, queries=1, more=EACH, meaning=times(lambda x: x.view(N, 1, 1))),
    Entry(sinks_of_groups, *CAUSAL, heads=M, layout="SND", **SUNK),
    Entry(sinks_of_tokens, *CAUSAL, layout="SND", **SUNK),
    Entry(sinks_by_hand, *CAUSAL, heads=M, layout="BSND", **SUNK),
    Entry(sinks_by_hand_without_the_largest, *CAUSAL, **SUNK),
    Entry(decoded, "dense", queries=1, **PADDED),
)


def refused(form, reason, *more, **how):
    """A form that nothing may be made of."""
    return Entry(form, "", reason, more=tensors(*more), **how)


def softmax_that_is_multiplied(q, k, v, by):
    return by * (k @ q.mT * D**-0.5).softmax(-2)


def sequences_of_one_head(q, k, v, seen):
    """Keys that all sequences share as heads do, and a mask of each."""
    scores = torch.einsum("bsd,td->bst", q[:, 0], k[0, 0]) * D**-0.5
    return torch.einsum("bst,td->bsd", scores.masked_fill(~seen, -math.inf).softmax(-1), v[0, 0])


LOOKALIKES = (
    Entry(
        softmax_that_is_multiplied,
        "",
        "they do not meet all values by weights [B",
        more=tensors(activations(8, B, N, S, S)),
    ),
    Entry(
        sequences_of_one_head,
        "dense",
        more=tensors(torch.rand(B, S, S, generator=torch.Generator().manual_seed(3)) < 0.7),
    ),
    Entry(tiled_before_they_change_places, heads=M, layout="BSND"),
    Entry(tiled_in_one_dim, heads=M),
    Entry(repeated_sequences),
    Entry(gathered_by_other_places, heads=1, more=tensors(PLACES, PLACES.flip(0))),
    refused(keys_first_over_queries, "over the queries"),
    refused(scaled_by_key, "they are multiplied by a tensor that", activations(8, S)),
    refused(scaled_by_a_column, "they are multiplied by a tensor that", activations(8, S)),
    refused(scaled_behind_the_mask, "they are multiplied by a tensor behind the", torch.tensor(0.25)),
    refused(scaled_by_themselves, "multiplied by a tensor that is computed from them"),
    refused(
        sink_that_a_tensor_scales,
        "it is scaled or masked together with the",
        torch.tensor(0.25),
        activations(4, N),
    ),
    Entry(sinks_in_another_order, heads=M, layout="SND", more=tensors(activations(4, N))),
    refused(sinks_of_places, "not one number for each head", activations(4, S), heads=M, layout="SND"),
    refused(sink_less_another_number, "of the scores, without a softmax", activations(4, N)),
    refused(decoded_and_masked_by_head, "differs from head to head", queries=1),
    refused(gated_weights, "they go through a multiplication", activations(8, S, S)),
    refused(shifted_weights, "they go through an addition between the softmax", activations(8, S, S)),
    refused(chosen_weights, "they go through a choice", activations(8, S, S)),
    refused(mixed_heads, "they go through another product", activations(8, N, N)),
    refused(cubed, "they go through pow"),
    refused(clipped, "they are clamped"),
)
