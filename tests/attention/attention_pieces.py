"""Masks that are put together of pieces, put on a part of the scores, or written by a boolean index."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from .attention import causal_seen, ragged
from .attention_base import B, Entry, N, S, T, lowest, tensors
from .attention_masks import near_seen, scores_of

P = T - S  # keys that are there already


def above(rows, number=-math.inf):
    """A triangle [S, S] of a number, zeros beside it."""
    return torch.full((rows, rows), number).triu(1)


def future(rows):
    return torch.ones(rows, rows, dtype=torch.bool).triu(1)


# pieces --------------------------------------------------------------------------------------------------------------


def zeros_before_a_triangle(q, k, v):
    mask = torch.hstack([torch.zeros(S, P), above(S)]).type_as(q)
    return (scores_of(q, k) + mask).softmax(-1) @ v


def nothing_before_a_triangle(q, k, v):
    mask = torch.hstack([torch.zeros(S, 0), above(S)]).type_as(q)
    return (scores_of(q, k) + mask).softmax(-1) @ v


def least_behind_zeros(q, k, v):
    mask = torch.cat((q.new_zeros(S, P), q.new_full((S, S), lowest(q)).triu(1)), dim=-1)
    return (scores_of(q, k) + mask[None, None]).softmax(-1) @ v


def false_before_true(q, k, v):
    hidden = torch.cat((torch.zeros(S, P, dtype=torch.bool), future(S)), -1)
    return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


def ones_before_tril(q, k, v):
    seen = torch.cat((torch.ones(S, P), torch.tril(torch.ones(S, S))), -1)
    return scores_of(q, k).masked_fill(seen[None, None] == 0, lowest(q)).softmax(-1) @ v


def three_pieces(q, k, v):
    seen = torch.cat((torch.ones(S, 2), torch.ones(S, P - 2), torch.ones(S, S).tril()), -1).bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def padded_with_zeros(q, k, v):
    bias = torch.zeros(S, S, dtype=q.dtype).masked_fill_(future(S), -math.inf)
    return (scores_of(q, k) + F.pad(bias, (P, 0))).softmax(-1) @ v


def hidden_first_keys(q, k, v):
    mask = torch.cat((torch.full((S, P), -math.inf), above(S)), -1).to(q.dtype)
    return (scores_of(q, k) + mask).softmax(-1) @ v


# parts ---------------------------------------------------------------------------------------------------------------


def added_to_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., -S:] += above(S)
    return scores.softmax(-1) @ v


def assigned_to_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[:, :, :, -S:] = scores[..., -S:] + above(S).to(q.dtype)
    return scores.softmax(-1) @ v


def filled_in_the_last(q, k, v):
    scores = scores_of(q, k).float()
    scores[..., P:].masked_fill_(future(S), -math.inf)
    return scores.softmax(-1).to(q.dtype) @ v


def kept_in_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., P:] = torch.where(future(S).logical_not(), scores[..., P:], lowest(q))
    return scores.softmax(-1) @ v


def indexed_in_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., -S:][future(S).expand(*q.shape[:2], S, S)] = -math.inf
    return scores.softmax(-1) @ v


def less_of_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., -2:] += -math.inf
    return scores.softmax(-1) @ v


# rows that are arranged otherwise when they have been masked ----------------------------------------------------------


def of_heads(q, k, put):
    """Scores [B · N, S, T], masked as [B, N, S, T]."""
    scores = torch.bmm(q, k.mT) * q.shape[-1] ** -0.5
    return put(scores.view(B, N, *scores.shape[1:])).reshape(scores.shape)


def added_before_heads_are_joined(q, k, v):
    return torch.bmm(of_heads(q, k, lambda z: z + above(S).to(q.dtype)).softmax(-1), v)


def lowered_before_heads_are_joined(q, k, v):
    least = torch.full((S, S), lowest(q), dtype=q.dtype).triu(1)
    return torch.bmm(F.softmax(of_heads(q, k, lambda z: z + least[None, None]), -1), v)


def filled_before_heads_are_joined(q, k, v):
    return torch.bmm(of_heads(q, k, lambda z: z.masked_fill(future(S), -math.inf)).softmax(-1), v)


def padded_before_heads_are_joined(q, k, v, there):
    return torch.bmm(of_heads(q, k, lambda z: z.masked_fill(~there, -math.inf)).softmax(-1), v)


# boolean indices -----------------------------------------------------------------------------------------------------


def indexed_whole(q, k, v):
    scores = scores_of(q, k)
    scores[future(S).expand_as(scores)] = -math.inf
    return scores.softmax(-1) @ v


def indexed_behind(q, k, v):
    scores = scores_of(q, k)
    scores[:, :, future(S)] = lowest(q)
    return scores.softmax(-1) @ v


def indexed_where_not(q, k, v):
    scores = scores_of(q, k)
    scores[..., ~torch.ones(S, S, dtype=torch.bool).tril()] = -1e9
    return scores.softmax(-1) @ v


# tables --------------------------------------------------------------------------------------------------------------


def rows_of_a_table(q, k, v, places):
    table = torch.full((1, 1, T, T), -2.3819763e38).triu(1)
    return (scores_of(q, k) + table.index_select(2, places)).softmax(-1).to(q.dtype) @ v


def two_triangles_and_a_window(q, k, v):
    ones = torch.ones(S, S)
    near = ones.triu(-2) * ones.tril(2)
    hidden = torch.where(near == 1, above(S, -1e30), -1e30)
    return (scores_of(q, k) + hidden).softmax(-1).to(q.dtype) @ v


PLACES = torch.tensor([0, 1, 2, 3, 5, 9])


def ends(b, i, j):
    return j <= i + P


SPELLINGS = (
    *(
        Entry(form, "causal_lower_right", seen=ends, keys=T)
        for form in (
            zeros_before_a_triangle, least_behind_zeros, false_before_true, ones_before_tril, three_pieces,
            padded_with_zeros,
            added_to_the_last, assigned_to_the_last, filled_in_the_last, kept_in_the_last, indexed_in_the_last,
        )
    ),
    *(
        Entry(form, "causal_upper_left", seen=causal_seen)
        for form in (nothing_before_a_triangle, indexed_whole, indexed_behind, indexed_where_not)
    ),
    Entry(less_of_the_last, "none kv_len 4", seen=lambda b, i, j: j < S - 2),
    Entry(two_triangles_and_a_window, "causal_lower_right window 2", seen=near_seen),
    Entry(
        rows_of_a_table, "dense", seen=lambda b, i, j: j <= PLACES[i], keys=T, more=tensors(PLACES),
    ),
    *(
        Entry(form, "causal_upper_left", seen=causal_seen, layout="XSD")
        for form in (
            added_before_heads_are_joined, lowered_before_heads_are_joined, filled_before_heads_are_joined,
        )
    ),
    Entry(
        padded_before_heads_are_joined, "dense", seen=lambda b, i, j: bool(ragged[b, j]), layout="XSD",
        more=tensors(ragged[:, None, None]),
    ),
    Entry(hidden_first_keys, "dense", seen=lambda b, i, j: P <= j <= i + P, keys=T),
)  # fmt: skip


# what only looks like it ---------------------------------------------------------------------------------------------


def rounded_in_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., -S:] = (scores[..., -S:] + above(S).to(q.dtype)).to(torch.bfloat16).to(q.dtype)
    return scores.softmax(-1) @ v


def others_in_the_last(q, k, v):
    scores = scores_of(q, k)
    scores[..., -S:] = scores[..., :S] + above(S).to(q.dtype)
    return scores.softmax(-1) @ v


def replaced_by_zero(q, k, v):
    scores = scores_of(q, k)
    scores[future(S).expand_as(scores)] = 0.0
    return scores.softmax(-1) @ v


def replaced_by_numbers(q, k, v):
    scores = scores_of(q, k)
    hidden = future(S).expand_as(scores)
    scores[hidden] = scores[hidden] * 0 - 1e9
    return scores.softmax(-1) @ v


LOOKALIKES = (
    Entry(rounded_in_the_last, "", "they go through slice_scatter", keys=T),
    Entry(others_in_the_last, "", "they go through slice_scatter", keys=T),
    Entry(replaced_by_zero, "", "hidden scores are replaced by a number"),
    Entry(replaced_by_numbers, "", "they go through index_put between"),
)
