"""Masks of attention, as people write them: causal, windows, padding, blocks and caches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from .attention import causal_seen
from .attention_base import B, D, Entry, M, S, T, lowest, repeat, tensors

SCALE = D**-0.5
MOST = 16
MANY = 200  # more than int8 holds, not more than uint8


def scores_of(q, k):
    return q @ k.transpose(-2, -1) * SCALE


# causal --------------------------------------------------------------------------------------------------------------


def filled_triu(q, k, v):
    hidden = torch.triu(torch.ones(S, S, dtype=torch.bool), diagonal=1)
    return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ v


def filled_lowest(q, k, v):
    seen = torch.tril(torch.ones(S, S))
    return scores_of(q, k).masked_fill(seen == 0, lowest(q)).softmax(-1) @ v


def filled_billion(q, k, v):
    seen = torch.ones(S, S).tril().view(1, 1, S, S)
    return scores_of(q, k).masked_fill(seen == 0, -1e9).softmax(-1) @ v


def added_infinity(q, k, v):
    hidden = torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    return (hidden + scores_of(q, k)).softmax(-1) @ v


def added_logarithm(q, k, v):
    seen = torch.triu(torch.tril(torch.full((S, S), fill_value=1, dtype=q.dtype)), diagonal=-2)
    return (scores_of(q, k) + torch.log(seen)).softmax(-1) @ v


def added_lowest_of_one_minus(q, k, v):
    seen = torch.ones(S, S, dtype=q.dtype).tril()
    return (scores_of(q, k) + (1.0 - seen) * lowest(q)).softmax(-1) @ v


def added_times_ten_thousand(q, k, v):
    hidden = (torch.arange(S)[None, :] > torch.arange(S)[:, None]).to(q.dtype)
    return (scores_of(q, k) - 10000.0 * hidden).softmax(-1) @ v


def where_compared(q, k, v):
    i = torch.arange(S)
    return torch.where(i[:, None] >= i[None], scores_of(q, k), -math.inf).softmax(-1) @ v


def where_full(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    scores = scores_of(q, k)
    return torch.where(seen, scores, torch.full_like(scores, lowest(q))).softmax(-1) @ v


def sdpa_mask(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril())


def sdpa_added(q, k, v):
    hidden = torch.zeros(S, S, dtype=q.dtype).masked_fill(~torch.ones(S, S, dtype=torch.bool).tril(), -math.inf)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=hidden[None, None])


def transposed_triu(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).triu().mT)


def cumulative(q, k, v):
    i = torch.ones(B, S, dtype=torch.int64).cumsum(-1) - 1
    seen = i[:, None, :, None] >= i[:, None, None, :]
    return scores_of(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


def ends_aligned(q, k, v):
    seen = torch.ones(S, T, dtype=torch.bool).tril(diagonal=T - S)
    return scores_of(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


class Buffered(nn.Module):
    """A triangle that is registered once, for more positions than there are."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("bias", torch.tril(torch.ones(MOST, MOST)).view(1, 1, MOST, MOST), persistent=False)

    def forward(self, q, k, v):
        scores = scores_of(q, k)
        past = k.shape[-2]
        return scores.masked_fill(self.bias[:, :, past - S : past, :past] == 0, -math.inf).softmax(-1) @ v


def causal_in_bytes(q, k, v):
    i = torch.arange(S, dtype=torch.int8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i[None] - i[:, None]) <= 0)


def causal_in_many_bytes(q, k, v):
    i = torch.arange(MANY).to(torch.uint8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def causal_in_halves(q, k, v):
    i = torch.arange(S).to(torch.float16) * 0.5
    return scores_of(q, k).masked_fill(i[None] > i[:, None], -math.inf).softmax(-1) @ v


def causal_in_int32_products(q, k, v):
    i = torch.arange(S, dtype=torch.int32) * 2**28
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def truths_compared(q, k, v):
    i = torch.arange(S)
    return scores_of(q, k).masked_fill((i[None] <= i[:, None]) != 1, -math.inf).softmax(-1) @ v


def added_of_whole_ones(q, k, v):
    seen = torch.ones(S, S, dtype=torch.int32).tril()
    return (scores_of(q, k) + (1 - seen).to(q.dtype) * lowest(q)).softmax(-1) @ v


def added_infinity_times_filled(q, k, v):
    hidden = torch.full((S, S), -1.0, dtype=q.dtype) * math.inf
    return (scores_of(q, k) + hidden.triu(1)).softmax(-1) @ v


# windows -------------------------------------------------------------------------------------------------------------


def window_of_triangles(q, k, v):
    ones = torch.ones(S, S, dtype=torch.bool)
    seen = ones.tril() & ~ones.tril(-3)
    return scores_of(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


def window_of_tril_triu(q, k, v):
    seen = torch.tril(torch.ones(S, S, dtype=torch.bool)).triu(-2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def window_of_distance(q, k, v):
    distance = torch.arange(S)[:, None] - torch.arange(S)[None]
    hidden = torch.zeros(S, S, dtype=q.dtype).masked_fill_((distance < 0) | (distance >= 3), lowest(q))
    return (scores_of(q, k) + hidden).softmax(-1) @ v


def window_on_both_sides(q, k, v):
    distance = (torch.arange(S)[:, None] - torch.arange(S)[None]).abs()
    return scores_of(q, k).masked_fill(distance > 1, -math.inf).softmax(-1) @ v


def chunked_blocks(q, k, v):
    i = torch.arange(S)
    seen = (i[:, None] // 2 == i[None] // 2) & (i[:, None] >= i[None])
    return scores_of(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


# padding and blocks --------------------------------------------------------------------------------------------------


def padded_keys(q, k, v, padding):
    hidden = (1.0 - padding[:, None, None, :].to(q.dtype)) * lowest(q)
    return (scores_of(q, k) + hidden).softmax(-1) @ v


def padded_and_causal(q, k, v, padding):
    seen = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def padded_and_causal_twice(q, k, v, padding):
    scores = scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
    return scores.masked_fill(padding[:, None, None, :] == 0, -math.inf).softmax(-1) @ v


def lengths_in_int32(q, k, v, length):
    seen = torch.arange(S, dtype=torch.int32)[None] <= (length.int() - 1)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def lengths_of_sums(q, k, v, padding):
    seen = torch.arange(S)[None] <= (padding.sum(-1, dtype=torch.int32) - 1)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def lengths(q, k, v, length):
    seen = (torch.arange(S)[None] < length[:, None])[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def segments(q, k, v, segment):
    seen = segment[:, :, None] == segment[:, None, :]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def packed_causal(q, k, v, segment):
    same = segment[:, None, :, None] == segment[:, None, None, :]
    seen = same & torch.ones(S, S, dtype=torch.bool).tril()
    return scores_of(q, k).masked_fill(~seen, -math.inf).softmax(-1) @ v


def prefix(q, k, v, length):
    i = torch.arange(S)
    seen = (i[:, None] >= i[None]) | (i[None] < length[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None])


def any_boolean(q, k, v, seen):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


# caches --------------------------------------------------------------------------------------------------------------


def no_bias_where_seen(q, k, v, seen):
    """T5 across: a bias of zeros for each head, in place of which stands the least number."""
    bias = torch.zeros(1, q.shape[1], S, S, dtype=q.dtype)
    scores = scores_of(q, k) + torch.where(seen, bias, torch.finfo(q.dtype).min).contiguous()
    return scores.softmax(-1) @ v


def decode_over_filled(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def decode_at_position(q, k, v, position):
    seen = torch.arange(T)[None] <= position[:, None]
    return F.scaled_dot_product_attention(q, repeat(k), repeat(v), attn_mask=seen[None, None])


def decode_by_lengths(q, k, v, length):
    hidden = torch.arange(T)[None] >= length[:, None]
    scores = scores_of(q, repeat(k)).masked_fill(hidden[:, None, None], -math.inf)
    weights = torch.where(hidden[:, None, None], 0.0, scores.softmax(-1))
    return weights @ repeat(v)


def decode_sliced(q, k, v):
    k, v = k[:, :, :7], v[:, :, :7]
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def chunk_at_position(q, k, v, position):
    hidden = torch.arange(T)[None] > position[:, None]
    mask = torch.zeros(S, T, dtype=q.dtype).masked_fill(hidden, lowest(q))
    return ((scores_of(q, repeat(k)) + mask).softmax(-1)) @ repeat(v)


def chunk_from_start(q, k, v, start):
    seen = torch.arange(T) <= (torch.arange(S) + start)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)


def windowed_chunk_from_start(q, k, v, start):
    i, j = (torch.arange(S) + start)[:, None], torch.arange(T)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i) & (j > i - 3), enable_gqa=True)


left_padded = torch.tensor([[0, 0, 1, 1, 1, 1], [1] * 6])
right_padded = torch.tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
segment = torch.tensor([[0, 0, 1, 1, 1, 2], [3, 3, 3, 4, 4, 4]])
scattered = torch.rand(B, 1, S, S, generator=torch.Generator().manual_seed(5)) < 0.6
length = torch.tensor([4, 6])


listed = torch.tensor(
    [[[0, 3], [1, 4], [5, 5], [2, 0], [3, 1], [4, 2]], [[1, 2], [0, 5], [3, 4], [1, 1], [2, 5], [0, 3]]]
)


def is_listed(b, i, j):
    return j in listed[b, i].tolist()


def listed_for_all_heads(q, k, v, places):
    scores = scores_of(q, repeat(k))
    mask = torch.full_like(scores, -math.inf)
    mask.scatter_(-1, places.unsqueeze(1).expand(-1, q.shape[1], -1, -1), 0.0)
    return (scores + mask).softmax(-1) @ repeat(v)


def kept_for_all_heads(q, k, v, places):
    scores = scores_of(q, k)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept = kept.scatter(-1, places.int().long().unsqueeze(1).expand(-1, q.shape[1], -1, -1), True)
    return scores.masked_fill(~kept, -math.inf).softmax(-1) @ v


def dropped_for_all_heads(q, k, v, places):
    scores = scores_of(q, k)
    dropped = torch.zeros(scores.shape, dtype=torch.bool)
    dropped.scatter_(-1, places.unsqueeze(1).expand(*scores.shape[:2], -1, -1), True)
    return scores.masked_fill(dropped, -math.inf).softmax(-1) @ v


def listed_of_ones(q, k, v, places):
    scores = scores_of(q, k)
    places = places.unsqueeze(1).expand(-1, q.shape[1], -1, -1)
    seen = torch.zeros(scores.shape).scatter_(-1, places, torch.ones(places.shape))
    return scores.masked_fill(seen == 0, -math.inf).softmax(-1) @ v


def where_number_in_a_tensor(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    return torch.where(seen, scores_of(q, k), torch.tensor(-1e30, dtype=q.dtype)).softmax(-1) @ v


def added_numbers_in_tensors(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    bias = torch.where(seen, torch.tensor(0.0), torch.tensor(-math.inf))
    return (scores_of(q, k) + bias.to(q.dtype)).softmax(-1) @ v


def both_seen(padding):
    return lambda b, i, j: j <= i and bool(padding[b, j])


def near_seen(b, i, j):
    return i - 2 <= j <= i


SPELLINGS = (
    Entry(filled_triu, "causal_upper_left", seen=causal_seen),
    Entry(filled_lowest, "causal_upper_left", seen=causal_seen),
    Entry(filled_billion, "causal_upper_left", seen=causal_seen),
    Entry(added_infinity, "causal_upper_left", seen=causal_seen),
    Entry(added_logarithm, "causal_lower_right window 2", seen=lambda b, i, j: i - 2 <= j <= i),
    Entry(added_lowest_of_one_minus, "causal_upper_left", seen=causal_seen),
    Entry(added_times_ten_thousand, "causal_upper_left", seen=causal_seen),
    Entry(where_compared, "causal_upper_left", seen=causal_seen),
    Entry(where_full, "causal_upper_left", seen=causal_seen),
    Entry(where_number_in_a_tensor, "causal_upper_left", seen=causal_seen),
    Entry(added_numbers_in_tensors, "causal_upper_left", seen=causal_seen),
    Entry(sdpa_mask, "causal_upper_left", seen=causal_seen),
    Entry(sdpa_added, "causal_upper_left", seen=causal_seen),
    Entry(transposed_triu, "causal_upper_left", seen=causal_seen),
    Entry(cumulative, "causal_upper_left", seen=causal_seen),
    Entry(causal_in_bytes, "causal_upper_left", seen=causal_seen),
    Entry(causal_in_many_bytes, "causal_upper_left", seen=causal_seen, queries=MANY, keys=MANY),
    Entry(causal_in_halves, "causal_upper_left", seen=causal_seen),
    Entry(causal_in_int32_products, "causal_upper_left", seen=causal_seen),
    Entry(truths_compared, "causal_upper_left", seen=causal_seen),
    Entry(added_of_whole_ones, "causal_upper_left", seen=causal_seen),
    Entry(added_infinity_times_filled, "causal_upper_left", seen=causal_seen),
    Entry(ends_aligned, "causal_lower_right", seen=lambda b, i, j: j <= i + T - S, keys=T),
    Entry(Buffered(), "causal_lower_right", seen=lambda b, i, j: j <= i + T - S, keys=T),
    Entry(window_of_triangles, "causal_lower_right window 2", seen=near_seen),
    Entry(window_of_tril_triu, "causal_lower_right window 2", seen=near_seen),
    Entry(window_of_distance, "causal_lower_right window 2", seen=near_seen),
    Entry(window_on_both_sides, "dense", seen=lambda b, i, j: abs(i - j) <= 1),
    Entry(chunked_blocks, "dense", seen=lambda b, i, j: j <= i and i // 2 == j // 2),
    Entry(
        padded_keys, "dense", seen=lambda b, i, j: bool(left_padded[b, j]), more=tensors(left_padded.bool())
    ),
    Entry(padded_and_causal, "dense", seen=both_seen(left_padded), more=tensors(left_padded)),
    Entry(padded_and_causal_twice, "dense", seen=both_seen(right_padded), more=tensors(right_padded)),
    Entry(lengths_in_int32, "none kv_lens", seen=lambda b, i, j: j < length[b], more=tensors(length)),
    Entry(lengths_of_sums, "none kv_lens", seen=lambda b, i, j: bool(right_padded[b, j]), more=tensors(right_padded)),
    Entry(lengths, "none kv_lens", seen=lambda b, i, j: j < length[b], more=tensors(length)),
    Entry(segments, "dense", seen=lambda b, i, j: segment[b, i] == segment[b, j], more=tensors(segment)),
    Entry(
        packed_causal, "dense", seen=lambda b, i, j: j <= i and segment[b, i] == segment[b, j], more=tensors(segment)
    ),
    Entry(prefix, "dense", seen=lambda b, i, j: j <= i or j < length[b], more=tensors(length)),
    Entry(any_boolean, "dense", seen=lambda b, i, j: bool(scattered[b, 0, i, j]), more=tensors(scattered)),
    Entry(no_bias_where_seen, "dense", seen=lambda b, i, j: bool(scattered[b, 0, i, j]), more=tensors(scattered)),
    Entry(listed_for_all_heads, "dense", seen=is_listed, heads=M, more=tensors(listed)),
    Entry(kept_for_all_heads, "dense", seen=is_listed, more=tensors(listed)),
    Entry(dropped_for_all_heads, "dense", seen=lambda b, i, j: not is_listed(b, i, j), more=tensors(listed)),
    Entry(listed_of_ones, "dense", seen=is_listed, more=tensors(listed)),
    Entry(decode_over_filled, heads=M, queries=1, keys=T),
    Entry(
        decode_at_position, "none kv_lens", seen=lambda b, i, j: j <= 6, heads=M, queries=1, keys=T,
        more=tensors(torch.tensor([6])),
    ),
    Entry(
        decode_by_lengths, "none kv_lens", seen=lambda b, i, j: j < length[b], heads=M, queries=1, keys=T,
        more=tensors(length),
    ),
    Entry(decode_sliced, seen=lambda b, i, j: j < 7, heads=M, queries=1, keys=T),
    Entry(
        chunk_at_position, "dense", seen=lambda b, i, j: j <= i + 3, heads=M, keys=T, more=tensors(torch.arange(S) + 3)
    ),
    Entry(
        chunk_from_start, "dense",  # nothing says that the last query stands before the end of the keys
        seen=lambda b, i, j: j <= i + 3, heads=M, keys=T,
        more=tensors(torch.tensor(3)),
    ),
    Entry(
        windowed_chunk_from_start, "dense",
        seen=lambda b, i, j: i + 1 <= j <= i + 3, heads=M, keys=T,
        more=tensors(torch.tensor(3)),
    ),
)  # fmt: skip
