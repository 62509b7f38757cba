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
OTHER_GROUPS, ALONG = "a scale and an offset of other groups", "neither one of each output channel nor"
Form = Callable[..., Tensor]


def read(form: Form, *more: Tensor) -> tuple[list[dict[str, Any]], list[str]]:
    """What is read of layers with int8 weights, and why others are none."""
    graph = read_graph(traced(form, *GIVEN, *more).graph)
    found = [each.captures for _, each in graph.readings.all("int8_weight_linear")]
    return found, [each.reason for _, each in graph.readings.missed("weight_only_linear")]


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
    "groups within groups": (
        lambda x, w, s, g, b: F.linear(x, (opened(w.float(), 2, 2, SIZE) * opened(g, 2, 2).unsqueeze(-1)).view(N, K)),
        "",
    ),
    "groups that are seen as other groups between scales": (
        lambda x, w, s, g, b: F.linear(
            x, ((opened(w.float(), G, SIZE) * g.unsqueeze(-1)).view(N, 2, -1) * s[0]).view(N, K)
        ),
        "",
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
    "a bias before the scale": (lambda x, w, s, g, b: (F.linear(x, w.float()) + b) * s + s, ""),
}  # fmt: skip


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
