"""Which cuts of a tensor are halves of its lanes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.engine.graphs import numbers, read_graph, traced


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
