"""softmax(scale · q kᵀ + bias, masked) v, as people write it: relative positions, slopes, tables, sums with a mask."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.corpus.base import activations

from .attention_base import B, Entry, M, N, S, T, lowest, repeat, tensors
from .attention_masks import SCALE, scores_of

SLOPES = 2.0 ** -torch.arange(1, N + 1)
WHOLE = activations(8, B, N, S, S)


def future():
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def distances():
    return torch.arange(S)[None] - torch.arange(S)[:, None]


def meaning(bias: Callable[..., Tensor], hidden: Callable[[], Tensor] | None = None, empty: float = math.nan):
    """The same in float64; `empty` for queries that see nothing."""

    def by_heads(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        added = bias(*more).double().expand(B, N, q.shape[2], k.shape[2])
        added = added if hidden is None else added.masked_fill(hidden(), -math.inf)
        powers = (torch.einsum("bnsd,bntd->bnst", q, repeat(k) if k.shape[1] != N else k) * SCALE + added).exp()
        total = powers.sum(-1, keepdim=True)
        y = powers @ (repeat(v) if v.shape[1] != N else v) / total
        return torch.where(total == 0, empty, y)

    return by_heads


# what is added is given ----------------------------------------------------------------------------------------------


def biased(q, k, v, bias):
    return (scores_of(q, k) + bias).softmax(-1) @ v


def of_two(q, k, v, bias, other):
    """Two biases one after the other, as of places within a window and of windows."""
    return (scores_of(q, k) + bias + other).softmax(-1) @ v


def of_three(q, k, v, bias, other):
    return (scores_of(q, k) + bias + other + bias.flip(-1)).softmax(-1) @ v


def of_one_twice(q, k, v, bias, other):
    """As of the windows of Swin v2, whose mask is added twice."""
    return (scores_of(q, k) + bias + other + other).softmax(-1) @ v


def of_one_query(q, k, v, bias):
    return (scores_of(q, k) + bias[:, :, :1]).softmax(-1) @ v


def grouped(q, k, v, bias):
    return (scores_of(q, repeat(k)) + bias).softmax(-1) @ repeat(v)


def by_einsum(q, k, v, bias):
    scores = torch.einsum("bsnd,btnd->bnst", q, k) * SCALE + bias
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v)


def causal_and_biased(q, k, v, bias):
    return (scores_of(q, k) + bias).masked_fill(future(), -math.inf).softmax(-1) @ v


INFINITE = WHOLE.clone()
INFINITE[0, 1, 2] = -math.inf
INFINITE[:, :, 3, 1:] = -math.inf
INFINITE[1, 0, :, 4] = -math.inf


# what is added is computed -------------------------------------------------------------------------------------------


def sloped(q, k, v):
    near = -(torch.arange(S)[:, None] - torch.arange(S)[None]).abs().to(q.dtype)
    slopes = 2.0 ** -torch.arange(1, N + 1).to(q.dtype)
    return (scores_of(q, k) + slopes[:, None, None] * near).softmax(-1) @ v


def sloped_in_float(q, k, v):
    """Numbers that every dtype of 16 bits holds."""
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625])
    bias = slopes[:, None, None] * distances() + torch.full((S, S), -math.inf).triu(1)
    return (scores_of(q, k).float() + bias).softmax(-1).to(q.dtype) @ v


def before_the_scale(q, k, v, slopes):
    bias = slopes[:, None, None] * distances().to(q.dtype)
    return ((q @ k.mT + bias) * SCALE).softmax(-1) @ v


def slopes_given(q, k, v, slopes):
    return (scores_of(q, k) + slopes.view(1, -1, 1, 1) * torch.arange(1 - S, 1).to(q.dtype)).softmax(-1) @ v


def causal_where(q, k, v, slopes):
    bias = torch.where(future(), -math.inf, distances().to(q.dtype) * slopes[:, None, None])
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias[None])


def lowest_added(q, k, v, slopes):
    bias = distances().to(q.dtype) * slopes[:, None, None] + torch.full((S, S), lowest(q), dtype=q.dtype).triu(1)
    return (scores_of(q, k) + bias[None]).softmax(-1) @ v


def heads_in_the_batch(q, k, v, slopes):
    """Bloom: slopes of all heads of all sequences, added by baddbmm; a mask after it."""
    alibi = (slopes[:, None] * torch.arange(S)).repeat(B, 1).reshape(B * N, 1, S).to(q.dtype)
    scores = alibi.baddbmm(q.flatten(0, 1), k.flatten(0, 1).mT, alpha=SCALE).view(B, N, S, S)
    weights = (scores + torch.full((S, S), lowest(q), dtype=q.dtype).triu(1)).softmax(-1).view(B * N, S, S)
    return torch.bmm(weights, v.flatten(0, 1)).view(B, N, S, -1)


def cut_from_a_longer_one(q, k, v, bias):
    """A bias and the order of more queries and keys than there are, as models keep it."""
    whole = bias + torch.full((S + 2, S + 2), -math.inf, dtype=q.dtype).triu(1)
    return (scores_of(q, k) + whole[..., 2:, 2:]).softmax(-1) @ v


def by_groups_of_heads(q, k, v, slopes, seen):
    """Slopes of heads in two dims, in a sum with an order and with padding, which all of them share."""
    hidden = torch.where(seen[:, None, None, None], 0.0, -math.inf).to(q.dtype)
    order = torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    bias = slopes.view(1, M, N // M, 1, 1) * torch.arange(S).to(q.dtype) + hidden + order
    return (scores_of(q, k) + bias.reshape(B, N, S, S)).softmax(-1) @ v


class Buckets(nn.Module):
    """T5: a table of relative positions, read by buckets."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(activations(9, 8, N))

    def forward(self, q, k, v):
        table = self.table.to(q.dtype)
        bias = table[(distances() + 4).clamp(0, 7)].permute(2, 0, 1).unsqueeze(0)
        scores = q @ k.transpose(3, 2) * SCALE
        scores += bias
        return F.softmax(scores.float(), dim=-1).type_as(scores) @ v


def lowered_by_a_hundred(q, k, v):
    hidden = torch.ones(S, S, dtype=q.dtype).triu(1) * -100.0
    return (scores_of(q, k) + hidden).softmax(-1) @ v


def ones_added_before(q, k, v):
    mask = torch.hstack([torch.ones(S, T - S), torch.full((S, S), -math.inf).triu(1)]).type_as(q)
    return (scores_of(q, k) + mask).softmax(-1) @ v


BUCKETS = Buckets()
_given, _sloped = meaning(lambda bias: bias), meaning(lambda: -SLOPES[:, None, None] * distances().abs())
_behind = meaning(lambda slopes: slopes[:, None, None] * distances(), future)
_ones = torch.cat((torch.ones(S, T - S), torch.zeros(S, S)), -1)
_LOW, _TWO = tensors(SLOPES), tensors(WHOLE, activations(7, N, 1, S))
SEEN = torch.arange(S) < torch.tensor([[4], [S]])
SPELLINGS = (
    Entry(biased, more=tensors(activations(8, S, S)), meaning=_given),
    Entry(biased, more=tensors(activations(8, N, 1, S)), meaning=_given),
    Entry(biased, more=tensors(INFINITE), meaning=_given),
    Entry(of_two, more=_TWO, meaning=meaning(lambda bias, other: bias + other)),
    Entry(grouped, heads=M, keys=T, more=tensors(activations(8, 1, N, S, T)), meaning=_given),
    Entry(of_one_query, queries=1, more=tensors(WHOLE), meaning=meaning(lambda bias: bias[:, :, :1])),
    Entry(by_einsum, layout="BSND", more=tensors(WHOLE), meaning=_given),
    Entry(causal_and_biased, "causal_upper_left", more=tensors(WHOLE), meaning=meaning(lambda bias: bias, future)),
    Entry(causal_and_biased, "causal_upper_left", more=tensors(INFINITE), meaning=meaning(lambda bias: bias, future)),
    Entry(before_the_scale, more=_LOW, meaning=meaning(lambda s: s[:, None, None] * distances() * SCALE)),
    Entry(sloped, meaning=_sloped),
    Entry(sloped_in_float, "causal_upper_left", meaning=meaning(lambda: SLOPES[:, None, None] * distances(), future)),
    Entry(slopes_given, more=_LOW, meaning=meaning(lambda s: s[:, None, None] * torch.arange(1 - S, 1))),
    Entry(causal_where, "causal_upper_left", more=_LOW, meaning=_behind),
    Entry(lowest_added, "causal_upper_left", more=_LOW, meaning=_behind),
    Entry(heads_in_the_batch, "causal_upper_left", more=_LOW, meaning=_behind),
    Entry(lowered_by_a_hundred, meaning=meaning(lambda: torch.full((S, S), -100.0).triu(1))),
    Entry(ones_added_before, keys=T, meaning=meaning(lambda: _ones, lambda: _late())),
    Entry(
        cut_from_a_longer_one,
        more=tensors(activations(7, N, S + 2, S + 2)),
        meaning=meaning(lambda bias: bias[:, 2:, 2:], future),
    ),
    Entry(
        by_groups_of_heads,
        "dense",
        more=tensors(SLOPES, SEEN),
        meaning=meaning(lambda slopes, seen: slopes[:, None, None] * torch.arange(S), lambda: future() | _padded()),
    ),
    Entry(BUCKETS, meaning=meaning(lambda: BUCKETS.table.detach()[(distances() + 4).clamp(0, 7)].permute(2, 0, 1))),
)


def _padded():
    return ~SEEN[:, None, None]


def _late():
    return torch.cat((torch.zeros(S, T - S, dtype=torch.bool), future()), -1)


# no bias that the operator takes, or another one than it seems ------------------------------------------------------


def of_whole_numbers(q, k, v, bias):
    return (scores_of(q, k) + bias).softmax(-1) @ v


def behind_the_softmax(q, k, v, bias):
    return (scores_of(q, k).softmax(-1) + bias) @ v


def of_the_scores(q, k, v):
    scores = scores_of(q, k)
    return (scores + scores.abs() / 8).softmax(-1) @ v


def scaled_with_the_scores(q, k, v, bias):
    return ((q @ k.mT + bias) * 0.3).softmax(-1) @ v


def beside_finite_numbers(q, k, v, bias):
    return (scores_of(q, k) + bias).masked_fill(future(), lowest(q)).softmax(-1) @ v


def infinite_both_ways(q, k, v, seen):
    added = torch.where(seen, 0.0, -math.inf) + torch.where(future(), math.inf, 0.0)
    return (scores_of(q, k) + added.to(q.dtype)).softmax(-1) @ v


def infinite_beside_a_bias(q, k, v, bias):
    """Raised where a query is its own key."""
    raised = torch.where(torch.eye(S, dtype=torch.bool), math.inf, 0.0)
    return (scores_of(q, k) + (raised + bias)).softmax(-1) @ v


def raised_beside_a_sink(q, k, v):
    """What is added to all that is seen matters beside a sink."""
    sink = torch.ones(N, dtype=q.dtype).view(1, N, 1, 1).expand(B, N, S, 1)
    scores = scores_of(q, k) + torch.where(future(), -math.inf, 0.5).to(q.dtype)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1] @ v


def turned_round(q, k, v):
    """Raised where a key is hidden, as the factor turns round what the softmax sees."""
    raised = torch.ones(S, S, dtype=q.dtype).triu(1) * 2.0**17
    return ((q @ k.mT + raised) * -0.25).softmax(-1) @ v


def of_heads_and_keys(q, k, v, bias):
    """There are as many queries as heads."""
    return (scores_of(q, k) + bias[:, None]).softmax(-1) @ v


def of_either(q, k, v, bias):
    return (scores_of(q, k) + torch.where(future(), bias, bias * 0.5)).softmax(-1) @ v


def of_three_and_scaled(q, k, v, bias, other):
    return ((scores_of(q, k) + bias + other + bias.flip(-1)) * 0.5).softmax(-1) @ v


def capped(q, k, v, bias):
    return (torch.tanh((scores_of(q, k) + bias) / 30.0) * 30.0).softmax(-1) @ v


def beside_a_sink(q, k, v, bias):
    sink = torch.ones(N, dtype=q.dtype).view(1, N, 1, 1).expand(B, N, S, 1)
    return torch.cat((scores_of(q, k) + bias, sink), -1).softmax(-1)[..., :-1] @ v


def of_no_keys(q, k, v, bias, lengths):
    """Queries without keys, which give the mean of all values, whatever is added to the least number."""
    hidden = torch.arange(S) >= lengths[:, None, None, None]
    return (scores_of(q, k) + bias.tanh()).masked_fill(hidden, lowest(q)).softmax(-1) @ v


def masks_of_heads(q, k, v, bias):
    return (scores_of(q, k) + bias).masked_fill(torch.ones(N, S, S).triu(1).bool(), -math.inf).softmax(-1) @ v


SEVERAL = (
    Entry(of_three, more=_TWO, meaning=meaning(lambda bias, other: bias + other + bias.flip(-1))),
    Entry(of_one_twice, more=_TWO, meaning=meaning(lambda bias, other: bias + other + other)),
)
"""More than two, which are summed in float32 where they are narrow: for so small an attention it does not pay."""

LOOKALIKES = (
    Entry(turned_round),
    Entry(of_heads_and_keys, queries=N, more=tensors(activations(8, N, S))),
    Entry(of_either, more=tensors(WHOLE)),
    Entry(masks_of_heads, "", "as a bias it may be -inf beside a mask", more=tensors(WHOLE)),
    Entry(of_whole_numbers, "", "as a bias it is in integers", more=tensors(torch.arange(S * S).reshape(S, S))),
    Entry(behind_the_softmax, "", "they go through an addition", more=tensors(WHOLE)),
    Entry(of_the_scores, "", "it is computed from the scores"),
    Entry(scaled_with_the_scores, "", "multiplied by 0.3 with the scores", more=tensors(WHOLE)),
    Entry(beside_finite_numbers, "", "beside a mask of finite numbers", more=tensors(WHOLE)),
    Entry(infinite_both_ways, "", "inf is added to some of the scores", more=tensors(torch.arange(S) < 3)),
    Entry(infinite_beside_a_bias, "", "inf is added to some of the scores", more=tensors(WHOLE)),
    Entry(raised_beside_a_sink, "", "a bias is added to its scores as well"),
    Entry(
        of_three_and_scaled,
        "",
        "as a bias it is a sum of several, which",
        more=tensors(WHOLE, activations(7, N, 1, S)),
    ),
    Entry(capped, "", "soft capping", more=tensors(WHOLE)),
    Entry(beside_a_sink, "", "a bias is added to its scores as well", more=tensors(WHOLE)),
    Entry(
        of_no_keys,
        "",
        "beside it, a query without visible keys",
        more=tensors(WHOLE, torch.tensor([0, 4])),
    ),
)
