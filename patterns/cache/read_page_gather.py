"""Pages that are gathered for whatever use, and what of them is kept: the first rows of each sequence.

rows = pages[table], the pages of a sequence one behind the other, the sequences too. `lengths` says how many rows of
every sequence are kept, one number for all or one for each; `shape`, in which one size may be symbolic, is that of the
value. What stands in a row beyond what a sequence really holds is kept where the model keeps it: lengths that only
tensors know cut nothing here.

Whether an input holds lines of NZ or rows, the operator goes by its storage format: lines are gathered, and turned to
rows, out of one in FRACTAL_NZ, rows out of one that is not, and neither where the format is not known.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, NamedTuple

from fusion import reader, word
from fusion.analysis.constant_folding import Folder
from fusion.analysis.runs import wrapped
from fusion.graph import Algebra, Found, Graph, Miss, Reading, Value
from fusion.inputs.nz_format import holds_lines
from patterns.cache.read_block_tables import Gather, gathers, unflattened
from patterns.cache.read_writes import WRITES

GATHERED_PAGES = word(
    "gathered_pages",
    "the first rows of each sequence, one sequence behind the other",
    pages="[Block, Size, ..]", table="[B, P]", size="rows of a page",
    lengths="how many rows of every sequence are kept, one number or one for each", shape="of the value",
    layout='"BSND" or "NZ": how a page lies',
)  # fmt: skip
_ALONE = (
    "the pages of one cache are gathered by this table: the operator reads two caches at once, of pages of one size, "
    "up to the same lengths"
)
_FORMAT = (
    "the pages hold lines of NZ, which the operator reads of an input in the storage format FRACTAL_NZ alone, as "
    "torch_npu.npu_format_cast(x, 29) makes it: these are none, or nothing is known of their format"
)
_LINES = (
    "the pages, rows of 32 bytes, could be lines of NZ: the operator would read them so in the storage format "
    "FRACTAL_NZ, in which they are supposed to lie where no NPU tells"
)
_SEEN = ("reshape", "permute", "slice", *WRITES)


class _Rows(NamedTuple):
    """The first `lengths` rows of each sequence [B] of the pages [Blocks, ..] that `table` [B, M] names."""

    pages: Value
    table: Value
    size: int
    lengths: Any
    layout: str = "BSND"

    @property
    def how(self) -> tuple[Any, ...]:
        """All but the pages: what two caches have in common that are gathered alike."""
        return self[1:]


@reader(gives=(GATHERED_PAGES,), needs=("paged_rows",))
def page_gathers(graph: Graph) -> Iterator[Found]:
    """Gathered pages of caches of which two are gathered alike; why others are not."""
    a, folder = graph.algebra, graph.shared(Folder)
    known = [value for value in graph.places if sum(not isinstance(size, int) for size in value.shape) < 2]
    read = ((value, _read(a, folder, value)) for value in known)
    lines = ((value, _of_lines(reading)) for value, reading in graph.readings.all("paged_rows"))
    found = {value: rows for value, rows in (*read, *lines) if rows is not None and not graph.is_fixed(rows.pages)}
    stored = {value: _is_fractal(graph, rows.pages) for value, rows in found.items()}
    alike = Counter(rows.how for value, rows in found.items() if stored[value] is (rows.layout == "NZ"))
    for value, rows in found.items():
        if stored[value] is not (rows.layout == "NZ"):
            lines = rows.layout == "NZ"
            if holds_lines(rows.pages.shape, rows.pages.dtype) if lines else _is_rows(graph, value, rows):
                yield value, Miss("page_gather", _FORMAT if lines else _LINES)
        elif alike[rows.how] > 1:
            yield value, _reading(graph, value, rows)
        elif _is_rows(graph, value, rows):
            yield value, Miss("page_gather", _ALONE)


def _of_lines(reading: Reading) -> _Rows | None:
    """Rows [B, M, T, D] that attention reads, of pages in lines of NZ; None for others."""
    told = reading.captures
    value, pages = told["rows"], told["pages"]
    known = (
        told["layout"] == "NZ"
        and value.rank == 4
        and value.shape[1] * value.shape[3] * pages.shape[-2] == prod(pages.shape[1:])
    )
    return _Rows(pages, told["block_table"], told["size"], value.shape[2], "NZ") if known else None


def _input(pages: Value) -> Value | None:
    """The input in whose memory pages stand, as they were or after writes."""
    below = pages.below(*_SEEN)
    return below if below.op == "input" else None


def _is_fractal(graph: Graph, pages: Value) -> bool | None:
    """Whether pages lie in FRACTAL_NZ; None where that is not known. What a graph computes does not."""
    source = _input(pages)
    if source is None:
        return False
    return graph.facts.fractal.get(source.attrs[0]) if holds_lines(source.shape, source.dtype) else False


def _is_rows(graph: Graph, value: Value, rows: _Rows) -> bool:
    """Whether the model reads what it gathers as rows of sequences: entries of a table of rotations are no pages."""
    users = (graph.held.get(user) for node in graph.places[value] for user in node.users)
    seen = [value, *(each for each in users if isinstance(each, Value) and each.op == "reshape")]
    batch, pages = rows.table.shape
    return any(rows.size * pages in each.shape or rows.size * pages * batch in each.shape for each in seen)


def _reading(graph: Graph, value: Value, rows: _Rows) -> Reading:
    wraps = rows.layout != "NZ"  # what attention reads is wrapped
    table = wrapped(graph.algebra, rows.table, rows.pages.shape[0]) if wraps else rows.table
    source = _input(rows.pages)
    relies = frozenset({source.attrs[0]} & graph.facts.fractal.keys()) if source is not None else frozenset[str]()
    return Reading("gathered_pages", {**rows._asdict(), "table": table, "shape": value.shape}, relies)


def _read(a: Algebra, folder: Folder, value: Value) -> _Rows | None:
    if value.op == "index":
        return next(_whole(a, folder, value), None)
    if value.op == "slice":
        return _cut(a, folder, value)
    if value.op == "cat" and value.attrs == (0,):
        return _joined(a, [_read(a, folder, each.below("reshape")) for each in value.args], value)
    return None


def _whole(a: Algebra, folder: Folder, value: Value) -> Iterator[_Rows]:
    """Pages as they are gathered."""
    opened, index = unflattened(value.arg), value.args[1]
    lanes, count = prod(opened.shape[2:]), prod(value.shape)
    sequences = [each.shape[0] for each in (index.below("reshape"), index) if each.rank > 1]
    for batch in dict.fromkeys((*sequences, 1)):
        known = opened.rank > 2 and isinstance(batch, int) and isinstance(count, int) and lanes
        keys = count // lanes // max(batch, 1) if known else 0
        for found in gathers(a, folder, value, batch, keys):
            whole = found._replace(pages=opened) if found.pages is value.arg else found
            if _is_of_pages(whole):
                yield _Rows(whole.pages, whole.table, whole.size, whole.table.shape[1] * whole.size)


def _is_of_pages(found: Gather) -> bool:
    """Whether what lies behind one number is a page: several rows of several lanes."""
    pages, table, size = found.pages, found.table, found.size
    sizes = (*pages.shape[1:], table.shape[1])
    known = table.rank == 2 and pages.rank > 2 and all(isinstance(each, int) for each in sizes)
    alike = known and pages.shape[1] == size != 1
    return alike and prod(found.gathered.shape) == prod((*table.shape, *pages.shape[1:]))


def _cut(a: Algebra, folder: Folder, value: Value) -> _Rows | None:
    """The first rows of every sequence."""
    axis, start, stop, step = value.attrs
    gathered = value.arg.below("reshape")
    if (start, step) != (0, 1) or gathered.op != "index":
        return None
    for rows in _whole(a, folder, gathered):
        if prod(value.arg.shape[:axis]) == rows.table.shape[0] and value.arg.shape[axis] == rows.lengths:
            return rows._replace(lengths=stop)
    return None


def _joined(a: Algebra, pieces: Sequence[_Rows | None], value: Value) -> _Rows | None:
    """The sequences one after the other, each with a length of its own."""
    known = [each for each in pieces if each is not None and each.table.shape[0] == 1]
    if len({(each.pages, each.size) for each in known}) != 1:
        return None
    rows = prod(value.shape[1:]) == prod(known[0].pages.shape[2:])
    if not rows or value.shape[0] != sum(each.lengths for each in known):
        return None
    table = _one_table(a, [each.table for each in known])
    lengths = tuple(each.lengths for each in known)
    return None if table is None else known[0]._replace(table=table, lengths=lengths)


def _one_table(a: Algebra, rows: Sequence[Value]) -> Value | None:
    """The table [B, M] of which these are the rows [1, m], perhaps with what no sequence reaches cut off."""
    whole = rows[0].below("reshape", "slice")
    if whole.rank == 2 and whole.shape[0] == len(rows):
        parts = [a.slice(whole, 0, number, number + 1) or whole for number in range(len(rows))]
        cuts = [a.slice(part, 1, 0, int(row.shape[1])) for part, row in zip(parts, rows, strict=True)]
        if all(cut is not None and a.reshape(cut, row.shape) is row for cut, row in zip(cuts, rows, strict=True)):
            return whole
    return a.cat(rows, 0) if len({row.shape for row in rows}) == 1 else None
