"""Tables of tokens that the caller has packed otherwise, of numbers that are known or not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fusion.language import Refused
from fusion.planning.fake_execution import Fakes
from fusion.testing import capture
from patterns.rotary.token_tables import TokenTables
from tests.engine.graphs import numbers, read_graph

H, D = 8, 6


def rows_of(x: torch.Tensor, table: torch.Tensor, dynamic: bool) -> tuple[Any, ...]:
    """The shape of the tables for tokens x, as the sizes of x and of the table."""
    graph = capture(lambda x, table: (x + 1, table + 1), (x, table), dynamic=dynamic).graph.graph
    x, table = (node.meta["val"] for node in graph.output_node().args[0])
    _, (rows, _) = Fakes(read_graph(graph)).record(
        lambda given: tuple(TokenTables(given["t"], given["t"]).rows(given["x"])), {"x": x, "t": table}
    )
    return tuple(rows.shape)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("tokens", "table", "expected"),
    [
        ((5, 3), (5, 3), (5, 3)),
        ((5, 3), (1, 3), (5, 3)),
        ((5, 3), (5, 1), (5, 3)),
        ((5,), (5, 1), (1, 5)),
        ((5,), (1, 5), (1, 5)),
        ((5,), (1, 1), (1, 5)),
        ((5, 3), (1, 1), (5, 3)),
    ],
)
@pytest.mark.rotates(4)
def test_each_token_has_its_row(tokens: Any, table: Any, expected: Any, dynamic: bool):
    found = rows_of(numbers(*tokens, H), numbers(*table, D, seed=1), dynamic)
    assert len(found) == 3
    assert [int(size) if dynamic else size for size in found] == [*expected, D]


def test_packed_tokens_are_those_of_all_sequences():
    assert rows_of(numbers(15, H), numbers(5, 3, D, seed=1), dynamic=False) == (1, 15, D)


def test_tokens_of_another_number_are_not_proven_to_have_them():
    with pytest.raises(Refused):
        rows_of(numbers(15, H), numbers(5, 3, D, seed=1), dynamic=True)
