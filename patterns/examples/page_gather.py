"""Pages of two caches that are gathered for another use than attention over pages, and what only resembles it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import embedding, linear

from fusion import Example
from patterns.examples.inputs import Inputs, normal

B, N, D, E, C, R, BLOCKS, SIZE, PAGES = 2, 2, 16, 32, 32, 16, 7, 4, 3
ROOM = PAGES * SIZE
TABLE = torch.tensor([[3, 6, -1], [5, 3, 2]])
WHOLE = torch.tensor([[3, 6, 0], [5, 3, 2]], dtype=torch.int32)


def inputs(table: Tensor = TABLE, *more: Tensor, heads: bool = True, sizes: tuple[int, int] = (SIZE, SIZE)) -> Inputs:
    """Pages of keys and values of heads, or of a latent and its rotated lanes; the block table, and more."""

    def make(dtype: torch.dtype) -> tuple[Tensor, ...]:
        widths = ((N, D), (N, E)) if heads else ((C,), (R,))
        shapes = [(BLOCKS, size, *width) for size, width in zip(sizes, widths, strict=True)]
        data = (normal(seed, *shape).to(dtype) for seed, shape in enumerate(shapes))
        return *data, table.clone(), *(each.clone() for each in more)

    return make


def up(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """The same of a latent, and the weight by which keys and values of all heads come from it."""
    return *inputs(heads=False)(dtype), (normal(3, N * (D + E), C) / 8).to(dtype)


def whole(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Whole pages."""
    return keys[table], values[table].flatten(1, 2)


def first_rows(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The first rows of each sequence."""
    return keys[table].flatten(1, 2)[:, :10], values[table].view(B, ROOM, N, E)[:, :10]


def selected(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """By index_select of a flattened table."""
    rows = (pages.index_select(0, table.flatten()).view(B, ROOM, -1) for pages in (keys, values))
    k, v = rows
    return k[:, :9], v[:, :9]


def looked_up(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Pages as rows of a table that is looked up."""
    k, v = (embedding(table, pages.view(BLOCKS, -1)).view(B, ROOM, N, -1) for pages in (keys, values))
    return k, v


def row_by_row(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of all pages by their number."""
    places = (table[:, :, None] * SIZE + torch.arange(SIZE)).view(B, ROOM)
    k, v = (pages.flatten(0, 1)[places] for pages in (keys, values))
    return k[:, :11], v[:, :11]


def by_place(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A page and a place in it for every token."""
    token = torch.arange(ROOM)
    k, v = (pages[table[:, token // SIZE], token % SIZE] for pages in (keys, values))
    return k, v


def one_sequence(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """A table of one sequence."""
    k, v = (pages[table[1]].flatten(0, 1)[:7] for pages in (keys, values))
    return k, v


def joined(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Sequences of lengths of their own, packed."""
    k, v = (
        torch.cat([pages[table[each]].flatten(0, 1)[:length] for each, length in enumerate((5, 11))])
        for pages in (keys, values)
    )
    return k, v


def joined_pages(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """The same, of no more pages than they need."""
    k, v = (
        torch.cat([pages[table[each, :most]].flatten(0, 1)[:length] for each, most, length in ((0, 2, 6), (1, 3, 12))])
        for pages in (keys, values)
    )
    return k, v


def expanded(latent: Tensor, rope: Tensor, table: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
    """The context of a prompt that comes in chunks: keys and values of all heads from the rows of a latent."""
    rows, turned = (pages[table].flatten(1, 2)[:, :10] for pages in (latent, rope))
    k, v = linear(rows, weight).unflatten(-1, (N, -1)).split((D, E), -1)
    return torch.cat((k, turned[:, :, None].expand(-1, -1, N, -1)), -1), v


EXAMPLES = (
    Example("whole pages", whole, inputs()),
    Example("the first rows", first_rows, inputs()),
    Example("index_select", selected, inputs(WHOLE)),
    Example("an embedding", looked_up, inputs(WHOLE)),
    Example("row by row", row_by_row, inputs(WHOLE)),
    Example("by page and place", by_place, inputs(WHOLE)),
    Example("one sequence", one_sequence, inputs()),
    Example("packed", joined, inputs()),
    Example("packed, fewer pages", joined_pages, inputs()),
    Example("a latent that is expanded", expanded, up),
)


def alone(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """One cache."""
    return keys[table].flatten(1, 2), values


def other_table(keys: Tensor, values: Tensor, table: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Pages of both, by two tables."""
    return keys[table], values[other]


def other_lengths(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Both are packed up to lengths of their own."""
    k = torch.cat([keys[table[each]].flatten(0, 1)[:length] for each, length in enumerate((5, 11))])
    v = torch.cat([values[table[each], :2].flatten(0, 1) for each in range(B)])
    return k, v


def other_lanes(keys: Tensor, values: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Some lanes of the rows of both."""
    return keys[..., :8][table], values[..., :8][table]


ALONE = "the pages of one cache are gathered"
REJECTS = (
    Example("one cache", alone, inputs(), ALONE),
    Example("two tables", other_table, inputs(TABLE, WHOLE), ALONE),
    Example("pages of two sizes", whole, inputs(sizes=(SIZE, 2 * SIZE)), ALONE),
    Example("lengths that differ", other_lengths, inputs(), ALONE),
    Example("some lanes", other_lanes, inputs(), "do not lie together"),
)

TRIED = {"page_gather": (*EXAMPLES, *REJECTS)}
"""Rule -> its examples and rejects."""
