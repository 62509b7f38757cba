"""Gathers of pages by a block table, for any use: the first rows of each sequence, concatenated.

rows = pages[table][:, :length]: the pages of a sequence are consecutive, and so are the sequences. `lengths` are
constants, one of all sequences or one of each. A length that only a tensor holds slices nothing: if the model gathers
rows beyond it, they are gathered here too.

The operator reads pages by the storage format of their input: from one in FRACTAL_NZ it gathers lines and transposes
them to rows, from any other one it gathers rows. Where the format is not known, nothing is rewritten.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from fusion import reader, word
from fusion.analysis.consecutive_positions import wrapped
from fusion.analysis.constant_folding import Folder
from fusion.graph import Algebra, Annotation, Graph, Miss, Reading, Value
from fusion.inputs.nz_format import holds_lines
from patterns.cache.read_block_tables import Gather, gathers, unflattened
from patterns.cache.read_writes import WRITES

GATHERED_PAGES = word(
    "gathered_pages",
    "pages[table], the first `lengths` rows of each sequence, sequences concatenated",
    pages="[Block, Size, ..]", table="[B, P]", size="rows of a page",
    lengths="rows of every sequence, one number or one for each", shape="of the value",
    layout='"BSND" or "NZ", the layout of a page',
)  # fmt: skip
_ALONE = (
    "block table: it gathers the pages of one cache; npu_gather_pa_kv_cache requires two caches, of pages "
    "of one size up to the same lengths; gather keys and values by the same table in one graph"
)
_FORMAT = (
    "pages: they are lines of NZ, whose storage format is not FRACTAL_NZ, or not known; "
    "npu_gather_pa_kv_cache requires FRACTAL_NZ; allocate the cache by torch_npu.npu_format_cast(x, 29)"
)
_LINES = (
    "pages: rows of 32 bytes could be lines of NZ, which is taken for their format where no NPU tells; "
    "npu_gather_pa_kv_cache requires a known format; compile on an NPU"
)
_VIEWS = ("reshape", "permute", "slice", *WRITES)


class _Rows(NamedTuple):
    """The first `lengths` rows of each sequence [B] of the pages [Blocks, ..] that `table` [B, M] names."""

    pages: Value
    table: Value
    size: int
    lengths: Any
    layout: str = "BSND"

    @property
    def how(self) -> tuple[Any, ...]:
        """The fields, except for the pages, that are equal for two caches gathered by one call."""
        return self[1:]


@reader(gives=(GATHERED_PAGES,), needs=("paged_rows",))
def page_gathers(graph: Graph) -> Iterator[Annotation]:
    """Read every gather of pages if a second cache is gathered by the same table and lengths; report the others."""
    a, folder = graph.algebra, graph.shared(Folder)
    known = [value for value in graph.places if sum(not isinstance(size, int) for size in value.shape) < 2]
    read = ((value, _read(a, folder, value)) for value in known)
    lines = ((value, _attention_lines(reading)) for value, reading in graph.readings.all("paged_rows"))
    gathered = {value: rows for value, rows in (*read, *lines) if rows is not None and not graph.is_fixed(rows.pages)}
    stored = {value: _is_fractal(graph, rows.pages) for value, rows in gathered.items()}
    alike = Counter(rows.how for value, rows in gathered.items() if stored[value] is (rows.layout == "NZ"))
    for value, rows in gathered.items():
        if stored[value] is not (rows.layout == "NZ"):
            lines = rows.layout == "NZ"
            if holds_lines(rows.pages.shape, rows.pages.dtype) if lines else _is_read_as_rows(graph, value, rows):
                yield value, Miss("page_gather", _FORMAT if lines else _LINES)
        elif alike[rows.how] > 1:
            yield value, _reading(graph, value, rows)
        elif _is_read_as_rows(graph, value, rows):
            yield value, Miss("page_gather", _ALONE)


def _attention_lines(reading: Reading) -> _Rows | None:
    """Return what `reading`, a paged_rows [B, N, T, D] of an attention, gathers, if its pages are in NZ; None
    otherwise.
    """
    captures = reading.captures
    value, pages = captures["rows"], captures["pages"]
    is_lines = (
        captures["layout"] == "NZ"
        and value.rank == 4
        and value.shape[1] * value.shape[3] * pages.shape[-2] == prod(pages.shape[1:])
    )
    return _Rows(pages, captures["block_table"], captures["size"], value.shape[2], "NZ") if is_lines else None


def _input(pages: Value) -> Value | None:
    """Return the graph input below the views of `pages` and the writes into them; None for computed pages."""
    below = pages.below(*_VIEWS)
    return below if below.op == "input" else None


def _is_fractal(graph: Graph, pages: Value) -> bool | None:
    """Return True if `pages` are in FRACTAL_NZ, None if the format is unknown; computed pages are never in
    FRACTAL_NZ.
    """
    source = _input(pages)
    if source is None:
        return False
    return graph.facts.fractal.get(source.attrs[0]) if holds_lines(source.shape, source.dtype) else False


def _is_read_as_rows(graph: Graph, value: Value, rows: _Rows) -> bool:
    """Return True if the model views the gathered `value` as rows of sequences.

    Otherwise it may be no gather from a cache at all, but one from a table of rotations.
    """
    users = (graph.value_of.get(user) for node in graph.places[value] for user in node.users)
    forms = [value, *(each for each in users if isinstance(each, Value) and each.op == "reshape")]
    if rows.table.rank != 2:
        return False
    batch, pages = rows.table.shape
    return any(rows.size * pages in each.shape or rows.size * pages * batch in each.shape for each in forms)


def _reading(graph: Graph, value: Value, rows: _Rows) -> Reading:
    wraps = rows.layout != "NZ"  # the table in a reading of paged_rows is wrapped already
    table = wrapped(graph.algebra, rows.table, rows.pages.shape[0]) if wraps else rows.table
    source = _input(rows.pages)
    relies = frozenset({source.attrs[0]} & graph.facts.fractal.keys()) if source is not None else frozenset[str]()
    return Reading("gathered_pages", {**rows._asdict(), "table": table, "shape": value.shape}, relies)


def _read(a: Algebra, folder: Folder, value: Value) -> _Rows | None:
    if value.op == "index":
        return next(_by_page(a, folder, value), None)
    if value.op == "slice":
        return _first_rows(a, folder, value)
    if value.op == "cat" and value.attrs == (0,):
        return _concatenated(a, [_read(a, folder, each.below("reshape")) for each in value.args], value)
    return None


def _by_page(a: Algebra, folder: Folder, value: Value) -> Iterator[_Rows]:
    """Yield the readings of `value` = pages[table] with all rows of every page."""
    pages, index = unflattened(value.arg), value.args[1]
    lanes, count = prod(pages.shape[2:]), prod(value.shape)
    sequences = [each.shape[0] for each in (index.below("reshape"), index) if each.rank > 1]
    for batch in dict.fromkeys((*sequences, 1)):
        is_static = pages.rank > 2 and isinstance(batch, int) and isinstance(count, int) and lanes
        keys = count // lanes // max(batch, 1) if is_static else 0
        for gather in gathers(a, folder, value, batch, keys):
            in_pages = gather._replace(pages=pages) if gather.pages is value.arg else gather
            if _gathers_pages(in_pages):
                yield _Rows(in_pages.pages, in_pages.table, in_pages.size, in_pages.table.shape[1] * in_pages.size)


def _gathers_pages(gather: Gather) -> bool:
    """Return True if each number in the table of `gather` selects one page [Size, ..] of more than one row."""
    pages, table, size = gather.pages, gather.table, gather.size
    sizes = (*pages.shape[1:], table.shape[1])
    is_static = table.rank == 2 and pages.rank > 2 and all(isinstance(each, int) for each in sizes)
    is_page = is_static and pages.shape[1] == size != 1
    return is_page and prod(gather.gathered.shape) == prod((*table.shape, *pages.shape[1:]))


def _first_rows(a: Algebra, folder: Folder, value: Value) -> _Rows | None:
    """Read a slice of gathered pages as the first rows of every sequence."""
    axis, start, stop, step = value.attrs
    gathered = value.arg.below("reshape")
    if (start, step) != (0, 1) or gathered.op != "index":
        return None
    for rows in _by_page(a, folder, gathered):
        if prod(value.arg.shape[:axis]) == rows.table.shape[0] and value.arg.shape[axis] == rows.lengths:
            return rows._replace(lengths=stop)
    return None


def _concatenated(a: Algebra, pieces: Sequence[_Rows | None], value: Value) -> _Rows | None:
    """Read `value`, the concatenation of `pieces`, one of each sequence, as one gather with a length of each."""
    known = [each for each in pieces if each is not None and each.table.shape[0] == 1]
    if len({(each.pages, each.size) for each in known}) != 1:
        return None
    is_in_rows = prod(value.shape[1:]) == prod(known[0].pages.shape[2:])
    if not is_in_rows or value.shape[0] != sum(each.lengths for each in known):
        return None
    table = _shared_table(a, [each.table for each in known])
    lengths = tuple(each.lengths for each in known)
    return None if table is None else known[0]._replace(table=table, lengths=lengths)


def _shared_table(a: Algebra, rows: Sequence[Value]) -> Value | None:
    """Return the table [B, M] whose rows, cut to their first columns, are `rows` [1, m]; else their concatenation.

    None if they are rows of no such table and differ in m.
    """
    source = rows[0].below("reshape", "slice")
    if source.rank == 2 and source.shape[0] == len(rows):
        parts = [a.slice(source, 0, i, i + 1) or source for i in range(len(rows))]
        cuts = [a.slice(part, 1, 0, int(row.shape[1])) for part, row in zip(parts, rows, strict=True)]
        if all(cut is not None and a.reshape(cut, row.shape) is row for cut, row in zip(cuts, rows, strict=True)):
            return source
    return a.cat(rows, 0) if len({row.shape for row in rows}) == 1 else None
