"""Pages that are gathered for whatever use, and what of them is kept: the first rows of each sequence.

rows = pages[table], the pages of a sequence one behind the other, the sequences too. `lengths` says how many rows of
every sequence are kept, one number for all or one for each; `shape`, in which one size may be symbolic, is that of the
value. What stands in a row beyond what a sequence really holds is kept where the model keeps it: lengths that only
tensors know cut nothing here.
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
from patterns.cache.read_block_tables import Gather, gathers

GATHERED_PAGES = word(
    "gathered_pages",
    "the first rows of each sequence, one sequence behind the other",
    pages="[Block, Size, ..]", table="[B, P]", size="rows of a page",
    lengths="how many rows of every sequence are kept, one number or one for each", shape="of the value",
)  # fmt: skip
_ALONE = (
    "the pages of one cache are gathered by this table: the operator reads two caches at once, of pages of one size, "
    "up to the same lengths"
)


class _Rows(NamedTuple):
    """The first `lengths` rows of each sequence [B] of the pages [Blocks, Size, ..] that `table` [B, M] names."""

    pages: Value
    table: Value
    size: int
    lengths: Any


@reader(gives=(GATHERED_PAGES,))
def page_gathers(graph: Graph) -> Iterator[Found]:
    """Gathered pages of caches of which two are gathered alike; why others are not."""
    a, folder = graph.algebra, graph.shared(Folder)
    known = [value for value in graph.places if sum(not isinstance(size, int) for size in value.shape) < 2]
    found = {value: rows for value in known if (rows := _read(a, folder, value)) is not None}
    found = {value: rows for value, rows in found.items() if not graph.is_fixed(rows.pages)}
    alike = Counter((rows.table, rows.size, rows.lengths) for rows in found.values())
    for value, rows in found.items():
        if alike[rows.table, rows.size, rows.lengths] > 1:
            yield value, _reading(a, value, rows)
        elif _is_rows(graph, value, rows):
            yield value, Miss("page_gather", _ALONE)


def _is_rows(graph: Graph, value: Value, rows: _Rows) -> bool:
    """Whether the model reads what it gathers as rows of sequences: entries of a table of rotations are no pages."""
    users = (graph.held.get(user) for node in graph.places[value] for user in node.users)
    seen = [value, *(each for each in users if isinstance(each, Value) and each.op == "reshape")]
    batch, pages = rows.table.shape
    return any(rows.size * pages in each.shape or rows.size * pages * batch in each.shape for each in seen)


def _reading(a: Algebra, value: Value, rows: _Rows) -> Reading:
    table = wrapped(a, rows.table, rows.pages.shape[0])
    return Reading("gathered_pages", {**rows._asdict(), "table": table, "shape": value.shape})


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
    opened, index = _opened(value.arg), value.args[1]
    lanes, count = prod(opened.shape[2:]), prod(value.shape)
    sequences = [each.shape[0] for each in (index.below("reshape"), index) if each.rank > 1]
    for batch in dict.fromkeys((*sequences, 1)):
        known = opened.rank > 2 and isinstance(batch, int) and isinstance(count, int) and lanes
        keys = count // lanes // max(batch, 1) if known else 0
        for found in gathers(a, folder, value, batch, keys):
            whole = found._replace(pages=opened) if found.pages is value.arg else found
            if _is_of_pages(whole):
                yield _Rows(whole.pages, whole.table, whole.size, whole.table.shape[1] * whole.size)


def _opened(pages: Value) -> Value:
    """Pages [Blocks, Size, ..] whose rows were made one."""
    below = pages.below("reshape")
    return below if pages.rank == 2 and below.shape[:1] == pages.shape[:1] else pages


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
