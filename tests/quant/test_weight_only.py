"""Linear layers of floats with an int8 weight: what is read of them, and what only looks like one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph

T, K, N, G, HEADS = 3, 8, 6, 2, 2
X, SCALE, GROUPED = numbers(T, K), numbers(N, seed=1), numbers(N, G, seed=2)
WEIGHT = torch.randint(-9, 10, (N, K), generator=torch.Generator().manual_seed(3), dtype=torch.int8)

Layer = Callable[..., Any]


def read(layer: Layer, *inputs: Tensor) -> tuple[list[tuple[tuple[int, ...], dict[str, Any]]], list[str]]:
    """The shape and the parts of each layer that is read, and why others are none."""
    readings = read_graph(capture(layer, inputs).graph.graph).readings
    found = [(value.shape, each.captures) for value, each in readings.all("int8_weight_linear")]
    return found, [each.reason for _, each in readings.missed("quantised_linear")]


def behind(made: Callable[[Tensor], Tensor]) -> Layer:
    """A layer whose weight [K, N] is made of that of int8, by a scale of each channel behind the product."""
    return lambda x, weight, scale: (x @ made(weight)) * scale


UNREAD: dict[str, tuple[Layer, Tensor]] = {
    "every second channel lies apart": (
        behind(lambda w: w.view(2, K, N // 2).float().permute(1, 2, 0).reshape(K, N)), SCALE,
    ),
    "groups of groups": (
        lambda x, w, s: x @ (w.view(2, 2, 2, N).float() * s.view(2, 2, 1, N)).reshape(K, N), numbers(4, N),
    ),
    "runs that end within a channel": (
        lambda x, w, s: F.linear(x, (w.view(2, 4, 6).float() * s[..., None]).view(N, K)), numbers(2, 4),
    ),
    "one row for all channels": (lambda x, w, s: F.linear(x, w[:1].float() * s[:, None]), SCALE),
    "one channel by several numbers": (lambda x, w, s: F.linear(x, w[:1].float()) * s, SCALE),
    "one number of a token": (lambda x, w, s: F.linear(x, w.float()) * (s + x[:1, :1]), SCALE[:1]),
    "a number that is added to all": (lambda x, w, s: F.linear(x, w.float()) + s, SCALE[:1]),
    "a number behind those of channels": (lambda x, w, s: F.linear(x, w.float()).sum() * s, SCALE),
    "products of whole numbers": (
        lambda x, w, s: x[:, : K // 2] @ w.view(K // 2, N, 2).float().prod(-1) * s, SCALE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("layer", "scale"), UNREAD.values(), ids=UNREAD)
def test_what_has_no_scale_of_each_channel_or_group_is_left_alone(layer: Layer, scale: Tensor):
    assert read(layer, X, WEIGHT, scale) == ([], [])


def test_what_is_added_to_each_head_is_no_bias_of_a_layer():
    def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        return F.linear(x, weight.float() * scale[:, None]).view(T, HEADS, -1) + scale[: N // HEADS]

    [(shape, found)], _ = read(layer, X, WEIGHT, SCALE)
    assert (shape, "bias" in found) == ((T, N), False)


def test_a_layer_is_read_once_with_all_that_belongs_to_it():
    def layer(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
        return ((F.linear(x, weight.float() * scale[:, None]) * scale) + bias).unsqueeze(0)

    [(shape, found)], _ = read(layer, X, WEIGHT, SCALE, SCALE)
    assert shape == (T, N)
    assert {name: each.shape for name, each in found.items() if name != "dtype"} == {
        "x": (T, K), "weight": (N, K), "scale": (N,), "bias": (N,),
    }  # fmt: skip


def test_groups_of_inputs_have_their_scales_and_zero_points_by_channels_last():
    def layer(x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        runs = weight.float().view(N, G, -1)
        return F.linear(x, ((runs + scale[..., None].sin()) * scale[..., None]).view(N, K))

    [(_, found)], _ = read(layer, X, WEIGHT, GROUPED)
    assert (found["scale"].shape, found["offset"].shape) == ((G, N), (G, N))
