"""Block tables: which index names pages, or rows of them, and which only looks like it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fusion.analysis.constant_folding import Folder
from fusion.graph import Algebra, Reading
from fusion.stages.canonicalise import canonicalise
from fusion.testing import capture
from patterns.cache.read_block_tables import gathers, in_graph_dims, int8_latent_rows
from tests.engine.graphs import numbers, read_graph

B, M, SIZE, BLOCKS, WIDTH = 2, 3, 4, 7, 8
ROOM = M * SIZE
PAGES, FLAT = numbers(BLOCKS, SIZE, WIDTH), numbers(BLOCKS * SIZE, WIDTH)
TABLE = torch.tensor([[3, 6, 1], [5, 0, 2]])
Read = Callable[[Tensor, Tensor], Tensor]


def at() -> Tensor:
    """The number of every key."""
    return torch.arange(ROOM)


def sequences() -> Tensor:
    return torch.arange(B)[:, None]


def places() -> Tensor:
    return torch.arange(SIZE)


class Named(NamedTuple):
    """A table, of what shape, and how many rows each of its pages has; and of what shape the pages are."""

    table: tuple[Any, ...]
    size: int
    pages: tuple[Any, ...] = (BLOCKS, SIZE, WIDTH)


def named(
    read: Read, pages: Tensor, table: Tensor, batch: Any = B, keys: int = 1, dynamic: bool | None = False
) -> set[Named]:
    """The pages of several rows that are read of an index."""
    captured = capture(read, (pages, table), dynamic=dynamic)
    graph = canonicalise(captured.graph.graph, captured.facts)
    (output,) = graph.source.output_node().args[0]
    value = graph.value_of[output].below("reshape")
    found = gathers(graph.algebra, graph.shared(Folder), value, value.shape[0] if dynamic is None else batch, keys)
    return {Named(each.table.shape, each.size, each.pages.shape) for each in found if each.size > 1}


WHOLE = Named((B, M), SIZE)
IN_ORDER: dict[str, tuple[Read, Tensor, Tensor, Named]] = {
    "pages": (lambda x, t: x[t], PAGES, TABLE, WHOLE),
    "pages by a flat table": (lambda x, t: x[t.flatten()], PAGES, TABLE, WHOLE),
    "pages by a table of other rows": (lambda x, t: x[t], PAGES, TABLE.view(M, B), WHOLE),
    "rows": (lambda x, t: x[(t * SIZE)[..., None] + places()], FLAT, TABLE, WHOLE),
    "rows of one page": (lambda x, t: x[t * SIZE + places()], FLAT, TABLE[0, :1], Named((1, 1), SIZE)),
    "places": (lambda x, t: x[t[:, at() // SIZE], at() % SIZE], PAGES, TABLE, WHOLE),
    "places of each sequence": (lambda x, t: x[t[sequences(), at() // SIZE], at() % SIZE], PAGES, TABLE, WHOLE),
    "all places": (lambda x, t: x[t[..., None], places()], PAGES, TABLE, WHOLE),
}


@pytest.mark.parametrize(("read", "pages", "table", "each"), IN_ORDER.values(), ids=IN_ORDER)
def test_tables_are_read(read: Read, pages: Tensor, table: Tensor, each: Named):
    assert each in named(read, pages, table, batch=each.table[0])


def told(
    read: Read, pages: Tensor, table: Tensor, heads: int = 1, dynamic: bool | None = False
) -> set[tuple[str, int, tuple[Any, ...]]]:
    """How pages lie whose rows are keys, how many rows each has, and of what shape all are."""

    def attended(query: Tensor, pages: Tensor, table: Tensor) -> Tensor:
        keys = read(pages, table)
        return (query @ keys.mT).softmax(-1) @ keys

    query = numbers(B, heads, 1, read(pages, table).shape[-1], seed=1)
    captured = capture(attended, (query, pages, table), dynamic=dynamic)
    found = read_graph(captured.graph.graph, captured.facts).readings.all("paged_rows")
    return {(each.captures["layout"], each.captures["size"], each.captures["pages"].shape) for _, each in found}


LINES = numbers(BLOCKS, 2, SIZE, 16)
"""As if in NZ: rows of 32 lanes, in two lines."""


def turned(x: Tensor, table: Tensor) -> Tensor:
    return x.transpose(1, 2).flatten(2)[table]


LIE: dict[str, tuple[Read, int, set[tuple[str, int, tuple[int, ...]]]]] = {
    "rows of lines": (
        lambda x, t: turned(x, t).reshape(B, 1, ROOM, 32), 1, {("NZ", SIZE, (BLOCKS, 2, SIZE, 16))},
    ),
    "rows of two dims": (
        lambda x, t: x[t].reshape(B, 1, 2 * ROOM, 16), 1, {("BSND", 2 * SIZE, (BLOCKS, 2 * SIZE, 1, 16))},
    ),
    "rows that are lines": (
        lambda x, t: turned(x, t).reshape(B, 1, 2 * ROOM, 16), 1, {("BSND", 2 * SIZE, (BLOCKS, 2 * SIZE, 1, 16))},
    ),
    "lines of heads": (
        lambda x, t: turned(x, t).reshape(B, ROOM, 2, 16).transpose(1, 2), 2, {("BSND", SIZE, (BLOCKS, SIZE, 2, 16))},
    ),
    "rows of what is no line": (
        lambda x, t: x[t].reshape(B, M, SIZE, 2, 16).transpose(2, 3).reshape(B, 1, 2 * M, 64), 1, set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("read", "heads", "lie"), LIE.values(), ids=LIE)
def test_pages_lie_as_their_rows_are_read(read: Read, heads: int, lie: set[tuple[str, int, tuple[int, ...]]]):
    assert told(read, LINES, TABLE, heads) == lie


def test_keys_whose_number_changes_are_left_alone():
    torch.compiler.reset()
    pages, table = FLAT.clone(), TABLE.clone()
    torch._dynamo.mark_dynamic(table, 1)
    assert not told(lambda x, t: x[(t * SIZE)[..., None] + places()].flatten(1, 2)[:, None], pages, table, dynamic=None)


FIVE = torch.tensor([3, 6, 1, 5, 0])
ODD: dict[str, tuple[Any, ...]] = {
    "no index": (lambda x, t: torch.cat((x, t)), numbers(24, 8), numbers(1, 8), 1, 25),
    "another dim": (lambda x, t: x[:, t], numbers(SIZE, BLOCKS, WIDTH), TABLE),
    "no number for each sequence": (lambda x, t: x[t], PAGES, FIVE),
    "rows of no number for each sequence": (lambda x, t: x[(t * SIZE)[:, None] + places()], FLAT, FIVE),
    "places of no number for each sequence": (lambda x, t: x[t[:, None], places()], PAGES, FIVE),
    "one row": (lambda x, t: torch.ops.aten.index.Tensor(x, [t[0, 0] + t[0, 1]]), FLAT, TABLE),
    "rows that are left over": (lambda x, t: x[(t * SIZE)[..., None] + places()], numbers(29, WIDTH), TABLE),
    "rows of pages of another size": (lambda x, t: x[(t * 8)[..., None] + places()], FLAT, TABLE),
    "rows that overlap": (lambda x, t: x[t[..., None] + places()], FLAT, TABLE),
    "a place for each page": (lambda x, t: x[t * SIZE + places()], FLAT, TABLE.repeat(1, 2)[:, :4]),
    "places before pages": (lambda x, t: x[t * SIZE + places()[:, None]], FLAT, TABLE[:1].repeat(1, 2)[:, :4]),
    "places that go on": (lambda x, t: x[(t * SIZE)[:, None] + torch.arange(16).view(4, 4)], FLAT, FIVE[:4]),
    "a place for each page of its own": (lambda x, t: x[t, places()], PAGES, TABLE.repeat(1, 2)[:, :4]),
    "places of pages of another size": (lambda x, t: x[t[:, at() // 2 % 3], at() % 2], PAGES, TABLE),
    "columns that are told": (lambda x, t: x[t[:, t[0]], places()[:M]], PAGES, TABLE),
    "places that are told": (lambda x, t: x[t[:, at() // SIZE], t.repeat(1, 4)[:1]], PAGES, TABLE),
    "sequences in another order": (lambda x, t: x[t[1 - sequences(), at() // SIZE], at() % SIZE], PAGES, TABLE),
    "some sequences": (lambda x, t: x[t[sequences(), at() // SIZE], at() % SIZE], PAGES, TABLE.repeat(2, 1)),
    "sequences of another table": (lambda x, t: x[t[:, at() // SIZE], at() % SIZE], PAGES, TABLE.repeat(2, 1)),
    "sequences along the second dim": (
        lambda x, t: x[t[torch.arange(4), (torch.arange(4) // 2)[:, None]], torch.arange(4) % 2],
        numbers(BLOCKS, 2, WIDTH), TABLE.repeat(2, 1)[:, :2], 4,
    ),
    "a page of each sequence": (
        lambda x, t: x[t[torch.arange(4)[None], (torch.arange(4) // 2)[None]], (torch.arange(4) % 2)[None]],
        numbers(BLOCKS, 2, WIDTH), TABLE.repeat(2, 1)[:, :2], 4,
    ),
    "a table of three dims": (lambda x, t: x[t[:, at() // SIZE].squeeze(-1), at() % SIZE], PAGES, TABLE[..., None]),
    "a joined table": (
        lambda x, t: x[torch.cat((t, torch.tensor([[0, 0], [1, 1]])), 1), torch.arange(4) % 2],
        numbers(BLOCKS, 2, WIDTH), TABLE[:, :2],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", ODD.values(), ids=ODD)
@pytest.mark.rotates(4)
def test_other_numbers_are_no_table(case: tuple[Any, ...]):
    assert not named(*case)


OPEN: dict[str, tuple[Read, dict[int, int], torch.dtype]] = {
    "pages of a sequence": (lambda x, t: x[t], {1: 1}, torch.int64),
    "rows of a page": (lambda x, t: x[t], {0: 1}, torch.int64),
    "pages of a sequence, by place": (lambda x, t: x[t[:, at() // SIZE], at() % SIZE], {1: 1}, torch.int64),
    "rows of a page, by place": (lambda x, t: x[t[:, at() // SIZE], at() % SIZE], {0: 1}, torch.int64),
    "sequences": (
        lambda x, t: x[t[torch.arange(t.shape[0])[:, None], at() // SIZE], at() % SIZE], {1: 0}, torch.int64,
    ),
    "rows, which int32 may not count": (
        lambda x, t: x.flatten(0, 1)[(t * SIZE)[..., None] + places()], {0: 0}, torch.int32,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("read", "symbolic", "dtype"), OPEN.values(), ids=OPEN)
def test_what_sizes_leave_open_is_no_table(read: Read, symbolic: dict[int, int], dtype: torch.dtype):
    torch.compiler.reset()
    given = PAGES.clone(), TABLE.to(dtype, copy=True)  # marks stay on a tensor
    for place, axis in symbolic.items():
        torch._dynamo.mark_dynamic(given[place], axis)
    assert not named(read, *given, dynamic=None)


def test_both_parts_of_a_latent_in_rows_are_read_in_rows():
    def form(latent: Tensor, rope: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        return latent[table].reshape(B, 1, ROOM, WIDTH), rope[table].reshape(B, 1, ROOM, WIDTH)

    graph = read_graph(capture(form, (PAGES, PAGES + 1, TABLE)).graph.graph)
    latent, rope = (graph.value_of[node] for node in graph.source.output_node().args[0])  # type: ignore[union-attr, index]
    found = int8_latent_rows(graph, Reading("int8_latent_attention", {"latent": latent, "k_rope": rope}))
    assert [reading.captures["layout"] for _, reading in found] == ["BSND", "BSND"]  # type: ignore[union-attr]


def test_pages_are_read_with_the_dims_that_a_node_holds():
    a = Algebra()
    pages = a.make("input", (), ("pages",), (BLOCKS, SIZE, 2, WIDTH), torch.float32)
    joined = a.reshape(pages, (BLOCKS, SIZE, 2 * WIDTH))
    assert in_graph_dims(a, pages, {pages, joined}) is pages
    assert in_graph_dims(a, pages, {joined}) is joined
    assert in_graph_dims(a, pages, set()) is pages
