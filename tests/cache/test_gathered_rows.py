"""What of gathered pages is kept, or joined: the first rows of sequences, and what only looks like them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fusion.graph import Graph, Value
from fusion.testing import capture
from tests.engine.graphs import numbers, read_graph

from .layouts import applied, tried

pytestmark = pytest.mark.rotates(8)

BLOCKS, SIZE, N, D = 7, 4, 2, 16
PAGES = numbers(BLOCKS, SIZE, N, D), numbers(BLOCKS, SIZE, N, D, seed=1)
SQUARE = numbers(BLOCKS, SIZE, 12), numbers(BLOCKS, SIZE, 12, seed=1)
"""As many lanes as a sequence has rows."""
TABLE = torch.tensor([[3, 6, 1], [5, 0, 2]])
THREE = torch.tensor([[3, 6, 1], [5, 0, 2], [4, 4, 6]])
Read = Callable[..., Tensor]


def of_both(read: Read) -> Callable[..., tuple[Tensor, ...]]:
    return lambda keys, values, *more: (read(keys, *more), read(values, *more))


def first(pages: Tensor, table: Tensor, length: int) -> Tensor:
    """The first rows of one sequence."""
    return pages[table].flatten(0, 1)[:length]


def rows(pages: Tensor, table: Tensor) -> Tensor:
    return pages[table].flatten(1, 2)


def results(function: Callable[..., Any], *inputs: Any) -> tuple[Graph, list[Value]]:
    captured = capture(function, inputs)
    graph = read_graph(captured.graph.graph, captured.facts)
    return graph, [graph.value_of[node] for node in graph.source.output_node().args[0]]


OTHERS: dict[str, tuple[Any, ...]] = {
    "sums along the rows": (lambda x, t: first(x, t[0], 7).flatten(1).cumsum(0), PAGES, TABLE),
    "sequences side by side": (
        lambda x, t: torch.cat([first(x, each, 3).reshape(6, -1) for each in t], 1), PAGES, TABLE,
    ),
    "not from the first row": (lambda x, t: rows(x, t)[:, 1:10], PAGES, TABLE),
    "every second row": (lambda x, t: rows(x, t)[:, ::2], PAGES, TABLE),
    "the first lanes": (lambda x, t: rows(x, t)[..., :10], SQUARE, TABLE),
    "the first pages": (lambda x, t: x[t][:, :2], PAGES, TABLE),
    "and another tensor": (lambda x, t, more: torch.cat((first(x, t[0], 5), more)), PAGES, TABLE, numbers(3, N, D)),
    "and a wide tensor": (
        lambda x, t, more: torch.cat((first(x, t[0], 4).reshape(2, -1), more)), PAGES, TABLE, numbers(2, 2 * N * D),
    ),
    "by tables of other lengths": (
        lambda x, t, more: torch.cat((first(x, t[0], 4), first(x, more, 5))), PAGES, TABLE, torch.tensor([5, 0]),
    ),
    "joined before": (
        lambda x, t: torch.cat(
            (torch.cat((first(x, t[0], 3), first(x, t[1], 5))).flatten(1), first(x, t[2], 4).flatten(1))
        ),
        PAGES, THREE,
    ),
    "the same pages for every sequence": (
        lambda x, t: x.flatten(0, 1)[((t * SIZE)[..., None].expand(3, -1, -1) + torch.arange(SIZE)).flatten(1)],
        PAGES, TABLE[:1],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", OTHERS.values(), ids=OTHERS)
def test_other_parts_of_pages_are_none(case: tuple[Any, ...]):
    read, pages, *more = case
    graph, made = results(of_both(read), *pages, *more)
    assert not [value for value in made if graph.readings.one(value, "gathered_pages")]


def test_sequences_of_two_caches_are_not_joined():
    def crossed(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        both = ((keys, values), (values, keys))
        return tuple(torch.cat((first(x, table[0], 5), first(y, table[1], 6))) for x, y in both)

    graph, made = results(crossed, *PAGES, TABLE)
    assert not [value for value in made if graph.readings.one(value, "gathered_pages")]


def test_rows_that_are_looked_up_are_no_pages():
    graph, _ = results(of_both(lambda x, ids: x[ids]), numbers(50, 8), numbers(50, 8, seed=1), TABLE)
    assert not graph.readings.all("gathered_pages")
    assert not graph.readings.missed("page_gather")


def test_entries_of_a_table_of_rotations_are_no_pages():
    """They lie as pages of two rows, which the model takes apart again; pages of one cache have their reason."""

    def rotated(tables: Tensor, positions: Tensor, cache: Tensor) -> tuple[Tensor, ...]:
        cos, sin = tables[positions].unbind(-2)
        return cos * 2, sin * 3, cache[positions].flatten(1, 2)

    graph, (*_, rows) = results(rotated, numbers(50, 2, 8), TABLE, PAGES[0])
    assert [value for value, _ in graph.readings.missed("page_gather")] == [rows.below("reshape")]


class Experts(nn.Module):
    """Weights of experts, which lie as pages do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Parameter(each, requires_grad=False) for each in PAGES)

    def forward(self, chosen: Tensor) -> tuple[Tensor, Tensor]:
        return self.up[chosen], self.down[chosen]


def test_parameters_are_no_pages_of_a_cache():
    graph, _ = results(Experts(), TABLE)
    assert not graph.readings.all("gathered_pages")


def test_the_dims_of_a_result_hold_one_symbolic_size():
    def opened(keys: Tensor, values: Tensor, table: Tensor, like: Tensor) -> tuple[Tensor, ...]:
        return tuple(pages[table.view(*like.shape, 3)] for pages in (keys, values))

    table, like = THREE[:, :].repeat(2, 1), numbers(2, 3)
    torch._dynamo.mark_dynamic(table, 0)
    for axis in range(2):
        torch._dynamo.mark_dynamic(like, axis)
    captured = capture(opened, (*PAGES, table, like), dynamic=None)
    assert not read_graph(captured.graph.graph, captured.facts).readings.all("gathered_pages")


JOINED: dict[str, tuple[Read, Tensor]] = {
    "some sequences": (lambda x, t: torch.cat((first(x, t[0], 3), first(x, t[1], 4))), THREE),
    "sequences in another order": (lambda x, t: torch.cat((first(x, t[1], 3), first(x, t[0], 4))), TABLE),
    "pages of their own": (lambda x, t: torch.cat((first(x, t[:1], 3), first(x, t[1:], 4))), TABLE[0, :2]),
}


@pytest.mark.parametrize(("read", "table"), JOINED.values(), ids=JOINED)
def test_sequences_are_joined_as_they_are_named(read: Read, table: Tensor):
    t = tried("page_gather", of_both(read), lambda dtype: (*(each.to(dtype) for each in PAGES), table))
    assert applied(t)
    graph, made = results(of_both(read), *PAGES, table)
    found = [graph.readings.one(value, "gathered_pages") for value in made]
    assert [each and each.captures["table"].shape[:1] for each in found] == [(2,), (2,)]
    assert all(each and each.captures["table"].rank == 2 for each in found)
