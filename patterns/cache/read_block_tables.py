"""Keys and values that are gathered from pages: rows[b, p · Size + o] = pages[table[b, p], o].

A page may be taken whole, by its number, or row by row, by `table · Size + o`. Every form is proven by building it.
What a sequence does not reach of its pages may be cut off behind. A negative number counts pages from the end: `wrap`
makes that explicit.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fusion import reader, word
from fusion.analysis.constant_folding import Folder
from fusion.analysis.intervals import uncast
from fusion.analysis.runs import iota, wrapped
from fusion.graph import Algebra, Found, Graph, Reading, Value
from fusion.graph.proof import must, proof, proven
from patterns.cache.joined_tables import joined_table

PAGED_ROWS = word(
    "paged_rows",
    "rows[b, p · Size + o] = pages[block_table[b, p], o]",
    rows="the value, perhaps with other dims", pages="[Block, ..]", block_table="[B, P]", size="rows of a page",
    layout='"BSND", "BNSD" or "NZ": how a page lies',
)  # fmt: skip
_ALL = ("BSND", "BNSD", "NZ")
_INT8 = ("int8_latent_attention", "int8_probability_attention")


class Gather(NamedTuple):
    """What was gathered, from which pages [Blocks, ..], by which table [B, M]; `rows` of a sequence, None for all."""

    gathered: Value
    pages: Value
    table: Value
    size: int
    rows: int | None = None


_OF_LATENTS = ("latent_keys", "latent_values")
Sizes = tuple[Any, Any, Any, Any]


_ATTENTION = ("softmax_attention", "listed_attention")
_OF_INT8 = ("int8_keys", "int8_values")
_INDEXERS = ("lightning_indexer", "indexer_list")


@reader(gives=(PAGED_ROWS,), needs=(*_ATTENTION, *_INT8, *_OF_INT8, *_OF_LATENTS, "unpacked_latent", *_INDEXERS))
def block_tables(graph: Graph) -> Iterator[Found]:
    """Keys, values and latents of attention, and keys of indexers, that are gathered from pages."""
    indexed = (each.captures["key"] for _, each in graph.readings.all(*_INDEXERS))
    yield from _each(graph, ((key, (key.shape[0], 1, *key.shape[1:])) for key in indexed))
    scales = (each.captures.get("key_scale") for _, each in graph.readings.all(*_INDEXERS))
    yield from _each(graph, ((each, (each.shape[0], 1, each.shape[1], 1)) for each in scales if each is not None))
    packed = (each.captures["rows"] for _, each in graph.readings.all("unpacked_latent"))
    yield from _each(graph, ((rows, (*_by_sequence(rows), rows.shape[-1])) for rows in packed))
    for _, attention in graph.readings.all(*_INT8):
        yield from _of_int8(graph, attention)
    for _, attention in graph.readings.all(*_ATTENTION):
        both = (attention.captures["k"], attention.captures["v"])
        both = tuple(_before(graph, each) for each in both)
        batch, _, keys, _ = both[0].shape
        yield from _each(graph, ((each, (batch, each.shape[1], keys, each.shape[-1])) for each in both))
        parts = (part for each in both for part in _latents(graph.readings.one(each, *_OF_LATENTS)))
        yield from _each(graph, ((each, (batch, 1, _keys(each, batch), each.shape[-1])) for each in parts))


def _before(graph: Graph, x: Value) -> Value:
    """Keys or values as they lie: in int8 before they become floats."""
    found = graph.readings.one(x, *_OF_INT8)
    return x if found is None else found.captures["x"]


def _each(graph: Graph, wanted: Iterable[tuple[Value, Sizes]]) -> Iterator[Found]:
    """The values, of so many sequences, heads, keys and lanes, that are rows of pages."""
    found = ((value, rows_of_pages(graph, value, sizes)) for value, sizes in wanted)
    return ((value, reading) for value, reading in found if reading is not None)


def _of_int8(graph: Graph, attention: Reading) -> list[Found]:
    """The same of a latent in whole numbers and its rotated lanes, of which one line alone could be a row as well."""
    parts = [attention.captures[name] for name in ("latent", "k_rope")]
    both = [(each, (each.shape[0], 1, *each.shape[2:])) for each in parts]
    found = [rows_of_pages(graph, *each) for each in both]
    if len({each and each.captures["layout"] for each in found}) > 1:
        found = [rows_of_pages(graph, *each, ("NZ",)) for each in both]
    return [(value, reading) for (value, _), reading in zip(both, found, strict=True) if reading is not None]


def _keys(latent: Value, batch: Any) -> Any:
    """How many rows each sequence has of a latent [B, .., T, D] or, packed, [B · T, D]."""
    count = prod(latent.shape[:-1])
    packed = latent.shape[0] != batch and isinstance(count, int) and isinstance(batch, int) and batch > 0
    return count // batch if packed else prod(latent.shape[1:-1])


def _by_sequence(rows: Value) -> tuple[Any, int, Any]:
    """B, one head, and T of rows [B, .., Row], or [T, Row] of one sequence."""
    lead = rows.shape[:-1] if rows.rank > 2 else (1, *rows.shape[:-1])
    return lead[0], 1, prod(lead[1:])


def _latents(reading: Reading | None) -> list[Value]:
    """What all heads share of keys or values."""
    shared = () if reading is None else (reading.captures.get(name) for name in ("latent", "rope"))
    return [each for each in shared if isinstance(each, Value)]


def rows_of_pages(graph: Graph, value: Value, sizes: Sizes, among: Container[str] = _ALL) -> Reading | None:
    """Read `value`, whose elements are [B, N, T, D] of these sizes, as rows of pages in one of the layouts `among`."""
    if not all(isinstance(each, int) for each in sizes[1:]) or prod(value.shape) != prod(sizes):
        return None
    a, below = graph.algebra, value.below("reshape", "permute", "slice")
    if value.op == "cat":
        return _rows_of_each(graph, value, sizes, among)
    for found in gathers(a, graph.shared(Folder), below, sizes[0], sizes[2]):
        for layout, pages, rows in _forms(a, found, sizes):
            if layout in among and a.reshape(rows, value.shape) is value:
                table = wrapped(a, found.table, pages.shape[0])
                pages = pages if layout == "NZ" else _as_held(a, pages, graph.places)
                how = {"pages": pages, "block_table": table, "size": found.size, "layout": layout}
                return Reading("paged_rows", {"rows": value, **how})
    return None


def _rows_of_each(graph: Graph, value: Value, sizes: Sizes, among: Container[str]) -> Reading | None:
    """The same of sequences whose rows were gathered one by one and joined."""
    batch, *others = sizes
    if not isinstance(batch, int) or batch < 2 or value.shape[:1] != (batch,):
        return None
    rows = (graph.algebra.cut(value, 0, number, number + 1) for number in range(batch))
    parts = [rows_of_pages(graph, each, (1, *others), among) for each in rows]
    if any(each is None for each in parts):
        return None
    told = [each.captures for each in parts if each is not None]
    same = {name: told[0][name] for name in ("pages", "size", "layout")}
    tables = [each["block_table"] for each in told]
    known = all(isinstance(each.shape[1], int) for each in tables)
    if not known or any(each[name] != same[name] for each in told for name in same):
        return None
    table = joined_table(graph.algebra, tables, same["pages"].shape[0])
    return Reading("paged_rows", {"rows": value, "block_table": table, **same})


def _as_held(a: Algebra, pages: Value, held: Container[Value]) -> Value:
    """Pages with the dims that they have in the model: what is read is what is written there."""
    blocks, size, heads, width = pages.shape
    joined = a.reshape(pages, (blocks, size, prod((heads, width))))
    return next((each for each in (pages, joined) if each in held), pages)


def gathers(a: Algebra, folder: Folder, gathered: Value, batch: Any, keys: Any) -> Iterator[Gather]:
    """Pages of so many keys of each sequence by their number in whole, or by the number of every row."""
    if gathered.op == "cat" and gathered.attrs == (0,) and len(gathered.args) == batch:
        yield from _of_each(a, folder, gathered, keys)
    if gathered.op != "index" or gathered.attrs not in ((0,), (0, 1)):
        return
    source, *index = gathered.args
    by_block, count = len(index) == 2, source.shape[0]
    table, size, rows = _looked_up_rows(a, folder, index, batch, source.shape[:2]) or (None, 0, None)
    blocks = count if by_block or table is None else _divided(count, size)
    if table is not None and blocks is not None:
        pages = a.reshape(source, (blocks, size, *source.shape[len(index) :]))
        yield Gather(gathered, pages, table, size, rows)
    elif not by_block:
        yield from _whole(a, gathered, source, index[0], batch, keys)


def _of_each(a: Algebra, folder: Folder, joined: Value, keys: Any) -> Iterator[Gather]:
    """The same of sequences whose pages were gathered one by one and joined, in one of the sizes of a page."""
    parts = [list(gathers(a, folder, each.below("reshape"), 1, keys)) for each in joined.args]
    for first in parts[0]:
        alike = (
            [each.table for each in part if (each.pages, each.size) == (first.pages, first.size)] for part in parts
        )
        tables = [each[0] for each in alike if each]
        if len(tables) == len(parts) and len({each.shape for each in tables}) == 1:
            yield first._replace(gathered=joined, table=joined_table(a, tables, first.pages.shape[0]))


def _whole(a: Algebra, gathered: Value, source: Value, index: Value, batch: Any, keys: int) -> Iterator[Gather]:
    """pages[table]."""
    table = _per_sequence(a, index, batch)
    if table is None or not isinstance(table.shape[1], int):
        return
    places = [source.shape[place] for place in (1, 2, 3) if place < source.rank - 1]
    for size in dict.fromkeys((*places, keys // max(table.shape[1], 1))):
        if isinstance(size, int):
            yield Gather(gathered, source, table, size)


def _per_sequence(a: Algebra, index: Value, batch: Any) -> Value | None:
    """Numbers of pages as [B, M]."""
    for each in (index.below("reshape"), index):
        if each.rank == 2 and each.shape[0] == batch:
            return each
    count = prod(index.shape)
    whole = isinstance(count, int) and isinstance(batch, int) and batch > 0 and count % batch == 0
    return a.reshape(index, (batch, count // batch)) if whole else None


def numbered(a: Algebra, index: Value, batch: Any, rows: Any) -> tuple[Value, int] | None:
    """The table and the size of a page of row numbers table · Size + o, whatever their dims.

    Where int32 counts all the rows, numbers that wrap round in it name no page.
    """
    total = uncast(index.below("reshape"))
    if total.op != "add" or not total.rank:
        return None
    for first, inner in (total.args, total.args[::-1]):
        size = _counted(inner, total.shape[-1])
        scaled = uncast(first, "reshape", "expand")
        blocks = scaled.arg if scaled.op == "scale" and scaled.attrs[0] == size else None
        if blocks is not None and blocks.dtype is not torch.int64 and isinstance(rows, int) and rows > 2**31:
            return None
        if blocks is not None and prod(first.shape) * size == prod(total.shape):
            table = _per_sequence(a, blocks, batch)
            return None if table is None else (table, size)
    return None


def _counted(x: Value, last: Any) -> int:
    """How many there are of 0, 1, … along the last dim and along no other; 0 for other numbers."""
    if prod(x.shape) != last or x.shape[-1:] != (last,):
        return 0
    row = uncast(x, "reshape")
    return last if row.rank == 1 and iota(row) == 0 else 0


def _looked_up_rows(
    a: Algebra, folder: Folder, index: Sequence[Value], batch: Any, lead: Sequence[Any]
) -> tuple[Value, int, int | None] | None:
    """Read the table, the size of a page, and the count of rows of a sequence, None for all, that `index` names."""
    count, size = lead
    by_block = len(index) == 2
    whole = _by_block(a, index[0], index[1], batch, size) if by_block else numbered(a, index[0], batch, count)
    return _row_by_row(a, folder, index, batch, lead) if whole is None else (whole[0], whole[1], None)


def _by_block(a: Algebra, block: Value, place: Value, batch: Any, size: Any) -> tuple[Value, int] | None:
    """Read the table and the size of a page of pages[table, o], with dims of their own."""
    if not isinstance(size, int) or block.shape[-1:] != (1,) or not _counted(place, size):
        return None
    table = _per_sequence(a, a.reshape(block, block.shape[:-1]), batch)
    return None if table is None else (table, size)


@proof
def _row_by_row(
    a: Algebra, folder: Folder, index: Sequence[Value], batch: Any, lead: Sequence[Any]
) -> tuple[Value, int, int] | None:
    """Read the table, the size of a page and the rows of a sequence of pages[table[:, t // Size], t % Size].

    Page and place may be one number of a row, table[:, t // Size] · Size + t % Size, of as many rows as int32 counts.
    """
    block, place, size = (*index, lead[1]) if len(index) == 2 else proven(_page_and_place(index[0], lead[0]))
    must(isinstance(size, int))
    table, columns = proven(_looked_up(a, folder, uncast(block, "reshape"), batch))
    must(isinstance(table.shape[1], int))
    must(_is_beside(place, block.shape) or place.shape == block.shape)
    steps, places = proven(_folded(folder, columns)), proven(_folded(folder, place))
    rows, many = len(steps), -(-len(steps) // size)
    must(0 < many <= table.shape[1])
    must(steps == [t // size for t in range(rows)] and places == [t % size for t in range(rows)])
    return a.cut(table, 1, 0, many), size, rows


@proof
def _page_and_place(index: Value, count: Any) -> tuple[Value, Value, int] | None:
    """Read page, place and size of a page of row numbers page · Size + place among `count` rows."""
    total = uncast(index, "reshape")
    must(total.op == "add" and total.rank)
    for first, place in (total.args, total.args[::-1]):
        scaled = uncast(first, "reshape", "expand")
        if scaled.op == "scale" and scaled.attrs[0] == int(scaled.attrs[0]) > 0:
            must(scaled.arg.dtype is torch.int64 or (isinstance(count, int) and count <= 2**31))
            return scaled.arg, place, int(scaled.attrs[0])
    return None


@proof
def _looked_up(a: Algebra, folder: Folder, below: Value, batch: Any) -> tuple[Value, Value] | None:
    """Read the table [B, P], and the columns that all sequences look up in it."""
    must(below.op == "index")
    table, columns = below.arg, below.args[-1]
    if below.attrs == (0,) and table.rank == 1 and batch == 1:
        return a.reshape(table, (1, *table.shape)), columns
    must(below.attrs in ((1,), (0, 1)) and table.rank == 2 and table.shape[0] == batch)
    if below.attrs == (0, 1):
        must(_is_batch(folder, below.args[1], batch) and _is_beside(columns, below.shape))
    return table, columns


def _is_beside(x: Value, shape: Sequence[Any]) -> bool:
    """Whether what broadcasts to `shape` has all of its dims but the first, along which it is the same."""
    return (1,) * (len(shape) - x.rank) + x.shape == (1, *shape[1:])


def _is_batch(folder: Folder, x: Value, batch: Any) -> bool:
    """Whether an index names every sequence by its own number."""
    return isinstance(batch, int) and x.shape[:1] == (batch,) and _folded(folder, x) == list(range(batch))


def _folded(folder: Folder, x: Value) -> list[int] | None:
    """The whole numbers that a value holds whatever the inputs are."""
    numbers = folder.fold(x)
    return None if numbers is None else [int(each) for each in numbers.reshape(-1)]


def _divided(rows: Any, size: int) -> Any:
    """How many pages so many rows are."""
    return rows // size if isinstance(rows, int) and rows % size == 0 else None


def _forms(a: Algebra, found: Gather, sizes: Sizes) -> Iterator[tuple[str, Value, Value]]:
    """How pages lie, the pages, and the rows [B, N, T, D] of them."""
    batch, heads, keys, width = sizes
    many, size = found.table.shape[1], found.size
    blocks, room = found.pages.shape[0], many * size if found.rows is None else found.rows
    if prod(found.gathered.shape) != batch * room * heads * width:
        return
    behind = _turned(a, found.gathered, (batch, room, heads, width), (0, 2, 1, 3))
    if room % size:
        pages = a.reshape(found.pages, (blocks, size, heads, width))
        yield from (("BSND", pages, cut) for each in behind if (cut := a.slice(each, 2, 0, keys)) is not None)
        return
    before = _turned(a, found.gathered, (batch, many, heads, size, width), (0, 2, 1, 3, 4))
    before += [
        rows
        for each in _turned(a, found.gathered, (batch, many, heads, size, width), (0, 1, 3, 2, 4))
        for rows in _turned(a, each, (batch, room, heads, width), (0, 2, 1, 3))
    ]
    turned = _of_lines(found.pages)
    rows, first = (a.reshape(found.pages, (blocks, *of)) for of in ((size, heads, width), (heads, size, width)))
    forms = [*(("BSND", rows, each) for each in behind), *(("BNSD", first, each) for each in before)]
    if heads == 1 and turned is not None and turned.shape[-2] == size:
        forms[:0] = [("NZ", turned, each) for each in behind]
    pages = unflattened(found.pages)
    line = pages.shape[-1]
    if pages.rank > 3 and pages.shape[-2] == size and width % line == 0:
        lines = a.reshape(found.gathered, (batch, many, heads, width // line, size, line))
        lines = a.reshape(a.permute(lines, (0, 2, 1, 4, 3, 5)), (batch, heads, room, width))
        of_rows = a.reshape(found.gathered, (batch, many, heads * width // line, size, line))
        of_rows = a.reshape(a.permute(of_rows, (0, 1, 3, 2, 4)), (batch, room, heads, width))
        forms += [("NZ", pages, lines), ("NZ", pages, a.permute(of_rows, (0, 2, 1, 3)))]
    for layout, pages, each in forms:
        cut = a.slice(a.reshape(each, (batch, heads, room, width)), 2, 0, keys)
        if cut is not None:
            yield layout, pages, cut


def unflattened(pages: Value) -> Value:
    """Pages with the dims that they had before all but the first became one."""
    below = pages.below("reshape")
    return below if pages.rank == 2 and below.shape[:1] == pages.shape[:1] else pages


def _turned(a: Algebra, x: Value, shape: Sequence[Any], order: Sequence[int]) -> list[Value]:
    """`x` opened and turned; a model may give it the dims of one entry only behind that."""
    turned = a.permute(a.reshape(x, shape), order)
    large = [axis for axis, size in enumerate(shape) if size != 1]
    if len(large) == len(shape):
        return [turned]
    bare = a.permute(
        a.reshape(x, [shape[axis] for axis in large]), [large.index(axis) for axis in order if axis in large]
    )
    return [turned, bare]


def _of_lines(pages: Value) -> Value | None:
    """The pages [Blocks, A, Size, L] that were turned to be [Blocks, Size, A · L] before they are gathered."""
    turned = pages.arg if pages.op == "reshape" else pages
    whole = turned.op == "permute" and turned.attrs == (0, 2, 1, 3) and pages.shape[:2] == turned.shape[:2]
    return turned.arg if whole else None
