"""Keys and values that are gathered from pages: rows[b, p · Size + o] = pages[table[b, p], o].

A model gathers pages by their numbers, pages[table], or single rows by `table · Size + o`. Every form is proven by
building it. The last rows of a sequence's pages, which the sequence does not reach, may be sliced off. A negative page
number counts from the last page: `wrap` makes this explicit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fusion import reader, word
from fusion.analysis.consecutive_positions import iota, wrapped
from fusion.analysis.constant_folding import Folder
from fusion.analysis.intervals import uncast
from fusion.graph import Algebra, Annotation, Graph, Reading, Value
from fusion.graph.proof_steps import must, proof, proven
from patterns.cache.joined_tables import joined_table

PAGED_ROWS = word(
    "paged_rows",
    "rows[b, p · Size + o] = pages[block_table[b, p], o]",
    rows="the value, perhaps with other dims", pages="[Block, ..]", block_table="[B, P]", size="rows of a page",
    layout='"BSND", "BNSD" or "NZ", the layout of a page',
)  # fmt: skip
_ALL = ("BSND", "BNSD", "NZ")
_INT8 = ("int8_latent_attention", "int8_probability_attention")


class Gather(NamedTuple):
    """A gather from `pages` [Blocks, ..], of `size` rows each, by the block table `table` [B, M].

    Attributes:
        gathered: the result.
        rows: the gathered rows of a sequence, the first of its pages; None for all M · size.
    """

    gathered: Value
    pages: Value
    table: Value
    size: int
    rows: int | None = None


_LATENTS = ("latent_keys", "latent_values")
Sizes = tuple[Any, Any, Any, Any]


_ATTENTION = ("softmax_attention", "listed_attention")
_ENCODED = ("encoded_keys", "encoded_values")
_INDEXERS = ("lightning_indexer", "indexer_list")


@reader(gives=(PAGED_ROWS,), needs=(*_ATTENTION, *_INT8, *_ENCODED, *_LATENTS, "unpacked_latent", *_INDEXERS))
def block_tables(graph: Graph) -> Iterator[Annotation]:
    """Read every key, value and latent of an attention, and every key of an indexer, that is gathered from pages."""
    indexed = (each.captures["key"] for _, each in graph.readings.all(*_INDEXERS))
    yield from _readings(graph, ((key, (key.shape[0], 1, *key.shape[1:])) for key in indexed))
    scales = (each.captures.get("key_scale") for _, each in graph.readings.all(*_INDEXERS))
    yield from _readings(graph, ((each, (each.shape[0], 1, each.shape[1], 1)) for each in scales if each is not None))
    packed = (each.captures["rows"] for _, each in graph.readings.all("unpacked_latent"))
    yield from _readings(graph, ((rows, (*_sequence_sizes(rows), rows.shape[-1])) for rows in packed))
    for _, attention in graph.readings.all(*_INT8):
        yield from int8_latent_rows(graph, attention)
    for _, attention in graph.readings.all(*_ATTENTION):
        operands = (attention.captures["k"], attention.captures["v"])
        operands = tuple(_stored(graph, each) for each in operands)
        batch, _, keys, _ = operands[0].shape
        yield from _readings(graph, ((each, (batch, each.shape[1], keys, each.shape[-1])) for each in operands))
        parts = (part for each in operands for part in _shared_parts(graph.readings.one(each, *_LATENTS)))
        yield from _readings(
            graph, ((each, (batch, 1, _rows_per_sequence(each, batch), each.shape[-1])) for each in parts)
        )


def _stored(graph: Graph, x: Value) -> Value:
    """Return the stored numbers that `x`, keys or values, is dequantised from; `x` itself if there is none."""
    reading = graph.readings.one(x, *_ENCODED)
    return x if reading is None else reading.captures["x"]


def _readings(graph: Graph, wanted: Iterable[tuple[Value, Sizes]]) -> Iterator[Annotation]:
    """Yield each value of `wanted`, [B, N, T, D] of the given sizes, with its reading as rows of pages, if any."""
    readings = ((value, rows_of_pages(graph, value, sizes)) for value, sizes in wanted)
    return ((value, reading) for value, reading in readings if reading is not None)


def int8_latent_rows(graph: Graph, attention: Reading) -> list[Annotation]:
    """Read the int8 latent and the rotated keys of `attention` as rows of pages of one layout.

    A part whose row fills one line of NZ reads as a plain row too: if the layouts differ, both are read as NZ.
    """
    parts = [attention.captures[name] for name in ("latent", "k_rope")]
    values = [(each, (each.shape[0], 1, *each.shape[2:])) for each in parts]
    readings = [rows_of_pages(graph, *each) for each in values]
    if len({each and each.captures["layout"] for each in readings}) > 1:
        readings = [rows_of_pages(graph, *each, ("NZ",)) for each in values]
    return [(value, reading) for (value, _), reading in zip(values, readings, strict=True) if reading is not None]


def _rows_per_sequence(latent: Value, batch: Any) -> Any:
    """Compute the rows of each of `batch` sequences in `latent` [B, .., T, D], or packed [B · T, D]."""
    count = prod(latent.shape[:-1])
    packed = latent.shape[0] != batch and isinstance(count, int) and isinstance(batch, int) and batch > 0
    return count // batch if packed else prod(latent.shape[1:-1])


def _sequence_sizes(rows: Value) -> tuple[Any, int, Any]:
    """Return B, 1 (head) and T of `rows` [B, .., Row], or of one sequence [T, Row]."""
    lead = rows.shape[:-1] if rows.rank > 2 else (1, *rows.shape[:-1])
    return lead[0], 1, prod(lead[1:])


def _shared_parts(reading: Reading | None) -> list[Value]:
    """Return the latent and the rotated keys that all heads share in the keys or values of `reading`."""
    shared = () if reading is None else (reading.captures.get(name) for name in ("latent", "rope"))
    return [each for each in shared if isinstance(each, Value)]


def rows_of_pages(graph: Graph, value: Value, sizes: Sizes, among: Container[str] = _ALL) -> Reading | None:
    """Read `value`, the elements of [B, N, T, D] = `sizes`, as rows of pages in one of the layouts `among`."""
    if not all(isinstance(each, int) for each in sizes[1:]) or prod(value.shape) != prod(sizes):
        return None
    a, below = graph.algebra, value.below("reshape", "permute", "slice")
    if value.op == "cat":
        return _joined_rows(graph, value, sizes, among)
    for gather in gathers(a, graph.shared(Folder), below, sizes[0], sizes[2]):
        for layout, pages, rows in _forms(a, gather, sizes):
            if layout in among and a.reshape(rows, value.shape) is value:
                table = wrapped(a, gather.table, pages.shape[0])
                pages = pages if layout == "NZ" else in_graph_dims(a, pages, graph.places)
                how = {"pages": pages, "block_table": table, "size": gather.size, "layout": layout}
                return Reading("paged_rows", {"rows": value, **how})
    return None


def _joined_rows(graph: Graph, value: Value, sizes: Sizes, among: Container[str]) -> Reading | None:
    """Read `value` [B, ..] as rows of pages [B, N, T, D] = `sizes` in a layout of `among`, if those of each sequence
    are such.

    The model has gathered them sequence by sequence and joined them.
    """
    batch, *others = sizes
    if not isinstance(batch, int) or batch < 2 or value.shape[:1] != (batch,):
        return None
    rows = (graph.algebra.cut(value, 0, number, number + 1) for number in range(batch))
    parts = [rows_of_pages(graph, each, (1, *others), among) for each in rows]
    if any(each is None for each in parts):
        return None
    captures = [each.captures for each in parts if each is not None]
    same = {name: captures[0][name] for name in ("pages", "size", "layout")}
    tables = [each["block_table"] for each in captures]
    known = all(isinstance(each.shape[1], int) for each in tables)
    if not known or any(each[name] != same[name] for each in captures for name in same):
        return None
    table = joined_table(graph.algebra, tables, same["pages"].shape[0])
    return Reading("paged_rows", {"rows": value, "block_table": table, **same})


def in_graph_dims(a: Algebra, pages: Value, places: Container[Value]) -> Value:
    """Return `pages` [Blocks, Size, N, D] in the dims of a value in `places`, with N · D joined if need be.

    The writes into the same pages have those dims, so that both name the same value.
    """
    blocks, size, heads, width = pages.shape
    joined = a.reshape(pages, (blocks, size, prod((heads, width))))
    return next((each for each in (pages, joined) if each in places), pages)


def gathers(a: Algebra, folder: Folder, gathered: Value, batch: Any, keys: Any) -> Iterator[Gather]:
    """Yield every reading of `gathered` as `keys` rows of each of `batch` sequences, gathered by page or by row."""
    if gathered.op == "cat" and gathered.attrs == (0,) and len(gathered.args) == batch:
        yield from _joined_gathers(a, folder, gathered, keys)
    if gathered.op != "index" or gathered.attrs not in ((0,), (0, 1)):
        return
    source, *index = gathered.args
    by_block, count = len(index) == 2, source.shape[0]
    table, size, rows = _looked_up_rows(a, folder, index, batch, source.shape[:2]) or (None, 0, None)
    blocks = count if by_block or table is None else _page_count(count, size)
    if table is not None and blocks is not None:
        pages = a.reshape(source, (blocks, size, *source.shape[len(index) :]))
        yield Gather(gathered, pages, table, size, rows)
    elif not by_block:
        yield from _gathers_by_page(a, gathered, source, index[0], batch, keys)


def _joined_gathers(a: Algebra, folder: Folder, joined: Value, keys: Any) -> Iterator[Gather]:
    """Yield every reading of `joined`, the concatenation of one gather of `keys` rows from the same pages for each
    sequence.
    """
    parts = [list(gathers(a, folder, each.below("reshape"), 1, keys)) for each in joined.args]
    for first in parts[0]:
        by_sequence = (
            [each.table for each in part if (each.pages, each.size) == (first.pages, first.size)] for part in parts
        )
        tables = [each[0] for each in by_sequence if each]
        if len(tables) == len(parts) and len({each.shape for each in tables}) == 1:
            yield first._replace(gathered=joined, table=joined_table(a, tables, first.pages.shape[0]))


def _gathers_by_page(
    a: Algebra, gathered: Value, source: Value, index: Value, batch: Any, keys: int
) -> Iterator[Gather]:
    """Yield `gathered` = source[index] as pages[table] of `batch` sequences, for every size that a page may have.

    These are the sizes of the first dims of a page, and the one by which the pages of a sequence have `keys` rows.
    """
    table = _page_table(a, index, batch)
    if table is None or not isinstance(table.shape[1], int):
        return
    places = [source.shape[place] for place in (1, 2, 3) if place < source.rank - 1]
    for size in dict.fromkeys((*places, keys // max(table.shape[1], 1))):
        if isinstance(size, int):
            yield Gather(gathered, source, table, size)


def _page_table(a: Algebra, index: Value, batch: Any) -> Value | None:
    """Return the page numbers `index` as a block table [B, M] for B = `batch`; None if their count is no
    multiple of B.
    """
    for each in (index.below("reshape"), index):
        if each.rank == 2 and each.shape[0] == batch:
            return each
    count = prod(index.shape)
    is_divisible = isinstance(count, int) and isinstance(batch, int) and batch > 0 and count % batch == 0
    return a.reshape(index, (batch, count // batch)) if is_divisible else None


def row_number_table(a: Algebra, index: Value, batch: Any, rows: Any) -> tuple[Value, int] | None:
    """Return the block table [`batch`, M] and the page size of row numbers `index` = table · Size + arange(Size), of
    any shape.

    None for other numbers, and if int32 cannot count all `rows` of the pages: a product that overflows names no page.
    """
    total = uncast(index.below("reshape"))
    if total.op != "add" or not total.rank:
        return None
    for first, inner in total.operands():
        size = _iota_length(inner, total.shape[-1])
        scaled = uncast(first, "reshape", "expand")
        blocks = scaled.arg if scaled.op == "scale" and scaled.attrs[0] == size else None
        if blocks is not None and blocks.dtype is not torch.int64 and isinstance(rows, int) and rows > 2**31:
            return None
        if blocks is not None and prod(first.shape) * size == prod(total.shape):
            table = _page_table(a, blocks, batch)
            return None if table is None else (table, size)
    return None


def _iota_length(x: Value, last: Any) -> int:
    """Return the size `last` of the last dim if `x` is arange(last) along it and 1 along all others, else 0."""
    if prod(x.shape) != last or x.shape[-1:] != (last,):
        return 0
    row = uncast(x, "reshape")
    return last if row.rank == 1 and iota(row) == 0 else 0


def _looked_up_rows(
    a: Algebra, folder: Folder, index: Sequence[Value], batch: Any, lead: Sequence[Any]
) -> tuple[Value, int, int | None] | None:
    """Return the block table, the page size and the rows of a sequence (None: all) of what `index` gathers, for `batch`
    sequences.

    `index` are the indices of a gather from a source whose first two sizes are `lead`: pages and rows of a page, or
    rows alone. None if they follow no block table.
    """
    if len(lead) < 2:  # a source of one dim has no rows
        return None
    count, size = lead
    by_block = len(index) == 2
    reading = _by_block(a, index[0], index[1], batch, size) if by_block else row_number_table(a, index[0], batch, count)
    return _row_by_row(a, folder, index, batch, lead) if reading is None else (reading[0], reading[1], None)


def _by_block(a: Algebra, block: Value, place: Value, batch: Any, size: Any) -> tuple[Value, int] | None:
    """Return the block table and the page size for the indices `block` = table[.., None] and `place` = arange(Size),
    `size`.

    None for others. The table is [`batch`, M].
    """
    if not isinstance(size, int) or block.shape[-1:] != (1,) or not _iota_length(place, size):
        return None
    table = _page_table(a, a.reshape(block, block.shape[:-1]), batch)
    return None if table is None else (table, size)


@proof
def _row_by_row(
    a: Algebra, folder: Folder, index: Sequence[Value], batch: Any, lead: Sequence[Any]
) -> tuple[Value, int, int] | None:
    """Return table, page size and number of rows of a sequence, if `index` is (table[:, t // Size], t % Size) for t =
    0, 1, ..

    `index` and `lead` are as in `_looked_up_rows`. Page and place may be one number of a row, table[:, t // Size] ·
    Size + t % Size, of as many rows as int32 counts. None for other indices.
    """
    block, place, size = (*index, lead[1]) if len(index) == 2 else proven(_page_and_place(index[0], lead[0]))
    must(isinstance(size, int))
    table, columns = proven(_looked_up(a, folder, uncast(block, "reshape"), batch))
    must(isinstance(table.shape[1], int))
    must(_is_shared_along_first(place, block.shape) or place.shape == block.shape)
    steps, places = proven(_constant(folder, columns)), proven(_constant(folder, place))
    rows, many = len(steps), -(-len(steps) // size)
    must(0 < many <= table.shape[1])
    must(steps == [t // size for t in range(rows)] and places == [t % size for t in range(rows)])
    return a.cut(table, 1, 0, many), size, rows


@proof
def _page_and_place(index: Value, count: Any) -> tuple[Value, Value, int] | None:
    """Split `index` = page · Size + place, numbers of one of `count` rows, into page, place and Size.

    None for other numbers, and if int32 could overflow.
    """
    total = uncast(index, "reshape")
    must(total.op == "add" and total.rank)
    for first, place in total.operands():
        scaled = uncast(first, "reshape", "expand")
        if scaled.op == "scale" and scaled.attrs[0] == int(scaled.attrs[0]) > 0:
            must(scaled.arg.dtype is torch.int64 or (isinstance(count, int) and count <= 2**31))
            return scaled.arg, place, int(scaled.attrs[0])
    return None


@proof
def _looked_up(a: Algebra, folder: Folder, below: Value, batch: Any) -> tuple[Value, Value] | None:
    """Read `below` as table[:, columns], the same columns for each of `batch` sequences; return the table [B, P] and
    columns.

    Unproven for other values.
    """
    must(below.op == "index")
    table, columns = below.arg, below.args[-1]
    if below.attrs == (0,) and table.rank == 1 and batch == 1:
        return a.reshape(table, (1, *table.shape)), columns
    must(below.attrs in ((1,), (0, 1)) and table.rank == 2 and table.shape[0] == batch)
    if below.attrs == (0, 1):
        must(_is_batch_index(folder, below.args[1], batch) and _is_shared_along_first(columns, below.shape))
    return table, columns


def _is_shared_along_first(x: Value, shape: Sequence[Any]) -> bool:
    """Return True if `x`, broadcast to `shape`, has size 1 along the first dim and all sizes along the others."""
    return (1,) * (len(shape) - x.rank) + x.shape == (1, *shape[1:])


def _is_batch_index(folder: Folder, x: Value, batch: Any) -> bool:
    """Return True if `x` is 0, 1, .. `batch` - 1 along its first dim, and all its other dims have size 1."""
    return isinstance(batch, int) and x.shape[:1] == (batch,) and _constant(folder, x) == list(range(batch))


def _constant(folder: Folder, x: Value) -> list[int] | None:
    """Return the integers of `x` if they are the same for all inputs; None otherwise."""
    numbers = folder.fold(x)
    return None if numbers is None else [int(each) for each in numbers.reshape(-1)]


def _page_count(rows: Any, size: int) -> Any:
    """Return the pages of `size` rows that hold `rows` rows; None if they leave a rest."""
    return rows // size if isinstance(rows, int) and rows % size == 0 else None


def _forms(a: Algebra, gather: Gather, sizes: Sizes) -> Iterator[tuple[str, Value, Value]]:
    """Yield (layout, pages, rows [B, N, T, D] = `sizes`) of `gather`, for each layout that its pages may have."""
    batch, heads, keys, width = sizes
    many, size = gather.table.shape[1], gather.size
    blocks, room = gather.pages.shape[0], many * size if gather.rows is None else gather.rows
    if prod(gather.gathered.shape) != batch * room * heads * width:
        return
    by_row = _permuted_forms(a, gather.gathered, (batch, room, heads, width), (0, 2, 1, 3))
    if room % size:
        pages = a.reshape(gather.pages, (blocks, size, heads, width))
        yield from (("BSND", pages, cut) for each in by_row if (cut := a.slice(each, 2, 0, keys)) is not None)
        return
    by_page = _permuted_forms(a, gather.gathered, (batch, many, heads, size, width), (0, 2, 1, 3, 4))
    by_page += [
        in_rows
        for each in _permuted_forms(a, gather.gathered, (batch, many, heads, size, width), (0, 1, 3, 2, 4))
        for in_rows in _permuted_forms(a, each, (batch, room, heads, width), (0, 2, 1, 3))
    ]
    lines_below = _untransposed_lines(gather.pages)
    in_rows, heads_first = (
        a.reshape(gather.pages, (blocks, *dims)) for dims in ((size, heads, width), (heads, size, width))
    )
    forms = [*(("BSND", in_rows, each) for each in by_row), *(("BNSD", heads_first, each) for each in by_page)]
    if heads == 1 and lines_below is not None and lines_below.shape[-2] == size:
        forms[:0] = [("NZ", lines_below, each) for each in by_row]
    pages = unflattened(gather.pages)
    line = pages.shape[-1]
    if pages.rank > 3 and pages.shape[-2] == size and width % line == 0:
        lines = a.reshape(gather.gathered, (batch, many, heads, width // line, size, line))
        lines = a.reshape(a.permute(lines, (0, 2, 1, 4, 3, 5)), (batch, heads, room, width))
        by_line = a.reshape(gather.gathered, (batch, many, heads * width // line, size, line))
        by_line = a.reshape(a.permute(by_line, (0, 1, 3, 2, 4)), (batch, room, heads, width))
        forms += [("NZ", pages, lines), ("NZ", pages, a.permute(by_line, (0, 2, 1, 3)))]
    for layout, pages, each in forms:
        cut = a.slice(a.reshape(each, (batch, heads, room, width)), 2, 0, keys)
        if cut is not None:
            yield layout, pages, cut


def unflattened(pages: Value) -> Value:
    """Return `pages` without the reshape that flattened each page, [Blocks, ..] to [Blocks, Row]."""
    below = pages.below("reshape")
    return below if pages.rank == 2 and below.shape[:1] == pages.shape[:1] else pages


def _permuted_forms(a: Algebra, x: Value, shape: Sequence[Any], order: Sequence[int]) -> list[Value]:
    """Permute `x`, reshaped to `shape`, by `order`; also without dims of size 1, which a model may add later."""
    permuted = a.permute(a.reshape(x, shape), order)
    large = [axis for axis, size in enumerate(shape) if size != 1]
    if len(large) == len(shape):
        return [permuted]
    bare = a.permute(
        a.reshape(x, [shape[axis] for axis in large]), [large.index(axis) for axis in order if axis in large]
    )
    return [permuted, bare]


def _untransposed_lines(pages: Value) -> Value | None:
    """Return the lines [Blocks, A, Size, L] whose transpose to rows [Blocks, Size, A · L] is `pages`."""
    transposed = pages.arg if pages.op == "reshape" else pages
    is_match = (
        transposed.op == "permute" and transposed.attrs == (0, 2, 1, 3) and pages.shape[:2] == transposed.shape[:2]
    )
    return transposed.arg if is_match else None
