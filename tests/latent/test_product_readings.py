"""Which products and calls of attention read as those over a latent, what is said of them, and why others do not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fusion.graph import Graph, Reading
from tests.engine.graphs import read_graph
from tests.latent.test_int8_readings import understood

B, N, S, T, D, C, R = 2, 4, 3, 8, 8, 16, 4
Q, P, LATENT, WEIGHT, ONE_HEAD = (B, N, S, D), (B, N, S, T), (B, T, C), (N * D, C), (D, C)
WORDS = ("latent_scores", "latent_context", "latent_sdpa")
Form = Callable[..., Tensor]


def heads(c: Tensor, weight: Tensor, count: int = N) -> Tensor:
    return F.linear(c, weight).unflatten(-1, (count, -1)).transpose(-3, -2)


def called(q: Tensor, c: Tensor, up_key: Tensor, up_value: Tensor, counts: tuple[int, int] = (N, N), **how: Any):
    k, v = (heads(c, *each) for each in zip((up_key, up_value), counts, strict=True))
    return F.scaled_dot_product_attention(q, k, v, **how)


def scores(q: Tensor, c: Tensor, up: Tensor) -> Tensor:
    return q @ heads(c, up).mT


def context(weights: Tensor, c: Tensor, up: Tensor) -> Tensor:
    return weights @ heads(c, up)


def whole_numbers(*shape: int) -> Tensor:
    return torch.randint(0, 9, shape)


def products(graph: Graph) -> list[Reading]:
    return [each for _, each in graph.readings.all(*WORDS)]


def read(form: Form, *shapes: tuple[int, ...], make: Callable[..., Tensor] = torch.randn) -> list[Reading]:
    return products(understood(form, [make(*each) for each in shapes])[0])


OTHERS: dict[str, tuple[Form, tuple[tuple[int, ...], ...]]] = {
    "a causal call": (lambda *x: called(*x, is_causal=True), ((B, N, T, D), LATENT, WEIGHT, WEIGHT)),
    "a call that drops weights": (lambda *x: called(*x, dropout_p=0.5), (Q, LATENT, WEIGHT, WEIGHT)),
    "a call in wider numbers": (
        lambda q, c, *up: F.scaled_dot_product_attention(
            q.bfloat16().float(), *(heads(c.bfloat16(), each.bfloat16()).float() for each in up)
        ),
        (Q, LATENT, WEIGHT, WEIGHT),
    ),
    "a call of one head": (lambda *x: called(*x, (1, 1)), ((B, 1, S, D), LATENT, ONE_HEAD, ONE_HEAD)),
    "a call without a dim for sequences": (called, ((N, S, D), (T, C), WEIGHT, WEIGHT)),
    "a call over the heads of each token": (
        lambda q, x, *up: F.scaled_dot_product_attention(q, *(F.linear(x, each).unflatten(-1, (N, D)) for each in up)),
        ((T, N, D), (T, C), WEIGHT, WEIGHT),
    ),
    "keys that heads share": (lambda *x: called(*x, (1, N)), (Q, LATENT, ONE_HEAD, WEIGHT)),
    "values that heads share": (lambda *x: called(*x, (N, 1)), (Q, LATENT, WEIGHT, ONE_HEAD)),
    "scores of one head": (lambda q, c, up: q @ heads(c, up, 1).mT, ((B, 1, S, D), LATENT, ONE_HEAD)),
    "scores of keys that heads share": (lambda q, c, up: q @ heads(c, up, 1).mT, (Q, LATENT, ONE_HEAD)),
    "values that heads share, times weights": (lambda p, c, up: p @ heads(c, up, 1), (P, LATENT, ONE_HEAD)),
    "weights that are doubled": (lambda p, *x: context(p * 2, *x), (P, LATENT, WEIGHT)),
    "keys in the middle": (lambda q, *x: q @ heads(*x)[:, :, 2:7].mT, (Q, LATENT, WEIGHT)),
    "values in the middle": (lambda p, *x: p[..., 2:7] @ heads(*x)[:, :, 2:7], (P, LATENT, WEIGHT)),
}


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
@pytest.mark.rotates(4)
def test_others_are_none(case: tuple[Form, tuple[tuple[int, ...], ...]]):
    form, shapes = case
    assert not read(form, *shapes)


def test_whole_numbers_have_no_such_products():
    assert not read(scores, Q, LATENT, WEIGHT, make=whole_numbers)


def test_values_that_alone_were_widened_are_none():
    def form(q: Tensor, c: Tensor, up_key: Tensor, up_value: Tensor) -> Tensor:
        v = heads(c.bfloat16(), up_value.bfloat16()).float()
        return F.scaled_dot_product_attention(q, heads(c, up_key), v)

    assert not read(form, Q, LATENT, WEIGHT, WEIGHT)


def test_rows_from_the_first_on_are_some_of_a_latent():
    [found] = read(lambda q, *x: q @ heads(*x)[:, :, :5].mT, Q, LATENT, WEIGHT)
    assert found.captures["rows"] == 5


def test_a_product_is_read_where_a_node_holds_it_and_again_behind_a_factor():
    found = read(lambda *x: scores(*x) * 0.1, Q, LATENT, WEIGHT)
    assert [each.op for each in found] == ["latent_scores"] * 2
    assert [each.captures["scale"] for each in found] == [1, 0.1]
    assert [each.captures["output_view"] for each in found] == [(), ()]


@pytest.mark.parametrize(("cap", "scales"), [(False, [1]), (True, [1, 0.1])])
def test_a_factor_goes_with_the_product_where_the_whole_is_no_attention(cap: bool, scales: list[float]):
    def form(q: Tensor, c: Tensor, *up: Tensor) -> Tensor:
        k, v = (heads(c, each) for each in up)
        x = q @ k.mT * 0.1
        return torch.softmax(torch.tanh(x) if cap else x, -1) @ v

    found = read(form, Q, LATENT, WEIGHT, WEIGHT)
    assert [each.captures["scale"] for each in found if each.op == "latent_scores"] == scales


@pytest.mark.parametrize("batch", [1, 2])
def test_a_sum_of_scores_holds_rotated_lanes(batch: int):
    def form(q: Tensor, c: Tensor, up: Tensor, q_rope: Tensor, rope: Tensor) -> Tensor:
        return scores(q, c, up) + q_rope @ rope[:, None].mT

    found = read(form, (batch, N, S, D), (batch, T, C), WEIGHT, (batch, N, S, R), (batch, T, R))
    assert [("rope" in each.captures) for each in found] == [False, True]


def test_a_sum_with_a_product_of_each_sequence_is_none():
    def form(p: Tensor, c: Tensor, up: Tensor, x: Tensor, weight: Tensor) -> Tensor:
        return p.flatten(0, 1) @ heads(c, up).flatten(0, 1) + x @ weight

    assert [each.op for each in read(form, P, LATENT, WEIGHT, (B * N, S, R), (R, D))] == ["latent_context"]


def test_values_are_told_apart_where_they_are_of_another_latent():
    [same] = read(lambda *x: called(*x, enable_gqa=True), Q, LATENT, WEIGHT, WEIGHT)
    assert "values" not in same.captures
    assert (same.captures["value_rows"], same.captures["bias"]) == (None, None)

    def of_another(q: Tensor, c: Tensor, other: Tensor, *up: Tensor) -> Tensor:
        k, v = (heads(*each) for each in zip((c, other), up, strict=True))
        return F.scaled_dot_product_attention(q, k, v)

    [found] = read(of_another, Q, LATENT, LATENT, WEIGHT, WEIGHT)
    assert found.captures["values"].attrs != found.captures["latent"].attrs


@pytest.mark.parametrize("write", [False, True])
def test_what_was_computed_before_a_write_is_not_computed_again_behind_it(write: bool):
    def form(q: Tensor, c: Tensor, *up: Tensor) -> Tensor:
        k, v = (heads(c, each) for each in up)
        if write:
            c.mul_(2)
        return F.scaled_dot_product_attention(q, k, v)

    graph = make_fx(form, tracing_mode="fake")(*(torch.randn(each) for each in (Q, LATENT, WEIGHT, WEIGHT)))
    assert bool(products(read_graph(graph.graph))) is not write
