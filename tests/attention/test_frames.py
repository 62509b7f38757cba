"""Which dims of a softmax are sequences, heads and queries, and which lanes are those of the keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fusion import testing
from fusion.graph import Algebra, Value
from fusion.testing import capture
from patterns.attention.core.frames import lanes_of_keys
from tests.engine.graphs import numbers, read_graph, traced

D = 16


def read(form: Callable[..., Tensor], *args: Tensor) -> list[tuple[Any, ...]]:
    """Sizes of the queries of each attention that is read."""
    readings = read_graph(traced(form, *args).graph).readings
    return [each.captures["q"].shape for _, each in readings.all("softmax_attention")]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT).softmax(-1) @ v


def inputs(*lead: int) -> tuple[Tensor, ...]:
    """Queries with keys and values that all of them share."""
    return numbers(*lead, 5, D), numbers(7, D, seed=1), numbers(7, D, seed=2)


@pytest.mark.rotates(6)
def test_one_matrix_of_queries_is_of_one_head():
    assert read(attended, *inputs()) == [(1, 1, 5, D)]


def test_matrices_with_the_same_keys_are_heads():
    assert read(attended, *inputs(6)) == [(1, 6, 5, D)]


def one_token(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One query [N, D] of heads with keys [T, N, D] of their own, without dims for sequences and queries."""
    return torch.einsum("nt,tnd->nd", torch.einsum("nd,tnd->nt", q, k).softmax(-1), v)


def test_the_heads_of_one_query_need_no_other_dim():
    keys, values = (numbers(7, 6, D, seed=seed) for seed in (1, 2))
    assert read(one_token, numbers(6, D), keys, values) == [(1, 6, 1, D)]


def test_a_loop_over_the_sequences_of_a_batch_is_one_attention():
    def loop(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        rows: list[Tensor] = []
        for sequence in range(q.shape[0]):
            scores = torch.einsum("nd,tnd->nt", q[sequence], k[sequence])
            scores = scores.masked_fill(torch.arange(k.shape[1]) >= lengths[sequence], -torch.inf)
            rows.append(torch.einsum("nt,tnd->nd", scores.softmax(-1), v[sequence]))
        return torch.stack(rows)

    lengths = torch.tensor([7, 4])
    keys, values = (numbers(2, 7, 6, D, seed=seed) for seed in (1, 2))
    assert (2, 6, 1, D) in read(loop, numbers(2, 6, D), keys, values, lengths)


def positions_first(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads behind the positions of one sequence, on which the mask depends alone."""
    mask = torch.arange(k.shape[0]) <= torch.arange(q.shape[0])[:, None]
    scores = torch.einsum("snd,td->snt", q, k).masked_fill(~mask[:, None], -torch.inf)
    return torch.einsum("snt,te->sne", scores.softmax(-1), v)


def heads_masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The mask depends on the second dim: that is the one of positions."""
    mask = torch.arange(k.shape[0]) <= torch.arange(q.shape[1])[:, None]
    return torch.einsum("nsd,td->nst", q, k).masked_fill(~mask, -torch.inf).softmax(-1) @ v


def test_heads_may_stand_behind_the_positions_of_one_sequence():
    assert read(positions_first, *inputs(6)) == [(1, 5, 6, D)]
    assert read(heads_masked, *inputs(6)) == [(1, 6, 5, D)]


def otherwise(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads of two sequences, of which the weights are then those of three."""
    weights = (q @ k.mT).flatten(0, 1).softmax(-1)
    return weights.unflatten(0, (3, 4)) @ v


def biased(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias of each head of each sequence, which are one dim; all heads share the keys."""
    weights = ((q @ k.mT).flatten(0, 1) + bias).softmax(-1)
    return weights.view(q.shape[0], q.shape[1], *weights.shape[1:]) @ v


def of_one_query(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias of heads [B, N, D] with one query each, which has no dim."""
    weights = (torch.einsum("bnd,bntd->bnt", q, k) + bias).softmax(-1)
    return torch.einsum("bnt,bntd->bnd", weights, v)


def of_joined_heads(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """A bias of each head, the same for all sequences, which are one dim with the heads."""
    joined = bias.expand(*q.shape[:2], *bias.shape[1:]).flatten(0, 1)
    q, k, v = (each.flatten(0, 1) for each in (q, k, v))
    return (q @ k.mT + joined).softmax(-1) @ v


def shared(*lead: int) -> tuple[Tensor, Tensor]:
    return numbers(*lead, 1, 7, D, seed=1), numbers(*lead, 1, 7, D, seed=2)


def test_rows_of_heads_and_sequences_in_one_dim_are_opened_where_all_that_they_meet_is():
    assert read(otherwise, numbers(2, 6, 5, D), shared(2)[0], shared(3)[1]) == [(12, 1, 5, D)]
    assert read(biased, numbers(2, 6, 5, D), *shared(2), numbers(12, 5, 7, seed=3)) == [(2, 6, 5, D)]


def ordered_alike(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """A mask [1, S, T] of all heads of all sequences, which are one dim."""
    mask = torch.ones(1, 5, 7, dtype=torch.bool).triu(1)
    return (q @ k.mT).flatten(0, 1).masked_fill(mask, -torch.inf).softmax(-1).unflatten(0, q.shape[:2]) @ v


def biased_alike(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Such a bias."""
    return ((q @ k.mT).flatten(0, 1) + bias.tanh()).softmax(-1).unflatten(0, q.shape[:2]) @ v


def sunk(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
    """Heads in groups, beside a sink of each head of each sequence."""
    scores = q @ k.mT
    return torch.cat((scores, sink.expand(*scores.shape[:-1], 1)), -1).softmax(-1)[..., :-1] @ v


@pytest.mark.parametrize(
    ("form", "args"),
    [
        (ordered_alike, (numbers(2, 6, 5, D), *shared(2))),
        (biased_alike, (numbers(2, 6, 5, D), *shared(2), numbers(1, 5, 7, seed=3))),
        (sunk, (numbers(2, 3, 4, 5, D), *shared(2, 3), numbers(2, 3, 4, 1, 1, seed=3))),
    ],
)
def test_what_stands_beside_the_scores_is_of_their_rows(form: Callable[..., Tensor], args: tuple[Tensor, ...]):
    trial = testing.trial_of(capture(form, args))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    testing.means_what_it_says(trial)


@pytest.mark.parametrize(
    ("form", "queries", "sizes"),
    [
        (of_one_query, (), (6, 7)),
        (of_one_query, (), (2, 6, 7)),
        (of_one_query, (), (7,)),
        (of_joined_heads, (5,), (6, 5, 7)),
        (of_joined_heads, (5,), (6, 1, 7)),
    ],
)
def test_a_bias_has_the_dims_of_the_scores(
    form: Callable[..., Tensor], queries: tuple[int, ...], sizes: tuple[int, ...]
):
    keys = (numbers(2, 6, 7, D, seed=seed) for seed in (1, 2))
    trial = testing.trial_of(capture(form, (numbers(2, 6, *queries, D), *keys, numbers(*sizes, seed=3))))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    assert not trial.outcome.failures
    testing.means_what_it_says(trial)


def in_groups(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    """A bias of heads in two dims, in a sum with padding, which all heads share."""
    padding = torch.where(seen[:, None, None, None], 0.0, -torch.inf)
    whole = bias.view(1, 2, 3, 1, 7) + padding + torch.full((5, 7), -torch.inf).triu(3)
    return (q @ k.mT + whole.reshape(2, 6, 5, 7)).softmax(-1) @ v


def test_what_all_heads_share_is_so_in_a_sum_with_a_bias_of_groups():
    keys = (numbers(2, 6, 7, D, seed=seed) for seed in (1, 2))
    seen = torch.arange(7) < torch.tensor([[4], [7]])
    graph = read_graph(traced(in_groups, numbers(2, 6, 5, D), *keys, numbers(6, 7, seed=3), seen).graph)
    ((_, reading),) = graph.readings.all("softmax_attention")
    assert (reading.captures["mask"].shape, reading.captures["bias"].shape) == ((2, 1, 5, 7), (1, 6, 5, 7))


# lanes ---------------------------------------------------------------------------------------------------------------


def rows(a: Algebra, source: Value, places: Value, axis: int) -> Value:
    shape = (*source.shape[:axis], *places.shape, *source.shape[axis + 1 :])
    return a.make("index", (source, places), (axis,), shape, source.dtype)


def test_values_that_are_gathered_from_some_lanes_are_lanes_of_the_keys():
    a = Algebra()
    table = a.make("input", (), ("table", 0), (9, 8), torch.bfloat16)
    places = a.make("input", (), ("places", 0), (4,), torch.int64)
    keys = rows(a, table, places, 0)
    values = rows(a, a.cut(table, -1, 0, 6), places, 0)
    cut = a.cut(keys, -1, 0, 6)
    assert lanes_of_keys(a, values, keys) is cut
    assert lanes_of_keys(a, a.cast(values, torch.float32), keys) is a.cast(cut, torch.float32)
    assert lanes_of_keys(a, a.permute(values, (1, 0)), keys) is a.permute(cut, (1, 0))


def test_lanes_that_are_chosen_themselves_are_not():
    """As many lanes of the first of a table, by the same places as the keys."""
    a = Algebra()
    table = a.make("input", (), ("table", 0), (9, 8), torch.float32)
    places = a.make("input", (), ("places", 0), (8,), torch.int64)
    values = rows(a, a.cut(table, -1, 0, 6), places, 1)
    assert lanes_of_keys(a, values, rows(a, table, places, 1)) is values


B, X, N, S = 2, 3, 4, 5


def streams(hidden: Callable[[], Tensor], bias: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """ProphetNet: several streams of each sequence, of which each has a mask of its own."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.where(hidden(), torch.finfo(q.dtype).min, 0.0).to(q.dtype).expand(B, N, X, S, S)
        scores = torch.einsum("bxnsd,bxntd->bxnst", q, k) + bias(q) + mask.permute(0, 2, 1, 3, 4)
        return torch.einsum("bxnst,bxnte->bxnse", scores.float().softmax(-1).to(q.dtype), v)

    return form


def of_streams() -> Tensor:
    """A stream further ahead sees less, but always the first key."""
    ahead = torch.arange(S) - torch.arange(S)[:, None]
    return (ahead >= 1 - torch.arange(X)[:, None, None]) & (torch.arange(S) > 0)


def of_streams_and_heads() -> Tensor:
    return of_streams() & (torch.arange(N)[:, None, None, None] > 0)


def of_rows(q: Tensor) -> Tensor:
    """A bias that the queries give."""
    return q[..., :S].tanh()


STREAMS = tuple(numbers(B, X, N, S, D, seed=each) for each in range(3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_masks_of_several_streams_are_those_of_sequences(dtype: torch.dtype):
    given = tuple(each.to(dtype) for each in STREAMS)
    found = testing.trial_of(capture(streams(of_streams, of_rows), given, "composite"))
    assert [each.match.rule.name for each in found.outcome.chosen] == ["attention"], found.outcome.refusals
    assert found.outcome.chosen[0].match.captures["q"].shape == (B * X, N, S, D)
    testing.means_what_it_says(found)


def test_masks_of_streams_and_heads_are_not():
    found = testing.trial_of(capture(streams(of_streams_and_heads, of_rows), STREAMS, "composite"))
    assert not found.outcome.chosen
    assert any("differs from head to head" in each.reason for each in found.outcome.refusals), found.outcome.refusals


def test_heads_of_four_dims_stay_heads_where_one_mask_is_of_all():
    form = streams(lambda: of_streams()[:1], of_rows)
    assert read(form, *STREAMS) == [(B, X * N, S, D)]
