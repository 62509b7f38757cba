"""Keys and values that are gathered from pages: rows[b, p · Size + o] = pages[table[b, p], o].

A page may be taken whole, by its number, or row by row, by `table · Size + o`. Every form is proven by building it.
What a sequence does not reach of its pages may be cut off behind. A negative number counts pages from the end: `wrap`
makes that explicit.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

import torch

from fusion import reader
from fusion.analysis.constant_folding import Folder
from fusion.analysis.intervals import uncast
from fusion.analysis.runs import iota, wrapped
from fusion.graph import Algebra, Found, Graph, Reading, Value, but_ones
from patterns.cache.words import PAGED_ROWS

_INT8 = ("int8_latent_attention", "int8_probability_attention")


class Gather(NamedTuple):
    """What was gathered, from which pages [Blocks, ..], by which table [B, M]."""

    gathered: Value
    pages: Value
    table: Value
    size: int


_OF_LATENTS = ("latent_keys", "latent_values")


@reader(
    gives=(PAGED_ROWS,),
    needs=("softmax_attention", *_INT8, "latent_keys", "latent_values", "lightning_indexer"),
)
def block_tables(graph: Graph) -> Iterator[Found]:
    """Keys, values and latents of attention, and keys of indexers, that are gathered from pages."""
    a, folder, held = graph.algebra, graph.shared(Folder), graph.places
    for key in (each.captures["key"] for _, each in graph.readings.all("lightning_indexer")):
        if (reading := _rows(a, folder, key, (key.shape[0], 1, *key.shape[1:]), held)) is not None:
            yield key, reading
    for _, attention in graph.readings.all(*_INT8):
        yield from _of_int8(a, folder, attention, held).items()
    for _, attention in graph.readings.all("softmax_attention"):
        batch, _, keys, _ = attention.captures["k"].shape
        names = (attention.captures["k"], attention.captures["v"])
        parts = [part for each in names for part in _latents(graph.readings.one(each, *_OF_LATENTS))]
        heads = [(each, each.shape[1], keys) for each in names]
        for value, count, keys in (*heads, *((each, 1, _keys(each, batch)) for each in parts)):
            reading = _rows(a, folder, value, (batch, count, keys, value.shape[-1]), held)
            if reading is not None:
                yield value, reading


def _of_int8(a: Algebra, folder: Folder, attention: Reading, held: Container[Value]) -> dict[Value, Reading]:
    """The same of a latent in whole numbers and its rotated lanes, of which one line alone could be a row as well."""
    parts = [attention.captures[name] for name in ("latent", "k_rope")]
    both = [(each, (each.shape[0], 1, *each.shape[2:])) for each in parts]
    found = [_rows(a, folder, value, sizes, held) for value, sizes in both]
    if len({each and each.captures["layout"] for each in found}) > 1:
        found = [_rows(a, folder, value, sizes, held, ("NZ",)) for value, sizes in both]
    return {value: reading for (value, _), reading in zip(both, found, strict=True) if reading is not None}


def _keys(latent: Value, batch: Any) -> Any:
    """How many rows each sequence has of a latent [B, .., T, D] or, packed, [B · T, D]."""
    count = prod(latent.shape[:-1])
    packed = latent.shape[0] != batch and isinstance(count, int) and isinstance(batch, int) and batch > 0
    return count // batch if packed else prod(latent.shape[1:-1])


def _latents(reading: Reading | None) -> list[Value]:
    """What all heads share of keys or values."""
    shared = () if reading is None else (reading.captures.get(name) for name in ("latent", "rope"))
    return [each for each in shared if isinstance(each, Value)]


def _rows(
    a: Algebra,
    folder: Folder,
    value: Value,
    sizes: tuple[Any, Any, Any, Any],
    held: Container[Value],
    among: Container[str] = ("BSND", "BNSD", "NZ"),
) -> Reading | None:
    """`value`, whose elements are [B, N, T, D], as rows of pages that lie in one of some ways."""
    if not all(isinstance(each, int) for each in sizes[1:]) or prod(value.shape) != prod(sizes):
        return None
    wanted = _cut_last(a, value)
    for gathered in _gathered(value):
        for each in gathers(a, folder, gathered, sizes):
            for layout, pages, rows in _forms(a, each, sizes):
                if layout in among and _cut_last(a, a.reshape(rows, value.shape)) is wanted:
                    table = wrapped(a, each.table, pages.shape[0])
                    held_as = pages if layout == "NZ" else _as_held(a, pages, held)
                    captures = {"rows": value, "pages": held_as, "block_table": table}
                    captures |= {"size": each.size, "layout": layout}
                    return Reading("paged_rows", captures)
    return None


def _as_held(a: Algebra, pages: Value, held: Container[Value]) -> Value:
    """Pages with the dims that they have in the model: what is read is what is written there."""
    blocks, size, heads, width = pages.shape
    joined = a.reshape(pages, (blocks, size, prod((heads, width))))
    return next((each for each in (pages, joined) if each in held), pages)


def _cut_last(a: Algebra, value: Value) -> Value:
    """`value`, cut after dims of size 1 have come or gone, not before."""
    cut = value.arg if value.op == "reshape" else value
    if value is cut or cut.op != "slice" or but_ones(value.shape) != but_ones(cut.shape):
        return value
    axis, *bounds = cut.attrs
    place = [n for n, size in enumerate(value.shape) if size != 1][sum(size != 1 for size in cut.shape[:axis])]
    whole = a.reshape(cut.arg, (*value.shape[:place], cut.arg.shape[axis], *value.shape[place + 1 :]))
    return a.slice(whole, place, *bounds) or value


def _gathered(value: Value) -> Iterator[Value]:
    """What is gathered below views and cuts."""
    below = value.below("reshape", "permute", "slice")
    if below.op == "index" and below.attrs in ((0,), (0, 1)):
        yield below


def gathers(a: Algebra, folder: Folder, gathered: Value, sizes: tuple[Any, Any, Any, Any]) -> Iterator[Gather]:
    """Pages of `sizes` [B, N, T, D] by their number in whole, or by the number of every row."""
    source, *index = gathered.args
    batch, _, keys, _ = sizes
    by_block, count = len(index) == 2, source.shape[0]
    rows = _by_block(a, folder, source, index[0], index[1], batch) if by_block else _numbered(a, index[0], batch, count)
    blocks = None if rows is None else count if by_block else _divided(count, rows[1])
    if rows is not None and blocks is not None:
        table, size = rows
        yield Gather(gathered, a.reshape(source, (blocks, size, *source.shape[len(index) :])), table, size)
    elif not by_block:
        yield from _whole(a, gathered, source, index[0], batch, keys)


def _whole(a: Algebra, gathered: Value, source: Value, index: Value, batch: Any, keys: int) -> Iterator[Gather]:
    """pages[table]."""
    table = _per_sequence(a, index, batch)
    if table is None or not isinstance(table.shape[1], int):
        return
    places = [source.shape[place] for place in (1, 2, 3) if place < source.rank - 1]
    for size in dict.fromkeys((*places, keys // max(table.shape[1], 1))):
        if isinstance(size, int) and size > 0:
            yield Gather(gathered, source, table, size)


def _per_sequence(a: Algebra, index: Value, batch: Any) -> Value | None:
    """Numbers of pages as [B, M]."""
    if index.op == "reshape" and index.arg.rank == 2 and index.arg.shape[0] == batch:
        return index.arg
    if index.rank == 2 and index.shape[0] == batch:
        return index
    count = prod(index.shape)
    whole = isinstance(count, int) and isinstance(batch, int) and batch > 0 and count % batch == 0
    return a.reshape(index, (batch, count // batch)) if whole else None


def _numbered(a: Algebra, index: Value, batch: Any, rows: Any) -> tuple[Value, int] | None:
    """The table and the size of a page of row numbers table · Size + o, whatever their dims.

    Where int32 counts all the rows, numbers that wrap round in it name no page.
    """
    total = index.arg if index.op == "reshape" else index
    total = uncast(total)
    if total.op != "add" or total.rank < 2:
        return None
    for first, inner in (total.args, total.args[::-1]):
        size = _counted(inner, total.shape[-1])
        scaled = uncast(first, "reshape", "expand")
        blocks = scaled.arg if scaled.op == "scale" and scaled.attrs[0] == size else None
        if blocks is not None and blocks.dtype is not torch.int64 and isinstance(rows, int) and rows > 2**31:
            return None
        if size and blocks is not None and first.shape[-1:] == (1,) and prod(first.shape) * size == prod(total.shape):
            table = _per_sequence(a, blocks, batch)
            return None if table is None else (table, size)
    return None


def _counted(x: Value, last: Any) -> int:
    """How many there are of 0, 1, … along the last dim and along no other; 0 for other numbers."""
    if not isinstance(last, int) or prod(x.shape) != last or x.shape[-1:] != (last,):
        return 0
    row = uncast(x, "reshape")
    return last if row.rank == 1 and iota(row) == 0 else 0


def _by_block(
    a: Algebra, folder: Folder, source: Value, block: Value, place: Value, batch: Any
) -> tuple[Value, int] | None:
    """pages[table[:, t // Size], t % Size]; or, with dims of their own, pages[table, o]."""
    size = source.shape[1]
    if not isinstance(size, int):
        return None
    if block.shape[-1:] == (1,) and _counted(place, size):
        table = _per_sequence(a, a.reshape(block, block.shape[:-1]), batch)
        return None if table is None else (table, size)
    below = uncast(block, "reshape")
    if below.op != "index" or below.attrs[-1:] != (1,) or below.arg.rank != 2 or below.arg.shape[0] != batch:
        return None
    table, columns = below.arg, below.args[-1]
    if below.attrs == (0, 1) and not _is_batch(folder, below.args[1], batch):
        return None
    whole = below.attrs == (1,) or _is_beside(columns, below.shape)
    if not whole or not (_is_beside(place, block.shape) or place.shape == block.shape):
        return None
    steps, places = _folded(folder, columns), _folded(folder, place)
    if not isinstance(table.shape[1], int) or steps is None or places is None:
        return None
    count = table.shape[1] * size
    right = steps == [t // size for t in range(count)] and places == [t % size for t in range(count)]
    return (table, size) if right else None


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


def _forms(a: Algebra, found: Gather, sizes: tuple[Any, Any, Any, Any]) -> Iterator[tuple[str, Value, Value]]:
    """How pages lie, the pages, and the rows [B, N, T, D] of them."""
    batch, heads, keys, width = sizes
    many, size = found.table.shape[1], found.size
    blocks, room = found.pages.shape[0], many * size
    if room < keys or prod(found.gathered.shape) != batch * room * heads * width:
        return
    if prod(found.pages.shape[1:]) != size * heads * width:
        return
    behind = a.reshape(found.gathered, (batch, room, heads, width))
    behind = a.permute(behind, (0, 2, 1, 3))
    before = a.reshape(found.gathered, (batch, many, heads, size, width))
    before = a.reshape(a.permute(before, (0, 2, 1, 3, 4)), (batch, heads, room, width))
    turned = _of_lines(found.pages)
    rows, first = (a.reshape(found.pages, (blocks, *of)) for of in ((size, heads, width), (heads, size, width)))
    forms = [("BSND", rows, behind), ("BNSD", first, before)]
    if heads == 1 and turned is not None and turned.shape[-2] == size:
        forms.insert(0, ("NZ", turned, behind))
    line = found.pages.shape[-1]
    if heads == 1 and found.pages.rank > 3 and found.pages.shape[-2] == size and width % line == 0:
        lines = a.reshape(found.gathered, (batch, many, width // line, size, line))
        lines = a.reshape(a.permute(lines, (0, 1, 3, 2, 4)), (batch, 1, room, width))
        forms.append(("NZ", found.pages, lines))
    for layout, pages, each in forms:
        cut = a.slice(each, 2, 0, keys)
        if cut is not None:
            yield layout, pages, cut


def _of_lines(pages: Value) -> Value | None:
    """The pages [Blocks, A, Size, L] that were turned to be [Blocks, Size, A · L] before they are gathered."""
    turned = pages.arg if pages.op == "reshape" else pages
    whole = turned.op == "permute" and turned.attrs == (0, 2, 1, 3) and pages.shape[:2] == turned.shape[:2]
    return turned.arg if whole else None
