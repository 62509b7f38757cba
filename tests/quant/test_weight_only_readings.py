"""Weights in int8 that are read as ones of a linear layer, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.engine.graphs import numbers, read_graph, traced

N, K, G, SIZE = 6, 16, 4, 4  # as many groups of inputs as inputs of a group
WEIGHT = torch.randint(-99, 100, (N, K), generator=torch.Generator().manual_seed(1), dtype=torch.int8)
GIVEN = numbers(3, K), WEIGHT, numbers(N, seed=2), numbers(N, G, seed=3), numbers(N, seed=4)
OTHER_GROUPS, ALONG = "its groups differ from those of the scale", "neither one of each output channel nor"
Form = Callable[..., Tensor]


def read(form: Form, *more: Tensor) -> tuple[list[dict[str, Any]], list[str]]:
    """What is read of layers with int8 weights, and why others are none."""
    graph = read_graph(traced(form, *GIVEN, *more).graph)
    found = [each.captures for _, each in graph.readings.all("int8_weight_linear")]
    return found, [each.reason for _, each in graph.readings.missed("quantised_linear")]


def scaled_heads(weight: Tensor, scale: Tensor) -> Tensor:
    """[H, D, K] of two heads."""
    return weight.float().view(2, -1, K) * scale.view(2, -1, 1)


def opened(x: Tensor, *sizes: int) -> Tensor:
    return x.unflatten(-1, sizes)


OTHERS: dict[str, tuple[Any, ...]] = {
    "a weight that is cut to float8 between": (
        lambda x, w, s, g, b: F.linear(x, (w.float() * s[:, None]).to(torch.float8_e4m3fn).float()), "",
    ),
    "a weight that is cut to whole numbers between": (
        lambda x, w, s, g, b: F.linear(x, (w.float() * s[:, None]).to(torch.int32).float()), "",
    ),
    "one row of which each channel has its own offset": (
        lambda x, w, s, g, b: F.linear(x, (w[:1].float() + b[:, None]) * s[:, None]), "",
    ),
    "two offsets": (lambda x, w, s, g, b: F.linear(x, (w.float() + b[:, None] + s[:, None]) * s[:, None]), ""),
    "a scale of each weight": (
        lambda x, w, s, g, b, every: F.linear(x, w.float() * every.view(N, K)), ALONG, numbers(N, G, SIZE),
    ),
    "scales of groups times those within a group": (
        lambda x, w, s, g, b: F.linear(x, w.float() * (g.unsqueeze(-1) * b[:SIZE]).view(N, K)), ALONG,
    ),
    "scales of a group, group after group": (
        lambda x, w, s, g, b: F.linear(x, w.float() * g[:, None].expand(N, G, SIZE).reshape(N, K)), ALONG,
    ),
    "scales of groups that all channels share": (
        lambda x, w, s, g, b: F.linear(x, w.float() * g[0].repeat_interleave(SIZE).expand(N, -1).exp()), ALONG,
    ),
    "scales in rows that are no channels": (
        lambda x, w, s, g, b: F.linear(x, w.float() * g.view(2 * N, -1).repeat_interleave(SIZE, -1).view(N, K)), ALONG,
    ),
    "groups that end within a channel": (
        lambda x, w, s, g, b: F.linear(x, (w.float().view(2, 2, -1) * s[:4].view(2, 2, 1)).view(N, K)), "",
    ),
    "scales of groups times those within a group, of columns": (
        lambda x, w, s, g, b: x @ (w.view(K, N).float() * (g.view(G, 1, N) * b[:SIZE, None]).view(K, N)), ALONG,
    ),
    "groups that are repeated in turns, of columns": (
        lambda x, w, s, g, b: x @ (w.view(K, N).float() * g.view(1, G, N).expand(SIZE, G, N).reshape(K, N)), ALONG,
    ),
    "groups that are interleaved, of columns": (
        lambda x, w, s, g, b: x @ (w.view(K, N).float() * g.view(G, N).repeat(SIZE, 1)), ALONG,
    ),
    "groups of other channels, of columns": (
        lambda x, w, s, g, b: x @ (w.view(K, N).float() * g.view(2, 12).repeat_interleave(4, 0).view(K, N)), ALONG,
    ),
    "groups of groups, of columns": (
        lambda x, w, s, g, b: x @ (
            w.view(K, N).float() * g.view(2, 2, 1, N).expand(2, 2, SIZE, N).reshape(K, N)
        ), ALONG,
    ),
    "columns by numbers of their own": (
        lambda x, w, s, g, b, c: x @ (w.view(K, N).float() * c.t()), ALONG, numbers(N, K),
    ),
    "a weight in uint8": (lambda x, w, s, g, b: F.linear(x, w.to(torch.uint8).float() * s[:, None]), "it is uint8"),
    "a weight in int16": (lambda x, w, s, g, b, i: F.linear(x, i.float() * s[:, None]), "", WEIGHT.to(torch.int16)),
    "a number that is added": (lambda x, w, s, g, b: F.linear(x, (w.float() + 3) * s[:, None]), "it is a number"),
    "scales in a list": (
        lambda x, w, s, g, b, i: F.linear(x, w.float() * g[:, i]), "by a list", torch.arange(K) // SIZE,
    ),
    "offsets in a list": (
        lambda x, w, s, g, b, i: F.linear(x, (w.float() - g[:, i]) * s[:, None]), "by a list", torch.arange(K) // SIZE,
    ),
    "inputs of each head": (
        lambda x, w, s, g, b: torch.einsum("thk,hdk->thd", x.unflatten(-1, (2, -1)), scaled_heads(w, s)[..., :8]), "",
    ),
    "inputs of each head, behind the weight": (
        lambda x, w, s, g, b: torch.einsum("hdk,thk->thd", scaled_heads(w, s), torch.stack((x, x.sin()), 1)), "",
    ),
    "heads of whole numbers": (
        lambda x, w, s, g, b: torch.einsum("tk,hdk->thd", x.int(), w.int().view(2, -1, K) * s.int().view(2, -1, 1)), "",
    ),
    "tokens of a batch last": (
        lambda x, w, s, g, b: torch.einsum("btk,hdk->bhdt", torch.stack((x, x.sin())), scaled_heads(w, s)), "",
    ),
    "heads first": (lambda x, w, s, g, b: torch.einsum("tk,hdk->hdt", x, scaled_heads(w, s)), ""),
    "groups that are seen as other groups between scales": (
        lambda x, w, s, g, b: F.linear(
            x, ((opened(w.float(), G, SIZE) * g.unsqueeze(-1)).view(N, 2, -1) * s[0]).view(N, K)
        ),
        "",
    ),
    "groups that are seen as rows between scales": (
        lambda x, w, s, g, b, halves: F.linear(
            x, ((opened(w.float(), 8, 2) * halves).view(N, 2, 8) * s[0]).view(N, K)
        ),
        "",
        numbers(N, 8, 1),
    ),
    "lanes that are turned in each channel": (
        lambda x, w, s, g, b, inputs: F.linear(
            x, inputs.float().permute(2, 0, 1).reshape(N, 2, 8).mT.reshape(N, K) * s[:, None]
        ),
        "",
        WEIGHT.t().reshape(G, SIZE, N),
    ),
    "columns that are joined of others": (
        lambda x, w, s, g, b: x @ w.view(8, 12).float().t().reshape(K, N) * s, "",
    ),
    "columns of twice as many channels": (
        lambda x, w, s, g, b: x @ (w.view(2, 4, 12).float() * g[:2].view(2, 4, 1)).reshape(K, N), "",
    ),
    "inputs in the order of other groups": (
        lambda x, w, s, g, b, inputs: F.linear(
            x, (inputs.float() * inputs.float().sin()).reshape(8, 2, N).permute(2, 1, 0).reshape(N, K)
        ),
        "",
        WEIGHT.t().reshape(G, SIZE, N),
    ),
    "offsets of groups, scales of channels": (
        lambda x, w, s, g, b: F.linear(x, (opened(w.float(), G, SIZE) - g.unsqueeze(-1)).view(N, K) * s[:, None]),
        OTHER_GROUPS,
    ),
    "scales of groups, offsets of channels": (
        lambda x, w, s, g, b: F.linear(x, ((w.float() - b[:, None]).view(N, G, -1) * g.unsqueeze(-1)).view(N, K)),
        "",
    ),
    "a scale behind the bias": (lambda x, w, s, g, b: F.linear(x, w.float(), b) * s, ""),
    "one channel, which is repeated with scales": (lambda x, w, s, g, b: F.linear(x, w[:1].float()) * b, ""),
    "a bias before the scale": (lambda x, w, s, g, b: (F.linear(x, w.float()) + b) * s + s, ""),
}  # fmt: skip


@pytest.mark.rotates(12)
@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_weights_are_none(case: tuple[Any, ...]):
    form, reason, *more = case
    found, reasons = read(form, *more)
    assert not found
    assert [each for each in reasons if reason and reason in each] if reason else not reasons


def test_zero_points_of_groups_that_are_joined_before_the_scales():
    def form(x: Tensor, w: Tensor, s: Tensor, g: Tensor, b: Tensor) -> Tensor:
        centred = (opened(w.float(), G, SIZE) - g.sin().unsqueeze(-1)).view(N, K)
        return F.linear(x, centred * g.repeat_interleave(SIZE, -1))

    [found], _ = read(form)
    assert found["scale"].shape == found["offset"].shape == (G, N)


def test_of_two_scales_behind_a_product_only_the_first_is_its_own():
    [found], _ = read(lambda x, w, s, g, b: F.linear(x, w.float()) * s * b.sin())
    assert found["scale"].op == "input"


def test_activations_are_no_scale_behind_a_product():
    found, _ = read(lambda x, w, s, g, b: F.linear(x, w.float()) * x[:, :N])
    assert not found


@pytest.mark.parametrize("rows", [lambda x, b: (x, b[:1]), lambda x, b: (x[:1], b[None])], ids=["one", "one token"])
def test_what_is_added_that_is_no_number_of_each_channel_is_no_bias(rows: Callable[[Tensor, Tensor], Any]):
    def form(x: Tensor, w: Tensor, s: Tensor, g: Tensor, b: Tensor) -> Tensor:
        x, added = rows(x, b)
        return F.linear(x, w.float() * s[:, None]) + added

    [found], _ = read(form)
    assert "bias" not in found


HEADS: dict[str, Form] = {
    "rows": lambda x, w, s, g, b: torch.einsum("tk,hdk->thd", x, scaled_heads(w, s)),
    "a batch": lambda x, w, s, g, b: torch.einsum("btk,hdk->bthd", x[None], scaled_heads(w, s)),
}


@pytest.mark.parametrize("form", HEADS.values(), ids=HEADS)
def test_a_layer_may_be_seen_in_heads(form: Form):
    [found], _ = read(form)
    assert (found["weight"].shape, found["scale"].shape, found["heads"]) == ((N, K), (N,), 2)


AFTERWARDS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a bias of each head": lambda y, line: y + line,
    "a scale of each head": lambda y, line: y * line,
    "in other rows": lambda y, line: y.flatten(0, 1),
}


@pytest.mark.parametrize("after", AFTERWARDS.values(), ids=AFTERWARDS)
def test_what_stands_behind_heads_is_not_of_the_layer(after: Callable[[Tensor, Tensor], Tensor]):
    [found], _ = read(lambda x, w, s, g, b: after(torch.einsum("tk,hdk->thd", x, scaled_heads(w, s)), s[: N // 2]))
    assert (found["scale"].shape, "bias" in found, found["heads"]) == ((N,), False, 2)


GROUPED: dict[str, Form] = {
    "groups within groups": lambda x, w, s, g, b: F.linear(
        x, (opened(w.float(), 2, 2, SIZE) * opened(g, 2, 2).unsqueeze(-1)).view(N, K)
    ),
    "rows": lambda x, w, s, g, b: F.linear(x, (w.view(-1, SIZE).float() * g.view(-1, 1)).view(N, K)),
    "repeated along columns": lambda x, w, s, g, b: x @ (w.t().float() * g.t().repeat_interleave(SIZE, 0)),
    "repeated along columns, times a number": lambda x, w, s, g, b: (
        x @ (w.t().float() * (g.t().repeat_interleave(SIZE, 0) * 0.3))
    ),
}


@pytest.mark.parametrize("form", GROUPED.values(), ids=GROUPED)
def test_groups_are_read_however_they_are_seen(form: Form):
    [found], _ = read(form)
    assert (found["weight"].shape, found["scale"].shape) == ((N, K), (G, N))


def test_scales_that_are_cast_behind_their_repetition_are_read():
    def form(x: Tensor, w: Tensor, s: Tensor, g: Tensor, b: Tensor) -> Tensor:
        x, wide = x.bfloat16(), g.t().repeat_interleave(SIZE, 0).bfloat16()
        return x @ (w.t().bfloat16() * wide)

    [found], _ = read(form)
    assert (found["scale"].shape, found["scale"].dtype) == ((G, N), torch.bfloat16)


def test_a_scale_of_float32_behind_the_product_ends_in_the_dtype_of_x():
    def form(x: Tensor, w: Tensor, s: Tensor, g: Tensor, b: Tensor) -> Tensor:
        x = x.bfloat16()
        return (F.linear(x, w.to(x.dtype)).float() * s + b).to(x.dtype)

    [found], _ = read(form)
    assert (found["scale"].dtype, "bias" in found) == (torch.float32, True)


def test_a_scale_of_float32_is_none_of_a_result_in_float32():
    found, _ = read(lambda x, w, s, g, b: F.linear(x.bfloat16(), w.bfloat16()).float() * s)
    assert not found


def test_a_layer_ends_before_it_is_made_narrower_than_x():
    graph = read_graph(traced(lambda x, w, s, g, b: (F.linear(x, w.float()) * s).bfloat16(), *GIVEN).graph)
    [(value, _)] = graph.readings.all("int8_weight_linear")
    assert value.dtype == torch.float32


@pytest.mark.parametrize("one", [lambda s: s[:1], lambda s: s[0]], ids=["[1]", "[]"])
def test_one_scale_may_stand_behind_the_product(one: Callable[[Tensor], Tensor]):
    [alone], _ = read(lambda x, w, s, g, b: F.linear(x, w.float()) * one(s))
    [beside], _ = read(lambda x, w, s, g, b: F.linear(x, w.float() * b[:, None]) * one(s))
    assert (alone["scale"].shape, beside["scale"].shape) == ((1,), (N,))
