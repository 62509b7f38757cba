"""What resembles attention with a simple mask: it must be refused, or fused with the mask that it really has."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from tests.corpus.base import activations

from .attention_base import B, D, Entry, G, M, N, S, T, lowest, repeat, tensors
from .attention_masks import MANY, SCALE, left_padded, scores_of

# masks that are not causal -------------------------------------------------------------------------------------------


def anti_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).triu())


def transposed_causal(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril().mT)


def strictly_causal_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.ones(S, S, dtype=torch.bool).tril(-1))


def one_score_for_several_keys(q, k, v, values):
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return scores_of(q, k).masked_fill(hidden, -math.inf).softmax(-1) @ values


def strictly_causal_mean(q, k, v):
    hidden = torch.ones(S, S, dtype=torch.bool).triu()
    return scores_of(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v


def strictly_causal_added(q, k, v):
    hidden = torch.ones(S, S, dtype=q.dtype).triu() * lowest(q)
    return (scores_of(q, k) + hidden).softmax(-1) @ v


def strictly_causal_weak(q, k, v):
    hidden = torch.ones(S, S, dtype=q.dtype).triu() * -10000.0
    return (scores_of(q, k) + hidden).softmax(-1) @ v


def two_ahead(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril(2)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def with_a_hole(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    columns = torch.arange(S)
    seen = seen & ~((torch.arange(S)[:, None] == 4) & (columns == 2))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def wider_window(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril().triu(-3)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def window_behind(q, k, v):
    i, j = torch.arange(S)[:, None], torch.arange(S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i - 1) & (j >= i - 2))


def fractional_bound(q, k, v):
    i, j = torch.arange(S)[:, None], torch.arange(S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j - i) < 0.5)


def every_other_key(q, k, v):
    seen = 2 * torch.arange(S)[None] <= torch.arange(S)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def wrapped_positions(q, k, v):
    i = torch.arange(S)
    turned = i[i - 2]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=turned[None] <= turned[:, None])


def bytes_that_wrap(q, k, v):
    i = torch.arange(S, dtype=torch.uint8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i[None] - i[:, None]) <= 2)


def causal_but_for(dtype, count):
    """Positions that are compared in a dtype that does not hold their differences."""

    def wrapped(q, k, v):
        ahead = (torch.arange(count)[None] - torch.arange(count)[:, None]).to(dtype)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=ahead <= 0)

    wrapped.__name__ = f"differences_in_{str(dtype).removeprefix('torch.')}"
    return wrapped


def bytes_compared(q, k, v):
    i = torch.arange(MANY).to(torch.int8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def bytes_compared_with_a_number(q, k, v):
    i = torch.arange(S, dtype=torch.uint8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i > -2)[None] | (i[None] <= i[:, None]))


def products_that_wrap(q, k, v):
    i = torch.arange(S, dtype=torch.int32) * 2**29
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def sums_that_wrap(q, k, v, start):
    i = torch.arange(S, dtype=torch.int32) + start
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def totals_that_wrap(q, k, v):
    i = torch.full((S,), 50, dtype=torch.int8).cumsum(0, dtype=torch.int8)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def positions_rounded(q, k, v):
    i = (torch.arange(S) + 2046).to(torch.float16)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def positions_rounded_on_the_way(q, k, v):
    i = torch.arange(S).float() + 2**25 - 2**25
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def positions_compared_as_floats(q, k, v):
    i = torch.arange(S) + 2**24
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(i[None] <= 2.0**24) | (i[None] <= i[:, None]))


def positions_cut_off(q, k, v):
    i = (torch.arange(S) * 0.5).long()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= i[:, None])


def factor_cut_off(q, k, v):
    i = torch.full((S,), 2.5, dtype=torch.int64).cumsum(0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=i[None] <= 2 * torch.arange(S)[:, None])


def truths_that_are_not_two(q, k, v):
    seen = torch.ones(S, S, dtype=torch.bool).tril()
    return scores_of(q, k).masked_fill(seen == 2, -math.inf).softmax(-1) @ v


def infinity_times_zero(q, k, v):
    seen = torch.ones(S, S, dtype=q.dtype).tril()
    return (scores_of(q, k) + (1.0 - seen) * -math.inf).softmax(-1) @ v


def infinity_times_triangle(q, k, v):
    return (scores_of(q, k) + torch.ones(S, S, dtype=q.dtype).triu(1) * -math.inf).softmax(-1) @ v


def infinity_taken_from_itself(q, k, v):
    hidden = torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    return (scores_of(q, k) + (hidden - hidden)).softmax(-1) @ v


def filled_with_nan(q, k, v):
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return scores_of(q, k).masked_fill(hidden, math.nan).softmax(-1) @ v


def scores_cut_off(q, k, v):
    return scores_of(q, k).to(torch.int32).to(q.dtype).softmax(-1) @ v


def logarithm_of_less(q, k, v):
    """NaN where a key is hidden, not -inf."""
    hidden = torch.ones(S, S, dtype=q.dtype).triu(1)
    return (scores_of(q, k) + torch.log(1 - 2 * hidden)).softmax(-1) @ v


def sums_cut_off(q, k, v):
    whole = q.to(torch.int8).to(q.dtype) @ k.to(torch.int8).to(q.dtype).mT
    return (whole + (q @ k.mT).to(torch.int32).to(q.dtype)).softmax(-1) @ v


def weights_cut_off(q, k, v):
    return scores_of(q, k).softmax(-1).to(torch.int32).to(q.dtype) @ v


def other_offset(q, k, v, start):
    seen = torch.arange(T) <= (2 * torch.arange(S) + start)[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def positions_of_others(q, k, v, positions):
    seen = positions[:, None, None, :] <= positions[:, None, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def heads_apart(q, k, v):
    i, j, head = torch.arange(S)[:, None], torch.arange(S), torch.arange(N)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=j <= i + head)


def padding_of_heads(q, k, v):
    seen = torch.arange(S) <= torch.arange(N)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def listed_for_each_head(q, k, v, places):
    mask = torch.full((B, N, S, S), -torch.inf).scatter_(-1, places, 0.0)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.to(q.dtype))


def listed_for_two_heads(q, k, v, places):
    mask = torch.full((B, N, S, S), -torch.inf)
    mask.view(B, 2, 2, S, S).scatter_(-1, places.unsqueeze(2).expand(-1, -1, 2, -1, -1), 0.0)
    return (scores_of(q, k) + mask.to(q.dtype)).softmax(-1) @ v


def divided_by_sums_of_others(q, k, v):
    q, k, v = (each[:, :, :N] for each in (q, k, v))  # as many queries as heads
    weights = (q @ k.mT * D**-0.5).exp()
    return ((weights @ v).transpose(1, 2) / weights.sum(-1).unsqueeze(-1)).transpose(1, 2)


def behind_the_sequence(q, k, v):
    ahead = torch.arange(S)[:, None] + torch.arange(B)[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=torch.arange(T) <= ahead)


def up_to_the_sequence(q, k, v):
    seen = torch.arange(S) <= torch.arange(B)[:, None, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def heads_compared(q, k, v, start):
    i, j, head = torch.arange(S)[:, None], torch.arange(T), torch.arange(N)[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(j <= i + start) & (head >= -j))


def lengths_of_more(q, k, v, length):
    seen = torch.arange(S)[None] < length[:B, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def lengths_on_a_diagonal(q, k, v, length):
    seen = torch.arange(S)[None] < length[torch.arange(B), torch.arange(B)][:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen[:, None, None])


def scaled_mask(q, k, v):
    hidden = torch.ones(S, S, dtype=q.dtype).triu(1) * -1e4
    return ((q @ k.mT * 1e3 + hidden) * 1e-4).softmax(-1) @ v


def turned_mask(q, k, v):
    hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
    return ((q @ k.mT * -SCALE).masked_fill(hidden, -1e9) * -1.0).softmax(-1) @ v


def hidden_queries(q, k, v, padding):
    rows = (1.0 - padding[:, None, :, None].to(q.dtype)) * lowest(q)
    return (scores_of(q, k) + rows).softmax(-1) @ v


def empty_rows_filled(q, k, v, padding):
    seen = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
    return scores_of(q, k).masked_fill(~seen, -1e9).softmax(-1) @ v


def empty_rows_added(q, k, v, padding):
    seen = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
    return (scores_of(q, k) + torch.zeros(B, 1, S, S, dtype=q.dtype).masked_fill(~seen, lowest(q))).softmax(-1) @ v


def empty_rows_lowered(q, k, v, padding):
    seen = torch.ones(S, S, dtype=torch.bool).tril() & padding[:, None, None, :].bool()
    return (scores_of(q, k) - 1e4 * (~seen).to(q.dtype)).softmax(-1) @ v


def empty_rows_of_two(q, k, v, padding):
    hidden = torch.ones(S, S, dtype=q.dtype).triu(1) * lowest(q) * 0.5
    rest = (1.0 - padding[:, None, None, :].to(q.dtype)) * lowest(q) * 0.25
    return (scores_of(q, k) + hidden + rest).softmax(-1) @ v


def nothing_seen(q, k, v):
    return scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool), -1e9).softmax(-1) @ v


def empty_sequences(q, k, v, count):
    hidden = (torch.arange(S)[None] >= count[:, None])[:, None, None]
    return scores_of(q, k).masked_fill(hidden, -1e9).softmax(-1) @ v


# keys and values -----------------------------------------------------------------------------------------------------


def reversed_keys(q, k, v):
    return F.scaled_dot_product_attention(q, k.flip(2), v, is_causal=True)


def rolled_values(q, k, v):
    return F.scaled_dot_product_attention(q, k, v.roll(1, 2))


def tiled_heads(q, k, v):
    k, v = k.repeat(1, G, 1, 1), v.repeat(1, G, 1, 1)
    return scores_of(q, k).softmax(-1) @ v


def tiled_keys_only(q, k, v):
    return scores_of(q, k.repeat(1, G, 1, 1)).softmax(-1) @ repeat(v)


def tiled_by_einsum(q, k, v):
    q = q.unflatten(1, (G, M))
    weights = torch.einsum("bgmsd,bmtd->bgmst", q, k).mul(SCALE).softmax(-1)
    return torch.einsum("bgmst,bmtd->bgmsd", weights, v).flatten(1, 2)


def keys_of_heads(q, k, v, keys):
    return (q @ keys.mT * SCALE).softmax(-1) @ v


def keys_of_heads_as_many(q, k, v, keys):
    q, v = q.repeat(2, 1, 1, 1), v.repeat(2, 1, 1, 1)
    return ((q @ keys.mT * SCALE).softmax(-1) @ v)[:B]


def values_of_heads_as_many(q, k, v, values):
    q, k = q.repeat(2, 1, 1, 1), k.repeat(2, 1, 1, 1)
    return ((q @ k.mT * SCALE).softmax(-1) @ values)[:B]


def keys_as_values(q, k, v):
    return scores_of(q, k).softmax(-1) @ k


def wider_values(q, k, v):
    return scores_of(q, k).softmax(-1) @ v


def keys_and_values_changed(q, k, v):
    return F.scaled_dot_product_attention(q, v, k)


# functions that are not softmax attention ----------------------------------------------------------------------------


def over_queries(q, k, v):
    return scores_of(q, k).softmax(-2) @ v


def capped(q, k, v):
    return (torch.tanh(scores_of(q, k) / 30.0) * 30.0).softmax(-1) @ v


def dropped(q, k, v):
    return F.dropout(scores_of(q, k).softmax(-1), 0.5, training=True) @ v


def sdpa_dropped(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)


def heated(q, k, v, temperature):
    return (scores_of(q, k) * temperature).softmax(-1) @ v


def scaled_by_argument(q, k, v, scale):
    return (q @ k.mT * scale).softmax(-1) @ v


def times_nothing(q, k, v):
    return (q @ k.mT * 0.0).softmax(-1) @ v


def times_infinity(q, k, v):
    return (q @ k.mT * math.inf).softmax(-1) @ v


def dropped_gates(q, k, v):
    return F.dropout(scores_of(q, k).sigmoid(), 0.5, training=True) @ v


def softmax_of_an_input(q, k, v):
    return q.softmax(-1) @ v.mT


def softmax_of_whole_numbers(q, k, v):
    return q.to(torch.int32).to(q.dtype).softmax(-1) @ v.mT


def softmax_of_a_gated_input(q, k, v):
    return (q * k).softmax(-1) @ v.mT


def raised_by_themselves(q, k, v):
    scores = scores_of(q, k)
    return (scores + scores.relu()).softmax(-1) @ v


def lowered_below_the_hidden(q, k, v):
    scores = scores_of(q, k)
    lowered = scores - 1e5 * scores.amax(-1, keepdim=True)
    return lowered.masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1e4).softmax(-1) @ v


def rows_hidden_by_their_scores(q, k, v):
    scores = scores_of(q, k)
    return scores.masked_fill(scores.amax(-1, keepdim=True) > 0.5, -1e9).softmax(-1) @ v


def scores_below_each_other(q, k, v):
    return torch.cat([scores_of(q, k), scores_of(q, k) * 2], 2).softmax(-1) @ v


def in_two_dtypes(q, k, v):
    return scores_of(q.half(), k.half()).softmax(-1).to(v.dtype) @ v


# exponentials that are divided by a sum after the product ------------------------------------------------------------


def powers_cut_off(q, k, v):
    powers = scores_of(q, k).exp()
    return (powers.to(torch.int32).to(q.dtype) @ v) / powers.sum(-1, keepdim=True)


def powers_rounded_beside_their_sum(q, k, v):
    powers = scores_of(q, k).exp()
    return (powers.half() / powers.sum(-1, keepdim=True).half()) @ v.half()


def powers_divided_by_other_rows(q, k, v):
    powers = scores_of(q, k).exp()
    return ((powers @ v).reshape(2, B, N, S, D // 2) / powers.sum(-1, keepdim=True)).reshape(B, N, S, D)


def powers_divided_by_columns(q, k, v):
    powers = scores_of(q, k).exp()
    return (powers @ v) / powers.sum(-2, keepdim=True)


def powers_divided_lane_by_lane(q, k, v):
    return (scores_of(q, k).exp() @ v) / q


def powers_divided_number_by_number(q, k, v):
    return (scores_of(q, k).exp() @ v) / q[..., :S]


# rows, keys and values that do not belong together -------------------------------------------------------------------


def scores_viewed(q, k, v):
    return scores_of(q, k).view(B, S, N, S).softmax(-1) @ v[:, :1]


def weights_viewed(q, k, v):
    return scores_of(q, k).softmax(-1).view(B, S, N, S) @ v[:, :1]


def weights_of_one_sequence(q, k, v):
    return scores_of(q[:1], k[:1]).softmax(-1) @ v


def scores_of_one_sequence(q, k, v, padding):
    return scores_of(q[:1], k[:1]).masked_fill(~padding[:, None, None], -math.inf).softmax(-1) @ v


def keys_of_queries(q, k, v, keys):
    return scores_of(q.unsqueeze(-2), keys).squeeze(-2).softmax(-1) @ v


def values_of_queries(q, k, v, values):
    return (scores_of(q, k).softmax(-1).unsqueeze(-2) @ values).squeeze(-2)


def shared_by_twos_and_threes(q, k, v):
    q = torch.cat((q, q[:, :2]), 1)
    k, v = k[:, :2].repeat_interleave(3, 1), v[:, :3].repeat_interleave(2, 1)
    return scores_of(q, k).softmax(-1) @ v


def of_six_dims(q, k, v):
    q, k, v = (each.view(B, 2, 2, S, 2, D // 2).transpose(3, 4) for each in (q, k, v))
    return scores_of(q, k).softmax(-1) @ v


def causal_with_matrices_of_queries(q, k, v, weights):
    q = torch.einsum("xsd,sde->xse", q, weights)
    return scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf).softmax(-1) @ v


def blocks_with_matrices_of_queries(q, k, v, weights):
    i = torch.arange(S)
    q = torch.einsum("xsd,sde->xse", q, weights)
    return scores_of(q, k).masked_fill(i[:, None] // 2 != i // 2, -math.inf).softmax(-1) @ v


def sigmoid(q, k, v):
    return scores_of(q, k).sigmoid() @ v


def relu(q, k, v):
    return scores_of(q, k).relu() @ v


def lowered_by_one(q, k, v):
    return scores_of(q, k).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -1.0).softmax(-1) @ v


def multiplied_mask(q, k, v):
    return (scores_of(q, k) * torch.ones(S, S, dtype=q.dtype).tril()).softmax(-1) @ v


def multiplied_weights(q, k, v):
    return (scores_of(q, k).softmax(-1) * torch.ones(S, S, dtype=q.dtype).tril()) @ v


def powers_not_normalised(q, k, v):
    return scores_of(q, k).exp() @ v


def softmax_over_more(q, k, v):
    powers = scores_of(q, k).exp()
    return powers / powers.sum((-2, -1), keepdim=True) @ v


def softmax_plus_one(q, k, v):
    powers = scores_of(q, k).exp()
    return powers / (1.0 + powers.sum(-1, keepdim=True)) @ v


def sink_that_is_masked(q, k, v, sink):
    joined = torch.cat([scores_of(q, k), sink.reshape(1, -1, 1, 1).expand(B, -1, S, 1)], -1)
    hidden = torch.ones(S, S + 1, dtype=torch.bool).triu(1)
    return joined.masked_fill(hidden, -math.inf).softmax(-1)[..., :-1] @ v


def sink_cut_off(q, k, v, sink):
    wide = sink.to(torch.int8).to(q.dtype).reshape(1, -1, 1, 1).expand(B, -1, S, 1)
    return torch.cat([scores_of(q, k), wide], -1).softmax(-1)[..., :-1] @ v


def wide(sink):
    """A sink for every row of the scores."""
    return sink.reshape(1, -1, 1, 1).expand(B, -1, S, 1)


def sink_that_is_scaled(q, k, v, sink):
    return (torch.cat([q @ k.mT, wide(sink)], -1) * SCALE).softmax(-1)[..., :-1] @ v


def sink_that_is_turned(q, k, v, sink):
    joined = torch.cat([scores_of(q, k), wide(sink)], -1).transpose(1, 2)
    return joined.softmax(-1)[..., :-1].transpose(1, 2) @ v


def sink_beside_lowered_scores(q, k, v, sink):
    scores = scores_of(q, k)
    return torch.cat([scores - scores.amax(-1, keepdim=True), wide(sink)], -1).softmax(-1)[..., :-1] @ v


def two_sinks(q, k, v, sink):
    return torch.cat([scores_of(q, k), wide(sink), wide(2 * sink)], -1).softmax(-1)[..., :-2] @ v


def sink_in_a_sink(q, k, v, sink):
    joined = torch.cat([scores_of(q.half(), k.half()), wide(sink).half()], -1).to(q.dtype)
    return torch.cat([joined, wide(2 * sink)], -1).softmax(-1)[..., :-2] @ v


def two_columns_of_sinks(q, k, v, sinks):
    joined = torch.cat([scores_of(q, k), sinks.reshape(1, N, 1, 2).expand(B, N, S, 2)], -1)
    return joined.softmax(-1)[..., :-2] @ v


def sink_up_to(q, k, v, sink):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = scores_of(q, k).masked_fill(torch.arange(S) >= 4, -math.inf)
    return (torch.cat([scores, wide(sink)], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def sink_before_more_keys(q, k, v, sink):
    q, k, v = (each.transpose(1, 2) for each in (q, k, v))
    scores = scores_of(q, k).masked_fill(torch.ones(S, T, dtype=torch.bool).triu(1), -math.inf)
    return (torch.cat([scores, wide(sink)], -1).softmax(-1)[..., :-1] @ v).transpose(1, 2)


def every_other_weight(q, k, v, sink):
    return torch.cat([scores_of(q, k), wide(sink)], -1).softmax(-1)[..., :-1:2] @ v[:, :, ::2]


def sink_in_front(q, k, v, sink):
    joined = torch.cat([sink.reshape(1, -1, 1, 1).expand(B, -1, S, 1), scores_of(q, k)], -1)
    return joined.softmax(-1)[..., :-1] @ v


def cut_in_front(q, k, v, sink):
    return torch.cat([scores_of(q, k), wide(sink)], -1).softmax(-1)[..., 1:] @ v


def cut_too_early(q, k, v, sink):
    joined = torch.cat([scores_of(q, k), sink.reshape(1, -1, 1, 1).expand(B, -1, S, 1)], -1)
    return joined.softmax(-1)[..., :-2] @ v[:, :, :-1]


def fewer_weights(q, k, v):
    return scores_of(q, k).softmax(-1)[..., :-1] @ v[:, :, :-1]


def sink_with_a_value(q, k, v, sink, values):
    """The one key and the sink have a value each."""
    return torch.cat([scores_of(q, k), wide(sink)], -1).softmax(-1) @ values


def fewer_heads(q, k, v):
    return scores_of(q, k).softmax(-1)[:, :2] @ v[:, :2]


def sink_of_queries(q, k, v, sink):
    joined = torch.cat([scores_of(q, k), sink.reshape(1, 1, -1, 1).expand(B, N, -1, 1)], -1)
    return joined.softmax(-1)[..., :-1] @ v


def weights_returned(q, k, v):
    weights = scores_of(q, k).softmax(-1)
    return weights @ v, weights


def scores_returned(q, k, v):
    scores = scores_of(q, k)
    return scores.softmax(-1) @ v, scores


def refused(form, reason="", **more):
    """A form that nothing may be made of; without a reason where it does not look like attention."""
    return Entry(form, "", reason, **more)


LENGTHS = torch.tensor([0, 4])
IN_PLACE = "of the scores, without a softmax"

LOOKALIKES = (
    Entry(anti_causal, "dense"),
    Entry(transposed_causal, "dense"),
    Entry(strictly_causal_sdpa, "dense"),
    Entry(strictly_causal_mean, "dense"),
    Entry(strictly_causal_added, "dense"),
    Entry(strictly_causal_weak),
    Entry(two_ahead, "dense"),
    Entry(with_a_hole, "dense"),
    Entry(wider_window, "causal_lower_right window 3"),
    Entry(window_behind, "dense"),
    Entry(fractional_bound, "causal_upper_left"),
    Entry(every_other_key, "dense"),
    Entry(wrapped_positions, "dense"),
    Entry(bytes_that_wrap, "dense"),
    Entry(causal_but_for(torch.int8, MANY), "dense", queries=MANY, keys=MANY),
    Entry(causal_but_for(torch.uint8, S), "causal_lower_right window 0"),
    Entry(bytes_compared, "dense", queries=MANY, keys=MANY),
    Entry(bytes_compared_with_a_number, "causal_upper_left"),
    Entry(products_that_wrap, "dense"),
    Entry(sums_that_wrap, "dense", more=tensors(torch.tensor(2**31 - 3, dtype=torch.int32))),
    Entry(totals_that_wrap, "dense"),
    Entry(positions_rounded, "dense"),
    Entry(positions_rounded_on_the_way, "dense"),
    Entry(positions_compared_as_floats, "dense"),
    Entry(positions_cut_off, "dense"),
    Entry(factor_cut_off, "dense"),
    Entry(truths_that_are_not_two),
    refused(infinity_times_zero, "it is NaN at some of the scores, as 0 * inf"),
    refused(infinity_times_triangle, "it is NaN at some of the scores, as 0 * inf"),
    refused(infinity_taken_from_itself, "is NaN"),
    refused(filled_with_nan, "hidden scores are replaced by a number"),
    refused(scores_cut_off, "they are cast from"),
    refused(logarithm_of_less, "is NaN"),
    refused(sums_cut_off, "what is added to the scores is not proven"),
    refused(weights_cut_off, "they do not meet all values by weights [B"),
    Entry(
        other_offset, "dense", keys=T, more=tensors(torch.tensor(1))
    ),
    Entry(
        positions_of_others, "dense",
        more=tensors((5 * torch.arange(S)[None] + torch.arange(B)[:, None]) % 6),
    ),
    refused(heads_apart, "differs from head to head"),
    refused(divided_by_sums_of_others, IN_PLACE),
    refused(padding_of_heads, "differs from head to head"),
    refused(
        listed_for_each_head, "differs from head to head",
        more=tensors((torch.arange(B * N * S * 2) * 5 % 7 % S).view(B, N, S, 2)),
    ),
    Entry(listed_for_two_heads, more=tensors((torch.arange(B * 2 * S * 2) * 5 % 7 % S).view(B, 2, S, 2))),
    Entry(behind_the_sequence, "dense", keys=T),
    Entry(up_to_the_sequence, "dense"),
    refused(heads_compared, "differs from head to head", keys=T, more=tensors(torch.tensor(3))),
    Entry(lengths_of_more, "dense", more=tensors(torch.tensor([4, 6, 5]))),
    Entry(lengths_on_a_diagonal, "dense", more=tensors(torch.tensor([[4, 6], [5, 3]]))),
    refused(scaled_mask, "multiplied by 0.0001 together with the scores"),
    refused(turned_mask, "hidden scores are replaced by a number"),
    Entry(hidden_queries, "dense", more=tensors(left_padded.bool())),
    Entry(empty_rows_filled, "dense", more=tensors(left_padded.bool())),
    Entry(empty_rows_added, "dense", more=tensors(left_padded.bool())),
    Entry(empty_rows_lowered, more=tensors(left_padded.bool())),
    Entry(empty_rows_of_two, "dense", more=tensors(left_padded.bool())),
    Entry(nothing_seen, "dense"),
    Entry(empty_sequences, "dense", more=tensors(LENGTHS)),
    Entry(reversed_keys, "causal_upper_left"),
    Entry(rolled_values),
    Entry(tiled_heads, heads=M),
    Entry(tiled_keys_only, heads=M),
    Entry(tiled_by_einsum, heads=M),
    Entry(keys_of_heads, more=tensors(activations(7, N, S, D))),
    Entry(keys_of_heads_as_many, more=tensors(activations(7, N, S, D))),
    Entry(values_of_heads_as_many, more=tensors(activations(7, N, S, D))),
    Entry(keys_as_values),
    Entry(wider_values, values=2 * D),
    Entry(keys_and_values_changed),
    refused(over_queries, "over the queries"),
    refused(capped, "soft capping"),
    refused(dropped, "dropped"),
    refused(sdpa_dropped, "dropped"),
    Entry(heated, more=tensors(activations(9, B, 1, S, 1))),
    Entry(scaled_by_argument, more=tensors(torch.tensor(-0.25))),
    refused(times_nothing, "multiplied by 0"),
    refused(times_infinity, "multiplied by inf"),
    refused(dropped_gates),
    refused(softmax_of_an_input, "they are an input of this graph"),
    refused(softmax_of_whole_numbers, "they are an input of this graph"),
    refused(softmax_of_a_gated_input, "computed from each row alone"),
    refused(raised_by_themselves, "it is computed from the scores"),
    refused(lowered_below_the_hidden, "it is computed from the scores"),
    refused(rows_hidden_by_their_scores, "it is computed from the scores"),
    refused(scores_below_each_other, "they do not meet all values by weights [B", keys=1),
    refused(in_two_dtypes, "their dtypes are"),
    refused(powers_cut_off, IN_PLACE),
    refused(powers_rounded_beside_their_sum, "their dtypes are"),
    refused(powers_divided_by_other_rows, IN_PLACE),
    refused(powers_divided_by_columns, IN_PLACE, values=S),
    refused(powers_divided_lane_by_lane, IN_PLACE),
    refused(powers_divided_number_by_number, IN_PLACE, values=S),
    refused(scores_viewed, "they differ among the queries of one head"),
    refused(weights_viewed, "they do not meet all values by weights [B"),
    refused(weights_of_one_sequence, "they differ among the queries of one head"),
    refused(scores_of_one_sequence, "parts of one row have a scale or a mask of", more=tensors(left_padded.bool())),
    refused(keys_of_queries, "they differ among the queries of one head", more=tensors(activations(7, B, N, S, S, D))),
    refused(
        one_score_for_several_keys, "one of them is repeated for several keys", keys=1,
        more=tensors(activations(7, B, N, S, D)),
    ),
    refused(values_of_queries, "differ among the queries of one head", more=tensors(activations(7, B, N, S, S, D))),
    refused(shared_by_twos_and_threes, "a head of keys serves other query heads"),
    refused(of_six_dims, "more than five dims"),
    Entry(
        causal_with_matrices_of_queries, "causal_upper_left", layout="XSD", more=tensors(activations(7, S, D, D)),
    ),
    Entry(blocks_with_matrices_of_queries, "dense", layout="XSD", more=tensors(activations(7, S, D, D))),
    refused(sigmoid, IN_PLACE),
    refused(relu, IN_PLACE),
    refused(lowered_by_one, "hidden scores are replaced by a number"),
    refused(multiplied_mask, "they are multiplied by a tensor that"),
    refused(multiplied_weights, "they go through a multiplication"),
    refused(powers_not_normalised, IN_PLACE),
    refused(softmax_over_more, IN_PLACE),
    Entry(softmax_plus_one, "none"),
    refused(sink_that_is_masked, "it is scaled or masked together with the", more=tensors(activations(4, N))),
    Entry(sink_cut_off, more=tensors(2 * activations(4, N))),
    refused(sink_that_is_scaled, "it is scaled or masked together with the", more=tensors(activations(4, N))),
    refused(sink_that_is_turned, "it is scaled or masked together with the", more=tensors(activations(4, N))),
    refused(sink_beside_lowered_scores, "it is computed from the scores", more=tensors(activations(4, N))),
    refused(two_sinks, "they do not meet all values by weights [B", more=tensors(activations(4, N))),
    refused(sink_in_a_sink, "it is scaled or masked together with the", more=tensors(activations(4, N))),
    refused(two_columns_of_sinks, "they do not meet all values by weights [B", more=tensors(activations(4, N, 2))),
    Entry(sink_up_to, "none kv_len 4", layout="BSND", more=tensors(activations(4, N))),
    Entry(
        sink_before_more_keys, "causal_upper_left", keys=T, layout="BSND", more=tensors(activations(4, N)),
    ),
    refused(every_other_weight, "they do not meet all values by weights [B", more=tensors(activations(4, N))),
    refused(sink_in_front, "they do not meet all values by weights [B", more=tensors(activations(4, N))),
    refused(cut_in_front, "they do not meet all values by weights [B", more=tensors(activations(4, N))),
    refused(cut_too_early, "columns are cut off behind the softmax that", more=tensors(activations(4, N))),
    refused(fewer_weights, "columns are cut off behind the softmax that"),
    Entry(
        sink_with_a_value, "", "it has a value of its own", keys=1,
        more=tensors(activations(4, N), activations(5, B, N, 2, D)),
    ),
    refused(fewer_heads, "they do not meet all values by weights [B"),
    refused(sink_of_queries, "not one number for each head", more=tensors(activations(4, S))),
    refused(weights_returned, "something else reads them beside the"),
    Entry(scores_returned),
)  # fmt: skip
