"""Pages of two caches that are gathered for another use than attention over pages, and what only resembles it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from fusion import Example
from tests.examples.attention_pages import BLOCKS, ROOM, SIZE, TABLE
from tests.examples.inputs import Inputs, Part, normal, tensors

B, N, D, E, C, R = 2, 2, 16, 32, 32, 16
UP = normal(3, N * (D + E), C) / 8
"""The weight by which keys and values of all heads come from a latent."""
WHOLE = torch.tensor([[3, 6, 0], [5, 3, 2]], dtype=torch.int32)


def inputs(table: Tensor = TABLE, *more: Part, heads: bool = True, sizes: tuple[int, int] = (SIZE, SIZE)) -> Inputs:
    """Pages of keys and values of heads, or of a latent and its rotated lanes; the block table, and more."""
    widths = ((N, D), (N, E)) if heads else ((C,), (R,))
    pages = ((BLOCKS, size, *width) for size, width in zip(sizes, widths, strict=True))
    return tensors(*pages, table, *more)


def whole(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages."""
    return keys[table], values[table].flatten(1, 2)


def first_rows(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The first rows of each sequence."""
    return keys[table].flatten(1, 2)[:, :10], values[table].view(B, ROOM, N, E)[:, :10]


def of_both(
    read: Callable[[Tensor, Tensor], Tensor], places: Callable[[Tensor], Tensor] = lambda table: table
) -> Callable[..., tuple[Tensor, ...]]:
    """The pages of both, read alike by places of a table."""

    def forward(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, ...]:
        at = places(table)
        return tuple(read(pages, at) for pages in (keys, values))

    return forward


def by_place(pages: Tensor, table: Tensor) -> Tensor:
    """A page and a place in it for every token."""
    token = torch.arange(ROOM)
    return pages[table[:, token // SIZE], token % SIZE]


def packed(*parts: tuple[int, int]) -> Callable[[Tensor, Tensor], Tensor]:
    """Sequences of lengths of their own, of so many pages each, packed."""
    return lambda pages, table: torch.cat(
        [pages[table[each, :most]].flatten(0, 1)[:length] for each, (most, length) in enumerate(parts)]
    )


def expanded(latent: Tensor, rope: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The context of a prompt that comes in chunks: keys and values of all heads from the rows of a latent."""
    rows, turned = (pages[table].flatten(1, 2)[:, :10] for pages in (latent, rope))
    k, v = linear(rows, weight).unflatten(-1, (N, -1)).split((D, E), -1)
    return torch.cat((k, turned[:, :, None].expand(-1, -1, N, -1)), -1), v


SELECTED = of_both(lambda pages, table: pages.index_select(0, table.flatten()).view(B, ROOM, -1)[:, :9])
LOOKED_UP = of_both(lambda pages, table: embedding(table, pages.view(BLOCKS, -1)).view(B, ROOM, N, -1))
ROW_BY_ROW = of_both(
    lambda pages, places: pages.flatten(0, 1)[places][:, :11],
    lambda table: (table[:, :, None] * SIZE + torch.arange(SIZE)).view(B, ROOM),
)


def other_lengths(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Both are packed up to lengths of their own."""
    v = torch.cat([values[table[each], :2].flatten(0, 1) for each in range(B)])
    return packed((3, 5), (3, 11))(keys, table), v


def by_two_tables(keys: Tensor, values: Tensor, table: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of keys by one, rows of values by the other."""
    return keys[table].flatten(1, 2), values[other].flatten(1, 2)


ALONE = "it gathers the pages of one cache"
EXAMPLES = (
    Example("whole pages", whole, inputs()),
    Example("the first rows", first_rows, inputs()),
    Example("index_select", SELECTED, inputs(WHOLE)),
    Example("an embedding", LOOKED_UP, inputs(WHOLE)),
    Example("row by row", ROW_BY_ROW, inputs(WHOLE)),
    Example("by page and place", of_both(by_place), inputs(WHOLE)),
    Example("one sequence", of_both(lambda pages, table: pages[table[1]].flatten(0, 1)[:7]), inputs()),
    Example("packed", of_both(packed((3, 5), (3, 11))), inputs()),
    Example("packed, fewer pages", of_both(packed((2, 6), (3, 12))), inputs()),
    Example("a latent that is expanded", expanded, inputs(TABLE, UP, heads=False)),
    Example("one cache", lambda keys, values, table: (keys[table].flatten(1, 2), values), inputs(), ALONE),
    Example("two tables", by_two_tables, inputs(TABLE, WHOLE), ALONE),
    Example("pages of two sizes", whole, inputs(sizes=(SIZE, 2 * SIZE)), ALONE),
    Example("lengths that differ", other_lengths, inputs(), ALONE),
    Example("some lanes", of_both(lambda pages, table: pages[..., :8][table]), inputs(), "are not contiguous"),
)

TRIED = {"page_gather": EXAMPLES}
