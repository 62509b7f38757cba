"""softmax(scale · q kᵀ + mask) v, as people write it: products, scales, softmaxes and layouts."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.corpus.base import activations

from .attention_base import B, D, E, Entry, G, M, N, S, T, attend, repeat, tensors


def causal_seen(b, i, j):
    return j <= i


# products and scales -------------------------------------------------------------------------------------------------


def sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_causal_over_more_keys(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_own_scale(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, scale=0.3)


def sdpa_grouped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def scaled_scores(q, k, v):
    scores = torch.matmul(q, k.transpose(-2, -1)) * D**-0.5
    return torch.matmul(F.softmax(scores, dim=-1), v)


def divided_scores(q, k, v):
    return ((q @ k.mT) / math.sqrt(D)).softmax(-1) @ v


def scaled_queries(q, k, v):
    return ((q * D**-0.5) @ k.transpose(2, 3)).softmax(dim=-1) @ v


def scaled_values(q, k, v):
    """MiMo-V2: values times a number, before heads are repeated."""
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v * 0.707))


def scaled_values_by_hand(q, k, v):
    return (q @ k.mT * D**-0.5).softmax(-1) @ (0.707 * v)


def scaled_keys(q, k, v):
    return (q @ (k / math.sqrt(D)).transpose(-1, -2)).softmax(dim=-1) @ v


def scaled_both(q, k, v):
    root = math.sqrt(math.sqrt(D))
    return ((q / root) @ (k / root).transpose(-1, -2)).softmax(dim=-1) @ v


def scaled_by_tensor_constant(q, k, v):
    scores = q @ k.transpose(-1, -2) / torch.full([], D**0.5, dtype=q.dtype, device=q.device)
    return scores.softmax(dim=-1) @ v


def scaled_by_the_root_of_a_tensor(q, k, v):
    return (q @ k.transpose(-1, -2) / torch.tensor(D).sqrt()).softmax(dim=-1) @ v


def unscaled(q, k, v):
    return (q @ k.transpose(-1, -2)).softmax(dim=-1) @ v


def einsum_heads(q, k, v):
    return torch.einsum("bhqk,bhkd->bhqd", torch.einsum("bhqd,bhkd->bhqk", q, k).mul(D**-0.5).softmax(-1), v)


def einsum_ellipsis(q, k, v):
    weights = torch.softmax(torch.einsum("...qd,...kd->...qk", q, k) * D**-0.5, -1)
    return torch.einsum("...qk,...kd->...qd", weights, v)


def einsum_positions_first(q, k, v):
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v)


def einsum_heads_last(q, k, v):
    scores = torch.einsum("bshd,bthd->bsht", q, k) * D**-0.5
    weights = scores.softmax(dim=-1, dtype=torch.float32).type_as(q)
    return torch.einsum("bsht,bthd->bshd", weights, v)


def einsum_groups(q, k, v):
    q = q.view(B, M, G, S, D)
    weights = torch.einsum("bgrqd,bgkd->bgrqk", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bgrqk,bgkd->bgrqd", weights, v).reshape(B, N, S, D)


def broadcast_groups(q, k, v):
    scores = q.unflatten(1, (M, G)) @ k.unsqueeze(2).transpose(-1, -2) * D**-0.5
    return (scores.softmax(-1) @ v.unsqueeze(2)).flatten(1, 2)


def groups_in_the_rows(q, k, v):
    rows = q.reshape(B, M, G * S, D)
    weights = (rows @ k.transpose(-1, -2) * D**-0.5).softmax(-1)
    return (weights @ v).reshape(B, N, S, D)


def bmm_heads(q, k, v):
    return torch.bmm(torch.bmm(q * D**-0.5, k.transpose(1, 2)).softmax(-1), v)


def baddbmm_ignored(q, k, v):
    base = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype, device=q.device)
    scores = torch.baddbmm(base, q, k.transpose(1, 2), beta=0.0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v)


def baddbmm_mask(q, k, v):
    hidden = torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    scores = torch.baddbmm(hidden.expand(q.shape[0], S, S), q, k.transpose(1, 2), beta=1.0, alpha=D**-0.5)
    return torch.bmm(scores.softmax(-1), v)


def merged_heads(q, k, v):
    q, k, v = (x.view(B, -1, N, D).transpose(1, 2) for x in (q, k, v))
    weights = F.softmax(q @ k.transpose(2, 3) / math.sqrt(D), dim=-1)
    return (weights @ v).transpose(1, 2).contiguous().view(B, -1, N * D)


def flattened_heads(q, k, v):
    q, k, v = (x.view(B, -1, N, D).transpose(1, 2).reshape(B * N, -1, D) for x in (q, k, v))
    weights = F.softmax(torch.bmm(q, k.transpose(1, 2)) * D**-0.5, dim=-1)
    return torch.bmm(weights, v).view(B, N, S, D).transpose(1, 2).reshape(B, S, N * D)


def no_batch(q, k, v):
    hidden = torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)
    return (q @ k.mT * D**-0.5).masked_fill(hidden, -math.inf).softmax(-1) @ v


# heads ---------------------------------------------------------------------------------------------------------------


def expanded_heads(q, k, v):
    return (q @ repeat(k).transpose(-2, -1) * D**-0.5).softmax(-1) @ repeat(v)


def interleaved_heads(q, k, v):
    k, v = k.repeat_interleave(G, dim=1), v.repeat_interleave(G, dim=1)
    return (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v


def one_key_head(q, k, v):
    return (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v


def one_key_head_squeezed(q, k, v):
    k, v = k.squeeze(1), v.squeeze(1)
    weights = torch.einsum("bhsd,btd->bhst", q, k).mul(D**-0.5).softmax(-1)
    return torch.einsum("bhst,btd->bhsd", weights, v)


def cross(q, k, v):
    return (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v


def narrow_values(q, k, v):
    return (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v


# softmaxes -----------------------------------------------------------------------------------------------------------


def softmax_in_float(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype) @ v


def scores_in_float(q, k, v):
    scores = (q.float() @ k.float().transpose(-2, -1)) * D**-0.5
    return (scores.softmax(-1) @ v.float()).to(q.dtype)


def softmax_by_hand(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    powers = torch.exp(scores - scores.max(dim=-1, keepdim=True).values)
    return powers / powers.sum(dim=-1, keepdim=True) @ v


def softmax_by_amax(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers / powers.sum(-1, keepdim=True)) @ v


def one_group_of_keys(q, k, v):
    """Keys and values of one head [T, B, 1, D], summed over it."""
    q, k, v = (each.permute(2, 0, 1, 3) for each in (q, k, v))
    weights = (torch.einsum("sbhd,tbgd->bhst", q, k) * D**-0.5).softmax(-1)
    return torch.einsum("bhst,tbgd->sbhd", weights, v).permute(1, 2, 0, 3)


def normalised_last_by_rows_of_heads(q, k, v):
    """Rows of all heads [S, N, D], and the sums turned as the product is."""
    weights = torch.einsum("qhd,khd->hqk", q, k).mul(q.shape[-1] ** -0.5)
    weights = (weights - weights.amax(-1, keepdim=True)).exp()
    return torch.einsum("hqk,khd->qhd", weights, v) / weights.sum(-1).transpose(0, 1).unsqueeze(-1)


def normalised_last_in_one_batch(q, k, v):
    """Both products by `bmm`, and sums that are divided by where heads stand behind queries."""
    flat = (each.flatten(0, 1) for each in (q, k, v))
    q, k, v = flat
    weights = (torch.bmm(q, k.mT) * q.shape[-1] ** -0.5).exp()
    y = torch.bmm(weights, v).view(B, N, S, D).transpose(1, 2)
    return (y / weights.sum(-1).view(B, N, S).permute(0, 2, 1)[..., None]).transpose(1, 2)


def normalised_last(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    powers = (scores - scores.amax(-1, keepdim=True)).exp()
    return (powers @ v) / powers.sum(-1, keepdim=True)


def by_log_softmax(q, k, v):
    return F.log_softmax(q @ k.transpose(-2, -1) * D**-0.5, dim=-1).exp() @ v


def by_logsumexp(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


def shifted_by_mean(q, k, v):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    return (scores - scores.mean(-1, keepdim=True)).softmax(-1) @ v


def safe_softmax(q, k, v, seen):
    weights = (q @ k.transpose(-2, -1) * D**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
    return torch.where(torch.isnan(weights), 0.0, weights) @ v


def nan_to_num(q, k, v, seen):
    weights = (q @ k.transpose(-2, -1) * D**-0.5).masked_fill(~seen, -math.inf).softmax(-1)
    return weights.nan_to_num(0.0) @ v


def dropout_of_nothing(q, k, v):
    weights = (q @ k.transpose(-2, -1) * D**-0.5).softmax(-1)
    return F.dropout(weights, 0.1, training=False) @ v


def with_sink(q, k, v, sink):
    scores = q @ k.transpose(-2, -1) * D**-0.5
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(hidden, -math.inf)
    joined = torch.cat([scores, sink.reshape(1, -1, 1, 1).expand(B, -1, S, -1)], dim=-1)
    return joined.softmax(-1)[..., :-1] @ v


def query_chunks(q, k, v):
    pieces = [(c @ k.transpose(-2, -1) * D**-0.5).softmax(-1) @ v for c in q.chunk(2, dim=2)]
    return torch.cat(pieces, dim=2)


def scaled_behind(q, k, v):
    """The result of plain attention times the number, in float64."""
    every = torch.ones(1, 1, q.shape[2], k.shape[2], dtype=torch.bool)
    return 0.707 * attend(q, k, v, every, D**-0.5)


def sunk(q, k, v, sink):
    """The meaning of `with_sink`."""
    scores = q @ k.mT * D**-0.5 + torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    total = scores.exp().sum(-1, keepdim=True) + sink.exp().reshape(1, -1, 1, 1)
    return scores.exp() / total @ v


ragged = torch.tensor([[False] * 2 + [True] * 4, [True] * 6])

SPELLINGS = (
    Entry(sdpa),
    Entry(sdpa_causal, "causal_upper_left", seen=causal_seen),
    Entry(sdpa_causal_over_more_keys, "causal_upper_left", seen=causal_seen, keys=T),
    Entry(sdpa_own_scale, scale=0.3),
    Entry(sdpa_grouped, "causal_upper_left", seen=causal_seen, heads=M),
    Entry(scaled_scores),
    Entry(divided_scores),
    Entry(scaled_queries),
    Entry(scaled_keys),
    Entry(scaled_both),
    Entry(scaled_by_tensor_constant),
    Entry(scaled_by_the_root_of_a_tensor),
    Entry(unscaled, scale=1.0),
    Entry(einsum_heads),
    Entry(einsum_ellipsis),
    Entry(einsum_positions_first, layout="BSND"),
    Entry(einsum_heads_last, layout="BSND"),
    Entry(einsum_groups, heads=M),
    Entry(broadcast_groups, heads=M),
    Entry(groups_in_the_rows, heads=M),
    Entry(bmm_heads, layout="XSD"),
    Entry(baddbmm_ignored, layout="XSD"),
    Entry(baddbmm_mask, "causal_upper_left", seen=causal_seen, layout="XSD"),
    Entry(merged_heads, layout="BSH"),
    Entry(flattened_heads, layout="BSH"),
    Entry(no_batch, "causal_upper_left", seen=causal_seen, layout="NSD"),
    Entry(expanded_heads, heads=M),
    Entry(interleaved_heads, heads=M),
    Entry(one_key_head, heads=1),
    Entry(one_key_head_squeezed, heads=1),
    Entry(cross, keys=T),
    Entry(narrow_values, values=E),
    Entry(scaled_values, heads=M, keys=T, meaning=scaled_behind),
    Entry(scaled_values_by_hand, values=E, meaning=scaled_behind),
    Entry(softmax_in_float),
    Entry(scores_in_float),
    Entry(softmax_by_hand),
    Entry(softmax_by_amax),
    Entry(one_group_of_keys, heads=1),
    Entry(normalised_last),
    Entry(normalised_last_by_rows_of_heads, layout="SND"),
    Entry(normalised_last_in_one_batch),
    Entry(by_log_softmax),
    Entry(by_logsumexp),
    Entry(shifted_by_mean),
    Entry(safe_softmax, "dense", seen=lambda b, i, j: bool(ragged[b, j]), more=tensors(ragged[:, None, None])),
    Entry(nan_to_num, "dense", seen=lambda b, i, j: bool(ragged[b, j]), more=tensors(ragged[:, None, None])),
    Entry(dropout_of_nothing),
    Entry(with_sink, "causal_upper_left", seen=causal_seen, more=tensors(activations(4, N)), meaning=sunk),
    Entry(query_chunks, "none, none"),
)
