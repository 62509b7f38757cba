"""What is added to scores and is a product itself, what is filled where it is not 0, and clamps behind masks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.testing import Trial, capture
from tests.attention import lowered
from tests.engine.graphs import numbers, read_graph
from tests.support.fused import FIA, calls

B, N, S, D, C = 2, 3, 8, 16, 5
QKV = tuple(numbers(B, N, S, D, seed=seed) for seed in range(3))
PAIRS, TABLE = numbers(B, S, S, C, seed=3), numbers(N, C, seed=4) / 4
OWN = numbers(B, S, S, D, seed=5)
BY_PLACE, BY_HEAD = numbers(S, S, D, seed=9), numbers(N, S, D, seed=10)
LISTED = torch.tensor([[5, 2]] * S)
BY_AXIS = numbers(2, 2, D, seed=6), numbers(4, 4, D, seed=7)
SLOPED = 0.5 * torch.arange(1, N + 1).view(N, 1, 1) * torch.arange(S) + torch.full((S, S), -math.inf).triu(1)
SINK = numbers(N, 1, 1, seed=11)
VALID = (torch.arange(S) < torch.tensor([[5], [S]])).long()

Form = Callable[..., Tensor]


def future() -> Tensor:
    return torch.ones(S, S, dtype=torch.bool).triu(1)


def of_pairs(pairs: Tensor, table: Tensor) -> Tensor:
    """A bias of every pair of tokens, [B, S, S, C] to [B, N, S, S]."""
    return F.linear(pairs, table).permute(0, 3, 1, 2)


def pair_sdpa(q, k, v):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=of_pairs(PAIRS.to(q.dtype), TABLE.to(q.dtype)))


def pair_by_hand(q, k, v):
    return (q @ k.mT / 4 + of_pairs(PAIRS.to(q.dtype), TABLE.to(q.dtype))).softmax(-1) @ v


def pair_first(q, k, v):
    """The bias stands first, and behind both a mask."""
    scores = of_pairs(PAIRS.to(q.dtype), TABLE.to(q.dtype)) + torch.einsum("bnsd,bntd->bnst", q, k) / 4
    return scores.masked_fill(future(), -math.inf).softmax(-1) @ v


def pair_of_two_halves(q, k, v):
    """Scores that are a sum of products themselves."""
    scores = q[..., :8] @ k[..., :8].mT + q[..., 8:] @ k[..., 8:].mT
    return (of_pairs(PAIRS.to(q.dtype), TABLE.to(q.dtype)) + scores).softmax(-1) @ v


def positions_first(q, k, v):
    """Heads behind positions."""
    q, k, v = (each.transpose(1, 2).contiguous() for each in (q, k, v))
    scores = torch.einsum("bsnd,btnd->bnst", q, k) / 4 + of_pairs(PAIRS.to(q.dtype), TABLE.to(q.dtype))
    return torch.einsum("bnst,btnd->bsnd", scores.softmax(-1), v)


def product_of_rows(q, k, v):
    """One product for all heads, which is broadcast to the scores."""
    rows = PAIRS[0, 0].to(q.dtype)
    return (rows @ rows.mT + q @ k.mT / 4).softmax(-1) @ v


def relative_rows_and_columns(q, k, v):
    """Of a picture, as in SAM."""
    picture = q.view(B, N, 2, 4, D)
    rows, columns = (each.to(q.dtype) for each in BY_AXIS)
    of_rows = torch.einsum("bnhwc,hkc->bnhwk", picture, rows)
    of_columns = torch.einsum("bnhwc,wkc->bnhwk", picture, columns)
    bias = (of_rows[..., None] + of_columns[..., None, :]).reshape(B, N, S, S)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def relative_places_first(q, k, v):
    """A product of each query with keys of its own, as in Shaw et al., before that with keys of all."""
    return ((torch.einsum("bnsd,std->bnst", q, BY_PLACE.to(q.dtype)) + q @ k.mT) / 4).softmax(-1) @ v


def places_of_heads_first(q, k, v):
    """The heads of one head of keys are its rows: both products as one would have keys of each row."""
    scores = (q @ BY_HEAD.to(q.dtype).mT + q @ k[:, :1].mT) / 4
    return (scores.reshape(B, 1, N * S, S).softmax(-1) @ v[:, :1]).view(q.shape)


def listed_beside_an_order(q, k, v):
    """What a list does not name is seen as the order says."""
    gone = torch.full((S, S), -math.inf, dtype=q.dtype).triu(1)
    return (q @ k.mT / 4 + gone.scatter(-1, LISTED, 0.0)).softmax(-1) @ v


def padding(q: Tensor) -> Tensor:
    return 1.0 - VALID[:, None, None, :].to(q.dtype)


def filled(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + m.masked_fill(m.bool(), torch.finfo(q.dtype).min)).softmax(-1) @ v


def filled_unequal(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + m.masked_fill(m != 0, -math.inf)).softmax(-1) @ v


def filled_where_zero(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + torch.where(m == 0, m, -math.inf)).softmax(-1) @ v


def filled_by_choice(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + torch.where(~m.bool(), m, -math.inf)).softmax(-1) @ v


def least(q: Tensor) -> float:
    return torch.finfo(q.dtype).min


def clamped(q, k, v):
    scores = q @ k.mT / 4 + torch.zeros(S, S, dtype=q.dtype).masked_fill(future(), least(q))
    return scores.clamp(min=least(q)).softmax(-1) @ v


def clamped_by_max(q, k, v):
    scores = (q @ k.mT / 4).masked_fill(future(), -math.inf)
    return torch.max(scores, torch.tensor(least(q), dtype=q.dtype)).softmax(-1) @ v


def clamped_without_mask(q, k, v):
    return (q @ k.mT / 4).clamp(min=least(q)).masked_fill(future(), -math.inf).softmax(-1) @ v


def clamped_padding(q, k, v):
    scores = (q @ k.mT / 4).masked_fill(VALID[:, None, None] == 0, -math.inf)
    return scores.clamp(min=least(q)).softmax(-1) @ v


def clamped_bias(q, k, v):
    """As Baichuan adds slopes: -inf in the future, clamped behind."""
    bias = SLOPED[:, -q.shape[2] :].to(q.dtype)
    return torch.max(q @ k.mT / 4 + bias, torch.tensor(least(q), dtype=q.dtype)).softmax(-1) @ v


def onto_zeros(q, k, v):
    """As in GPT-NeoX."""
    zeros = torch.zeros(B * N, S, S, dtype=q.dtype)
    scores = torch.baddbmm(zeros, q.flatten(0, 1), k.flatten(0, 1).mT, beta=1.0, alpha=0.25)
    return scores.view(B, N, S, S).masked_fill(future(), -math.inf).softmax(-1) @ v


def lowered_by_numbers(q, k, v):
    """As Falcon does: what no query may see alone is exact as a bias."""
    gone = (VALID[:, None, None] == 0) | future()
    bias = torch.zeros(gone.shape, dtype=q.dtype).masked_fill(gone, -1e9 if q.dtype != torch.float16 else -1e4)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias)


def divided_late_beside_a_sink(q, k, v):
    """Both less the largest score, and divided behind the product with values."""
    scores = q @ k.mT / 4
    largest, sink = scores.amax(-1, keepdim=True), SINK.to(q.dtype)
    powers = (scores - largest).exp()
    return powers @ v / (powers.sum(-1, keepdim=True) + (sink - largest).exp())


def less_the_largest_once_they_are_scaled(q, k, v):
    scores = (q @ k.mT).masked_fill(future(), -math.inf) / 4
    return (scores - scores.amax(-1, keepdim=True)).softmax(-1) @ v


def keys_in_rows_and_columns(q, k, v):
    """As in SAM, by hand."""
    picture = (q @ k.mT / 4).view(B, N, S, 2, 4)
    rows = torch.einsum("bnsd,hd->bnsh", q, BY_AXIS[0][0].to(q.dtype))[..., None]
    columns = torch.einsum("bnsd,wd->bnsw", q, BY_AXIS[1][0].to(q.dtype))[..., None, :]
    return (picture + rows + columns).view(B, N, S, S).softmax(-1) @ v


FUSED: list[Form] = [
    pair_sdpa, pair_by_hand, pair_first, pair_of_two_halves, positions_first, product_of_rows,
    relative_rows_and_columns, relative_places_first, places_of_heads_first, listed_beside_an_order,
    keys_in_rows_and_columns, filled, filled_unequal, filled_where_zero, filled_by_choice,
    clamped, clamped_by_max, clamped_padding, clamped_without_mask, clamped_bias, onto_zeros,
    lowered_by_numbers, divided_late_beside_a_sink, less_the_largest_once_they_are_scaled,
]  # fmt: skip


ROUNDED: set[tuple[Any, ...]] = {
    (pair_sdpa, torch.float16, "composite"), (pair_sdpa, torch.float16, "decomposed"), (clamped_bias, torch.float16),
    (relative_places_first, torch.float16), (places_of_heads_first, torch.float16),
    (keys_in_rows_and_columns, torch.float16),
    (relative_rows_and_columns, torch.float16, "composite"), (relative_rows_and_columns, torch.float16, "decomposed"),
}  # fmt: skip
"""What is refused: a bias of float16 may be infinite or near where scores are clamped, a sum of several is rounded; or
torch's own attention, which a machine may run as one, is left as it is."""


def tried(form: Form, dtype: torch.dtype, level: testing.Level = "composite") -> Trial:
    t = testing.trial_of(capture(form, [each.to(dtype) for each in QKV], level))
    assert not t.outcome.failures, t.outcome.failures
    return t


@pytest.mark.rotates(8)
@pytest.mark.parametrize("form", FUSED, ids=lambda each: each.__name__)
@pytest.mark.parametrize(
    ("dtype", "level"),
    [
        (torch.float32, "composite"),
        *(
            pytest.param(dtype, level, marks=pytest.mark.rotates)
            for dtype in (torch.bfloat16, torch.float16, torch.float32)
            for level in ("composite", "decomposed", "core")
        ),
    ],
    ids=str,
)
def test_it_is_fused_and_means_the_same(form: Form, dtype: torch.dtype, level: testing.Level):
    trial = tried(form, dtype, level)
    refused = (form, dtype) in ROUNDED or (form, dtype, level) in ROUNDED
    assert ["attention" in each.match.rule.name for each in trial.outcome.chosen].count(True) == (not refused)
    testing.means_what_it_says(trial)


def keys_of_each_query(q, k, v):
    """Neither product has keys that are shared by the queries."""
    scores = torch.einsum("bsnd,bstd->bnst", q.transpose(1, 2), OWN)
    return (scores + of_pairs(PAIRS, TABLE)).softmax(-1) @ v


def hidden_in_rows_and_columns(q, k, v):
    """Columns of a picture are hidden by one mask."""
    picture = (q @ k.mT / 4).view(B, N, S, 2, 4)
    return picture.masked_fill(torch.arange(4) > 2, -math.inf).view(B, N, S, S).softmax(-1) @ v


def numbers_beside_an_order(q, k, v):
    """A bias as low as what the order fills in, which hides the future from those that see another key alone."""
    gone = torch.sigmoid(PAIRS[:, 0, :, 0].to(q.dtype))[:, None, None] * -3e4
    return ((q @ k.mT / 4).masked_fill(future(), -1e4) + gone).softmax(-1) @ v


def growing_where_shown(q, k, v):
    """In the manner of Doge: what values say of keys is added where they are seen, and elsewhere the least number."""
    steps = F.softplus(v[..., 0]).exp()[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=steps.masked_fill(future(), least(q)))


def growing_where_shown_to_all(q, k, v):
    """The same with keys that nobody sees, and queries that see none: they give the mean of all values."""
    steps = torch.where(VALID[:, None, None] == 1, F.softplus(v[..., 0]).exp()[:, :, None], least(q))
    hidden = (torch.arange(S) % 5 == 2)[:, None]
    return (q @ k.mT / 4 + steps.masked_fill(hidden, least(q))).softmax(-1) @ v


def growing_by_hand(q, k, v):
    """Keys as they pass by weigh more and more, of which the largest few are kept."""
    steps = (v[..., 0].abs() + 1).log().exp()[:, :, None].expand(B, N, S, S)
    kept = torch.zeros_like(steps).scatter(-1, steps.topk(4, dim=-1).indices, 1.0)
    return (q @ k.mT / 4 + steps.masked_fill(kept == 0.0, least(q))).softmax(-1) @ v


GROWING: list[Form] = [growing_where_shown, growing_where_shown_to_all, growing_by_hand]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("form", GROWING, ids=lambda each: each.__name__)
def test_a_bias_that_is_never_minus_infinity_holds_its_mask(form: Form, dtype: torch.dtype):
    trial = tried(form, dtype)
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"], trial.outcome.refusals
    testing.means_what_it_says(trial)


def shrinking_where_shown(q, k, v):
    """The logarithm of 0 is -inf, where the least number hides others."""
    steps = F.softplus(v[..., 0]).log()[:, :, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=steps.masked_fill(future(), least(q)))


def test_one_that_may_be_is_refused():
    outcome = tried(shrinking_where_shown, torch.float32).outcome
    assert not outcome.chosen
    reasons = [each.reason for each in outcome.refusals]
    assert any("as a bias it may hide keys beside a mask of" in each for each in reasons), reasons


FILLED = torch.tensor(3)


def by_slopes(q: Tensor, k: Tensor, v: Tensor, base: float) -> Tensor:
    """BLOOM behind a static cache, in float16: the least number hides keys, and a bias comes nowhere near it."""
    powers = torch.arange(1, N + 1, dtype=torch.int32)
    bias = torch.pow(torch.full((), base), powers)[:, None, None] * torch.arange(S)
    seen = torch.arange(S) <= torch.arange(S)[:, None] + FILLED
    hidden = torch.where(seen[None, None], 0.0, least(q)).to(q.dtype)
    return (q @ k.mT / 4 + bias.to(q.dtype) + hidden).softmax(-1) @ v


def gentle_slopes(q, k, v):
    return by_slopes(q, k, v, 2**-0.5)


def steep_slopes(q, k, v):
    return by_slopes(q, k, v, 200.5)


def test_slopes_hide_no_key_in_float16_unless_they_are_steep():
    trial = tried(gentle_slopes, torch.float16)
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"], trial.outcome.refusals
    testing.means_what_it_says(trial)
    steep = tried(steep_slopes, torch.float16).outcome
    assert not steep.chosen
    assert any("as a bias it may hide keys beside a mask of" in each.reason for each in steep.refusals)


def chosen_of_two_products(q, k, v):
    return torch.where(future(), q @ OWN[:, None, 0].mT, q @ k.mT).softmax(-1) @ v


def clamped_scores(q, k, v):
    return (q @ k.mT / 4).masked_fill(future(), -math.inf).clamp(min=-5.0).softmax(-1) @ v


def clamped_beside_a_sink(q, k, v):
    hidden = torch.ones(S, S + 1, dtype=torch.bool).triu(1)
    joined = torch.cat((q @ k.mT, q[..., :1]), -1).masked_fill(hidden, -math.inf)
    return joined.clamp(min=-5.0).softmax(-1)[..., :-1] @ v


def clamped_above(q, k, v):
    return (q @ k.mT / 4).masked_fill(future(), -math.inf).clamp(min=least(q), max=50.0).softmax(-1) @ v


def clamped_and_masked(q, k, v):
    scores = (q @ k.mT / 4).masked_fill(future(), -math.inf).clamp(min=least(q))
    return scores.masked_fill(VALID[:, None, None] == 0, -math.inf).softmax(-1) @ v


def clamped_and_scaled(q, k, v):
    return ((q @ k.mT).masked_fill(future(), -math.inf).clamp(min=least(q)) * 1e-36).softmax(-1) @ v


def clamped_and_turned(q, k, v):
    return ((q @ k.mT).masked_fill(future(), -math.inf).clamp(min=least(q)) * -0.25).softmax(-1) @ v


def clamped_and_multiplied_by_rows(q, k, v):
    scores = (q @ k.mT).masked_fill(future(), -math.inf).clamp(min=least(q))
    return (scores * q[..., :1].sigmoid()).softmax(-1) @ v


def lowered_by_infinity_or_nearly(q, k, v):
    """Of what a query sees that sees no key, -inf is hidden and the least number is not."""
    gone = (PAIRS[:, None, :1, :, 0] > 0) | (torch.arange(N) == 1)[:, None, None]
    bias = torch.where(future(), -math.inf, torch.where(gone, least(q), 0.0))
    return (q @ k.mT / 4 + bias).softmax(-1) @ v


def hidden_scores(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.mT / 4).masked_fill(future(), -math.inf)


def less_the_least(q, k, v):
    """Infinity is taken from each row with a hidden key, whose weights are NaN."""
    scores = hidden_scores(q, k)
    return (scores + (-scores).amax(-1, keepdim=True)).softmax(-1) @ v


def less_the_least_by_a_sum(q, k, v):
    scores = hidden_scores(q, k)
    return (scores + (-scores).logsumexp(-1, keepdim=True)).softmax(-1) @ v


def less_the_largest_of_what_is_raised(q, k, v):
    scores = hidden_scores(q, k)
    return (scores - scores.masked_fill(future(), math.inf).amax(-1, keepdim=True)).softmax(-1) @ v


def less_the_least_beside_a_sink(q, k, v):
    scores = hidden_scores(q, k)
    least_score = scores.amin(-1, keepdim=True)
    powers = (scores - least_score).exp()
    return (powers / (powers.sum(-1, keepdim=True) + (SINK - least_score).exp())) @ v


REFUSED: dict[Form, str] = {
    keys_of_each_query: "they differ among the queries of one head",
    hidden_in_rows_and_columns: "they are masked while keys have several",
    numbers_beside_an_order: "as a bias it may hide keys beside a mask of",
    chosen_of_two_products: "hidden scores are replaced by a number",
    clamped_scores: "they are clamped",
    clamped_beside_a_sink: "they are clamped",
    clamped_above: "they are clamped",
    clamped_and_masked: "masked ones are clamped, and then masked or",
    clamped_and_scaled: "masked ones are clamped, and then masked or",
    clamped_and_turned: "hidden scores are replaced by a number",
    clamped_and_multiplied_by_rows: "they are multiplied by a tensor behind the",
    lowered_by_infinity_or_nearly: "would see those that are lowered least",
    **dict.fromkeys(
        (less_the_least, less_the_least_by_a_sum, less_the_largest_of_what_is_raised, less_the_least_beside_a_sink),
        "may be the number that hides a key",
    ),
}


@pytest.mark.parametrize("form", REFUSED, ids=lambda each: each.__name__)
@pytest.mark.rotates(4)
def test_what_resembles_it_is_refused(form: Form):
    outcome = tried(form, torch.float32).outcome
    assert not outcome.chosen
    assert any(REFUSED[form] in each.reason for each in outcome.refusals), outcome.refusals


def test_a_bias_that_may_be_infinite_is_clamped_itself_where_nothing_else_hides_a_key():
    def form(q, k, v, bias):
        return (q @ k.mT / 4 + bias).clamp(min=least(q)).softmax(-1) @ v

    bias = numbers(B, N, S, S, seed=8)
    bias[:, :, 2] = bias[:, :, 3, 4:] = -math.inf
    trial = testing.trial_of(capture(form, (*QKV, bias)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    testing.means_what_it_says(trial)

    def beside(q, k, v, bias):
        """A mask within the bias is a part of it."""
        return form(q, k, v, bias.masked_fill(future(), -math.inf))

    trial = testing.trial_of(capture(beside, (*QKV, bias)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    testing.means_what_it_says(trial)

    def behind(q, k, v, bias):
        return ((q @ k.mT / 4).masked_fill(future(), -math.inf) + bias).clamp(min=least(q)).softmax(-1) @ v

    captured = capture(behind, (*QKV, bias))
    missed = read_graph(captured.graph.graph, captured.facts).readings.missed("softmax_attention")
    assert ["as a bias it may hide keys beside a mask of" in each.reason for _, each in missed] == [True]


def test_a_bias_of_float16_that_comes_near_the_clamp_is_not():
    """A score that is added to its least number may go beyond it, and is clamped."""

    def form(q, k, v, bias):
        return (q @ k.mT / 4 + bias).clamp(min=least(q)).softmax(-1) @ v

    given = (each.half() for each in (*QKV, numbers(B, N, S, S, seed=8).masked_fill(future(), -math.inf)))
    outcome = testing.trial_of(capture(form, tuple(given))).outcome
    assert not outcome.chosen
    reasons = [each.reason for each in outcome.refusals]
    assert any("come near the number at which scores are clamped" in each for each in reasons), reasons


def of_wider_numbers(q, k, v):
    gone = (1.0 - (PAIRS[:, 0, :, 0] * 8).long().float()) * torch.finfo(torch.float32).min
    return F.scaled_dot_product_attention(q, k, v, attn_mask=gone[:, None, None].to(q.dtype))


def test_what_float32_holds_may_be_infinite_as_a_bias_of_16_bits():
    outcome = tried(of_wider_numbers, torch.bfloat16).outcome
    assert any("as a bias it may be -inf" in each.reason for each in outcome.refusals), outcome.refusals


def filled_elsewhere(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + m.masked_fill(~m.bool(), -math.inf)).softmax(-1) @ v


def filled_another(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + (m + 0.5).masked_fill(m.bool(), -math.inf)).softmax(-1) @ v


def kept_where_one(q, k, v):
    m = padding(q)
    return (q @ k.mT / 4 + torch.where(m == 1, m, 0.0)).softmax(-1) @ v


def kept_where_larger(q, k, v):
    m = PAIRS[:, None, ..., 0].to(q.dtype)
    return (q @ k.mT / 4 + torch.where(m <= 0, 0.0, m)).softmax(-1) @ v


def kept_where_alike(q, k, v):
    m = (PAIRS + PAIRS.flip(0))[..., 0].to(q.dtype)
    return (q @ k.mT / 4 + torch.where(m == m.flip(0), m, 0.0)[:, None]).softmax(-1) @ v


KEPT: list[Form] = [filled_elsewhere, filled_another, kept_where_one, kept_where_larger, kept_where_alike]


@pytest.mark.parametrize("form", KEPT, ids=lambda each: each.__name__)
def test_what_is_not_0_where_it_is_kept_is_no_mask(form: Form):
    testing.means_what_it_says(tried(form, torch.float32))


def test_a_gate_of_each_query_and_head_stays_behind_the_attention():
    """One number [B, N, S, 1] that is passed in; it is no part of the weights."""

    def gated(q: Tensor, k: Tensor, v: Tensor, gate: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v) * gate

    inputs = [*(numbers(2, 4, 64, 64, seed=seed).bfloat16() for seed in range(3)), numbers(2, 4, 64, 1).bfloat16()]
    t = lowered.tried(gated, inputs)
    assert len(calls(t, FIA)) == 1
    testing.means_what_it_says(t)
