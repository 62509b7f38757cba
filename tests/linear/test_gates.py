"""Gate and up are read of one tensor, as halves or every second lane; why a product with a sigmoid is no silu."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fusion.graph import Graph
from tests.engine.graphs import fused, numbers, read_graph, traced

H = 6


def read(function: Callable[[Tensor], Tensor], lanes: int = 2 * H) -> Graph:
    return read_graph(traced(function, numbers(2, 3, lanes)).graph)


LANES: dict[str, tuple[Callable[[Tensor], Tensor], bool, bool]] = {
    "the first half": (lambda x: x[..., :H], False, False),
    "the second half": (lambda x: x[..., H:], True, False),
    "the first run": (lambda x: x.unflatten(-1, (2, H))[..., 0, :], False, False),
    "the second run": (lambda x: x.unflatten(-1, (2, H))[..., 1, :], True, False),
    "every even lane": (lambda x: x[..., ::2], False, True),
    "every odd lane": (lambda x: x[..., 1::2], True, True),
    "the first of pairs": (lambda x: x.unflatten(-1, (H, 2))[..., 0], False, True),
    "the second of pairs": (lambda x: x.unflatten(-1, (H, 2))[..., 1], True, True),
}


@pytest.mark.parametrize("name", LANES)
def test_lanes_are_read_as_what_they_are(name: str):
    function, second, interleaved = LANES[name]
    [(_, found)] = read(lambda x: function(x).exp()).readings.all("gate_lanes")
    assert (found.captures["second"], found.captures["interleaved"]) == (second, interleaved)
    assert found.captures["x"].op == "input"


OTHERS: dict[str, tuple[Callable[[Tensor], Tensor], int]] = {
    "a half from the second lane on": (lambda x: x[..., 1 : H + 1], 2 * H),
    "a third": (lambda x: x[..., :H], 3 * H),
    "every third lane of four": (lambda x: x[..., ::3], 4),
    "the first of three": (lambda x: x.unflatten(-1, (H, 3))[..., 0], 3 * H),
    "the first of three runs": (lambda x: x.unflatten(-1, (3, H))[..., 0, :], 3 * H),
    "half of the rows": (lambda x: x.unflatten(1, (1, 3))[:, :, :1], H),
}


@pytest.mark.parametrize(("function", "lanes"), OTHERS.values(), ids=OTHERS)
def test_other_lanes_are_no_half(function: Callable[[Tensor], Tensor], lanes: int):
    assert not read(lambda x: function(x).exp(), lanes).readings.all("gate_lanes")


PLAIN = "it is a sigmoid alone"
INSIDE = "in the sigmoid alone"
GATES: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "silu": (lambda gate, up: F.silu(gate) * up, ""),
    "a sigmoid": (lambda gate, up: gate.sigmoid() * up, PLAIN),
    "silu of a gate times a tensor": (lambda gate, up: F.silu(gate * up[:1]) * up, ""),
    "silu of a gate times a tensor and a number": (lambda gate, up: F.silu(gate * up[:1] * 0.5) * up, ""),
    "silu of three factors": (lambda gate, up: F.silu(gate * up[:1] * up.cos()) * up, ""),
    "silu of a gate in float32": (lambda gate, up: F.silu(gate.float() * up[:1]) * up, ""),
    "a sigmoid of a gate times a tensor": (lambda gate, up: (gate * up[:1]).sigmoid() * up.cos(), PLAIN),
    "a sigmoid of more than the gate": (lambda gate, up: gate * (1.702 * gate).sigmoid() * up, INSIDE),
    "a sigmoid for all lanes": (lambda gate, up: gate[..., :1].sigmoid() * up, ""),
    "a sigmoid divided by a number": (lambda gate, up: gate.sigmoid() / up.sum(-1, keepdim=True), ""),
    "a sigmoid divided by its sum": (lambda gate, up: gate.sigmoid() / up, ""),
    "an activation alone": (lambda gate, up: gate * (1.702 * gate).sigmoid() + up, ""),
    "a sigmoid that is added as well": (lambda gate, up: (gate.sigmoid() * up).exp() + gate.sigmoid(), PLAIN),
}


@pytest.mark.parametrize(("function", "reason"), GATES.values(), ids=GATES)
def test_a_gate_that_is_no_silu_is_told(function: Callable[[Tensor, Tensor], Tensor], reason: str):
    graph = read(lambda x: function(x[..., :H], x[..., H:]))
    found = {(value.op, each.reason) for value, each in graph.readings.missed("activation")}
    assert {op for op, _ in found} == ({"mul"} if reason else set())
    assert all(reason in each for _, each in found)


def halves(form: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[bool, bool]]:
    """Which half is read, and whether its lanes are every second one."""
    found = read_graph(traced(form, x).graph).readings.all("gate_lanes")
    return [(each.captures["second"], each.captures["interleaved"]) for _, each in found]


def test_a_run_and_a_lane_of_each_pair_are_halves():
    assert halves(lambda x: x.view(4, 2, 3)[:, 1].exp(), numbers(4, 6)) == [(True, False)]


@pytest.mark.parametrize(
    ("form", "shape"),
    [
        (lambda x: x[:2].reshape(4, 3).exp(), (4, 2, 3)),
        (lambda x: x[:2].exp(), (4, 0)),
        (lambda x: x[0].exp(), (4,)),
    ],
)
def test_rows_are_none(form: Callable[[Tensor], Tensor], shape: tuple[int, ...]):
    assert halves(form, numbers(*shape) if 0 not in shape else torch.empty(shape)) == []


def reasons(function: Callable[[Tensor], Tensor], *shape: int) -> list[tuple[str, str]]:
    _, outcome = fused(function, numbers(*shape))
    return [(each.rule, each.reason) for each in outcome.refusals if each.rule == "activation"]


def test_one_reason_is_told_of_one_gate():
    ((rule, reason),) = reasons(lambda x: x[..., :H] * F.silu(x[..., H:]), 2, 3, 2 * H)
    assert rule == "activation"
    assert "the first half, or lane, is up" in reason


def test_a_gate_that_fused_is_not_told_of_with_what_it_is_multiplied_by():
    assert not reasons(lambda x: F.silu(x[..., :H]) * x[..., H:] * x[..., :1].cos(), 2, 3, 2 * H)


FACTORS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], str]] = {
    "of the gate": (lambda gate, up: F.silu(gate * up[:1].cos()) * up, "multiplied by a tensor before silu"),
    "of silu": (lambda gate, up: F.silu(gate) * up[:1].cos() * up, "write (silu(gate) * up) * factor"),
    "of up": (lambda gate, up: F.silu(gate) * (up[:1].cos() * up), "write (silu(gate) * up) * factor"),
}


@pytest.mark.parametrize(("function", "reason"), FACTORS.values(), ids=FACTORS)
def test_one_reason_names_the_place_of_a_factor(function: Callable[[Tensor, Tensor], Tensor], reason: str):
    ((_, reported),) = reasons(lambda x: function(x[..., :H], x[..., H:]), 2, 3, 2 * H)
    assert reason in reported


def test_a_product_that_a_guard_refuses_has_no_second_reason_where_it_is_weighted():
    _, outcome = fused(
        lambda x, row, first, second: F.silu(F.linear(x, first)) * F.linear(x, second) * row,
        numbers(2, 3, 64), numbers(2, 3, 1), numbers(H, 64, seed=1), numbers(H, 64, seed=2),
    )  # fmt: skip
    [reason] = [each.reason for each in outcome.refusals if each.rule == "activation"]
    assert "they are no Parameters of the module" in reason
