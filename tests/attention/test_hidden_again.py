"""What is hidden once more: weights of hidden keys made 0 behind the softmax, padding filled into slopes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.testing import DTYPES, LEVELS, Level, Trial, capture

from .attention_base import B, D, N, S, lowest
from .attention_masks import SCALE, scores_of

pytestmark = pytest.mark.rotates(12)

Form = Callable[..., Tensor]
VALID = torch.arange(S) >= torch.tensor([[2], [0]])
"""Padding on the left: the first queries of the first sequence see nothing behind a causal order."""
PAIRS = VALID[:, None, None] & VALID[:, None, :, None]


def future():
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def inputs(dtype: torch.dtype, seen: Tensor = PAIRS) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(5)
    return (*(torch.randn(B, N, S, D, generator=generator).to(dtype) for _ in range(3)), seen)


def tried(form: Form, dtype: torch.dtype, level: Level = "composite", seen: Tensor = PAIRS) -> Trial:
    found = testing.trial_of(capture(form, inputs(dtype, seen), level))
    assert not found.outcome.failures, found.outcome.failures
    return found


def fuses(found: Trial) -> bool:
    return [each.match.rule.name for each in found.outcome.chosen].count("attention") == 1


# weights made 0 ------------------------------------------------------------------------------------------------------


def of_pairs(q, k, v, seen):
    """As in DeBERTa: sequences and heads are one dim but where they are masked."""
    scores = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT / math.sqrt(D)).view(B, N, S, S)
    gone = ~seen.to(torch.bool)
    weights = scores.masked_fill(gone, torch.finfo(q.dtype).min).softmax(-1).masked_fill(gone, 0)
    return torch.bmm(weights.view(B * N, S, S), v.flatten(0, 1)).view(B, N, S, D)


def where_seen(q, k, v, seen):
    weights = torch.where(seen, scores_of(q, k), -1e9 if q.dtype != torch.float16 else -3e4).softmax(-1)
    return torch.where(seen, weights, 0.0) @ v


def in_float(q, k, v, seen):
    scores = scores_of(q, k).masked_fill(~seen, lowest(q))
    return F.softmax(scores, dim=-1, dtype=torch.float32).to(q.dtype).masked_fill(~seen, 0.0) @ v


def beside_a_product(q, k, v, seen):
    """As in Transformer-XL and the Conformer: places that are scored by the queries, moved by one in each row."""
    places = q @ torch.linspace(-1, 1, D * (2 * S - 1)).view(D, -1).to(q.dtype)
    joined = torch.cat([places.new_zeros(*places.shape[:3], 1), places], dim=-1).view(B, N, 2 * S, S)
    moved = joined[:, :, 1:].view_as(places)[..., :S]
    scores = ((q @ k.mT + moved) / math.sqrt(D)).masked_fill(~seen, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~seen, 0.0) @ v


def beside_what_is_taken(q, k, v, seen):
    """As in SEW-D: scores of positions are taken from those of all, and divided by a number like the rest."""
    places = q @ torch.linspace(-1, 1, D * (2 * S - 1)).view(D, -1).to(q.dtype)
    apart = torch.arange(S)[:, None] - torch.arange(S) + S - 1
    taken = places.gather(-1, apart.expand(B, N, S, S))
    root = torch.sqrt(torch.tensor(D, dtype=torch.float) * 3).to(q.dtype)
    scores = (q @ (k.mT / root) + taken / root).masked_fill(~seen, torch.finfo(q.dtype).min)
    return scores.softmax(-1).masked_fill(~seen, 0) @ v


MADE_0 = [of_pairs, where_seen, in_float, beside_a_product, beside_what_is_taken]


@pytest.mark.parametrize("form", MADE_0, ids=lambda each: each.__name__)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_weights_of_hidden_keys_may_be_made_0(form: Form, dtype: torch.dtype, level: Level):
    found = tried(form, dtype, level)
    assert fuses(found) or testing.lacks_range(found), found.outcome.refusals
    testing.means_what_it_says(found)


def by_another(q, k, v, seen):
    return scores_of(q, k).masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(~VALID[:, None, None], 0) @ v


def the_other_way_round(q, k, v, seen):
    return scores_of(q, k).masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(seen, 0) @ v


def to_another_number(q, k, v, seen):
    return scores_of(q, k).masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(~seen, 0.5) @ v


def lowered_by_little(q, k, v, seen):
    return scores_of(q, k).masked_fill(~seen, -5.0).softmax(-1).masked_fill(~seen, 0) @ v


def behind_another_mask(q, k, v, seen):
    """A query that is hidden from all by one of the two shares its weights among both, before those of one are 0."""
    scores = scores_of(q, k) + torch.zeros(S, S, dtype=q.dtype).masked_fill(future(), lowest(q))
    return scores.masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(~seen, 0) @ v


def beside_what_is_passed_in(q, k, v, seen):
    """Some of which may be as low as what hides a key."""
    scores = scores_of(q, k) + q[..., :1] @ seen[:, 0, :1].to(q.dtype)[:, None] + k[:, :, None, :, 0] * 2
    return scores.masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(~seen, 0) @ v


def beside_what_is_taken_of_what_is_passed_in(q, k, v, seen):
    taken = k[:, :, 0, :1].expand(B, N, S).gather(-1, torch.zeros(B, N, S, dtype=torch.long))
    return (scores_of(q, k) + taken[:, :, None]).masked_fill(~seen, lowest(q)).softmax(-1).masked_fill(~seen, 0) @ v


def over_queries(q, k, v, seen):
    return scores_of(q, k).masked_fill(~seen, lowest(q)).softmax(-2).masked_fill(~seen, 0) @ v


def of_whole_weights(q, k, v, seen):
    weights = (scores_of(q, k) * 4).masked_fill(~seen, lowest(q)).softmax(-1).to(torch.int32).to(q.dtype)
    return weights.masked_fill(~seen, 0) @ v


@pytest.mark.parametrize(
    "form",
    [
        of_whole_weights,
        by_another,
        the_other_way_round,
        to_another_number,
        lowered_by_little,
        behind_another_mask,
        beside_what_is_passed_in,
        beside_what_is_taken_of_what_is_passed_in,
        over_queries,
    ],
    ids=lambda each: each.__name__,
)
def test_other_choices_of_weights_are_refused(form: Form):
    found = tried(form, torch.float32)
    assert not fuses(found)
    assert any("they go through a" in each.reason for each in found.outcome.refusals), found.outcome.refusals
    testing.means_what_it_says(found)


# padding in a bias ---------------------------------------------------------------------------------------------------


def slopes(dtype: torch.dtype) -> Tensor:
    return (torch.arange(1 - S, 1).view(1, 1, 1, S) * 2.0 ** -torch.arange(1, N + 1).view(1, N, 1, 1)).to(dtype)


def padding_in_slopes(q, k, v, seen):
    """As in MPT: padding replaces slopes, the order replaces scores."""
    bias = slopes(q.dtype).masked_fill(~seen.view(B, 1, 1, S), lowest(q))
    return (scores_of(q, k) + bias).masked_fill(future(), lowest(q)).softmax(-1) @ v


def padding_beside_an_order(q, k, v, seen):
    """Padding added first, the same number filled in behind it."""
    scores = scores_of(q, k) + torch.zeros(B, 1, 1, S, dtype=q.dtype).masked_fill(~seen[:, None, None], lowest(q))
    return scores.masked_fill(future(), lowest(q)).softmax(-1) @ v


def order_in_float(q, k, v, seen):
    """As in OLMo: ones filled in where they stand, slopes joined to them in float32, and cast."""
    order = torch.ones(S, S).triu(1)
    order.masked_fill_(order == 1, torch.finfo(torch.float32).min)
    bias = (order.view(1, 1, S, S) + slopes(torch.float32)).to(q.dtype)
    return (scores_of(q, k) + bias).softmax(-1) @ v


@pytest.mark.parametrize(
    "form", [padding_in_slopes, padding_beside_an_order, order_in_float], ids=lambda each: each.__name__
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_padding_and_an_order_of_one_number_hide_beside_slopes(form: Form, dtype: torch.dtype, level: Level):
    """A query that sees nothing gives the mean of all values, as each score has become that number."""
    found = tried(form, dtype, level, VALID)
    assert fuses(found), found.outcome.refusals
    testing.means_what_it_says(found)


def of_two_numbers(q, k, v, seen):
    bias = slopes(q.dtype).masked_fill(~seen[:, None, None], -1e32)
    return (scores_of(q, k) + bias).masked_fill(future(), lowest(q)).softmax(-1) @ v


def of_a_number_that_swallows_nothing(q, k, v, seen):
    bias = slopes(q.dtype).masked_fill(~seen[:, None, None], -(2.0**20))
    return (scores_of(q, k) + bias).masked_fill(future(), -(2.0**20)).softmax(-1) @ v


def order_before_padding(q, k, v, seen):
    """Added to what the order has filled in: of both, keys that are hidden twice are lowered twice."""
    padding = torch.zeros(B, 1, 1, S, dtype=q.dtype).masked_fill(~seen[:, None, None], -1e31)
    return (scores_of(q, k).masked_fill(future(), -1e31) + slopes(q.dtype) + padding).softmax(-1) @ v


@pytest.mark.parametrize(
    "form", [of_two_numbers, of_a_number_that_swallows_nothing, order_before_padding], ids=lambda each: each.__name__
)
def test_where_a_query_without_keys_sees_some_it_is_refused(form: Form):
    found = tried(form, torch.float32, seen=VALID)
    assert not fuses(found)
    assert any("would see those that are lowered least" in each.reason for each in found.outcome.refusals)


# scores made 0 -------------------------------------------------------------------------------------------------------


def multiplied(q, k, v, seen):
    """As in the first GPT-2: scores times 0 where they are hidden, and a number subtracted there."""
    b = torch.tril(torch.ones(S, S, dtype=q.dtype)).view(1, 1, S, S)
    return (scores_of(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


def multiplied_by_booleans(q, k, v, seen):
    b = seen.view(B, 1, 1, S).to(q.dtype)
    return (b * scores_of(q, k) + (1 - b) * -1e4).softmax(-1) @ v


def multiplied_by_a_cast(q, k, v, seen):
    """What is 0 or 1 in float32 is so in each dtype."""
    b = torch.tril(torch.ones(S, S)).to(q.dtype)
    return (scores_of(q, k) * b + (1 - b) * -1e4).softmax(-1) @ v


def multiplied_by_two(q, k, v, seen):
    """An order and a window, of which one is booleans."""
    b = torch.tril(torch.ones(S, S)).to(q.dtype) * torch.ones(S, S, dtype=torch.bool).triu(-2)
    return (scores_of(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


@pytest.mark.rotates(8)
@pytest.mark.parametrize(
    "form",
    [multiplied, multiplied_by_booleans, multiplied_by_a_cast, multiplied_by_two],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_scores_may_be_made_0_before_they_are_lowered(form: Form, dtype: torch.dtype, level: Level):
    found = tried(form, dtype, level, VALID)
    assert fuses(found), found.outcome.refusals
    testing.means_what_it_says(found)


def multiplied_by_another(q, k, v, seen):
    b, other = torch.tril(torch.ones(S, S)), torch.tril(torch.ones(S, S), -1)
    return (scores_of(q, k) * b - 1e4 * (1 - other)).softmax(-1) @ v


def multiplied_by_what_is_given(q, k, v, seen):
    """Nothing says that it is 0 or 1."""
    return (scores_of(q, k) * seen - 1e4 * (1 - seen)).softmax(-1) @ v


def multiplied_by_halves(q, k, v, seen):
    b = torch.tril(torch.full((S, S), 0.5))
    return (scores_of(q, k) * b - 1e4 * (1 - b)).softmax(-1) @ v


def hidden_before(q, k, v, seen):
    """0 times -inf is no number."""
    b = torch.tril(torch.ones(S, S))
    return (scores_of(q, k).masked_fill(future(), -math.inf) * b - 1e4 * (1 - b)).softmax(-1) @ v


def lowered_by_little_where_it_is_0(q, k, v, seen):
    b = torch.tril(torch.ones(S, S))
    return (scores_of(q, k) * b - 5 * (1 - b)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        (multiplied_by_another, "they are multiplied by a tensor that"),
        (multiplied_by_what_is_given, "they are multiplied by a tensor that"),
        (hidden_before, "they are multiplied by a tensor that"),
        (multiplied_by_halves, "they are multiplied by a tensor that"),
        (lowered_by_little_where_it_is_0, "hidden scores are replaced by a number"),
    ],
    ids=lambda each: getattr(each, "__name__", ""),
)
def test_other_factors_of_scores_are_refused(form: Form, reason: str):
    found = tried(form, torch.float32, seen=VALID.float()[:, None, None])
    assert not fuses(found)
    assert any(reason in each.reason for each in found.outcome.refusals), found.outcome.refusals


# one condition -------------------------------------------------------------------------------------------------------


def choices_of_numbers(q, k, v, seen):
    mask = torch.zeros_like(seen, dtype=q.dtype).masked_fill(seen, -math.inf)
    bias = mask.view(B, 1, 1, S).expand(-1, N, -1, -1).reshape(B * N, 1, S).view(B, N, 1, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, scale=SCALE)


def test_a_mask_that_is_chosen_by_booleans_is_shown_as_them():
    """As nn.MultiheadAttention makes one of padding: neither the numbers nor a comparison of them is left."""
    found = tried(choices_of_numbers, torch.float32, seen=~VALID)
    assert fuses(found), found.outcome.refusals
    names = {str(node.target) for node in found.fused.graph.nodes}
    assert not names & {"aten.lt.Scalar", "aten.masked_fill.Scalar", "aten.zeros_like.default"}
    testing.means_what_it_says(found)
