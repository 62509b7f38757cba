"""Which values hold no number below 0, as far as how they were computed tells."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fusion.graph.nonnegative import is_nonnegative
from tests.engine.graphs import numbers, read_graph, traced

X = numbers(2, 3, 8)

FORMS: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "magnitudes": (lambda x: x.abs(), True),
    "numbers": (lambda x: x + 1, False),
    "rectified, twice as large": (lambda x: x.relu() * 2, True),
    "rectified, turned": (lambda x: x.relu() * -2, False),
    "a sum of shares": (lambda x: x.softmax(-1) + x.sigmoid(), True),
    "a share and a number": (lambda x: x.softmax(-1) + x, False),
    "whole numbers": (lambda x: x.long().abs(), False),
    "chosen of two": (lambda x: torch.where(x > 1, x.abs(), x.exp()), True),
    "chosen of one and a number": (lambda x: torch.where(x > 1, x.abs(), torch.tensor(2.0)), True),
    "chosen of one and a negative number": (lambda x: torch.where(x > 1, x.abs(), torch.tensor(-2.0)), False),
    "chosen of one and numbers": (lambda x: torch.where(x > 1, x.abs(), x), False),
    "bounded by 0": (lambda x: x.clamp(min=0.0), True),
    "bounded below 0": (lambda x: x.clamp(min=-1.0), False),
    "magnitudes, bounded": (lambda x: x.abs().clamp(min=-1.0), True),
}


@pytest.mark.parametrize(("form", "expected"), FORMS.values(), ids=FORMS)
@pytest.mark.rotates(3)
def test_signs(form: Callable[[Tensor], Tensor], expected: bool):
    graph = read_graph(traced(form, X).graph)
    (result,) = graph.source.output_node().args[0]
    assert is_nonnegative(graph.value_of[result]) is expected
