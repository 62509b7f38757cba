"""What is read as the weights of a softmax beside a sink, and as scores below what is done to them; and what is not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion.graph import Algebra, Value
from fusion.stages.canonicalise import canonicalise
from fusion.testing import capture, trial_of
from patterns.attention.core.scores import Scores, scores_of
from patterns.attention.core.weights import Weights, weights_of
from patterns.attention.masks.mask_terms import REPLACED
from tests.engine.graphs import numbers, traced

N, S, T, D = 3, 5, 6, 4
QK, SINK, WIDE = (numbers(N, S, D), numbers(N, T, D, seed=1)), numbers(N, 1, 1, seed=2), numbers(N, S, T, seed=3)


def canonical(form: Callable[..., Tensor], *args: Tensor) -> tuple[Algebra, Value]:
    graph = canonicalise(traced(form, *args).graph)
    (root,) = graph.source.output_node().args[0]
    found = graph.value_of[root]
    assert isinstance(found, Value)
    return graph.algebra, found


def shares(z: Tensor, rest: Tensor) -> Tensor:
    """exp(z) / (Σ exp(z) + rest)."""
    return z.exp() / (z.exp().sum(-1, keepdim=True) + rest)


def beside_sink(form: Callable[..., Tensor], more: Tensor) -> Weights | None:
    """What weights of scores, of the largest of each row and of something more are."""

    def weights(q: Tensor, k: Tensor, more: Tensor) -> Tensor:
        scores = q @ k.mT
        return form(scores, scores.amax(-1, keepdim=True), more)

    return weights_of(*canonical(weights, *QK, more))


NO_SOFTMAX: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor]] = {
    "of squares": (lambda z, top, sink: z.square() / (z.square().sum(-1, keepdim=True) + sink.exp()), SINK),
    "multiplied": (lambda z, top, sink: z.exp() * (z.exp().sum(-1, keepdim=True) + sink.exp()), SINK),
    "of another sum": (lambda z, top, sink: z.exp() / ((2 * z).exp().sum(-1, keepdim=True) + sink.exp()), SINK),
    "of the largest": (lambda z, top, sink: z.exp() / (top + sink.exp()), SINK),
    "beside a sink that is no power": (lambda z, top, sink: shares(z, sink.cos()), SINK),
    "beside as many sinks as keys": (lambda z, top, sink: shares(z, sink.exp()), WIDE),
    "beside a sink of each key": (lambda z, top, sink: shares(z, sink.exp()), WIDE[0, 0]),
}


@pytest.mark.parametrize("name", NO_SOFTMAX)
def test_what_is_no_softmax_beside_a_sink(name: str):
    assert beside_sink(*NO_SOFTMAX[name]) is None


def sunk(of_sink: Callable[[Tensor, Tensor], Tensor]) -> Scores | None:
    """Scores of exponentials below the largest of each row, divided by their sum and exp of what is made of a sink."""

    def weights(q: Tensor, k: Tensor, sink: Tensor) -> Tensor:
        z = q @ k.mT
        top = z.amax(-1, keepdim=True)
        return shares(z - top, of_sink(sink, top).exp())

    a, p = canonical(weights, *QK, SINK)
    found = weights_of(a, p)
    return None if found is None else scores_of(a, Scores(), found.softmax.arg)


def test_a_sink_is_freed_of_what_the_scores_are_freed_of():
    found = sunk(lambda sink, top: sink - top)
    assert found is not None
    assert found.product is not None
    assert found.sink is not None
    assert found.sink.below("expand", "reshape").op == "input"


@pytest.mark.parametrize(
    "of_sink",
    [
        lambda sink, top: sink + top,
        lambda sink, top: sink - 2 * top,
        lambda sink, top: sink + (top - 1),
        lambda sink, top: torch.maximum(sink, -top),
    ],
)
def test_what_is_done_to_a_sink_alone_makes_no_share(of_sink: Callable[[Tensor, Tensor], Tensor]):
    assert sunk(of_sink) is None


# scores --------------------------------------------------------------------------------------------------------------


def scores(form: Callable[..., Tensor], *args: Tensor) -> Scores:
    a, z = canonical(form, *args)
    return scores_of(a, Scores(), z)


def test_scores_of_keys_first_are_turned_alone():
    """q kᵀ is the transpose of k qᵀ, which nothing else is."""
    found = scores(lambda q, k: (k @ q.mT).mT, *QK)
    assert found.product is not None
    assert found.product.shape == (N, S, T)
    wide = numbers(N, T, T, seed=4), numbers(N, T, T, seed=5)
    for form in (lambda x, y: (x + y).mT, lambda x, y: (x @ y).reshape(N, 2 * T, T // 2)):
        assert scores(form, *wide).product is None


SQUARE = numbers(D, S, D), numbers(D, D, D, seed=1)  # as many heads as keys
NO_SCORES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[Tensor, Tensor]]] = {
    "over heads": (lambda q, k: (q @ k.mT).permute(1, 2, 0), QK),
    "over as many heads as keys": (lambda q, k: (q @ k.mT).permute(1, 2, 0), SQUARE),
    "over half of the keys": (lambda q, k: (q @ k.mT).reshape(N, S * 2, T // 2), QK),
    "of an input in another shape": (lambda q, k: q.reshape(N, 2, -1), QK),
    "of an input that is clamped": (lambda q, k: q.clamp(min=-5.0), QK),
}


@pytest.mark.parametrize("name", NO_SCORES)
def test_of_what_is_no_scores_over_keys_nothing_is_told(name: str):
    form, given = NO_SCORES[name]
    found = scores(form, *given)
    assert (found.product, found.reason) == (None, "")


def test_a_factor_of_one_number_stays_one_however_rows_are_arranged():
    """Queries that are multiplied by one number keep their dtype, as torch does."""
    found = scores(lambda q, k, by: ((q @ k.mT) * by).reshape(N * S, T), *QK, torch.tensor(2.0))
    (factor,) = found.factors
    assert factor.op == "input"
    found = scores(lambda q, k, by: ((q @ k.mT) * by).reshape(N * S, T), *QK, SINK)
    (factor,) = found.factors
    assert factor.shape == (N * S, 1)


def test_scores_that_are_replaced_before_their_rows_are_arranged_are_told():
    def replaced(q: Tensor, k: Tensor, wide: Tensor) -> Tensor:
        return torch.where(wide > 0, q @ k.mT, wide).reshape(N * S, T)

    assert scores(replaced, *QK, WIDE).reason == REPLACED


def test_of_a_sum_the_product_is_found_that_has_one_key_for_all():
    """Whichever stands first."""
    for form in (lambda q, k, wide: wide + q @ k[:, :1].mT, lambda q, k, wide: q @ k[:, :1].mT + wide):
        found = scores(form, *QK, WIDE)
        assert found.product is not None
        assert (found.product.shape, len(found.terms)) == ((N, S, 1), 1)


def test_what_is_taken_for_a_bias_is_not_joined_with_the_product_of_queries_and_keys():
    a, z = canonical(lambda q, k, other: q @ k.mT + other @ k.mT, *QK, numbers(N, S, D, seed=4))
    own, bias = z.args
    assert scores_of(a, Scores(), z).product not in (own, bias)
    assert scores_of(a, Scores(biases=frozenset({bias})), z).product is own


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_scores_are_widened_to_any_dtype(dtype: torch.dtype):
    """The least numbers of which a dtype makes -inf are numbers of float64, or -inf."""

    def form(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ((q @ k.mT).to(dtype) * 0.125).softmax(-1).to(q.dtype) @ v

    trial = trial_of(capture(form, [torch.randn(2, 4, size, 64) for size in (3, 5, 5)]))
    assert [each.match.rule.name for each in trial.outcome.chosen] == ["attention"]
    assert not trial.outcome.failures
