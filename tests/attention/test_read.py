"""How the result of attention may be arranged where sizes are symbolic, what its rows are, and what is told of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion import testing
from fusion.frontend.library import installed
from fusion.options import Options
from fusion.pipeline import fuse_graph
from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph

QKV = tuple(numbers(3, 7, 16, seed=seed) for seed in range(3))
HALVES = tuple(numbers(2, 4, 5, 16, seed=seed).bfloat16() for seed in range(3))


def attended_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads and sequences are one dim of the result, which no name says."""
    out = attended_alone(q, k, v)
    return out.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1)


def test_a_result_that_is_arranged_by_several_symbolic_sizes_is_left_alone():
    given = (numbers(5, 3, 4, 16), numbers(5, 3, 7, 16, seed=1), numbers(5, 3, 7, 16, seed=2))
    captured = capture(attended, given, dynamic=True)
    readings = read_graph(captured.graph.graph, captured.facts).readings
    [(_, missed)] = readings.missed("softmax_attention")
    assert "it is reshaped by several symbolic sizes" in missed.reason


def decoded(q: Tensor, rows: Tensor) -> Tensor:
    """q [B, 1, N, C + Dr] over rows [B, T, C + Dr] whose first 32 lanes are values."""
    weights = torch.einsum("bshc,btc->bsht", q, rows).softmax(-1)
    return torch.einsum("bsht,btc->bshc", weights, rows[..., :32])


def last_lanes(q: Tensor, rows: Tensor) -> Tensor:
    """The same where the values are the last lanes."""
    weights = torch.einsum("bshc,btc->bsht", q, rows).softmax(-1)
    return torch.einsum("bsht,btc->bshc", weights, rows[..., 16:])


def other_values(q: Tensor, rows: Tensor) -> Tensor:
    """The same of lanes in the middle, which are no latent beside its rotated lanes."""
    weights = torch.einsum("bshc,btc->bsht", q, rows).softmax(-1)
    return torch.einsum("bsht,btc->bshc", weights, rows[..., 8:40])


def whole_rows(q: Tensor, rows: Tensor) -> Tensor:
    """The same of all lanes, which are no latent beside others."""
    weights = torch.einsum("bshc,btc->bsht", q, rows).softmax(-1)
    return torch.einsum("bsht,btc->bshc", weights, rows)


def captures(form: Callable[..., Tensor], *given: Tensor, dynamic: bool = False) -> list[Mapping[str, Any]]:
    """What is said of each attention that is read."""
    captured = capture(form, given, dynamic=dynamic)
    readings = read_graph(captured.graph.graph, captured.facts).readings
    return [each.captures for _, each in readings.all("softmax_attention")]


def queries_of(form: Callable[..., Tensor], heads: int = 16) -> list[Any]:
    """Sizes of the queries of the one attention that is read, N and S."""
    found = captures(form, numbers(2, 1, heads, 48), numbers(2, 64, 48, seed=1))
    return [each["q"].shape[1:3] for each in found]


def test_rows_over_a_latent_are_heads_of_one_query():
    assert queries_of(decoded) == queries_of(last_lanes) == [(16, 1)]
    assert queries_of(other_values) == queries_of(whole_rows) == [(1, 16)]
    assert queries_of(decoded, heads=144) == [(1, 144)]


def test_rows_of_a_symbolic_number_are_not():
    (found,) = captures(lambda q, k: attended_alone(q, k, k[..., :8]), *QKV[:2], dynamic=True)
    assert found["q"].shape[1] == 1


def test_sequences_that_share_their_keys_are_no_heads():
    (found,) = captures(lambda q, k, v: attended_alone(q, k[:1], v[:1]), *HALVES)
    assert found["q"].shape == (2, 4, 5, 16)


def test_one_number_multiplies_queries_as_they_are():
    (found,) = captures(
        lambda q, k, v, by: ((q @ k.mT).float() * by).softmax(-1).to(q.dtype) @ v, *HALVES, torch.ones(1)
    )
    assert (found["q"].op, found["q"].arg.op, found["q"].args[1].shape) == ("mul", "input", ())


def test_a_factor_of_each_head_is_that_which_was_rounded():
    scaled = captures(lambda q, k, v, by: (q @ k.mT * by.to(q.dtype)).softmax(-1) @ v, *HALVES, torch.ones(4, 1, 1))
    assert [(each["q"].op, each["q"].arg.op, each["q"].arg.dtype) for each in scaled] == [
        ("cast", "mul", torch.float32)
    ]


def divided_late(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """In float32, and rounded."""
    powers = (q.float() @ k.float().mT).exp()
    return (powers @ v.float() / powers.sum(-1, keepdim=True)).to(q.dtype)


def divided_behind_a_cast(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The same of a product that was rounded before."""
    powers = (q.float() @ k.float().mT).exp()
    return ((powers.to(q.dtype) @ v).float() / powers.sum(-1, keepdim=True)).to(q.dtype)


def test_a_result_is_cast_once_to_a_wider_dtype_alone():
    wide = (("cast", (torch.float32,)),)
    assert [each["output_view"] for each in captures(attended_alone, *HALVES)] == [()]
    for form in (divided_late, divided_behind_a_cast):
        assert [each["output_view"] for each in captures(form, *HALVES)] == [wide, ()]


def over_a_latent(q: Tensor, rows: Tensor) -> Tensor:
    """q [B, N, C + Dr] over rows [B, T, C + Dr]."""
    return F.scaled_dot_product_attention(q, rows, rows[..., :512], scale=0.07)


def in_float32(q: Tensor, rows: Tensor) -> Tensor:
    """The same, of which the result is kept in float32: the operator would round it."""
    weights = (q.float() @ rows.float().mT).mul(0.07).softmax(-1)
    return weights @ rows[..., :512].float()


def refusals(form: Callable[..., Tensor]) -> list[tuple[str, str]]:
    """The rules that are refused on a chip, and why."""
    captured = capture(form, (numbers(2, 16, 576).bfloat16(), numbers(2, 128, 576, seed=1).bfloat16()))
    outcome = fuse_graph(captured.graph.graph, installed(), Options(target="ascend910_93"), captured.facts)
    return [(each.rule, each.reason) for each in outcome.refusals]


def test_of_one_attention_one_reason_is_told_and_none_where_it_is_fused():
    assert refusals(over_a_latent) == []
    ((_, reason),) = refusals(in_float32)
    assert "it is read in float32" in reason


# what lies between the softmax and the values ------------------------------------------------------------------------


def missed(form: Callable[..., Tensor], *given: Tensor) -> list[str]:
    """Why what looks like attention is none."""
    captured = capture(form, given)
    return [
        each.reason for _, each in read_graph(captured.graph.graph, captured.facts).readings.missed("softmax_attention")
    ]


def gated_twice(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What multiplies the values is a product, which is cast."""
    weights = (q.float() @ k.float().mT).softmax(-1).sigmoid() * q[..., :1].float()
    return weights.to(q.dtype) @ v


def summed_up(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Weights of which a sum is left."""
    return ((q @ k.mT).softmax(-1).sum(-1, keepdim=True) * k) @ v.mT


def projected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention whose results are as many as its weights, and a product of these."""
    return attended_alone(q, k, v) @ v


def grouped(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Two heads for each of keys, opened behind the softmax, whose gated results are projected to as many."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k.repeat_interleave(2, dim=1)
        weights = change((q @ k.mT).softmax(-1)).unflatten(1, (-1, 2))
        out = (weights @ v.unsqueeze(2)).flatten(1, 2).transpose(1, 2).flatten(2)
        return (out * out.sigmoid()) @ q.transpose(1, 2).flatten(2).mT

    return form


GROUPED = (numbers(2, 4, 16, 16), *(numbers(2, 2, 16, 16, seed=seed) for seed in (1, 2)))


def test_a_product_of_what_attention_gives_is_no_attention_itself():
    """Its rows have as many elements as weights; what stands between weights and values is told of these alone."""
    assert missed(grouped(lambda weights: weights), *GROUPED) == []
    for change in (Tensor.square, Tensor.sigmoid, lambda weights: weights * weights.sigmoid()):
        (reason,) = missed(grouped(change), *GROUPED)
        assert "between the softmax and the values" in reason


def test_what_is_next_to_the_values_is_named():
    (reason,) = missed(gated_twice, *HALVES)
    assert "they go through a multiplication" in reason


def test_what_has_other_elements_than_weights_is_no_attention():
    assert missed(summed_up, *HALVES) == []
    assert missed(projected, *(numbers(2, 4, 16, 16, seed=seed) for seed in range(3))) == []


# queries that see no key ---------------------------------------------------------------------------------------------

KEYS = 192
LONG = tuple(numbers(2, 2, KEYS, 16, seed=seed) for seed in range(3))
LEAST = torch.finfo(torch.float32).min
PADDED, EMPTY = (torch.arange(KEYS) < torch.tensor([[count], [0]]) for count in (70, KEYS))
"""Keys that are padding: those that the first queries of a sequence could see, or all of it."""


def future(first: int = 1) -> Tensor:
    return torch.ones(KEYS, KEYS, dtype=torch.bool).triu(first)


def ordered(low: float, first: int = 1) -> Tensor:
    return torch.zeros(KEYS, KEYS).masked_fill(future(first), low)


def padded(padding: Tensor, low: float) -> Tensor:
    return torch.zeros(2, 1, 1, KEYS).masked_fill(padding[:, None, None], low)


def lowered_together(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Two finite numbers whose sum is -inf, beside an order."""
    scores = q @ k.mT / 4 + ordered(LEAST / 2) + padded(padding, LEAST)
    return (scores + padded(padding, LEAST)).softmax(-1) @ v


def lowered_by_infinity(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return (q @ k.mT / 4 + ordered(LEAST) + padded(padding, -torch.inf)).softmax(-1) @ v


def zero_without_a_key(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    scores = q @ k.mT / 4 + ordered(LEAST) + padded(padding, -torch.inf)
    return scores.softmax(-1).nan_to_num(0.0) @ v


def without_the_own_key(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """The first query sees no key of the order, which is -inf."""
    return (q @ k.mT / 4 + ordered(-torch.inf, 0) + padded(padding, LEAST)).softmax(-1) @ v


def neither_later_nor_far(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Truths that are added."""
    scores = (q @ k.mT / 4).masked_fill(future() + ~future(-32), LEAST)
    return (scores + padded(padding, LEAST)).softmax(-1) @ v


@pytest.mark.parametrize(
    ("form", "padding", "empty"),
    [
        (lowered_together, EMPTY, "lowest_or_nan"),
        (lowered_by_infinity, EMPTY, "lowest_or_nan"),
        (zero_without_a_key, EMPTY, "lowest_or_zero"),
        (without_the_own_key, PADDED, "lowest_or_nan"),
        (neither_later_nor_far, EMPTY, "lowest"),
    ],
)
@pytest.mark.rotates(3)
def test_a_query_that_sees_no_key_gives_nan_or_zero_where_no_key_is_proven_to_be_finite(
    form: Callable[..., Tensor], padding: Tensor, empty: str
):
    assert [each["fully_masked_row"] for each in captures(form, *LONG, padding)] == [empty]
    trial = testing.trial_of(capture(form, (*LONG, padding)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    (eager,), (fused,) = trial.captured.graph(*trial.captured.inputs), trial.fused(*trial.inputs())
    torch.testing.assert_close(fused, eager, equal_nan=True)


def clamped(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """What is -inf is as low as the least number then."""
    scores = q @ k.mT / 4 + ordered(LEAST / 2) + padded(padding, -torch.inf)
    return torch.max(scores, torch.tensor(LEAST)).softmax(-1) @ v


def beside_a_bias(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """The masks swallow it with the scores, as they do where all three are one bias."""
    scores = q @ k.mT / 4 + ordered(LEAST / 2) + padded(padding, LEAST / 4)
    return (scores + (q[..., :1] * torch.arange(KEYS)).tanh()).softmax(-1) @ v


def scaled_between(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """The order lowers by half as much as the padding then."""
    return ((q @ k.mT / 4 + ordered(LEAST / 2)) * 0.25 + padded(padding, LEAST / 4)).softmax(-1) @ v


def rounded_behind(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """What differs in float32 alone is lowered alike in bfloat16."""
    q, k, v = (each.bfloat16() for each in (q, k, v))
    scores = (q @ k.mT / 4).float() + ordered(-1e33, 0) + padded(padding, -1e30)
    return scores.bfloat16().softmax(-1) @ v


@pytest.mark.parametrize("form", [clamped, scaled_between, rounded_behind])
def test_which_keys_it_sees_is_not_told_where_levels_do_not_tell_it(form: Callable[..., Tensor]):
    (reason,) = missed(form, *LONG, PADDED)
    assert "a query that sees no key would see those that are lowered least" in reason


def test_masks_and_a_bias_that_they_swallow_are_a_bias():
    trial = testing.trial_of(capture(beside_a_bias, (*LONG, PADDED)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    assert captures(beside_a_bias, *LONG, PADDED)[0]["bias"].shape == (2, 2, KEYS, KEYS)
    (eager,), (fused,) = trial.captured.graph(*trial.captured.inputs), trial.fused(*trial.inputs())
    torch.testing.assert_close(fused, eager)


def of_each_head(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Some heads see a part of the keys only."""
    heads = torch.zeros(1, 2, 1, KEYS).masked_fill(padding[:, None], LEAST / 4)
    return (q @ k.mT / 4 + (ordered(LEAST / 2) + heads)).softmax(-1) @ v


def by_large_numbers(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    """Whose sums the dtype holds."""
    return (q @ k.mT / 4 + (ordered(-1e38) + padded(padding, -1e9))).softmax(-1) @ v


def by_infinity_beside_numbers(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
    return (q @ k.mT / 4 + (ordered(-torch.inf) + padded(padding, -1e9))).softmax(-1) @ v


@pytest.mark.parametrize("form", [of_each_head, by_large_numbers, by_infinity_beside_numbers])
def test_masks_that_are_not_told_otherwise_are_a_bias(form: Callable[..., Tensor]):
    trial = testing.trial_of(capture(form, (*LONG, PADDED)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    assert all("bias" in each for each in captures(form, *LONG, PADDED))
    testing.means_what_it_says(trial)


def shared_out(powers: Tensor) -> Tensor:
    return powers / powers.sum(-1, keepdim=True)


def less(scores: Tensor, number: Tensor) -> Tensor:
    return shared_out((scores - number).exp())


@pytest.mark.rotates(5)
@pytest.mark.parametrize(
    ("shares", "empty"),
    [
        (lambda scores: shared_out(scores.exp()), ["nan"]),
        (lambda scores: shared_out(scores.exp()).nan_to_num(0), ["zero"]),
        (lambda scores: less(scores, scores.amax(-1, keepdim=True)), ["mean"]),
        (lambda scores: less(scores, scores.topk(1, -1).values), ["mean"]),
        (lambda scores: less(scores, scores[..., ::2].amax(-1, keepdim=True)), []),
        (lambda scores: less(scores, scores.mean(-1, keepdim=True)), []),
        (lambda scores: (scores - scores.mean(-1, keepdim=True)).softmax(-1), []),
    ],
)
@pytest.mark.parametrize("low", [LEAST, -1e9, -1e4])
def test_what_a_query_without_a_key_gives_depends_on_what_is_subtracted_first(
    shares: Callable[[Tensor], Tensor], empty: list[str], low: float
):
    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return shares((q @ k.mT / 4).masked_fill(padding[:, None, None], low)) @ v

    assert [each["fully_masked_row"] for each in captures(attend, *LONG, EMPTY)] == empty
    trial = testing.trial_of(capture(attend, (*LONG, EMPTY)))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"] * len(empty)
    testing.means_what_it_says(trial)


def test_exponentials_of_numbers_lowered_by_what_does_not_swallow_them_vanish_all_the_same():
    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        return shared_out((q @ k.mT / 4 + padding[:, None, None] * -1e4).exp()) @ v

    assert [each["fully_masked_row"] for each in captures(attend, *LONG, EMPTY)] == ["nan"]
    testing.means_what_it_says(testing.trial_of(capture(attend, (*LONG, EMPTY))))


@pytest.mark.parametrize("low", [LEAST, -1e9, -1e4])
def test_added_numbers_are_no_bias_of_what_is_not_known_of_a_query_without_a_key(low: float):
    def attend(q: Tensor, k: Tensor, v: Tensor, padding: Tensor) -> Tensor:
        scores = q @ k.mT / 4 + padded(padding, low)
        return less(scores, scores.mean(-1, keepdim=True)) @ v

    assert not captures(attend, *LONG, EMPTY)
