"""How the result of attention may be arranged where sizes are symbolic."""

from __future__ import annotations

from torch import Tensor

from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Heads and sequences are one dim of the result, which no name says."""
    out = (q @ k.mT).softmax(-1) @ v
    return out.transpose(1, 2).reshape(q.shape[0] * q.shape[1], -1)


def test_a_result_that_is_arranged_by_several_symbolic_sizes_is_left_alone():
    given = (numbers(5, 3, 4, 16), numbers(5, 3, 7, 16, seed=1), numbers(5, 3, 7, 16, seed=2))
    captured = capture(attended, given, dynamic=True)
    readings = read_graph(captured.graph.graph, captured.facts).readings
    assert [each.reason for _, each in readings.missed("softmax_attention")] == [
        "the result is arranged by several symbolic sizes"
    ]
